"""Tasks that models are trained on: splits of examples, batches of them, and the order in which they are seen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor


class DataError(ValueError):
    """A file that is missing or broken, or an option that is not allowed: which, what was expected, how to get it."""


_MOST = 10**12  # far more than fits into memory, and still a size that torch can refuse


def require_counts(at_least: int = 1, **counts: int) -> None:
    """Refuse options that are not integers of at least `at_least`, and sizes that nothing can have."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < at_least:
            raise DataError(f"{name} is {count!r}, expected an integer of at least {at_least}")
        if count > _MOST:
            raise DataError(f"{name} is above {_MOST:,}, expected at most that")


IGNORED = -100  # the target of a step at which nothing is asked, as in torch's cross-entropy


class TaskKind(Enum):
    """The question of a task: one class of a sequence or a step, or real outputs of a step or (PREDICT) a sequence."""

    CLASSIFY = "classify"
    LABEL_STEPS = "label_steps"
    REGRESS = "regress"
    PREDICT = "predict"

    @property
    def is_regression(self) -> bool:
        """True if the answers are real numbers."""
        return self in (TaskKind.REGRESS, TaskKind.PREDICT)

    @property
    def asks_steps(self) -> bool:
        """True if there is an answer at every step."""
        return self in (TaskKind.REGRESS, TaskKind.LABEL_STEPS)


class Batch(NamedTuple):
    """Examples as a model takes them: normalised float32 signals or int64 tokens; `indices` are those in the split."""

    inputs: Float[Tensor, "batch length channels"] | Int64[Tensor, "batch *towers length"]
    targets: Shaped[Tensor, "batch *target"]
    lengths: Int64[Tensor, "batch *towers"] | None
    indices: Int[Tensor, " batch"] | None = None


