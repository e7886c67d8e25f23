"""Files of sequences with their answers: tables in three layouts and arrays (.npz); archives has .ts and .arff."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Shaped

from compressm.errors import did_you_mean
from compressm_lab.data.archives import from_arff, from_ts
from compressm_lab.data.cells import (
    DECIMAL_COMMA,
    MISSING,
    Cells,
    ColumnarCells,
    Rows,
    TextCells,
    as_number,
    is_number,
    require_memory,
    shortly,
)
from compressm_lab.data.examples import Answer, Choices, Examples
from compressm_lab.data.task import DataError

TEXT = (".csv", ".tsv", ".txt", ".dat")
COLUMNS = (".parquet", ".pq", ".arrow", ".feather")
ARRAYS = (".npz",)
ARCHIVES = (".ts", ".arff")
ENDINGS = (*TEXT, *COLUMNS, *ARRAYS, *ARCHIVES)


def ending(path: Path) -> str:
    """The ending that tells the kind of a file; .csv.gz is .csv."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def read_examples(path: Path, choices: Choices, split: str = "train", *, answers: bool = True) -> Examples:
    """Read the sequences of a file, whatever its kind; without `answers` they are in another file."""
    require_file(path)
    kind = ending(path)
    _require_taken(path, choices)
    if kind in ARRAYS:
        return _from_arrays(path, choices, split)
    if kind in ARCHIVES:
        return (from_ts if kind == ".ts" else from_arff)(path)
    cells = open_cells(path, choices)
    return _by_steps(cells, choices, answers) if choices.sequence is not None else _by_rows(cells, choices, answers)


_TEXT_ONLY, _TABLES_ONLY = ("delimiter", "header"), ("sequence", "step", "leave_out", "remaining")
# The options of which a file would take no notice, by its ending.
_WITHOUT = (
    dict.fromkeys(TEXT, ("lengths",))
    | dict.fromkeys(COLUMNS, ("lengths", *_TEXT_ONLY))
    | dict.fromkeys(ARRAYS, (*_TABLES_ONLY, *_TEXT_ONLY))
    | dict.fromkeys(ARCHIVES, ("inputs", "target", "lengths", *_TABLES_ONLY, *_TEXT_ONLY))
)


def _require_taken(path: Path, choices: Choices) -> None:
    """Refuse options that say nothing of a file of this kind, such as columns that an .npz file has not."""
    for option in _WITHOUT[ending(path)]:
        if (given := getattr(choices, option)) is not None:
            raise DataError(
                f"{path}: {option} is {given!r:.60}, which says nothing of a file {ending(path)}: leave it out"
            )


def require_file(path: Path) -> None:
    """Refuse a path without a file, one of an unknown kind, and an empty file."""
    if not path.is_file():
        what = "is a folder, expected a file" if path.is_dir() else "does not exist"
        raise DataError(f"{path} {what}")
    if ending(path) not in ENDINGS:
        raise DataError(f"{path} ends in {path.suffix!r}, expected one of {', '.join(ENDINGS)}, or text as .csv.gz")
    if not path.stat().st_size:
        raise DataError(f"{path} is empty: it has no bytes")
    require_memory(path)


def open_cells(path: Path, choices: Choices) -> Cells:
    """The rows of a text file, or of a Parquet or Arrow file."""
    if ending(path) in COLUMNS:
        return ColumnarCells(path)
    return TextCells(path, choices.delimiter, choices.header)


def read_answers(path: Path, choices: Choices) -> tuple[Cells, list[list[str]]]:
    """The rows of a file with the answers of the sequences of another one, without a header or with one."""
    require_file(path)
    if ending(path) not in (*TEXT, *COLUMNS):
        raise DataError(f"{path} ends in {path.suffix!r}, expected a table of answers: {', '.join((*TEXT, *COLUMNS))}")
    # The header of the file with the sequences says nothing of this one.
    cells = open_cells(path, Choices(header=False if choices.header is False else None))
    rows = [list(row) for row in zip(*cells.read([], cells.names).texts, strict=True)]
    if not cells.has_header and len(cells.names) == 2 and all(DECIMAL_COMMA.fullmatch(",".join(row)) for row in rows):
        raise DataError(
            f"{path}: every row has two whole numbers, as {','.join(rows[0])}: write a point if it is one decimal"
            " number, or give the file a header if there are two answers"
        )
    return cells, rows


