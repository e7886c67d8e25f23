"""A description of what training would read from a file, and the recipe that does so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import torch

from compressm_lab.data.catalogue import make
from compressm_lab.data.cells import MISSING, Cells, TextCells, is_number
from compressm_lab.data.files import Store
from compressm_lab.data.sequences import ARCHIVES, ARRAYS, TEXT, ending, open_cells, require_file
from compressm_lab.data.table import Table
from compressm_lab.data.task import IGNORED, DataError, Split, Splits, Task, TaskKind

_SHOWN = 40  # columns that are shown one by one
_DISTINCT = 1000  # values of a column that are counted
_ASKED = {
    TaskKind.CLASSIFY: "classification, one answer a sequence",
    TaskKind.LABEL_STEPS: "classification, one answer a step",
    TaskKind.PREDICT: "regression, one answer a sequence",
    TaskKind.REGRESS: "regression, one answer a step",
}


class Description(NamedTuple):
    """Lines about a file, the lines of a recipe, and what is still to be decided; empty if nothing is."""

    lines: list[str]
    recipe: list[str]
    undecided: str


def describe(path: Path, options: Mapping[str, Any], store: Store) -> Description:
    """Describe a file of training data, read with these options of the task `table`."""
    given = dict(options)
    for option in ("name", "train"):
        if option in given:
            raise DataError(f"{option} is the file itself: leave it out")
    table = make("table", train=str(path), **given)
    assert isinstance(table, Table)
    require_file(path)
    lines = []
    if ending(path) not in (*ARRAYS, *ARCHIVES):
        cells = open_cells(path, table.choices)
        lines += [f"{path}: {cells.said}", *_columns(cells)]
    if "test" not in given and (beside := _test_beside(path)) is not None:
        given["test"] = str(beside)
    # Missing values are counted, not refused.
    looked_at = make("table", train=str(path), **{"missing": "last", **given})
    try:
        task = looked_at.load(store)
    except DataError as error:
        return Description(lines, _recipe(path, given, None), str(error))
    lines += _task_lines(path, task)
    if not {"sequence", "target", "train_targets"} & set(given) and ending(path) in TEXT:
        lines.append("column 1 is the answer, as in the UCR archive; if rows are steps, set sequence, and perhaps step")
    if task.about["missing values"]["train"] and "missing" not in given:
        given["missing"] = "last"
        lines.append("training refuses missing values: set missing: last (the value before), or missing: mean")
    return Description(lines, _recipe(path, given, task), "")


def _test_beside(path: Path) -> Path | None:
    """The file of the test, where it has the name of the training file with "test" in the place of "train"."""
    for word, other in (("TRAIN", "TEST"), ("train", "test"), ("Train", "Test")):
        beside = path.with_name(path.name.replace(word, other))
        if beside != path and beside.is_file():
            return beside
    return None


@final
@dataclass
class _Column:
    """The cells of a column, row by row."""

    numbers: int = 0
    missing: int = 0
    low: float = float("inf")
    high: float = float("-inf")
    values: Counter[str] = field(default_factory=Counter)
    texts: int = 0

    def add(self, text: str) -> None:
        if text.lower() in MISSING:
            self.missing += 1
            return
        if is_number(text):
            self.numbers += 1
            self.low, self.high = min(self.low, float(text)), max(self.high, float(text))
        else:
            self.texts += 1
        if len(self.values) <= _DISTINCT:
            self.values[text] += 1

    def __str__(self) -> str:
        distinct = f"more than {_DISTINCT}" if len(self.values) > _DISTINCT else str(len(self.values))
        parts = [f"numbers {self.low:g} to {self.high:g}"] if self.numbers else []
        if self.texts:
            parts.append(f"texts, such as {next(text for text in self.values if not is_number(text))[:30]!r}")
        parts.append(f"{distinct} different")
        return ", ".join([*parts, *([f"{self.missing} missing"] if self.missing else [])])


def _columns(cells: Cells) -> list[str]:
    """One line a column; of many columns only the first and the last."""
    names = cells.names
    shown = names if len(names) <= _SHOWN else (*names[:3], names[-1])
    found = {name: _Column() for name in shown}
    rows = 0
    plain = [name for name in shown if name not in cells.nested]
    if isinstance(cells, TextCells):
        places = {names.index(name): column for name, column in found.items()}
        for _, row in cells.rows():
            rows += 1
            for place, column in places.items():
                column.add(row[place].strip())
    else:
        numbers, texts = cells.read([], plain)
        rows = len(numbers)
        for name, many in zip(plain, texts, strict=True):
            for text in many:
                found[name].add(text)
    if not rows:
        raise DataError(f"{cells.path} has a header and no rows")
    lines = [f"{rows} rows, {len(names)} {'column' if len(names) == 1 else 'columns'}"]
    for name, column in found.items():
        unnamed = "; it has no name in the header and is left out" if name in cells.unnamed else ""
        lines.append(f"  {name}: {'lists' if name in cells.nested else column}{unnamed}")
        if len(names) > _SHOWN and name == names[2]:
            lines.append("  …")
    return lines


def _task_lines(path: Path, task: Task) -> list[str]:
    about = task.about
    held = about["held out of train"]
    lines = [f"{which}: {layout}" for which, layout in about["read as"].items()]
    sizes = []
    for which in Splits._fields:
        how = f", a tenth of {path.name}" if which in held else ""
        sizes.append(f"{which} {len(getattr(task, which))} sequences{how}")
    lines += [", ".join(sizes), f"{_lengths(task.train)}, {_channels(about['channels'])}", _ASKED[task.kind]]
    for which in ("train", *(other for other in ("validation", "test") if other not in held)):
        lines.append(_answers(which, task, [which, *(held if which == "train" else ())]))
    missing = {which: count for which, count in about["missing values"].items() if count}
    lines.append(f"missing values: {', '.join(f'{which} {count}' for which, count in missing.items()) or 'none'}")
    return lines


def _lengths(split: Split) -> str:
    if split.lengths is None:
        return f"{split.inputs.shape[1]} steps each"
    lengths = split.lengths.double()
    return f"{int(lengths.min())} to {int(lengths.max())} steps, mean {float(lengths.mean()):.0f}"


def _channels(names: list[str]) -> str:
    if len(names) == 1:
        return "1 channel"
    shown = names if len(names) <= 12 else [*names[:4], "…", names[-1]]
    return f"{len(names)} channels: {', '.join(shown)}"


def _answers(which: str, task: Task, splits: list[str]) -> str:
    """The classes of one file with their counts, or the range of its numbers."""
    targets = torch.cat([getattr(task, split).targets.flatten() for split in splits])
    if task.kind.is_regression:
        asked = targets[targets.isfinite()]
        return (
            f"answers of {which}: {len(asked)} numbers, {float(asked.min()):g} to {float(asked.max()):g}, mean"
            f" {float(asked.mean()):g}"
        )
    counts = torch.bincount(targets[targets != IGNORED], minlength=task.classes).tolist()
    each = [f"{label} ({count})" for label, count in zip(task.labels, counts, strict=True)]
    shown = each if len(each) <= 20 else [*each[:10], "…", each[-1]]
    return f"classes of {which}: {', '.join(shown)}"


def _recipe(path: Path, options: Mapping[str, Any], task: Task | None) -> list[str]:
    """A recipe that trains on the file, to be changed; without a task a place is left for what is undecided."""
    import yaml

    named = {"name": "table", "train": str(path), **options}
    if task is None and not {"target", "remaining", "train_targets"} & set(options):
        named["target"] = "?"
    said = yaml.safe_dump(named, default_flow_style=True, sort_keys=False, width=1000, allow_unicode=True).strip()
    steps = task is not None and task.kind.asks_steps
    batch = 32 if task is None else max(1, min(32, len(task.train) // 4))
    return [
        f"name: {path.name.split('.')[0]}",
        f"task: {said}",
        f"model: {{depth: 2, width: 32, order: 64, pooling: {'steps' if steps else 'mean'}}}",
        f"training: {{steps: 1000, batch: {batch}, learning_rate: 4.0e-3, schedule: cosine, evaluate_every: 100}}",
        "compression: {rho: 0.5, gramian: measured, when: {every: 100, last: 300}}",
    ]