@final
@dataclass(frozen=True, eq=False)
class Split:
    """Examples as they are stored.

    `inputs` are signals (examples, length, channels), uint8 or float32, or integer tokens (examples, length), of two
    towers (examples, 2, length). `targets` are classes (examples,), classes of steps (examples, length), outputs of
    steps (examples, length, outputs) or of sequences (examples, outputs). Steps at and after `lengths` are padding;
    None: there is none. Outputs of steps that are NaN are not asked for, where there are `lengths`.
    """

    inputs: Shaped[Tensor, "examples *input"]
    targets: Shaped[Tensor, "answers *target"]
    lengths: Int64[Tensor, "examples *towers"] | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise DataError(f"{len(self.inputs)} inputs and {len(self.targets)} targets, expected as many")

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> Split:
        return self._each(lambda tensor: tensor.to(device))

    def select(self, indices: Int64[Tensor, " chosen"]) -> Split:
        """The examples at `indices`, in that order."""
        return self._each(lambda tensor: tensor.index_select(0, indices))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Split:
        return replace(self, **{name: change(tensor) for name, tensor in vars(self).items() if tensor is not None})

    @property
    def bytes(self) -> int:
        """The memory that all tensors take."""
        return sum(tensor.nbytes for tensor in vars(self).values() if tensor is not None)


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Task:
    """Signals of `channels` or tokens below `vocabulary`, and `classes` (of a regression: outputs) to tell.

    A signal reaches the model as (x − shift) · scale, channel by channel; bytes are divided by 255 first. With `time`
    the first of the channels is t / L at step t = 0, 1, …, L − 1; it is made in the batch and not stored. Targets of a
    regression reach it as (y − target_shift) · target_scale. `labels` are the names of the classes, `about` is what a
    run notes of the data, as plain values.
    """

    name: str
    kind: TaskKind
    train: Split
    validation: Split
    test: Split
    classes: int
    channels: int | None = None
    vocabulary: int | None = None
    towers: int = 1
    shift: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = (1.0,)
    time: bool = False
    target_shift: tuple[float, ...] = (0.0,)
    target_scale: tuple[float, ...] = (1.0,)
    labels: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.channels is None) == (self.vocabulary is None):
            raise DataError(
                f"{self.name}: channels is {self.channels} and vocabulary {self.vocabulary}, expected exactly one"
            )
        if self.channels is None and self.time:
            raise DataError(f"{self.name}: time is a channel of signals, and there are tokens below {self.vocabulary}")
        stored = None if self.channels is None else self.channels - self.time
        if stored is not None and {len(self.shift), len(self.scale)} - {1, stored}:
            raise DataError(f"{self.name}: {len(self.shift)} shifts and {len(self.scale)} scales for {stored} channels")
        if {len(self.target_shift), len(self.target_scale)} - {1, self.classes}:
            raise DataError(
                f"{self.name}: {len(self.target_shift)} target shifts and {len(self.target_scale)} target scales for"
                f" {self.classes} outputs"
            )
        if len(self.labels) not in (0, self.classes):
            raise DataError(f"{self.name}: {len(self.labels)} labels for {self.classes} classes")

    @property
    def length(self) -> int:
        """The steps of a sequence, padding included."""
        return self.train.inputs.shape[1 if self.vocabulary is None else -1]

    def notes(self) -> dict[str, Any]:
        """The notes of a run on its data: sizes, names of classes, and how numbers are normalised."""
        counted = {which: len(getattr(self, which)) for which in Splits._fields}
        sizes = ("classes", "labels", "channels", "vocabulary", "shift", "scale", "target_shift", "target_scale")
        values = {name: getattr(self, name) for name in sizes}
        return {"name": self.name, "kind": self.kind.value, "examples": counted, **values, "about": dict(self.about)}

    def require_sound(self) -> None:
        """Refuse splits that do not hold what the fields say, as a task of your own code may."""
        for which in Splits._fields:
            self._require_inputs(which, getattr(self, which))
            self._require_targets(which, getattr(self, which))

    def _require_inputs(self, which: str, split: Split) -> None:
        x, towers = split.inputs, (self.towers,) if self.towers > 1 else ()
        said = f"{which}: the inputs are {x.dtype} {tuple(x.shape)}"
        if not len(x):
            raise DataError(f"{which}: no examples")
        if self.channels is not None:
            width = self.channels - self.time
            if x.dtype not in (torch.float32, torch.uint8) or x.ndim != 3 or x.shape[2] != width:
                raise DataError(f"{said}, expected float32 or uint8 (examples, length, {width})")
            if not x.isfinite().all():
                raise DataError(f"{which}: inputs that are not finite in example {_first(~x.isfinite())}")
        elif x.is_floating_point() or tuple(x.shape[1:-1]) != towers:
            shape = ", ".join(map(str, ("examples", *towers, "length")))
            raise DataError(f"{said}, expected integers ({shape})")
        elif ((x < 0) | (x >= (self.vocabulary or 0))).any():
            raise DataError(f"{which}: tokens {int(x.min())} to {int(x.max())}, expected 0 to below {self.vocabulary}")
        lengths = split.lengths
        if lengths is None:
            return
        steps = x.shape[len(towers) + 1]
        if lengths.dtype != torch.int64 or tuple(lengths.shape) != (len(x), *towers):
            raise DataError(
                f"{which}: lengths are {lengths.dtype} {tuple(lengths.shape)}, expected int64 {(len(x), *towers)}"
            )
        if int(lengths.min()) < 1 or int(lengths.max()) > steps:
            raise DataError(f"{which}: lengths {int(lengths.min())} to {int(lengths.max())}, expected 1 to {steps}")

    def _require_targets(self, which: str, split: Split) -> None:
        y, steps = split.targets, (split.inputs.shape[-1 if self.channels is None else 1],)
        shape = (
            len(split),
            *(steps if self.kind.asks_steps else ()),
            *((self.classes,) if self.kind.is_regression else ()),
        )
        wanted = torch.float32 if self.kind.is_regression else torch.int64
        if y.dtype != wanted or tuple(y.shape) != shape:
            raise DataError(
                f"{which}: the targets are {y.dtype} {tuple(y.shape)}, expected {wanted} {shape} of a task that is"
                f" {self.kind.value}"
            )
        if self.kind.is_regression:
            free = self.kind.asks_steps and split.lengths is not None
            if (wrong := y.isinf() if free else ~y.isfinite()).any():
                raise DataError(f"{which}: targets that are not finite in example {_first(wrong)}")
            return
        asked = y != IGNORED if self.kind.asks_steps else torch.ones_like(y, dtype=torch.bool)
        if (wrong := asked & ((y < 0) | (y >= self.classes))).any():
            most = self.classes - 1
            raise DataError(f"{which}: target {int(y[wrong][0])} in example {_first(wrong)}, expected 0 to {most}")

    def to(self, device: torch.device | str) -> Task:
        """The same task with all splits on one device."""
        train, validation, test = (split.to(device) for split in (self.train, self.validation, self.test))
        return replace(self, train=train, validation=validation, test=test)

    def batch(self, split: Split, indices: Int[Tensor, " batch"]) -> Batch:
        """The examples at `indices`, by operations that a CUDA graph can hold: no copy from the host, no wait."""
        chosen = split.select(indices)
        inputs = self._normalised(chosen.inputs) if self.vocabulary is None else chosen.inputs.long()
        inputs = self._timed(inputs) if self.time else inputs
        targets = chosen.targets
        if self.kind.is_regression:
            targets = _affine(targets, self.target_shift, self.target_scale)
        return Batch(inputs, targets, chosen.lengths, indices)

    def _normalised(self, x: Shaped[Tensor, "*batch channels"]) -> Float[Tensor, "*batch channels"]:
        return _affine(x, self.shift, self.scale, 1 / 255 if x.dtype == torch.uint8 else 1.0)

    @staticmethod
    def _timed(x: Float[Tensor, "batch length channels"]) -> Float[Tensor, "batch length more"]:
        """Put the channel t / L before the others."""
        times = torch.arange(x.shape[1], device=x.device, dtype=x.dtype) / x.shape[1]
        return torch.cat([times[None, :, None].expand(len(x), -1, 1), x], dim=-1)