def _roles(cells: Cells, choices: Choices, answers: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns of inputs and of targets: all that are nothing else are inputs, if none are named."""
    target: tuple[str, ...] = ()
    if answers and choices.target is not None:
        target = cells.columns(choices.target)
    elif answers and choices.remaining is None and choices.sequence is None and not cells.has_header:
        target = cells.names[:1]  # as in the UCR archive
    elif answers and choices.remaining is None:
        raise DataError(f"target is missing, the column of answers: {cells.path} has {shortly(cells.names)}")
    others = [cells.column(one) for one in (choices.sequence, choices.step) if one is not None]
    taken = {*target, *others, *(cells.columns(choices.leave_out) if choices.leave_out is not None else ())}
    if choices.inputs is None:
        named = tuple(name for name in cells.names if name not in taken | cells.unnamed)
    else:
        named = cells.columns(choices.inputs)
        if both := [name for name in named if name in taken]:
            raise DataError(
                f"inputs has {both[0]!r}, which is target, sequence, step or left out: expected other columns"
            )
    if not named:
        raise DataError(f"{cells.path} has no column left for inputs: it has {shortly(cells.names)}")
    return named, target


def _by_rows(cells: Cells, choices: Choices, answers: bool) -> Examples:
    """One sequence a row: cells are its steps, and those at the end may be empty; or each cell is a list of steps."""
    inputs, target = _roles(cells, choices, answers)
    if choices.step is not None or choices.remaining is not None:
        name = "step" if choices.step is not None else "remaining"
        raise DataError(f"{name} is for tables with one row a step: set sequence too, the column that tells sequences")
    nested = [name for name in inputs if name in cells.nested]
    if nested and len(nested) < len(inputs):
        plain = next(name for name in inputs if name not in nested)
        raise DataError(
            f"{cells.path}: column {nested[0]} has a list in each cell and {plain} has not; name the columns of lists"
            " as inputs"
        )
    if nested:
        return _by_lists(cells, inputs, target)
    rows = cells.read(inputs, target)
    if choices.header is None and not cells.has_header and len(target) == 1:
        _require_no_names(cells, rows.texts[0])
    signals = [_without_end(row)[:, None] for row in rows.numbers]
    return Examples(
        path=cells.path,
        said=cells.said,
        layout=f"one row a sequence, its steps in {_from_to(inputs)}",
        channels=("1",),
        signals=signals,
        answers=_answers_of(rows, len(signals)),
        outputs=target,
        every_step=False,
        classes=None,
        where=cells.where,
        place=lambda example, step, channel: f"{cells.where(example)}, column {inputs[step]}",
        steps=inputs if cells.has_header else (),
    )


def _require_no_names(cells: Cells, answers: Sequence[str]) -> None:
    """Refuse a first row that may be a header: its answer is a text that no other row has, and others are repeated."""
    first, others = answers[0], set(answers[1:])
    if first not in others and not is_number(first) and len(others) < len(answers) - 1:
        raise DataError(
            f"{cells.where(0)}: {first[:40]!r} is the answer of this row alone: set header: true if the row has the"
            " names of columns, or header: false if it is a sequence"
        )


def _from_to(names: Sequence[str]) -> str:
    return f"column {names[0]}" if len(names) == 1 else f"columns {names[0]} to {names[-1]}"


def _without_end(row: Float64[np.ndarray, " steps"]) -> Float64[np.ndarray, " kept"]:
    """The row without the missing cells at its end."""
    there = (~np.isnan(row)).nonzero()[0]
    return row[: there[-1] + 1] if len(there) else row[:0]


def _answers_of(rows: Rows, count: int) -> list[Answer]:
    """The answers of each row; none if there are no columns of them."""
    if not rows.texts:
        return [np.empty(0, dtype=object)] * count
    return [np.array(row, dtype=object) for row in zip(*rows.texts, strict=True)]


def _by_lists(cells: Cells, inputs: tuple[str, ...], target: tuple[str, ...]) -> Examples:
    """One sequence a row, with a list of steps in each cell; a list may have lists of channels."""
    assert isinstance(cells, ColumnarCells)
    columns = [cells.values(name) for name in inputs]
    signals = []
    for number, row in enumerate(zip(*columns, strict=True)):
        try:
            parts = [np.array([] if one is None else one, dtype=np.float64) for one in row]
            parts = [part[:, None] if part.ndim == 1 else part for part in parts]
            signals.append(np.concatenate(parts, axis=1))
        except (TypeError, ValueError):
            steps = ", ".join(_size(one) for one in row)
            raise DataError(
                f"{cells.where(number)}: the lists of {shortly(inputs)} have {steps} steps, expected numbers, as many"
                " in each"
            ) from None
    width = signals[0].shape[1]
    channels = inputs if len(inputs) == width else tuple(map(str, range(1, width + 1)))
    if other := [k for k, signal in enumerate(signals) if signal.shape[1] != width]:
        raise DataError(
            f"{cells.where(other[0])}: {signals[other[0]].shape[1]} channels, expected {width} as in the first row"
        )
    return Examples(
        path=cells.path,
        said=cells.said,
        layout="one row a sequence, a list of steps in each cell",
        channels=channels,
        signals=signals,
        answers=_answers_of(cells.read([], target), len(signals)),
        outputs=target,
        every_step=False,
        classes=None,
        where=cells.where,
        place=lambda example, step, channel: f"{cells.where(example)}, step {step + 1} of {channels[channel]}",
    )


def _size(value: object) -> str:
    return str(len(value)) if isinstance(value, list) else "no"


def _by_steps(cells: Cells, choices: Choices, answers: bool) -> Examples:
    """One row a step, and a column that tells to which sequence it belongs."""
    inputs, target = _roles(cells, choices, answers)
    names = [cells.column(choices.sequence), *([] if choices.step is None else [cells.column(choices.step)])]
    rows = cells.read(inputs, (*names, *target))
    members: dict[str, list[int]] = {}
    for row, name in enumerate(rows.texts[0]):
        if name.lower() in MISSING:
            raise DataError(f"{cells.where(row)}, column {names[0]}: it is empty, expected the name of a sequence")
        members.setdefault(name, []).append(row)
    if choices.step is not None:
        members = {name: _in_order(cells, rows.texts[1], found, names) for name, found in members.items()}
    found, kept = list(members.values()), rows.texts[len(names) :]
    given = [np.array([[texts[row] for texts in kept] for row in some], dtype=object) for some in found]
    every_step = choices.every_step
    if every_step is None:
        every_step = choices.remaining is not None or any((one != one[:1]).any() for one in given if one.size)
    if choices.remaining is not None and answers:
        most = choices.remaining
        given = [np.minimum(np.arange(len(some))[::-1, None], most).astype(object) for some in found]
        target = ("steps left",)
    elif not every_step:
        given = [_same(cells, one, some, target) for one, some in zip(given, found, strict=True)]
    keys = list(members)
    return Examples(
        path=cells.path,
        said=cells.said,
        layout=f"one row a step, sequences by column {names[0]}",
        channels=inputs,
        signals=[rows.numbers[some] for some in found],
        answers=given,
        outputs=target,
        every_step=every_step,
        classes=False if choices.remaining is not None else None,
        where=lambda example: f"{cells.where(found[example][0])}, sequence {keys[example]}",
        place=lambda example, step, channel: f"{cells.where(found[example][step])}, column {inputs[channel]}",
        keys=tuple(members),
    )


def _in_order(cells: Cells, texts: list[str], rows: list[int], names: Sequence[str]) -> list[int]:
    """The rows of a sequence by their step, each step once."""
    sequence, step = names
    keys = _step_keys(cells, texts, rows, step)
    ordered = sorted(rows, key=keys.__getitem__)
    for one, other in pairwise(ordered):
        if keys[one] == keys[other]:
            raise DataError(
                f"{cells.where(other)}, column {step}: step {texts[other]} is there twice in one sequence, expected"
                f" once; is {sequence} the column that tells sequences?"
            )
    return ordered


def _step_keys(cells: Cells, texts: list[str], rows: list[int], step: str) -> dict[int, Any]:
    """Numbers, dates or times that order rows; as texts, step 10 would come before step 2, and 10:00 before 9:00."""
    for row in rows:
        if texts[row].lower() in MISSING:
            raise DataError(
                f"{cells.where(row)}, column {step}: it is empty, expected the number or the time of a step"
            )
    for read in _STEPS:
        keys: dict[int, Any] = {}
        with suppress(ValueError):
            keys = {row: read(texts[row]) for row in rows}
        if keys:
            if read is _time:
                _require_rising(cells, keys, texts, step)
            return keys
    other = next((row for row in rows if not is_number(texts[row])), rows[0])
    raise DataError(
        f"{cells.where(other)}, column {step}: {texts[other][:40]!r} gives no order; expected numbers in the whole"
        " sequence, or dates or times as 2024-01-31, 2024-01-31 09:05 or 09:05; if rows are in order, leave step out"
    )


def _require_rising(cells: Cells, times: dict[int, Any], texts: list[str], step: str) -> None:
    """Refuse times of a day that fall: 23:59 may be the minute before 00:00."""
    for one, other in pairwise(times):
        if times[other] < times[one]:
            raise DataError(
                f"{cells.where(other)}, column {step}: {texts[other]} comes after {texts[one]}, which without dates may"
                " be a new day; write dates too, as 2024-01-31 09:05, or, if rows are in order, leave step out and"
                f" set leave_out: {step}"
            )


def _local_time(text: str) -> datetime:
    if (found := datetime.fromisoformat(text)).tzinfo is not None:
        raise ValueError("it has a time zone")
    return found


def _zoned_time(text: str) -> datetime:
    if (found := datetime.fromisoformat(text)).tzinfo is None:
        raise ValueError("it has no time zone")
    return found


def _time(text: str) -> time:
    if (found := time.fromisoformat(text)).tzinfo is not None:
        raise ValueError("it has a time zone, and no date")
    return found


_STEPS = (as_number, _local_time, _zoned_time, _time)


def _same(
    cells: Cells, answers: Shaped[np.ndarray, "rows outputs"], rows: list[int], target: Sequence[str]
) -> Shaped[np.ndarray, " outputs"]:
    """The one answer of a sequence, which all of its rows have."""
    if not answers.size:
        return answers[0]
    other = (answers != answers[:1]).any(axis=1).nonzero()[0]
    if len(other):
        raise DataError(
            f"{cells.where(rows[other[0]])}, column {target[0]}: another answer than at the first step of its sequence;"
            " with every_step: true each step has its own"
        )
    return answers[0]


# Arrays of a .npz file by the names that they often have.
_ARRAYS = {
    "inputs": ("inputs", "x", "X", "data", "signals"),
    "target": ("targets", "target", "y", "Y", "labels", "label"),
    "lengths": ("lengths", "length"),
}


def _from_arrays(path: Path, choices: Choices, split: str) -> Examples:
    """Arrays of inputs (examples, length, channels) or (examples, length), of targets, and perhaps of lengths."""
    found = _arrays(path)
    names = {role: _array(role, getattr(choices, role), found, path, split) for role in ("inputs", "target")}
    _require_same_split(path, names, choices, split)
    x, y = found[names["inputs"]], found[names["target"]]
    if x.ndim not in (2, 3) or x.dtype.kind not in "fiub":
        raise DataError(
            f"{path}: the inputs are {x.dtype} of shape {x.shape}, expected numbers as (examples, length, channels) or"
            " (examples, length)"
        )
    if len(x) != len(y) or y.ndim == 0:
        raise DataError(f"{path}: {len(x)} inputs and targets of shape {y.shape}, expected one target an example")
    if not x.size:
        raise DataError(f"{path} has no examples: the inputs have the shape {x.shape}")
    x = x[..., None] if x.ndim == 2 else x
    if infinite := np.argwhere(np.isinf(x)).tolist() if x.dtype.kind == "f" else []:
        example, step, channel = infinite[0]
        raise DataError(f"{path}, example {example + 1}, step {step + 1}, channel {channel + 1}: an infinite number")
    lengths = _lengths(path, choices, found, names["inputs"], split)
    steps = y.ndim > 1 and y.shape[1] == x.shape[1] if choices.every_step is None else choices.every_step
    if y.ndim > (3 if steps else 2) or (steps and (y.ndim < 2 or y.shape[1] != x.shape[1])):
        raise DataError(
            f"{path}: targets of shape {y.shape} for inputs of shape {x.shape}, expected (examples,), (examples,"
            " outputs), (examples, length) or (examples, length, outputs)"
        )
    y = y[..., None] if y.ndim == (2 if steps else 1) else y
    return Examples(
        path=path,
        said="arrays",
        layout=f"inputs {x.shape}, targets {found[names['target']].shape}",
        channels=tuple(map(str, range(1, x.shape[2] + 1))),
        signals=[one[:length].astype(np.float64) for one, length in zip(x, lengths, strict=True)],
        answers=[_as_texts(one[:length] if steps else one) for one, length in zip(y, lengths, strict=True)],
        outputs=tuple(map(str, range(1, y.shape[-1] + 1))),
        every_step=steps,
        classes=_says_classes(y),
        where=lambda example: f"{path}, example {example + 1}",
        place=lambda example, step, channel: f"{path}, example {example + 1}, step {step + 1}, channel {channel + 1}",
    )


def _says_classes(y: Shaped[np.ndarray, "*shape"]) -> bool | None:
    """Tell what the type of targets says: classes, amounts (False) or nothing (None), as of whole numbers in floats."""
    if y.dtype.kind != "f":
        return True
    given = y[np.isfinite(y)]
    return None if given.size and (given == np.floor(given)).all() else False


def _require_same_split(path: Path, names: Mapping[str, str], choices: Choices, split: str) -> None:
    """Refuse arrays of which some have the name of the split and others have not: those may be of another split."""
    for role, name in names.items():
        alone = names["inputs"] not in _ARRAYS["inputs"] and name in _ARRAYS[role]
        if choices.inputs is None and getattr(choices, role) is None and alone:
            raise DataError(
                f"{path} has {names['inputs']}, but {name} without the name of a split: name it {name}_{split}, or set"
                f" {role}: {name}"
            )


def _as_texts(values: Shaped[np.ndarray, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    """Numbers as they are, everything else as texts."""
    return values.astype(object) if values.dtype.kind == "f" else values.astype(str).astype(object)


def require_no_other_split(path: Path, splits: Sequence[str]) -> None:
    """Refuse an .npz file of training that has arrays of another split too, which no option asks for."""
    names = _arrays(path) if ending(path) in ARRAYS else {}
    for split in splits:
        with_split = _often("inputs", split)[: -len(_ARRAYS["inputs"])]
        if name := next((name for name in with_split if name in names), None):
            raise DataError(
                f"{path} has the array {name} too: set {split}: {path.name} to use it, or inputs and target to the"
                " names of the arrays to train on"
            )


def _arrays(path: Path) -> dict[str, Any]:
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} cannot be read as .npz: it is not the archive that numpy.savez writes")
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        if "allow_pickle" in str(error):
            raise DataError(
                f"{path} holds Python objects, which are not read: write sequences of different lengths as one array,"
                " filled up at the ends, and an array of lengths"
            ) from None
        raise DataError(f"{path} cannot be read as .npz: {error}") from None


def _array(role: str, given: Any, found: Mapping[str, Any], path: Path, split: str) -> str:
    """The name of the array that is inputs or target: as given, or one that it often has, with the split or without."""
    if given is not None:
        if not isinstance(given, str) or given not in found:
            raise DataError(
                f"{path} has no array {given!r}; its arrays: {shortly([*found])}{did_you_mean(str(given), found)}"
            )
        return str(given)
    several = [name for name in _often(role, split) if name in found]
    if not several:
        usual = _ARRAYS[role][:3]
        raise DataError(
            f"{path} has the arrays {shortly([*found])}, expected {' or '.join(map(repr, usual))}, or set {role} to one"
        )
    return several[0]


def _often(role: str, split: str) -> list[str]:
    """Usual names of an array: those with the name of the split come first."""
    usual = _ARRAYS[role]
    return [*(f"{name}_{split}" for name in usual), *(f"{split}_{name}" for name in usual), *usual]


def _lengths(path: Path, choices: Choices, found: Mapping[str, Any], inputs: str, split: str) -> list[int]:
    name, x = choices.lengths, found[inputs]
    if name is not None:
        _array("lengths", name, found, path, split)
    else:
        name = next((one for one in _often("lengths", split) if one in found), None)
    if name is None:
        return [x.shape[1]] * len(x)
    _require_same_split(path, {"inputs": inputs, "lengths": name}, choices, split)
    lengths = found[name]
    if lengths.shape != (len(x),) or lengths.dtype.kind not in "iu":
        raise DataError(f"{path}: {name} is {lengths.dtype} of shape {lengths.shape}, expected {len(x)} integers")
    wrong = ((lengths < 1) | (lengths > x.shape[1])).nonzero()[0]
    if len(wrong):
        raise DataError(
            f"{path}, example {wrong[0] + 1}: {name} is {lengths[wrong[0]]}, expected 1 to {x.shape[1]}, the steps of"
            " the inputs"
        )
    return [int(length) for length in lengths]
