"""Draw the first picture of the README from two committed results of `compressm demo`."""

from __future__ import annotations

from pathlib import Path

from compressm_lab.reports.answer_chart import draw_demo
from compressm_lab.runs.measurement import Measurement

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Draw it, as the report of the demo does from its runs."""
    results = ROOT / "benchmarks" / "results"
    demo, spectra = (Measurement.read(results / f"{name}.json") for name in ("demo", "demo-spectra"))
    draw_demo(demo, spectra, ROOT / "docs" / "images" / "demo.png")


if __name__ == "__main__":
    main()
