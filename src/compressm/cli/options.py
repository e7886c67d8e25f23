"""Options that several commands share."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

DeviceChoice = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute; auto is a GPU where there is one.")
]
DataOption = Annotated[Path | None, typer.Option(help="Folder of data sets. Default: $COMPRESSM_DATA, or a cache.")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Fetch nothing.")]
MeasuredOption = Annotated[
    bool, typer.Option("--measured", help="Gramians of training data instead of white noise; the path is a run.")
]


def integer(text: str | int) -> int:
    """Typer's own check does not say what was given."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer") from None


def number(text: str | float) -> float:
    """As `integer`."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def count(text: str | int) -> int:
    """An integer of at least 1."""
    if (found := integer(text)) < 1:
        raise typer.BadParameter(f"{found} is too small, expected at least 1")
    return found


def chosen_device(choice: str) -> torch.device:
    """A GPU that is not there is an error, not a CPU."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device here; allowed: auto, cpu", param_hint="--device")
    return torch.device("cuda" if choice != "cpu" and torch.cuda.is_available() else "cpu")


PICTURES = (".png", ".pdf", ".svg", ".eps", ".jpg", ".jpeg", ".webp")


class PathError(ValueError):
    """A path that cannot be written, or names no kind of picture."""


def require_writable(path: Path) -> Path:
    """A file that can be written, in a folder that is there or can be made; nothing is left behind."""
    folder = path.parent
    try:
        with tempfile.TemporaryFile(dir=_nearest(folder)):
            pass
    except OSError as error:
        raise PathError(f"{folder}: {error.strerror}; expected a folder that can be made and written") from None
    if path.is_dir():
        raise PathError(f"{path} is a folder; expected a file")
    return path


def _nearest(folder: Path) -> Path:
    """The folder itself, or of those above it the first that is there."""
    for place in (folder, *folder.parents):
        try:
            place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return place
    return folder


def require_picture(path: Path) -> Path:
    """A file that can be written, with the suffix of a picture."""
    if path.suffix.lower() not in PICTURES:
        raise PathError(f"{path} ends in {path.suffix!r}; expected one of {', '.join(PICTURES)}")
    return require_writable(path)
