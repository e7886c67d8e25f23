"""What every reader of files gives: sequences with their answers; and what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from jaxtyping import Float64, Shaped

Signal = Float64[np.ndarray, "length channels"]
# The answers of a sequence: one text or number for each output, a row of them for each step.
Answer = Shaped[np.ndarray, "*steps outputs"]


@final
@dataclass(frozen=True, kw_only=True)
class Choices:
    """The roles of the columns or arrays of a file, and how it is written: options of a table by their names."""

    inputs: Any = None
    leave_out: Any = None
    target: Any = None
    sequence: Any = None
    step: Any = None
    lengths: str | None = None
    remaining: float | None = None
    every_step: bool | None = None
    delimiter: str | None = None
    header: bool | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Examples:
    """The sequences of a file: signals, in which NaN is missing, and answers as texts or as numbers.

    `every_step`: a sequence has an answer at each step. `classes`: the file itself says that answers are classes, or
    (False) that they are numbers. `where` names the place of a sequence, `place` that of a step and a channel;
    `keys` are the names of sequences; `steps` are those of the columns that are steps, if a header has them.
    """

    path: Path
    said: str
    layout: str
    channels: tuple[str, ...]
    signals: list[Signal]
    answers: list[Answer]
    outputs: tuple[str, ...]
    every_step: bool
    classes: bool | None
    where: Callable[[int], str]
    place: Callable[[int, int, int], str]
    keys: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.signals)
