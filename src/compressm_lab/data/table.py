"""Tasks from files of one's own, without code: the task `table` of recipes."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float64, Shaped

from compressm_lab.data.cells import DECIMAL_COMMA, MISSING, class_name, is_number, memory, shortly
from compressm_lab.data.dataset import Source
from compressm_lab.data.examples import Answer, Choices, Examples, Signal
from compressm_lab.data.files import Store
from compressm_lab.data.sequences import TEXT, ending, read_answers, read_examples, require_no_other_split
from compressm_lab.data.task import IGNORED, SHARE, DataError, Split, Splits, Task, TaskKind, hold_out

_KINDS = {
    ("classification", False): TaskKind.CLASSIFY,
    ("classification", True): TaskKind.LABEL_STEPS,
    ("regression", False): TaskKind.PREDICT,
    ("regression", True): TaskKind.REGRESS,
}
_MISSING = ("refuse", "last", "mean")
_UNCLEAR = ("none", "null")
_LARGEST = float(np.finfo(np.float32).max)
FILES = tuple(f"{split}{part}" for split in Splits._fields for part in ("", "_targets"))  # options that are paths


def located(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The task of a recipe with absolute paths of files that are in the current folder, or in that of the recipe."""
    if task.get("name") != Table.name:
        return dict(task)
    found = dict(task)
    for option in FILES:
        given = found.get(option)
        if isinstance(given, str):
            own = Path(given).expanduser()
            there = next((path for path in (own, folder / own) if path.is_file()), None)
            found[option] = given if there is None else str(there.absolute())
    return found


