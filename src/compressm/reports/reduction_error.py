"""What a reduction costs in accuracy: the spectrum, the bound at every order, and the true error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compressm.reports.canvas import BLUE, GREY, ORANGE, RED, picture


@dataclass(frozen=True)
class ReductionCurve:
    """Of one system: σ of all states, and for some orders the bound and the true H∞ error, all over ‖G‖∞."""

    title: str
    sigma: list[float]
    orders: list[int]
    bounds: list[float]
    errors: list[float]


def draw_reduction_error(curves: list[ReductionCurve], path: Path | str) -> Path:
    """One panel a system."""
    with picture(path, columns=len(curves), size=(5.2, 4.0)) as figure:
        for axes, curve in zip(figure.axes, curves, strict=True):
            axes.semilogy(
                range(1, len(curve.sigma) + 1), curve.sigma, color=GREY, lw=2, label="Hankel singular value $\\sigma_r$"
            )
            axes.semilogy(curve.orders, curve.bounds, color=ORANGE, label="bound  $2\\,\\Sigma_{i>r}\\,\\sigma_i$")
            axes.semilogy(curve.orders, curve.errors, "o", color=BLUE, ms=4, label="true error  $\\|G-G_r\\|_\\infty$")
            axes.axhline(1, color=RED, lw=0.8, ls=":", label="as large as the system")
            axes.set(title=curve.title, xlabel="states kept, r", ylabel="relative to $\\|G\\|_\\infty$")
            axes.legend(fontsize=8, loc="lower left")
    return Path(path)
