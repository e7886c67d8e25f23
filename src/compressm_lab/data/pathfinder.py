"""Scenes of Pathfinder, read or made here: dashed paths that keep apart, and two dots (Linsley et al. 2018).

Two long paths and some short ones, none near another. Label 1: the dots stand on both ends of one long path; label 0:
on one end of each. All scenes of a batch grow together, dash by dash; one where a long path finds no room is dropped.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from compressm_lab.data.dataset import DataSet, Form
from compressm_lab.data.files import Progress, Wanted, contents, members, released
from compressm_lab.data.task import DataError, Split, Splits, in_three, require_counts, seeded

TRIES = 6  # directions of a next dash, or places of a first one, of which the first that fits is taken
RESTARTS = 12
NOWHERE = -1  # the path of a dash that found no room


@final
@dataclass(frozen=True)
class Geometry:
    """The sizes of a scene in pixels; `bend` is the largest turn between two dashes, in radians."""

    side: int
    dash: float
    gap: float
    thickness: float
    dot: float
    distractors: int
    bend: float = 0.7

    @property
    def clearance(self) -> float:
        """The distance between paths: more than the gap within one, so that near dashes belong together."""
        return self.gap + self.thickness


# Dashes, gaps and dots as in the Long Range Arena at 128 px, and what is left of them on fewer pixels.
GEOMETRIES = {
    32: Geometry(32, dash=1.7, gap=1.1, thickness=0.6, dot=1.5, distractors=5),
    64: Geometry(64, dash=3.5, gap=1.75, thickness=1.2, dot=2.4, distractors=8),
    128: Geometry(128, dash=5.5, gap=2.5, thickness=1.5, dot=3.2, distractors=14),
}


class Scenes(NamedTuple):
    """Dashes from point to point, the path each belongs to, and the dots with the paths whose ends they mark."""

    dashes: Float[Tensor, "scenes dashes 2 2"]
    paths: Int64[Tensor, "scenes dashes"]
    dots: Float[Tensor, "scenes 2 2"]
    marked: Int64[Tensor, "scenes 2"]

    @property
    def labels(self) -> Int64[Tensor, " scenes"]:
        return (self.marked[:, 0] == self.marked[:, 1]).long()


@final
class _Canvas:
    """The shapes in each scene so far, as points with the distance that others must keep."""

    def __init__(self, scenes: int, geometry: Geometry, generator: torch.Generator) -> None:
        self.geometry, self.generator = geometry, generator
        self.points: Float[Tensor, "scenes points 2"] = torch.empty(scenes, 0, 2)
        self.berth: Float[Tensor, "scenes points"] = torch.empty(scenes, 0)

    def only(self, chosen: Tensor) -> _Canvas:
        """A copy with some of the scenes."""
        part = _Canvas(0, self.geometry, self.generator)
        part.points, part.berth = self.points[chosen], self.berth[chosen]
        return part

    def add_(self, points: Float[Tensor, "scenes new 2"], berth: float, there: Bool[Tensor, " scenes"]) -> None:
        self.points = torch.cat([self.points, points], dim=1)
        # Where nothing was drawn, nothing is to be kept clear.
        self.berth = torch.cat([self.berth, torch.where(there[:, None], berth, -1.0).expand(points.shape[:2])], dim=1)

    def inside(self, points: Float[Tensor, "*shape 2"]) -> Bool[Tensor, "*shape"]:
        edge = self.geometry.dot + 0.5
        return ((points >= edge) & (points <= self.geometry.side - edge)).all(dim=-1)

    def fits(self, dashes: Float[Tensor, "scenes tries 2 2"], ignored: int) -> Bool[Tensor, "scenes tries"]:
        """True for dashes that are inside, and clear of all but the last `ignored` points."""
        inside = self.inside(dashes).all(dim=-1)
        count = self.points.shape[1] - ignored
        if count <= 0:
            return inside
        distance = torch.cdist(_samples(dashes).flatten(1, 2), self.points[:, :count])
        room = distance.sub_(self.berth[:, None, :count]).amin(dim=2)
        return inside & (room.unflatten(1, (-1, 3)).amin(dim=2) > 0)

    def uniform(self, *shape: int) -> Float[Tensor, "*shape"]:
        return torch.rand(shape, generator=self.generator)


def scenes(count: int, geometry: Geometry, contour_length: int, generator: torch.Generator) -> Scenes:
    """Make at most `count` scenes in which all paths fit: both labels in turn, equally often and equally far apart."""
    canvas = _Canvas(count, geometry, generator)
    dashes = torch.empty(count, 0, 2, 2)
    for _ in range(2):
        new = _long_path_(canvas, contour_length)
        found = new.isfinite().all(dim=(1, 2, 3))
        canvas = canvas.only(found)
        dashes = torch.cat([dashes, new], dim=1)[found]
    dots, marked, kept = _dots(canvas, dashes)
    canvas, dashes, dots, marked = canvas.only(kept), dashes[kept], dots[kept], marked[kept]
    paths = torch.arange(2).repeat_interleave(contour_length).expand(len(dashes), -1)
    everywhere = torch.ones(len(dots), dtype=torch.bool)
    canvas.add_(dots, geometry.dot + geometry.thickness + 1, everywhere)
    for path in range(2, 2 + geometry.distractors):
        new, there = _short_path_(canvas, max(contour_length // 3, 1))
        dashes = torch.cat([dashes, new], dim=1)
        paths = torch.cat([paths, torch.where(there, path, NOWHERE)], dim=1)
    return Scenes(dashes, paths, dots, marked)


def _long_path_(canvas: _Canvas, length: int) -> Float[Tensor, "scenes {length} 2 2"]:
    """Draw a long path in every scene, begun anew up to RESTARTS times where it is stuck; NaN where none fits."""
    count = len(canvas.points)
    path = torch.full((count, length, 2, 2), math.nan)
    stuck = torch.arange(count)
    for _ in range(RESTARTS):
        rows, dashes = _whole_paths(canvas.only(stuck), length)
        path[stuck[rows]] = dashes
        stuck = stuck[torch.ones(len(stuck), dtype=torch.bool).index_fill(0, rows, False)]
    found = torch.ones(count, dtype=torch.bool).index_fill(0, stuck, False)
    canvas.add_(_samples(path).flatten(1, 2), canvas.geometry.clearance, found)
    return path


def _whole_paths(canvas: _Canvas, length: int) -> tuple[Int64[Tensor, " found"], Float[Tensor, "found {length} 2 2"]]:
    """Draw a long path in every scene, and give up where it is stuck: the scenes with a whole path, and the paths."""
    rows = torch.arange(len(canvas.points))
    path = torch.empty(len(rows), 0, 2, 2)
    tip = None
    for _ in range(length):
        dash, fits = _next_dash_(canvas, tip)
        canvas, rows, tip = canvas.only(fits), rows[fits], dash[fits]
        path = torch.cat([path[fits], tip[:, None]], dim=1)
        if not len(rows):
            return rows, torch.empty(0, length, 2, 2)
    return rows, path


def _short_path_(
    canvas: _Canvas, length: int
) -> tuple[Float[Tensor, "scenes {length} 2 2"], Bool[Tensor, "scenes {length}"]]:
    """Draw a dash and its followers, and say which are there: after one that does not fit there are no more."""
    alive, tip = torch.ones(len(canvas.points), dtype=torch.bool), None
    grown, there = [], []
    for _ in range(length):
        tip, fits = _next_dash_(canvas, tip)
        alive = alive & fits
        grown.append(tip)
        there.append(alive)
    return torch.stack(grown, dim=1), torch.stack(there, dim=1)


def _next_dash_(
    canvas: _Canvas, tip: Float[Tensor, "scenes 2 2"] | None
) -> tuple[Float[Tensor, "scenes 2 2"], Bool[Tensor, " scenes"]]:
    """Draw a dash that follows the last one, or begins a path where there is none, and say whether it fits."""
    geometry, count = canvas.geometry, len(canvas.points)
    if tip is None:
        start = geometry.side * canvas.uniform(count, TRIES, 2)
        heading = 2 * math.pi * canvas.uniform(count, TRIES)
    else:
        along = tip[:, 1] - tip[:, 0]
        turn = torch.atan2(along[:, 1], along[:, 0])[:, None]
        bends = geometry.bend * (2 * canvas.uniform(count, TRIES) - 1)
        heading = turn + bends
        start = tip[:, 1:] + geometry.gap * _direction(turn + bends / 2)
    tried = torch.stack([start, start + geometry.dash * _direction(heading)], dim=2)
    fits = canvas.fits(tried, ignored=0 if tip is None else 3)
    # The first that fits, rather one that does not head for the edge.
    ahead = canvas.inside(tried[:, :, 1] + 2 * geometry.dash * _direction(heading))
    chosen = (2 * fits.int() + (fits & ahead).int()).argmax(dim=1)
    dash = tried[torch.arange(count), chosen]
    canvas.add_(_samples(dash), geometry.clearance, fits.any(dim=1))
    return dash, fits.any(dim=1)


def _samples(dashes: Float[Tensor, "*shape 2 2"]) -> Float[Tensor, "*shape 3 2"]:
    """The points that stand for a dash: its ends and its middle."""
    return torch.cat([dashes, dashes.mean(-2, keepdim=True)], dim=-2)


def _direction(angle: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape 2"]:
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def _dots(
    canvas: _Canvas, dashes: Float[Tensor, "scenes dashes 2 2"]
) -> tuple[Float[Tensor, "scenes 2 2"], Int64[Tensor, "scenes 2"], Int64[Tensor, " kept"]]:
    """Mark two ends a scene with dots: the dots, the paths they are of, and the scenes to keep."""
    count, geometry = len(dashes), canvas.geometry
    first, second = dashes.chunk(2, dim=1)
    ends = torch.stack([first[:, 0, 0], first[:, -1, 1], second[:, 0, 0], second[:, -1, 1]], dim=1)
    drawn = canvas.uniform(count)
    # Ends 0, 1 are of the first path, 2, 3 of the second: half of the draws take a path, the others an end of each.
    pairs = torch.tensor([[0, 1], [0, 1], [2, 3], [2, 3], [0, 2], [0, 3], [1, 2], [1, 3]])[(8 * drawn).long()]
    dots = ends.gather(1, pairs[..., None].expand(-1, -1, 2))
    distance = (dots[:, 0] - dots[:, 1]).norm(dim=-1)
    # A dot is wider than a path: only the dash it ends, of which three points, may be near.
    crowd = (torch.cdist(dots, _samples(dashes).flatten(1, 2)) < geometry.dot + geometry.gap).sum(dim=2)
    clear = (distance > 4 * geometry.dot) & (crowd <= 3).all(dim=1)
    marked = pairs // 2
    same = (marked[:, 0] == marked[:, 1]).long()
    return dots, marked, _matched(same, (16 * distance / geometry.side).long(), clear)


def _matched(
    label: Int64[Tensor, " scenes"], distance: Int64[Tensor, " scenes"], clear: Bool[Tensor, " scenes"]
) -> Int64[Tensor, " kept"]:
    """The scenes to keep, labels 1 and 0 in turn, at every distance as many of one as of the other.

    Ends of one path are nearer to each other than ends of two: distance alone would tell many labels.
    """
    kept: list[Tensor] = []
    for far in distance[clear].unique().tolist():
        here = clear & (distance == far)
        both = [(here & (label == which)).nonzero()[:, 0] for which in (1, 0)]
        count = min(map(len, both))
        kept.append(torch.stack([members[:count] for members in both], dim=1))
    pairs = torch.cat(kept) if kept else torch.empty(0, 2, dtype=torch.int64)
    return pairs[pairs[:, 0].argsort()].flatten()


def drawn(scenes: Scenes, geometry: Geometry) -> UInt8[Tensor, "scenes side side"]:
    """The pictures of scenes; the brightest shape counts where several meet."""
    count, side = len(scenes.dots), geometry.side
    canvas = torch.zeros(count * side * side)
    there = scenes.paths != NOWHERE
    row = torch.arange(count)[:, None].expand(there.shape)[there]
    _paint_(canvas, side, row, scenes.dashes[there], geometry.thickness / 2)
    dots = scenes.dots.flatten(0, 1)[:, None].expand(-1, 2, -1)
    _paint_(canvas, side, torch.arange(count).repeat_interleave(2), dots, geometry.dot)
    return (255 * canvas).round().to(torch.uint8).unflatten(0, (count, side, side))


def _paint_(
    canvas: Float[Tensor, " pixels"],
    side: int,
    row: Int64[Tensor, " shapes"],
    segments: Float[Tensor, "shapes 2 2"],
    radius: float,
) -> None:
    """Paint each segment, as thick as its radius, on the patch of pixels around it: a fortieth of all pixels."""
    if not len(segments):
        return
    begin, along = segments[:, :1], segments[:, 1:] - segments[:, :1]
    reach = math.ceil(float(along.norm(dim=-1).max()) / 2 + radius + 1)
    window = torch.arange(-reach, reach + 1)
    patch = torch.cartesian_prod(window, window) + segments.mean(1, keepdim=True).floor().long()
    x = patch + 0.5 - begin
    share = ((x * along).sum(-1) / along.square().sum(-1).clamp(min=1e-9)).clamp(0, 1)
    distance = (x - share[..., None] * along).norm(dim=-1)
    ink = (radius + 0.5 - distance).clamp(0, 1)
    inside = ((patch >= 0) & (patch < side)).all(dim=-1)
    index = (row[:, None] * side + patch[..., 1]) * side + patch[..., 0]
    canvas.scatter_reduce_(0, index[inside], ink[inside], "amax")


# How many dashes a long path has, and the folder of the Long Range Arena with such paths.
FOLDERS = {6: "curv_baseline", 9: "curv_contour_length_9", 14: "curv_contour_length_14"}
FILE_COLUMN, LABEL_COLUMN = 1, 3  # of a line of metadata; column 0 is the folder
EMPTY_AS_PUBLISHED = {"curv_baseline/imgs/0/sample_172.png"}  # at 32 px
_SCENES = 4000  # grown together


@final
@dataclass(frozen=True)
class Pathfinder(DataSet):
    """Images of the Long Range Arena, or made here: `examples` to train on, harder with longer paths and distractors.

    The intensities reach the model in [−1, 1]. Of the published images a tenth each is for validation and test.
    """

    side: int = 32
    contour_length: int = 14
    generated: bool = False
    distractors: int | None = None
    examples: int = 160_000
    held_out: int = 20_000
    seed: int = 0

    name = "pathfinder"

    def __post_init__(self) -> None:
        if self.side not in GEOMETRIES:
            raise DataError(f"side is {self.side!r}, expected one of {', '.join(map(str, GEOMETRIES))}")
        require_counts(2, contour_length=self.contour_length)
        require_counts(examples=self.examples, held_out=self.held_out)
        if self.distractors is not None:
            require_counts(0, distractors=self.distractors)
        if not self.generated and self.contour_length not in FOLDERS:
            raise DataError(
                f"contour_length is {self.contour_length}, the files have {', '.join(map(str, FOLDERS))}; "
                "others can be made, with generated=True"
            )

    @property
    def form(self) -> Form:
        return Form(length=self.side**2, classes=2, channels=1, shift=(0.5,), scale=(2.0,))

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        if self.generated:
            return ()
        folder = f"pathfinder{self.side}"
        return (released(folder, f"pathfinder/{folder}"),)

    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        if self.generated:
            return self._made(progress)
        (path,) = paths
        return in_three(self._read(path, progress))

    def _made(self, progress: Progress) -> Splits:
        geometry, generator = GEOMETRIES[self.side], seeded("pathfinder", self.seed)
        if self.distractors is not None:
            geometry = replace(geometry, distractors=self.distractors)
        counts = (self.examples, self.held_out, self.held_out)
        images = torch.empty(sum(counts), self.side, self.side, dtype=torch.uint8)
        labels, done, batches = torch.empty(sum(counts), dtype=torch.int64), 0, 0
        while done < sum(counts):
            batch, batches = scenes(_SCENES, geometry, self.contour_length, generator), batches + 1
            part = slice(done, done + len(batch.labels))
            images[part] = drawn(batch, geometry)[: sum(counts) - done]
            labels[part] = batch.labels[: sum(counts) - done]
            done += len(batch.labels)
            if not done and batches == 3:
                raise DataError(
                    f"paths of {self.contour_length} dashes find no room on {self.side} px; make them shorter"
                )
            progress("making Pathfinder", min(done, sum(counts)), sum(counts))
        x = images.flatten(1)[..., None]
        return Splits(*map(Split, x.split(counts), labels.split(counts)))

    def _read(self, path: Path, progress: Progress) -> Split:
        level = FOLDERS[self.contour_length]
        # In the archive there are other sizes and levels beside this one.
        size = "" if path.is_dir() else rf"pathfinder{self.side}/"
        images: dict[str, UInt8[np.ndarray, "side side"]] = {}
        labels: dict[str, int] = {}
        pattern = rf"(^|/){size}{level}/(imgs/\d+/[^/]+\.png|metadata/\d+\.npy)$"
        for name, where, stream in members(path, pattern):
            short = name[name.index(f"{level}/") :]
            if short.endswith(".npy"):
                labels |= _labels(contents(stream, where), level, where)
            elif not (self.side == 32 and short in EMPTY_AS_PUBLISHED):
                images[short] = self._image(contents(stream, where), where)
            if len(images) % 1000 == 1:
                progress(f"reading {path}", len(images), None)
        return _joined(images, labels, path / level)

    def _image(self, data: bytes, where: str) -> UInt8[np.ndarray, "side side"]:
        try:
            from PIL import Image, UnidentifiedImageError
        except ModuleNotFoundError as error:
            raise DataError(f"reading {where} needs the package {error.name}: pip install pillow") from None
        try:
            pixels = np.array(Image.open(io.BytesIO(data)).convert("L"))
        # How Pillow says that a PNG is empty, cut short or damaged.
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{where} is broken or only half there ({error}); get it again") from None
        if pixels.shape != (self.side, self.side):
            raise DataError(f"{where} has {pixels.shape} pixels, expected {(self.side, self.side)}")
        return pixels


def _labels(data: bytes, level: str, where: str) -> dict[str, int]:
    """Read lines of text: folder, file, number, label, and how the image was made."""
    found = {}
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
        columns = line.split()
        if len(columns) <= LABEL_COLUMN or columns[LABEL_COLUMN] not in ("0", "1"):
            raise DataError(f"{where}, line {number}: {line[:80]!r}, expected folder, file, number and label 0 or 1")
        found[f"{level}/{columns[0]}/{columns[FILE_COLUMN]}"] = int(columns[LABEL_COLUMN])
    return found


def _joined(images: dict[str, UInt8[np.ndarray, "side side"]], labels: dict[str, int], where: Path) -> Split:
    """Join images and labels by name: an archive and a folder have other orders."""
    labels = {name: label for name, label in labels.items() if name not in EMPTY_AS_PUBLISHED or name in images}
    if missing := sorted(labels.keys() - images.keys()):
        raise DataError(f"{where}: {len(missing)} images are missing, the first is {missing[0]}; get it again")
    if not labels:
        raise DataError(f"{where} has no images with metadata, expected imgs/N/sample_K.png and metadata/N.npy")
    names = sorted(labels)
    x = torch.from_numpy(np.stack([images[name] for name in names]))
    return Split(x.flatten(1)[..., None], torch.tensor([labels[name] for name in names], dtype=torch.int64))
