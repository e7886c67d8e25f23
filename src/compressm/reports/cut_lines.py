"""Where a run was cut, and where it was brought back, as lines across a panel."""

from __future__ import annotations

from matplotlib.axes import Axes

from compressm.reports.canvas import RED
from compressm.reports.panels import INK
from compressm.runs.records import CutRecord
from compressm.runs.run import Run

# Lines nearer than this part of the axis share one label.
_NEAR = 0.16


def title_pad(run: Run) -> float:
    """Room for the labels between a panel and its title, in points."""
    return 17.0 if run.events else 6.0


def mark_cuts(axes: Axes, run: Run, module: str | None = None) -> None:
    """Dotted lines at cuts with the order that remains, dashed ones at restorations; `axes` has its limits in x."""
    changes = _changes(run, module)
    low, high = axes.get_xlim()
    for step, (_, restored) in changes.items():
        axes.axvline(step, color=RED if restored else INK, lw=0.9, ls="--" if restored else ":", alpha=0.75, zorder=1.5)
    cluster: list[int] = []
    for step in changes:
        if cluster and step - cluster[-1] > _NEAR * (high - low):
            _label(axes, cluster, changes)
            cluster = []
        cluster.append(step)
    if cluster:
        _label(axes, cluster, changes)


def _changes(run: Run, module: str | None) -> dict[int, tuple[float, bool]]:
    """By step: the order from there on, of deep models the mean over layers, and whether it was restored."""
    orders = dict(run.initial_orders)
    found: dict[int, tuple[float, bool]] = {}
    for event in run.events:
        cut = isinstance(event, CutRecord)
        orders.update({event.module: event.rank} if isinstance(event, CutRecord) else event.orders)
        if module is None or not isinstance(event, CutRecord) or event.module == module:
            mean = sum(orders.values()) / len(orders) if module is None else float(orders[module])
            found[event.step] = (mean, not cut)
    return found


def _label(axes: Axes, cluster: list[int], changes: dict[int, tuple[float, bool]]) -> None:
    order, restored = changes[cluster[-1]]
    said = f"{'back to' if restored else '→'} {order:.3g}"
    cuts = sum(not changes[step][1] for step in cluster)
    if cuts > 1:
        said = f"{cuts} cuts {said}"
    # Left of the last line where there is room, so that labels of one cluster end at its last line.
    place = (sum(cluster) / len(cluster) - axes.get_xlim()[0]) / (axes.get_xlim()[1] - axes.get_xlim()[0])
    where = "left" if place < 0.15 else "right" if place > 0.85 else "center"
    transform = axes.get_xaxis_transform()
    axes.text(sum(cluster) / len(cluster), 1.015, said, transform=transform, ha=where, va="bottom", fontsize=8)
