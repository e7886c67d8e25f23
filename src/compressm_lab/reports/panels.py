"""One look for every picture: figures, panels and charts, and what several of them draw; no screen needed."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from compressm.files import replacing
from compressm_lab.reports.palette import BLUE, BROWN, GREEN, GREY, INK, ORANGE, PAPER, PURPLE, RAMP, RED, SKY
from compressm_lab.runs.measurement import Measurement

matplotlib.use("Agg")

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
    path: Path | str, *, columns: int = 1, rows: int = 1, size: tuple[float, float], below: str = ""
) -> Iterator[Figure]:
    """A figure with axes of this size that is written to `path`, whole or not at all, when the block ends."""
    with plt.rc_context(STYLE):
        figure, _ = plt.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows))
        try:
            yield figure
            if below:
                figure.supxlabel(below, x=0.01, ha="left", fontsize=7, color=GREY)
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


# What the page's style sheet sets anew for a dark screen.
_VARIABLES = {
    INK: "ink", BLUE: "blue", ORANGE: "orange", GREEN: "green", RED: "red", PURPLE: "purple", GREY: "grey",
    PAPER: "paper", SKY: "sky", BROWN: "brown", **{shade: f"ramp-{k}" for k, shade in enumerate(RAMP)},
}  # fmt: skip
# Points that the numbers and the label of an axis take.
_BELOW = 32
# Of the height of a panel, between two labels of 8 points.
_APART = 0.085
# Characters of a legend that go beside each other below a panel of 4 inches, handles counted as _HANDLE; of one label.
_ABREAST, _HANDLE, _LONGEST = 66, 6, 48
# Lines of a legend that a panel has room for, and inches for each further one.
_ROOM, _LINE = 4, 0.17
# Points around all panels, and between two beyond the room for their labels.
_EDGE, _BETWEEN = 3.0, 10.0

_STYLE: dict[Any, Any] = {
    **STYLE,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8.5),
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), GREY),
    "svg.fonttype": "none",
    # `_lay_out` does it; a title's height is given, not looked for.
    "figure.constrained_layout.use": False,
    "axes.titley": 1.0,
}


@dataclass(frozen=True)
class Panel:
    """One picture with axes; `words` say what there is to see, for those who do not see it."""

    title: str
    words: str
    draw: Callable[[Axes], None]
    pad: float = 6.0


@dataclass(frozen=True)
class Chart:
    """Rows of panels under one caption; `name` is that of its files; a `folded` one is opened by its reader.

    `moments` say what there is to see at each place of a slider, of which panels draw the k-th as `moment-k`.
    """

    name: str
    title: str
    caption: str
    rows: tuple[tuple[Panel, ...], ...]
    size: tuple[float, float] = (4.0, 2.9)
    folded: bool = False
    moments: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, caption: str, panels: Sequence[Panel], **options: Any) -> Chart:
        """A chart of panels two by two."""
        return cls(name, "", caption, tuple(tuple(panels[k : k + 2]) for k in range(0, len(panels), 2)), **options)

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row]


def inline_svg(panel: Panel, *, key: str, size: tuple[float, float]) -> str:
    """One panel as SVG for a page: colours are variables of the style sheet, names are unique by `key`."""
    buffer = io.StringIO()
    with plt.rc_context({**_STYLE, "svg.hashsalt": key}):
        figure, axes = plt.subplots(figsize=size)
        try:
            _fill(axes, panel)
            figure.set_figheight(size[1] + _room_below(axes))
            _lay_out(figure)
            figure.savefig(buffer, format="svg", transparent=True)
        finally:
            plt.close(figure)
    return _embedded(buffer.getvalue(), panel, key)


def write_files(chart: Chart, folder: Path, formats: Iterable[str]) -> list[Path]:
    """Write the whole chart on white, once for every format, each file whole or not there."""
    columns = max(len(row) for row in chart.rows)
    width, height = chart.size[0] * (0.8 if columns > 2 else 1), chart.size[1]
    files = []
    with plt.rc_context({**_STYLE, "pdf.fonttype": 42}):
        figure, grid = plt.subplots(
            len(chart.rows), columns, figsize=(width * columns, height * len(chart.rows)), squeeze=False
        )
        try:
            for row, places in zip(chart.rows, grid, strict=True):
                for axes in places[len(row) :]:
                    axes.set_axis_off()
                for panel, axes in zip(row, places, strict=False):
                    _fill(axes, panel)
            figure.set_figheight(height * len(chart.rows) + sum(max(map(_room_below, places)) for places in grid))
            _lay_out(figure)
            for kind in formats:
                files.append(folder / f"{chart.name}.{kind}")
                with replacing(files[-1]) as scratch:
                    figure.savefig(scratch, format=kind, dpi=200)
        finally:
            plt.close(figure)
    return files


def count_steps(axes: Axes, last: int) -> None:
    """Show training steps along x, thousands as k."""
    axes.set(xlabel="step", xlim=(0, max(last, 1)))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: short_count(step)))


def legend_below(axes: Axes, *, columns: int = 2) -> None:
    """Put the legend under the axis label, where it covers nothing; long labels are broken and take fewer columns."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        longest = min(max(map(len, labels)), _LONGEST)
        columns = max(1, min(columns, _ABREAST // (longest + _HANDLE)))
        # In points, since axes of every height have a label of the same.
        below = axes.transAxes + ScaledTranslation(0, -_BELOW / 72, axes.figure.dpi_scale_trans)
        place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": below}
        broken = [textwrap.fill(label, _LONGEST) for label in labels]
        axes.legend(handles, broken, **place, ncols=columns, borderaxespad=0, handlelength=1.6, columnspacing=1.2)


def say_instead(axes: Axes, words: str) -> None:
    """Say in the middle of empty axes why there is nothing to see."""
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center")
    axes.set(xticks=[], yticks=[])


def logarithmic(axes: Axes) -> None:
    """Make y logarithmic, where there is something that it could show."""
    if positive_heights(axes):
        axes.set_yscale("log")
        plain_ticks(axes)


def positive_heights(axes: Axes) -> list[float]:
    """The heights of all points of its lines that a logarithmic axis could show."""
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines]
    return [float(height) for heights in drawn for height in heights[np.isfinite(heights) & (heights > 0)]]


def label_ends(axes: Axes, ends: Mapping[str, tuple[float, str]]) -> None:
    """Name each line at its right end, pushed apart where they are close; `ends` is (last value, colour) by label."""
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = {label: float(to_axes.transform((axes.get_xlim()[1], value))[1]) for label, (value, _) in ends.items()}
    lowest = 0.0
    for label in sorted(heights, key=heights.__getitem__):
        place = max(heights[label], lowest)
        lowest = place + _APART
        # The text is ink: light colours of lines are too pale to read.
        leader: dict[str, Any] = {"color": ends[label][1], "lw": 1.3, "transform": axes.transAxes, "clip_on": False}
        axes.add_artist(Line2D([1.005, 1.03], [heights[label], place], **leader))
        axes.text(1.04, place, label, transform=axes.transAxes, va="center", fontsize=8)


def short_names(modules: Sequence[str]) -> dict[str, str]:
    """Names without the last parts that all of several share: blocks.0 for blocks.0.ssm."""
    short = {module: module for module in modules}
    while len(modules) > 1 and len({name.rpartition(".")[2] for name in short.values()}) == 1:
        if not all(name.rpartition(".")[0] for name in short.values()):
            break
        short = {module: name.rpartition(".")[0] for module, name in short.items()}
    return short


def short_count(number: float) -> str:
    """A number with thousands as k and millions as M: 200k for 200000."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:g}"


def tick_powers(axes: Axes) -> None:
    """Label powers of 2, at most eight of them."""
    low, high = axes.get_xlim()
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    shown = [2.0**power for power in powers[:: max(1, math.ceil(len(powers) / 8))]]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()


def plain_ticks(axes: Axes) -> None:
    """Label ticks with 1, 0.1 and 0.01 rather than powers of ten, which a page without mathematics cannot set."""
    # Labels that are not there are not measured either.
    axes.tick_params(which="minor", labelbottom=False, labelleft=False)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            if high < 5 * low:  # of 1, 2 and 5 there may be one alone, or none
                axis.set_major_locator(MaxNLocator(5))
                axis.set_minor_locator(NullLocator())
            elif high < 100 * low:
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            else:  # eight between two powers of ten would take longer to draw than all else
                axis.set_minor_locator(LogLocator(subs=(2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}" if value < 1e-3 else f"{value:g}"))


def _room_below(axes: Axes) -> float:
    """Inches that its legend needs beyond those that every panel has."""
    legend = axes.get_legend()
    if legend is None:
        return 0.0
    texts = [text.get_text() for text in legend.get_texts()]
    rows = math.ceil(len(texts) / legend._ncols)  # type: ignore[attr-defined]
    return _LINE * max(0, rows * max(1 + text.count("\n") for text in texts) - _ROOM)


def _lay_out(figure: Figure) -> None:
    """Give all panels one size, with room around each for its labels and its legend.

    Matplotlib's own layouts measure all texts two times, and again for every format: a third of a report's time.
    """
    figure.subplots_adjust(left=0.1, right=0.95, bottom=0.25, top=0.85)
    room = [0.0] * 4
    for axes in figure.axes:
        if axes.axison and (box := axes.get_tightbbox()) is not None:
            own = axes.get_window_extent()
            found = own.x0 - box.x0, box.x1 - own.x1, own.y0 - box.y0, box.y1 - own.y1
            room = list(map(max, room, found))
    _make_room(figure, *room)
    # Panels of another height may have other ticks, and so wider labels.
    boxes = [(axes.get_window_extent(), axes.yaxis.get_tightbbox()) for axes in figure.axes if axes.axison]
    left = max((own.x0 - box.x0 for own, box in boxes if box is not None), default=0.0)
    if left > room[0]:
        _make_room(figure, left, *room[1:])


def _make_room(figure: Figure, left: float, right: float, below: float, above: float) -> None:
    """Place panels with so many pixels around each."""
    width, height = (inches * figure.dpi for inches in figure.get_size_inches())
    edge, apart = (points / 72 * figure.dpi for points in (_EDGE, _BETWEEN))
    grid = figure.axes[0].get_gridspec()
    assert grid is not None
    beside, between = left + right + apart, below + above + apart
    wide = (width - 2 * edge - left - right - (grid.ncols - 1) * beside) / grid.ncols
    high = (height - 2 * edge - below - above - (grid.nrows - 1) * between) / grid.nrows
    figure.subplots_adjust(
        left=(edge + left) / width,
        right=1 - (edge + right) / width,
        bottom=(edge + below) / height,
        top=1 - (edge + above) / height,
        wspace=beside / wide,
        hspace=between / high,
    )


def _fill(axes: Axes, panel: Panel) -> None:
    axes.set_axisbelow(True)
    panel.draw(axes)
    axes.set_title(panel.title, pad=panel.pad)


def _embedded(text: str, panel: Panel, key: str) -> str:
    body = text[text.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{key}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{key}-", body)
    # A hundredth of a point is less than a pixel. Only inside of tags: text between them is what a reader sees.
    body = re.sub(r"<[^>]*>", lambda tag: re.sub(r"\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", tag[0]), body)
    for colour, name in _VARIABLES.items():
        body = body.replace(colour.lower(), f"var(--{name})")
    words = escape(f"{panel.title}. {panel.words}").replace("\\", "\\\\")
    opening = rf'<svg viewBox="\1" role="img" aria-label="{words}" xmlns:xlink="http://www.w3.org/1999/xlink">'
    body = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', opening, body, count=1, flags=re.DOTALL)
    return re.sub(r"\n\s*", "\n", body).strip()