@final
@dataclass(frozen=True)
class Table(Source):
    """Files with sequences and their answers; paths are of the current folder, or of the folder of data sets.

    Without a file a tenth of the training sequences is for validation, and another for the test. `X_targets` are files
    with the answers of the sequences in X, one row each. `inputs`, `leave_out`, `target`, `sequence` and `step` are
    columns; of .npz `inputs`, `target` and `lengths` are arrays. `remaining`: the answer is the number of steps that
    are left, at most that number. kind: classification or regression. missing: refuse, last (value before) or mean.
    """

    train: str
    test: str | None = None
    validation: str | None = None
    train_targets: str | None = None
    test_targets: str | None = None
    validation_targets: str | None = None
    inputs: str | int | list | None = None
    leave_out: str | int | list | None = None
    target: str | int | list | None = None
    sequence: str | int | None = None
    step: str | int | None = None
    lengths: str | None = None
    remaining: bool | int | float | None = None
    every_step: bool | None = None
    kind: str | None = None
    missing: str = "refuse"
    normalise: bool = True
    delimiter: str | None = None
    header: bool | None = None

    name = "table"

    def __post_init__(self) -> None:
        if self.kind not in (None, "classification", "regression"):
            raise DataError(f"kind is {self.kind!r}, expected classification or regression")
        if self.missing not in _MISSING:
            raise DataError(f"missing is {self.missing!r}, expected {' or '.join(_MISSING)}")
        if self.remaining is not None and not (self.remaining is True or self.remaining > 0):
            raise DataError(f"remaining is {self.remaining!r}, expected true, or the largest number of steps to tell")
        if self.remaining is not None and (self.target is not None or self.sequence is None):
            raise DataError("remaining is for tables with sequence, and stands in the place of target")
        if self.remaining is not None and (self.kind == "classification" or self.every_step is False):
            raise DataError("remaining is a regression at every step: leave kind and every_step out")

    @property
    def choices(self) -> Choices:
        """The choices that readers of files get."""
        own = {field.name: getattr(self, field.name) for field in fields(Choices) if field.name != "remaining"}
        most = math.inf if self.remaining is True else self.remaining
        return Choices(**own, remaining=None if most is None else float(most))

    def path(self, option: str, store: Store) -> Path | None:
        """The file of an option such as "test": of the current folder, or of the store."""
        given = getattr(self, option)
        if given is None:
            return None
        own = Path(given).expanduser()
        # A file that was moved may be in the folder of data sets, under its own name.
        stored = store.root / (own.name if own.is_absolute() else own)
        if not own.exists() and not stored.exists():
            here = "" if own.is_absolute() else f" in the current folder, {Path.cwd()},"
            raise DataError(
                f"{option}: {own} is not there{here} and not in the folder of data sets, {store.root}; --data takes"
                " another one"
            )
        return own if own.exists() else stored

    def present(self, store: Store) -> bool:
        try:
            return all(self.path(option, store) is not None or getattr(self, option) is None for option in FILES)
        except DataError:
            return False

    def load(self, store: Store) -> Task:
        read = self._read(store)
        kind = _KINDS[self._wanted_kind(read["train"]), read["train"].every_step]
        if not kind.is_regression:
            for found in read.values():
                _require_clear(found)
        labels = () if kind.is_regression else self._labels(read["train"])
        answers = {which: _answers(found, kind, labels) for which, found in read.items()}
        examples, held_out = _in_three(read, answers, kind)
        moments = _moments([part.signal for part in examples["train"]])
        if (empty := np.isnan(moments.mean).nonzero()[0]).size:
            raise DataError(
                f"{self.train}: channel {read['train'].channels[empty[0]]} has no value in the training data"
            )
        scaled = {which: self._filled(some, moments) for which, some in examples.items()}
        uneven = _uneven([one for found in examples.values() for one in found], kind)
        shift, scale = _target_moments(examples["train"]) if kind.is_regression and self.normalise else ((0.0,), (1.0,))
        notes = {
            "files": {which: _stamp(path) for which in FILES if (path := self.path(which, store)) is not None},
            "read as": {which: found.layout for which, found in read.items()},
            "channels": list(read["train"].channels),
            "outputs": list(read["train"].outputs),
            "held out of train": held_out,
            "missing values": {which: _count_missing(found) for which, found in examples.items()},
            "normalised by": moments.as_dict() if self.normalise else None,
        }
        return Task(
            name=Path(self.train).name,
            kind=kind,
            train=_padded(scaled["train"], kind, uneven, self.train),
            validation=_padded(scaled["validation"], kind, uneven, self.train),
            test=_padded(scaled["test"], kind, uneven, self.train),
            classes=len(labels) or len(read["train"].outputs),
            channels=len(read["train"].channels),
            target_shift=shift,
            target_scale=scale,
            labels=labels,
            about=notes,
        )

    def _read(self, store: Store) -> dict[str, Examples]:
        """The examples of every file that is given; all have the channels of the training data."""
        found: dict[str, Examples] = {}
        choices = self.choices
        for which in Splits._fields:
            path, targets = self.path(which, store), self.path(f"{which}_targets", store)
            if path is None:
                if targets is not None:
                    raise DataError(f"{which}_targets is given without {which}, the file with their sequences")
                continue
            examples = read_examples(path, choices, which, answers=targets is None)
            if which == "train" and self.inputs is None:
                require_no_other_split(path, [split for split in Splits._fields if getattr(self, split) is None])
            if targets is not None:
                examples = _with_answers(examples, targets, choices)
            found[which] = examples
            if which == "train":
                # A test in which no answer changes is asked like the training data.
                choices = replace(choices, every_step=examples.every_step)
                if self.sequence is not None and self.inputs is None:
                    choices = replace(choices, inputs=list(examples.channels))
            elif examples.channels != found["train"].channels:
                raise DataError(
                    f"{path} has the channels {shortly(examples.channels)}, and {self.train}"
                    f" {shortly(found['train'].channels)}: expected the same"
                )
            if which != "train":
                _require_other(examples, found["train"], which)
            for number, signal in enumerate(examples.signals):
                if (far := np.argwhere(np.abs(signal) > _LARGEST)).size:
                    raise DataError(
                        f"{examples.place(number, *map(int, far[0]))}: {signal[tuple(far[0])]:g} is larger than numbers"
                        " of float32 are: scale the channel, or leave it out"
                    )
                if not len(signal):
                    raise DataError(f"{examples.where(number)}: a sequence without a value, expected at least one step")
                if self.missing == "refuse" and (gaps := np.argwhere(np.isnan(signal))).size:
                    raise DataError(
                        f"{examples.place(number, *map(int, gaps[0]))}: a value is missing; set missing: last (value"
                        " before) or missing: mean (of the training data), or leave the column out"
                    )
        return found

    def _wanted_kind(self, examples: Examples) -> str:
        """The kind that is set, or that the answers show; whole numbers may be both."""
        if self.kind is not None:
            return self.kind
        if examples.classes is not None:
            return "classification" if examples.classes else "regression"
        values = Counter(str(value) for answer in examples.answers for value in answer.flat)
        texts = [value for value in values if value.lower() not in MISSING and not is_number(value)]
        numbers = [value for value in values if is_number(value)]
        said = f"{examples.path}: the target {shortly(examples.outputs)}"
        if texts and all(map(DECIMAL_COMMA.fullmatch, texts)):
            raise DataError(
                f"{said} holds {texts[0]!r}: write a point in decimal numbers, or set kind: classification if it is a"
                " class"
            )
        if texts and numbers:
            raise DataError(
                f"{said} holds texts, such as {texts[0][:40]!r}, and numbers, such as {numbers[0]}: set kind:"
                " classification if all of them are classes"
            )
        if texts:
            return "classification"
        # As in the UCR archive.
        first = ending(examples.path) in TEXT and self.target is self.sequence is self.train_targets is None
        if any(not float(value).is_integer() for value in numbers):
            if first:
                raise DataError(
                    f"{said} is the first column, as in the UCR archive, but holds numbers with a fraction, no classes:"
                    " set target, or train_targets (a file with the answers), or kind: regression if it is right"
                )
            return "regression"
        if not numbers:
            raise DataError(f"{said} is empty in every row, expected classes or numbers")
        if first:
            return "classification"
        raise DataError(
            f"{said} holds {len(numbers)} different whole numbers: set kind: classification if they are classes, or"
            " kind: regression if they are amounts"
        )

    def _labels(self, examples: Examples) -> tuple[str, ...]:
        """The classes of the training data, in the order of numbers or of the alphabet."""
        if len(examples.outputs) != 1:
            raise DataError(f"target has {shortly(examples.outputs)}, expected one column of classes")
        found = {class_name(value) for answer in examples.answers for value in answer.flat} - {None}
        labels = [label for label in found if label is not None]
        if len(labels) < 2:
            came = f"all are {labels[0]!r}" if labels else "there are none"
            raise DataError(f"{examples.path}: expected at least two classes in {examples.outputs[0]}, and {came}")
        answers = sum(answer.size for answer in examples.answers)
        if self.kind is None and len(labels) > 20 and 2 * len(labels) > answers:
            raise DataError(
                f"{examples.path}: {len(labels)} classes in {answers} answers of {examples.outputs[0]}: is it the right"
                " column? set kind: classification if it is"
            )
        numbers = all(map(is_number, labels))
        return tuple(sorted(sorted(labels), key=float) if numbers else sorted(labels))  # float rounds long ones

    def _filled(self, examples: list[_Example], moments: _Moments) -> list[_Example]:
        """The examples without missing values and, if asked for, with channels of mean 0 and variance 1."""
        found = []
        for one in examples:
            gaps, signal = np.isnan(one.signal), one.signal
            if gaps.any():
                if self.missing == "last":
                    before = np.maximum.accumulate(np.where(gaps, -1, np.arange(len(signal))[:, None]), axis=0)
                    held = np.take_along_axis(signal, before.clip(min=0), axis=0)
                    signal = np.where(before < 0, np.nan, held)
                signal = np.where(np.isnan(signal), moments.mean, signal)
            found.append(one._replace(signal=(signal - moments.mean) * moments.scale if self.normalise else signal))
        return found


