"""Draw accuracy against the final order for all tasks of the study of automatic cuts, from committed results."""

from __future__ import annotations

from pathlib import Path

from compressm_lab.reports.automatic_tables import AUTOMATIC
from compressm_lab.reports.measurements import draw_fronts
from compressm_lab.runs.measurement import Measurement

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Draw a panel for every task that has a result."""
    results = [ROOT / "benchmarks" / "results" / f"{name}.json" for name in AUTOMATIC]
    found = [Measurement.read(path) for path in results if path.exists()]
    draw_fronts(found, ROOT / "docs" / "images" / "automatic.png")


if __name__ == "__main__":
    main()
