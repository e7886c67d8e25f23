"""Options of several commands, and checks of their values and paths."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from compressm.deploy import named_orders
from compressm.errors import CompressionError
from compressm.families.choices import RoundTo, as_allowed_orders

DeviceChoice = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute; auto is a GPU where there is one.")
]
DataOption = Annotated[
    Path | None, typer.Option(file_okay=False, help="Folder of data sets. Default: $COMPRESSM_DATA, or a cache.")
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Fetch nothing.")]
MeasuredOption = Annotated[
    bool, typer.Option("--measured", help="Gramians of training data instead of white noise; the path is a run.")
]


def integer(text: str | int) -> int:
    """Parse an integer; unlike Typer's own, the error quotes the text."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer") from None


def number(text: str | float) -> float:
    """Parse a number; the error quotes the text."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def count(text: str | int) -> int:
    """Parse an integer of at least 1."""
    if (found := integer(text)) < 1:
        raise typer.BadParameter(f"{found} is too small, expected at least 1")
    return found


def orders(text: str | int) -> RoundTo:
    """Parse what `round_to` takes: 8, or 16,32, or powers-of-two, or the name of a runtime."""
    words = str(text).split(",")
    try:
        if all(word.strip().lstrip("-").isdigit() for word in words):
            found = [int(word) for word in words]
            round_to: RoundTo = found[0] if len(found) == 1 else found
            as_allowed_orders(round_to)
            return round_to
        return named_orders(str(text))
    except CompressionError as error:
        raise typer.BadParameter(str(error).replace("round_to is", "--round-to is")) from None


def chosen_device(choice: str) -> torch.device:
    """The device of a choice; cuda without a GPU is an error."""
    if choice == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device here; allowed: auto, cpu", param_hint="--device")
    return torch.device("cuda" if choice != "cpu" and torch.cuda.is_available() else "cpu")


PICTURES = (".png", ".pdf", ".svg", ".eps", ".jpg", ".jpeg", ".webp")


class PathError(ValueError):
    """A path cannot be written, or does not end like a picture."""


def require_writable(path: Path) -> Path:
    """The path, if a file can be written there, in a folder that exists or can be made; nothing is created."""
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
    """The folder itself, or the nearest one above it that exists."""
    for place in (folder, *folder.parents):
        try:
            place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return place
    return folder


def require_picture(path: Path) -> Path:
    """The path, if it is writable and ends like a picture."""
    if path.suffix.lower() not in PICTURES:
        raise PathError(f"{path} ends in {path.suffix!r}; expected one of {', '.join(PICTURES)}")
    return require_writable(path)