def _require_clear(examples: Examples) -> None:
    """Refuse the words none and null among classes: they may be the name of a class, or say that there is no answer."""
    for number, answer in enumerate(examples.answers):
        if unclear := next((text for text in answer.flat if str(text).lower() in _UNCLEAR), None):
            raise DataError(
                f"{examples.where(number)}: the answer {unclear!r} may be a class, or say that there is none: write"
                " another name of the class, or leave the cell empty"
            )


def _require_other(examples: Examples, train: Examples, which: str) -> None:
    """Refuse the training data as a test, and steps in columns of another order."""
    pairs = zip(examples.signals, train.signals, strict=False)
    same = len(examples) == len(train) and examples.path.samefile(train.path)
    if same and all(np.array_equal(one, two, equal_nan=True) for one, two in pairs):
        raise DataError(
            f"{which}: {examples.path} holds the training data: leave {which} out, and a tenth of them is kept for it,"
            " or give another file"
        )
    ours = [name for name in examples.steps if name in set(train.steps)]
    if ours != [name for name in train.steps if name in set(examples.steps)]:
        raise DataError(
            f"{examples.path} has the steps {shortly(examples.steps)}, and {train.path} {shortly(train.steps)}:"
            " expected columns in the same order"
        )


class _Example(NamedTuple):
    """A sequence, and its answer as an index of classes or as numbers."""

    signal: Signal
    answer: Any