def _first(wrong: Shaped[Tensor, "examples *rest"]) -> int:
    """The first example, counted from 0, in which something is wrong."""
    return int(wrong.flatten(1).any(dim=1).nonzero()[0]) if wrong.ndim > 1 else int(wrong.nonzero()[0])


def _affine(
    x: Shaped[Tensor, "*batch channels"], shift: tuple[float, ...], scale: tuple[float, ...], unit: float = 1.0
) -> Float[Tensor, "*batch channels"]:
    """(unit · x − shift) · scale in float32; x may be changed."""
    weight = tuple(value * unit for value in scale)
    bias = tuple((-np.array(shift) * np.array(scale)).tolist())  # one value stands for all channels
    if len(set(weight)) == 1 and len(set(bias)) == 1:
        x = x.float()  # a copy: `select` made it
        return x if (weight[0], bias[0]) == (1.0, 0.0) else x.mul_(weight[0]).add_(bias[0])
    return torch.addcmul(_filled(bias, x.device), x.float(), _filled(weight, x.device))


def _filled(values: tuple[float, ...], device: torch.device) -> Float[Tensor, " values"]:
    """A vector that kernels fill: a copy from the host could not be captured in a CUDA graph."""
    made = torch.empty(len(values), device=device)
    for slot, value in zip(made.unbind(), values, strict=True):
        slot.fill_(value)
    return made


@final
@dataclass(frozen=True)
class Order:
    """Batches of indices without end, a new permutation every epoch; what is left smaller than a batch is dropped."""

    examples: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        require_counts(examples=self.examples, batch=self.batch)
        if self.examples < self.batch:
            raise DataError(f"{self.examples} examples are fewer than a batch of {self.batch}")

    @property
    def steps_per_epoch(self) -> int:
        return self.examples // self.batch

    def at(self, step: int) -> Int64[Tensor, " batch"]:
        """The examples of gradient step `step`, the first being 1."""
        return self.rows(step, step)[0]

    def rows(self, first: int, last: int) -> Int64[Tensor, "steps batch"]:
        """The examples of steps `first` to `last`, both included."""
        if not 1 <= first <= last:
            raise DataError(f"steps {first} to {last}, expected 1 <= first <= last")
        steps = self.steps_per_epoch
        epochs = range((first - 1) // steps, (last - 1) // steps + 1)
        used = steps * self.batch
        shuffled = [_permutation(self.examples, self.seed, epoch)[:used] for epoch in epochs]
        rows = torch.cat(shuffled).unflatten(0, (-1, self.batch))
        skipped = first - 1 - epochs.start * steps
        return rows[skipped : skipped + last - first + 1].clone()


# Two: consecutive steps of one epoch, and rows that reach into the next.
@lru_cache(maxsize=2)
def _permutation(examples: int, seed: int, epoch: int) -> Int64[Tensor, " examples"]:
    return torch.randperm(examples, generator=seeded(seed, epoch))


def seeded(*words: int | str) -> torch.Generator:
    """A generator of its own for every sequence of words; torch's global generator is not touched."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


SHARE = 0.1  # of the training set, for validation


class Splits(NamedTuple):
    """All examples of a data set, each in one of three splits."""

    train: Split
    validation: Split
    test: Split


def hold_out(
    targets: Int64[Tensor, " examples"], share: float = SHARE, *, purpose: str = "validation"
) -> tuple[Int64[Tensor, " kept"], Int64[Tensor, " held"]]:
    """Indices to keep and to hold out, ascending; every class gives the same share."""
    generator = seeded("hold out", purpose)
    held = torch.zeros(len(targets), dtype=torch.bool)
    labels, counts = targets.unique(return_counts=True)
    for label, count in zip(labels.tolist(), _shares(counts, share).tolist(), strict=True):
        members = (targets == label).nonzero()[:, 0]
        held[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def _shares(counts: Int64[Tensor, " classes"], share: float) -> Int64[Tensor, " classes"]:
    """Whole numbers near share · counts that add up to share of the sum, rounded (largest remainders)."""
    exact = share * counts.double()
    whole = exact.floor()
    missing = round(float(exact.sum())) - int(whole.sum())
    whole[(exact - whole).argsort(descending=True, stable=True)[:missing]] += 1
    # A class keeps an example to learn from.
    return whole.long().minimum(counts - 1)


def with_validation(train: Split, test: Split) -> Splits:
    """Make a tenth of the training examples the validation split."""
    kept, held = hold_out(train.targets)
    return Splits(train.select(kept), train.select(held), test)


def in_three(everything: Split) -> Splits:
    """80 % to train on, 10 % each for validation and test."""
    rest, test = hold_out(everything.targets, SHARE, purpose="test")
    kept, held = hold_out(everything.targets[rest], SHARE / (1 - SHARE))
    return Splits(everything.select(rest[kept]), everything.select(rest[held]), everything.select(test))
