"""The files of the UCR and UEA archives: .ts of sktime and aeon, and Weka's .arff."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from compressm.errors import did_you_mean
from compressm_lab.data.cells import MISSING, as_number, class_name, lines_of, shortly
from compressm_lab.data.examples import Examples, Signal
from compressm_lab.data.task import DataError


class _Line(NamedTuple):
    """A sequence of a .ts or .arff file: the line, a text of numbers for each channel, and the answer."""

    number: int
    parts: list[str]
    answer: str


def from_ts(path: Path) -> Examples:
    """The format of sktime and aeon: a header of @ lines, then channels divided by colons, with the answer last."""
    classes: bool | None = None
    named: list[str] = []
    found, begun = list[_Line](), False
    for number, line in lines_of(path):
        if not line or line.startswith(("#", "%")):
            continue
        word, _, rest = line.lower().partition(" ")
        if begun:
            *parts, answer = line.split(":")
            if not parts:
                raise DataError(f"{path}, line {number}: no colon, expected channels and an answer divided by colons")
            found.append(_Line(number, parts, answer.strip()))
        elif word == "@data":
            begun = True
        elif word == "@timestamps" and rest.strip() == "true":
            raise DataError(f"{path}, line {number}: it has time stamps, expected @timeStamps false")
        elif word in ("@classlabel", "@targetlabel") and rest.split()[:1] == ["true"]:
            classes = word == "@classlabel"
            named = line.split()[2:] if classes else []
        elif word in ("@classlabel", "@targetlabel") and rest.split()[:1] == ["false"] and classes is None:
            raise DataError(f"{path}, line {number}: it has no answers, expected @classLabel true or @targetLabel true")
    if not begun:
        raise DataError(f"{path} has no line @data, expected the header of a .ts file")
    _require_named(path, found, named)
    return _of_lines(path, found, True if classes is None else classes, "a .ts file")


_ATTRIBUTE = re.compile(r"""@attribute\s+('[^']*'|"[^"]*"|\S+)\s+(.*)""", re.IGNORECASE)


def from_arff(path: Path) -> Examples:
    """Weka's format as UCR and UEA use it: a number a step, or channels as quoted lines; the answer is the last one."""
    kinds, names, named, found = list[str](), list[str](), list[str](), list[_Line]()
    inside = begun = False
    for number, line in lines_of(path):
        lower = line.lower()
        if not line or line.startswith("%"):
            continue
        if begun:
            found.append(_arff_line(path, number, line, kinds))
        elif lower.startswith("@end"):
            inside = False
        elif lower.startswith("@data"):
            if not kinds:
                raise DataError(f"{path} has no line @attribute, expected one for every step and one for the answer")
            begun = True
        elif (attribute := _ATTRIBUTE.match(line)) and not inside:
            kinds.append(attribute[2].strip().lower())
            names.append(attribute[1])
            named = _in_braces(attribute[2].strip())
            inside = kinds[-1] == "relational"
    if not begun:
        raise DataError(f"{path} has no line @data, expected the header of an .arff file")
    for name, kind in zip(names[:-1], kinds, strict=False):
        if kind.split()[0] not in ("numeric", "real", "integer", "relational"):
            raise DataError(
                f"{path}: attribute {name} is {kind[:40]}, expected numeric ones and the answer as the last attribute:"
                " move or remove it"
            )
    _require_named(path, found, named)
    return _of_lines(path, found, kinds[-1].startswith("{") or kinds[-1] == "string", "an .arff file")


def _in_braces(kind: str) -> list[str]:
    """The classes of an attribute such as {yes, 'not yet'}."""
    return [one.strip(" '\"") for one in kind[1:].rstrip("} ").split(",")] if kind.startswith("{") else []


def _require_named(path: Path, lines: Sequence[_Line], named: Sequence[str]) -> None:
    """Refuse an answer that is not among the classes of the header, if it names any."""
    known = {class_name(one) for one in named}
    for line in lines:
        if known and (name := class_name(line.answer)) is not None and name not in known:
            raise DataError(
                f"{path}, line {line.number}: class {line.answer[:40]!r} is not in the header, which has"
                f" {shortly(named)}; correct the line or the header{did_you_mean(line.answer, named)}"
            )


def _arff_line(path: Path, number: int, line: str, kinds: Sequence[str]) -> _Line:
    if line.startswith("{"):
        raise DataError(f"{path}, line {number}: a sparse row, expected one with every value")
    quoted = re.match(r"""(['"])(.*)\1\s*,\s*(.+)$""", line)
    if quoted is not None and "relational" in kinds:
        return _Line(number, quoted[2].split("\\n"), quoted[3].strip(" '\""))
    *cells, answer = line.split(",")
    if len(cells) + 1 != len(kinds):
        raise DataError(f"{path}, line {number}: {len(cells) + 1} cells, expected {len(kinds)}, one an attribute")
    return _Line(number, [",".join(cells)], answer.strip(" '\""))


def _of_lines(path: Path, lines: list[_Line], classes: bool, said: str) -> Examples:
    if not lines:
        raise DataError(f"{path} has a header and no sequences after @data")
    width = len(lines[0].parts)
    signals = [_signal_of(path, line, width) for line in lines]
    return Examples(
        path=path,
        said=said,
        layout="one line a sequence",
        channels=tuple(map(str, range(1, width + 1))),
        signals=signals,
        answers=[np.array([line.answer], dtype=object) for line in lines],
        outputs=("class" if classes else "target",),
        every_step=False,
        classes=classes,
        where=lambda example: f"{path}, line {lines[example].number}",
        place=lambda example, step, channel: (
            f"{path}, line {lines[example].number}, step {step + 1} of channel {channel + 1}"
        ),
    )


def _signal_of(path: Path, line: _Line, width: int) -> Signal:
    """The numbers of a line; channels may be filled up at their ends, as in UEA's .arff files."""
    if len(line.parts) != width:
        raise DataError(
            f"{path}, line {line.number}: {len(line.parts)} channels, expected {width} as in the first line"
        )
    channels = [
        np.array(list(_numbers_of(path, line.number, channel, part))) for channel, part in enumerate(line.parts, 1)
    ]
    if len(steps := {len(channel) for channel in channels}) > 1:
        raise DataError(
            f"{path}, line {line.number}: its channels have {' and '.join(map(str, sorted(steps)))} steps, expected as"
            " many in each"
        )
    signal = np.stack(channels, axis=1)
    there = (~np.isnan(signal)).any(axis=1).nonzero()[0]
    return signal[: there[-1] + 1] if len(there) else signal[:0]


def _numbers_of(path: Path, line: int, channel: int, text: str) -> Iterator[float]:
    for step, cell in enumerate(text.split(","), 1):
        plain = cell.strip()
        try:
            value = math.nan if plain.lower() in MISSING else as_number(plain)
        except ValueError:
            value = math.inf
        if math.isinf(value):
            raise DataError(f"{path}, line {line}, step {step} of channel {channel}: {plain[:40]!r} is not a number")
        yield value
