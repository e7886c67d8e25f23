"""Pathfinder: are two dots joined by a dashed path, pixel by pixel (Linsley et al. 2018; Tay et al. 2021)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import final

import numpy as np
import torch
from jaxtyping import UInt8

from compressm.data.archives import contents, members, place
from compressm.data.dataset import DataSet, Form
from compressm.data.errors import DataError, require_counts
from compressm.data.fetch import Progress, Wanted
from compressm.data.lra import released
from compressm.data.pathfinder_drawing import drawn
from compressm.data.pathfinder_scenes import GEOMETRIES, scenes
from compressm.data.shuffling import seeded
from compressm.data.splitting import Splits, in_three
from compressm.data.task import Split

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
        for name, stream in members(path, rf"(^|/){size}{level}/(imgs/\d+/[^/]+\.png|metadata/\d+\.npy)$"):
            short = name[name.index(f"{level}/") :]
            if short.endswith(".npy"):
                labels |= _labels(stream, level, place(path, name))
            elif not (self.side == 32 and short in EMPTY_AS_PUBLISHED):
                images[short] = self._image(stream, place(path, name))
            if len(images) % 1000 == 1:
                progress(f"reading {path}", len(images), None)
        return _joined(images, labels, path / level)

    def _image(self, stream: BufferedReader, where: str) -> UInt8[np.ndarray, "side side"]:
        try:
            from PIL import Image, UnidentifiedImageError
        except ModuleNotFoundError as error:
            raise DataError(f"reading {where} needs the package {error.name}: pip install pillow") from None
        try:
            pixels = np.array(Image.open(io.BytesIO(contents(stream, where))).convert("L"))
        # How Pillow says that a PNG is empty, cut short or damaged.
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
            raise DataError(f"{where} is broken or only half there ({error}); get it again") from None
        if pixels.shape != (self.side, self.side):
            raise DataError(f"{where} has {pixels.shape} pixels, expected {(self.side, self.side)}")
        return pixels


def _labels(stream: BufferedReader, level: str, where: str) -> dict[str, int]:
    """Lines of text: folder, file, number, label, and how the image was made."""
    found = {}
    for number, line in enumerate(contents(stream, where).decode("utf-8", "replace").splitlines(), start=1):
        columns = line.split()
        if len(columns) <= LABEL_COLUMN or columns[LABEL_COLUMN] not in ("0", "1"):
            raise DataError(f"{where}, line {number}: {line[:80]!r}, expected folder, file, number and label 0 or 1")
        found[f"{level}/{columns[0]}/{columns[FILE_COLUMN]}"] = int(columns[LABEL_COLUMN])
    return found


def _joined(images: dict[str, UInt8[np.ndarray, "side side"]], labels: dict[str, int], where: Path) -> Split:
    """By name: an archive and a folder have other orders."""
    labels = {name: label for name, label in labels.items() if name not in EMPTY_AS_PUBLISHED or name in images}
    if missing := sorted(labels.keys() - images.keys()):
        raise DataError(f"{where}: {len(missing)} images are missing, the first is {missing[0]}; get it again")
    if not labels:
        raise DataError(f"{where} has no images with metadata, expected imgs/N/sample_K.png and metadata/N.npy")
    names = sorted(labels)
    x = torch.from_numpy(np.stack([images[name] for name in names]))
    return Split(x.flatten(1)[..., None], torch.tensor([labels[name] for name in names], dtype=torch.int64))
