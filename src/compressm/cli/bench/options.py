"""Options that several benchmarks share, and what must hold before anything is measured."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from compressm.cli.paths import PathError, require_writable


class Device(StrEnum):
    """Where to measure."""

    cpu = "cpu"
    cuda = "cuda"


class Precision(StrEnum):
    """Of the activations; parameters are float32, as is everything in tf32 but products on a GPU."""

    float32 = "float32"
    tf32 = "tf32"
    bfloat16 = "bfloat16"


class Task(StrEnum):
    """The paper's tasks, by their sizes."""

    smnist = "smnist"
    scifar = "scifar"
    listops = "listops"
    imdb = "imdb"
    aan = "aan"
    pathfinder = "pathfinder"


def count(text: str | int) -> int:
    """Typer's own check does not say what was given."""
    try:
        number = int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer, expected at least 1") from None
    if number < 1:
        raise typer.BadParameter(f"{number} is too small, expected at least 1")
    return number


DeviceOption = Annotated[Device, typer.Option(help="Where to measure.")]
RepeatsOption = Annotated[int, typer.Option(parser=count, metavar="INTEGER", help="Repeats; the median counts.")]
CompileOption = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Compile the regions around the SSM layers first.")
]
OutOption = Annotated[Path, typer.Option(help="Folder for the result file.")]
PicturedOutOption = Annotated[Path, typer.Option(help="Folder for the result file and the picture.")]
OUT = Path("out/bench")


def require(device: Device, *paths: Path) -> None:
    """A device that is there and files that can be written."""
    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device here; allowed: cpu", param_hint="--device")
    try:
        for path in paths:
            require_writable(path)
    except PathError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None
