"""`compressm init`: a folder with a commented recipe, a small data set and a task in code, which train at once."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from compressm_lab.cli.terminal import say

_SHAPES = ("saw", "sine", "square")
_STEPS = 32
_SPLITS = {"train.csv": (240, 0), "test.csv": (90, 1)}  # sequences, and the seed they are drawn with

_RECIPE = """\
# A recipe. `compressm train recipe.yaml` trains it; `compressm report out/runs/waves` shows the run.
name: waves

# The data, from files: here a row is a step. docs/own_data.md has the other layouts.
# `compressm data inspect train.csv --set sequence=series --set step=step --set target=shape` shows what is read.
task:
  name: table
  train: train.csv
  test: test.csv                  # without it, a tenth of the training sequences
  # validation: validation.csv    # without it, a tenth too
  sequence: series                # the column that tells which rows are one sequence
  step: step                      # their order; without it the order of the file
  target: shape                   # texts are classes; of whole numbers say kind: classification, or kind: regression
  # inputs: [value]               # the channels; without it all other columns
  # missing: last                 # without it a missing value is an error; last is the value before it, or mean

# Or from code: the function `waves` of mytask.py, which then is imported. Its arguments are options.
# task: {name: "mytask:waves", noise: 0.3}

model:
  layer: LRU                      # or S5, S4, S4D, LinOSS, Mamba
  depth: 2                        # blocks
  width: 16                       # channels inside the model
  order: 32                       # states of every layer at the start: more than it needs, the cuts find out
  pooling: mean                   # steps for tasks with an answer at every step

training:
  steps: 300
  batch: 20
  learning_rate: 5.0e-3
  schedule: cosine
  evaluate_every: 50
  # class_weights: balanced       # where some classes are rare

# Cuts: at steps 30, 60 and 90 each layer keeps at most half of its states.
compression:
  rho: 0.5
  gramian: measured               # by what training data excite; white_noise needs no data and has an error bound
  when: {every: 30, last: 90}

spectra: {every: 30}              # Hankel singular values for the report
"""

_TASK = '''\
"""A task in code: a function that returns a Task. The recipe names it as "mytask:waves"."""

import torch

from compressm_lab.data import Split, Task, TaskKind

SHAPES = ("saw", "sine", "square")


def waves(noise: float = 0.3, examples: int = 240, length: int = 32) -> Task:
    """Tell which shape a noisy wave has."""
    return Task(
        name="waves",
        kind=TaskKind.CLASSIFY,  # LABEL_STEPS: a class a step; PREDICT: numbers a sequence; REGRESS: numbers a step
        train=_split(examples, length, noise, seed=0),
        validation=_split(examples // 4, length, noise, seed=1),
        test=_split(examples // 4, length, noise, seed=2),
        channels=1,
        classes=len(SHAPES),
        labels=SHAPES,
    )


def _split(examples: int, length: int, noise: float, seed: int) -> Split:
    generator = torch.Generator().manual_seed(seed)
    shape = torch.randint(len(SHAPES), (examples,), generator=generator)
    rate = 0.5 + torch.rand(examples, 1, generator=generator)
    phase = torch.rand(examples, 1, generator=generator) + rate * torch.arange(length) / 8
    sine = torch.sin(2 * torch.pi * phase)
    curves = torch.stack([2 * (phase % 1) - 1, sine, sine.sign()])
    signal = curves[shape, torch.arange(examples)] + noise * torch.randn(examples, length, generator=generator)
    # Signals are (examples, length, channels) in float32; classes are (examples,) in int64.
    return Split(signal[..., None], shape)
'''


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder, or one without these files.")],
) -> None:
    """Write a commented recipe, a small data set and a task in code into DIR; they train at once."""
    texts = {"recipe.yaml": _RECIPE, "mytask.py": _TASK}
    texts |= {name: "\n".join(_rows(count, seed)) + "\n" for name, (count, seed) in _SPLITS.items()}
    if there := [name for name in texts if (folder / name).exists()]:
        raise typer.BadParameter(f"{folder} has {', '.join(there)} already; expected a new folder", param_hint="DIR")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        for name in texts:  # half of them would be in the way of a second try
            with suppress(OSError):
                (folder / name).unlink()
        raise typer.BadParameter(
            f"{folder}: {error.strerror}; expected a folder to write to", param_hint="DIR"
        ) from None
    say(*(f"wrote {folder / name}" for name in texts), "next:", f"  cd {folder}", "  compressm train recipe.yaml")
    say("  compressm report out/runs/waves")


def _rows(count: int, seed: int) -> Iterator[str]:
    """The lines of a table of noisy waves, one row a step."""
    draw = random.Random(seed)
    yield "series,step,value,shape"
    for series in range(count):
        shape, rate, start = draw.choice(_SHAPES), 0.5 + draw.random(), draw.random()
        for step in range(_STEPS):
            yield f"{series},{step},{_value(shape, start + rate * step / 8) + draw.gauss(0, 0.3):.4f},{shape}"


def _value(shape: str, phase: float) -> float:
    if shape == "saw":
        return 2 * (phase % 1) - 1
    sine = math.sin(2 * math.pi * phase)
    return sine if shape == "sine" else math.copysign(1, sine)
