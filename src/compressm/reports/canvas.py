"""One look for every picture: colours told apart also in grey and by colour-blind eyes, no screen needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from compressm.runs.atomic import replacing
from compressm.runs.measurement import Measurement

# Okabe and Ito's palette.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#7F7F7F"

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


@contextmanager
def picture(
    path: Path | str, *, rows: int = 1, columns: int = 1, size: tuple[float, float] = (5.0, 3.6)
) -> Iterator[Figure]:
    """A figure with a grid of axes that is written to `path`, whole or not at all, when the block ends."""
    with plt.rc_context(STYLE):
        figure, _ = plt.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows))
        try:
            yield figure
            with replacing(path) as scratch:
                figure.savefig(scratch, dpi=160)
        finally:
            plt.close(figure)


def where_measured(measurement: Measurement) -> str:
    """Machine, threads, version, date and commit, for below a picture."""
    environment = measurement.environment
    machine = environment.processor if measurement.rows[0]["device"] == "cpu" else environment.accelerator
    threads = f"{environment.threads} thread(s)"
    return f"{machine}, {threads}, torch {environment.torch}, {environment.date[:10]}, {environment.commit}"