class _Moments(NamedTuple):
    """The mean of each channel, and one over its standard deviation; 1 for a channel that does not change."""

    mean: Float64[np.ndarray, " channels"]
    scale: Float64[np.ndarray, " channels"]

    def as_dict(self) -> dict[str, list[float]]:
        return {"mean": self.mean.tolist(), "scale": self.scale.tolist()}


def _moments(parts: Sequence[Float64[np.ndarray, "steps channels"]]) -> _Moments:
    """The moments of all steps together, without missing values."""
    rows = np.concatenate(parts)
    count = (~np.isnan(rows)).sum(axis=0)
    mean = np.where(count > 0, np.nansum(rows, axis=0) / count.clip(min=1), np.nan)
    deviation = np.sqrt(np.nansum((rows - mean) ** 2, axis=0) / count.clip(min=1))
    changes = deviation > 1e-9 * np.abs(mean)
    # The mean of equal numbers is off by a rounding, and these shall be 0.
    mean = np.where(changes | (count == 0), mean, np.fmax.reduce(rows))
    return _Moments(mean, 1 / np.where(changes, deviation, 1.0))


def _target_moments(examples: Sequence[_Example]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    moments = _moments([one.answer.reshape(-1, one.answer.shape[-1]) for one in examples])
    return tuple(moments.mean.tolist()), tuple(moments.scale.tolist())


def _with_answers(examples: Examples, path: Path, choices: Choices) -> Examples:
    """The sequences with the answers of another file: row by row, or by the column that tells sequences."""
    cells, rows = read_answers(path, choices)
    sequence = None if choices.sequence is None else str(choices.sequence)
    if cells.has_header and len(rows) + 1 == len(examples) and sequence not in cells.names:  # a column of texts
        cells, rows = read_answers(path, replace(choices, header=False))
    names = list(cells.names)
    if cells.has_header and sequence in names and examples.keys:
        by_key: dict[str, int] = {}
        for number, row in enumerate(rows):
            if by_key.setdefault(row[names.index(sequence)], number) != number:
                raise DataError(f"{cells.where(number)}: the second answer of sequence {row[names.index(sequence)]}")
        if lost := [key for key in examples.keys if key not in by_key]:
            raise DataError(f"{path} has no row for sequence {lost[0]} of {examples.path}")
        order = [by_key[key] for key in examples.keys]
    elif len(names) > 1 and (keyed := _with_keys(names, rows, examples)) is not None:
        raise DataError(
            f"{path}, column {keyed}: it has the names of the sequences: give the file a header in which this column is"
            f" called {sequence}"
        )
    elif len(rows) != len(examples):
        raise DataError(
            f"{path} has {len(rows)} rows, expected {len(examples)}, one for each sequence of {examples.path}"
        )
    else:
        order = list(range(len(rows)))
    target = [name for name in names if not (cells.has_header and name == sequence)]
    target = list(cells.columns(choices.target)) if choices.target is not None and cells.has_header else target
    places = [names.index(name) for name in target]
    found: list[Answer] = [np.array([rows[number][k] for k in places], dtype=object) for number in order]
    if examples.every_step:  # asked at the last step
        found = [_at_the_end(answer, len(signal)) for answer, signal in zip(found, examples.signals, strict=True)]
    return replace(examples, answers=found, outputs=tuple(target))


def _with_keys(names: Sequence[str], rows: Sequence[Sequence[str]], examples: Examples) -> str | None:
    """The column of answers that has the name of every sequence, if one has."""
    keys = set(examples.keys)
    return next(
        (name for name, cells in zip(names, zip(*rows, strict=True), strict=True) if keys and keys <= set(cells)), None
    )


def _at_the_end(answer: Shaped[np.ndarray, " outputs"], length: int) -> Shaped[np.ndarray, "{length} outputs"]:
    steps = np.full((length, len(answer)), "", dtype=object)
    steps[-1:] = answer
    return steps


def _answers(examples: Examples, kind: TaskKind, labels: Sequence[str]) -> list[Any]:
    """The answers as float64 numbers or as indices of classes; a step may have none, a sequence must have one."""
    index = {label: k for k, label in enumerate(labels)}

    seen: dict[object, float | int] = {}

    def read(value: object, number: int) -> float | int:
        if value in seen:
            return seen[value]
        label = class_name(value)
        if label is None:
            if not kind.asks_steps:
                raise DataError(f"{examples.where(number)}: no answer, expected one for each sequence")
            return math.nan if kind.is_regression else IGNORED
        if kind.is_regression:
            if not is_number(label) or math.isinf(float(label)):
                raise DataError(f"{examples.where(number)}: the answer {label[:40]!r} is not a finite number")
            return float(str(value))
        if label not in index:
            raise DataError(
                f"{examples.where(number)}: class {label[:40]!r} is not in the training data, which have"
                f" {shortly(labels)}"
            )
        return seen.setdefault(value, index[label])

    kept = np.float64 if kind.is_regression else np.int64
    found = []
    for number, answer in enumerate(examples.answers):
        if kind.is_regression and (numbers := _all_numbers(answer)) is not None:
            found.append(numbers)
            continue
        values = np.array([read(value, number) for value in answer.flat], dtype=kept).reshape(answer.shape)
        if not len(values) or (kind.asks_steps and not (np.isfinite(values) & (values != IGNORED)).any()):
            raise DataError(f"{examples.where(number)}: no answer, expected at least one")
        found.append(values if kind.is_regression else values[..., 0])
    return found


def _all_numbers(answer: Answer) -> Float64[np.ndarray, "*steps outputs"] | None:
    """The answers as numbers, if all are finite ones; others are looked at one by one."""
    if any("_" in value for value in answer.flat if isinstance(value, str)):
        return None  # float reads 1_000
    try:
        values = answer.astype(np.float64)
    except ValueError:
        return None
    return values if len(values) and np.isfinite(values).all() else None


def _in_three(
    read: Mapping[str, Examples], answers: Mapping[str, list[Any]], kind: TaskKind
) -> tuple[dict[str, list[_Example]], list[str]]:
    """The examples of each split, and the splits that are a tenth of the training file each."""
    found = {which: list(map(_Example, examples.signals, answers[which])) for which, examples in read.items()}
    held_out = [which for which in ("test", "validation") if which not in found]
    share = SHARE
    for which in held_out:
        rest = found["train"]
        classes = torch.tensor([int(one.answer) if kind is TaskKind.CLASSIFY else 0 for one in rest])
        kept, held = hold_out(classes, max(share, 1 / len(rest)), purpose=which)
        if not len(held) or not len(kept):
            kinds = f" of {len(classes.unique())} classes" if kind is TaskKind.CLASSIFY else ""
            raise DataError(
                f"{read['train'].path} has {len(rest)} sequences{kinds}, of which none can be held out: give a file for"
                f" {which}"
            )
        found["train"], found[which] = [rest[k] for k in kept.tolist()], [rest[k] for k in held.tolist()]
        share = SHARE / (1 - SHARE)
    return found, held_out


def _count_missing(examples: Iterable[_Example]) -> int:
    return sum(int(np.isnan(one.signal).sum()) for one in examples)


def _stamp(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"path": str(path.absolute()), "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _uneven(examples: Sequence[_Example], kind: TaskKind) -> bool:
    """Tell if sequences have different lengths, or steps of a regression have no answer."""
    unasked = kind is TaskKind.REGRESS and any(np.isnan(one.answer).any() for one in examples)
    return unasked or len({len(one.signal) for one in examples}) > 1


def _padded(examples: Sequence[_Example], kind: TaskKind, uneven: bool, name: str) -> Split:
    """The examples as tensors; a step after the end of a sequence is 0 and has no answer."""
    lengths = [len(one.signal) for one in examples]
    channels, longest = examples[0].signal.shape[1], max(lengths)
    _require_room(len(examples) * longest * channels * 4, f"{name}: {len(examples)} sequences, filled up to {longest}")
    inputs = torch.zeros(len(examples), longest, channels)
    for row, one in zip(inputs, examples, strict=True):
        row[: len(one.signal)] = torch.from_numpy(one.signal)
    if not kind.asks_steps:
        dtype = torch.float32 if kind.is_regression else torch.int64
        targets = torch.tensor(np.stack([one.answer for one in examples]), dtype=dtype)
    else:
        numbers = kind.is_regression
        shape = (len(examples), longest, *examples[0].answer.shape[1:])
        targets = torch.full(shape, math.nan) if numbers else torch.full(shape, IGNORED)
        for steps, one in zip(targets, examples, strict=True):
            steps[: len(one.answer)] = torch.from_numpy(one.answer)
    return Split(inputs, targets, torch.tensor(lengths) if uneven else None)


def _require_room(size: int, what: str) -> None:
    """Refuse what does not fit into memory, as many short sequences beside a very long one."""
    there = memory()
    if size > there:
        raise DataError(
            f"{what} steps, take {size:,} bytes, and this machine has {there:,}: divide the longest sequences"
        )
