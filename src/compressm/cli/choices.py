"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import typer

DeviceChoice = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute; auto is a GPU where there is one.")
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
