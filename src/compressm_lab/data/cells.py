"""Tables of files, row by row: text with any delimiter, and columns of Parquet and Arrow files."""

from __future__ import annotations

import csv
import fnmatch
import gzip
import math
import os
import re
import sys
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from jaxtyping import Float64

from compressm.errors import did_you_mean
from compressm_lab.data.task import DataError

DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
MISSING = frozenset({"", "?", "na", "n/a", "nan", "-nan", "null", "none"})
_DELIMITERS = {"tab": "\t", "comma": ",", "semicolon": ";", "bar": "|", "space": None}
_SAID = {mark: word for word, mark in _DELIMITERS.items()}
_LOOKED_AT = 20  # lines of a file that tell its delimiter
_LONGEST_FIELD = 1 << 27
_SHARE = 0.5  # of this machine's memory, that a file may take


class Rows(NamedTuple):
    """All rows of a file: numbers with NaN where a cell is missing, and texts of other columns."""

    numbers: Float64[np.ndarray, "rows columns"]
    texts: list[list[str]]


class Cells(ABC):
    """A file with rows and named columns; `nested` are those whose cells are lists."""

    path: Path
    nested: tuple[str, ...] = ()

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the columns; of a file without a header their numbers, from 1."""

    @abstractmethod
    def read(self, numbers: Sequence[str], texts: Sequence[str]) -> Rows:
        """Read some columns as numbers and others as texts; what is no number, or infinite, is refused by its place."""

    @abstractmethod
    def where(self, row: int) -> str:
        """The place of a row, counted from 0, in words."""

    @property
    @abstractmethod
    def said(self) -> str:
        """The kind of file, in words."""

    @property
    def has_header(self) -> bool:
        """Tell if the file names its columns."""
        return True

    @property
    def unnamed(self) -> frozenset[str]:
        """Columns of a header that have no name there, such as the index that pandas writes."""
        return frozenset()

    def column(self, wanted: str | int) -> str:
        """The column of that name, or of that number in a file without a header."""
        name = str(wanted)
        if name in self.names:
            return name
        raise DataError(
            f"{self.path} has no column {name!r}; its columns: {shortly(self.names)}{did_you_mean(name, self.names)}"
        )

    def columns(self, wanted: str | int | Iterable[str | int]) -> tuple[str, ...]:
        """The columns of names, of patterns such as "s*", and of ranges of numbers such as "3-26"."""
        found: dict[str, None] = {}
        for one in [wanted] if isinstance(wanted, str | int) else wanted:
            text = str(one)
            span = re.fullmatch(r"(\d+)-(\d+)", text)
            if text not in self.names and span is not None and not self.has_header:
                found |= dict.fromkeys(self.column(k) for k in range(int(span[1]), int(span[2]) + 1))
            elif text not in self.names and (matching := fnmatch.filter(self.names, text)):
                found |= dict.fromkeys(matching)
            else:
                found[self.column(one)] = None
        return tuple(found)


def shortly(names: Sequence[str], most: int = 12) -> str:
    """The names, without those in the middle of a long list."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:4])}, …, {names[-1]} ({len(names)} of them)"


@final
class TextCells(Cells):
    """A text file with one row a line: comma, tab, semicolon, bar or spaces between cells, a header or none.

    A header is a first row without numbers, or one whose numbers are 0, 1, 2, …, as pandas writes it, or, beside
    a name, 1, 2, 3, …
    """

    def __init__(self, path: Path, delimiter: str | None = None, header: bool | None = None) -> None:
        self.path = path
        self._mark = _sniffed(path) if delimiter is None else _mark(delimiter)  # None: any number of spaces
        self._first = self._first_row()
        self._has_header = _is_header(self._first[1]) if header is None else header
        self._names = self._read_names()
        self._lines = array("q")  # of the rows that were read last

    @property
    def said(self) -> str:
        mark = self._mark
        return f"text, {_SAID.get(mark, repr(mark))} between cells, {'a' if self.has_header else 'no'} header"

    def _first_row(self) -> tuple[int, list[str]]:
        with _opened(self.path) as file:
            for line, cells in self._split(file):
                return line, [cell.strip() for cell in cells]
        raise DataError(f"{self.path} is empty, expected rows of cells")

    @property
    def has_header(self) -> bool:
        return self._has_header

    @property
    def unnamed(self) -> frozenset[str]:
        return frozenset(str(k) for k, name in enumerate(self._first[1], 1) if self.has_header and not name)

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    def _read_names(self) -> tuple[str, ...]:
        line, first = self._first
        if not self.has_header:
            return tuple(map(str, range(1, len(first) + 1)))
        names = [name or str(k) for k, name in enumerate(first, 1)]
        if twice := [name for k, name in enumerate(names) if name in names[:k]]:
            raise DataError(f"{self.path}, line {line}: the header has {twice[0]!r} twice, expected other names")
        return tuple(names)

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """The lines of the rows, and their cells; a row of another length is refused."""
        expected, skip = len(self.names), self.has_header
        with _opened(self.path) as file:
            for line, cells in self._split(file):
                if skip:
                    skip = False
                    continue
                if len(cells) != expected:
                    if len(cells) == expected + 1 and not cells[-1].strip():
                        cells.pop()  # a delimiter at the end of the line
                    else:
                        raise DataError(self._ragged(line, len(cells), expected))
                yield line, cells

    def _ragged(self, line: int, came: int, expected: int) -> str:
        first = "the header" if self.has_header else "the first row"
        hint = "" if self.has_header else "; short rows of sequences end in empty cells or NaN"
        mark = _SAID.get(self._mark, repr(self._mark))
        return (
            f"{self.path}, line {line}: {came} cells, expected {expected} as in {first}, with {mark} between"
            f" cells{hint}; if cells are divided otherwise, set delimiter"
        )

    def _split(self, file: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        """The cells of every line that is not empty, without comments before the first."""
        mark, begun = self._mark, False
        if mark is None:
            for line, text in enumerate(file, 1):
                if (cells := text.split()) and (begun or not text.startswith(("#", "%"))):
                    begun = True
                    yield line, cells
            return
        reader = csv.reader(file, delimiter=mark, strict=True, skipinitialspace=True)
        before = csv.field_size_limit(_LONGEST_FIELD)
        try:
            for cells in reader:
                if not cells or (len(cells) == 1 and not cells[0].strip()):
                    continue
                if begun or not cells[0].startswith(("#", "%")):
                    begun = True
                    yield reader.line_num, cells
        except csv.Error as error:
            raise DataError(f"{self.path}, line {reader.line_num}: {error}; is a quotation mark left open?") from None
        finally:
            csv.field_size_limit(before)

    def read(self, numbers: Sequence[str], texts: Sequence[str]) -> Rows:
        places = [self.names.index(name) for name in numbers]
        others = [self.names.index(name) for name in texts]
        flat, found = array("d"), [list[str]() for _ in texts]
        lines = self._lines = array("q")
        for line, cells in self.rows():
            lines.append(line)
            try:
                if "_" in "".join(cells):
                    raise ValueError  # float reads 1_000
                flat.extend([float(cells[k]) for k in places])
            except ValueError:
                flat.extend([self._number(cells[k], line, k) for k in places])
            for kept, k in zip(found, others, strict=True):
                kept.append(cells[k].strip())
        if not lines:
            raise DataError(f"{self.path} has a header and no rows")
        block = np.frombuffer(flat, dtype=np.float64).reshape(len(lines), len(places)) if places else _none(len(lines))
        _require_finite(self, block, numbers)
        return Rows(block, found)

    def _number(self, text: str, line: int, k: int) -> float:
        """The number of a cell, NaN for a missing one."""
        if (plain := text.strip()).lower() in MISSING:
            return math.nan
        try:
            return as_number(plain)
        except ValueError:
            comma = "; write a point in decimal numbers" if DECIMAL_COMMA.fullmatch(plain) else ""
            raise DataError(
                f"{self.path}, line {line}, column {self.names[k]}: {plain[:40]!r} is not a number{comma};"
                " a column of text can be target or sequence, or be left out"
            ) from None

    def where(self, row: int) -> str:
        return f"{self.path}, line {self._lines[row]}"


def _mark(delimiter: str) -> str | None:
    """The character of a word such as "comma", or that character; None for spaces."""
    if delimiter not in _DELIMITERS and len(delimiter) != 1:
        raise DataError(f"delimiter is {delimiter!r}, expected {', '.join(_DELIMITERS)} or one character")
    return _DELIMITERS.get(delimiter, None if delimiter == " " else delimiter)


def _none(rows: int) -> Float64[np.ndarray, "rows 0"]:
    return np.empty((rows, 0))


def _require_finite(cells: Cells, block: Float64[np.ndarray, "rows columns"], names: Sequence[str]) -> None:
    """Refuse infinite numbers; NaN is a missing one."""
    if np.isinf(block).any():
        row, column = np.argwhere(np.isinf(block))[0]
        raise DataError(f"{cells.where(int(row))}, column {names[column]}: an infinite number, expected finite ones")


def _is_header(cells: Sequence[str]) -> bool:
    """Tell if cells of a first row are names: none is a number, or the numbers count the columns from 0 or from 1."""
    numbers = [cell for cell in cells if is_number(cell)]
    names = [cell for k, cell in enumerate(cells) if not is_number(cell) and (k or cell)]
    if any(cell.lower() in MISSING for cell in names) and numbers:
        return False
    if not numbers:
        return any(cell.lower() not in MISSING for cell in names)
    if not all(cell.isdecimal() for cell in numbers):
        return False
    counted = [int(cell) for cell in numbers]
    begins = (0, 1) if len(numbers) < len(cells) else (0,)
    return len(counted) > 2 and counted[0] in begins and counted == list(range(counted[0], counted[-1] + 1))


def as_number(text: str) -> float:
    """The number that a text is; 1_000, which `float` takes, is none."""
    if "_" in text:
        raise ValueError(f"{text!r} is not a number")
    return float(text)


def is_number(text: str) -> bool:
    """Tell if a text is a number; words for missing ones are not."""
    try:
        return not math.isnan(as_number(text))
    except ValueError:
        return False


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[str]]:
    """A context with the text of a file, without a byte-order mark; what cannot be read is refused."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        what = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "of another encoding"
        raise DataError(f"{path} is not UTF-8 text, but {what}, or not text at all; write it as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def class_name(value: object) -> str | None:
    """The name of a class; numbers have one form, so that 1, 1.0 and 1.0000000e+00 are one class."""
    text = str(value).strip()
    if text.lower() in MISSING:
        return None
    if not is_number(text):
        return text
    if text.isdecimal():
        return str(int(text))  # whose last digits float would lose
    found = as_number(text)
    return str(int(found)) if found.is_integer() else str(found)


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers, without white space at both ends."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            yield number, line.strip()


def _sniffed(path: Path) -> str | None:
    """The delimiter that is in all of the first lines, the same number of times if one is; None for spaces."""
    lines: list[str] = []
    for _, line in lines_of(path):
        if line and not (not lines and line.startswith(("#", "%"))):
            lines.append(re.sub(r'"[^"]*"', '""', line))
        if len(lines) == _LOOKED_AT:
            break
    if any("\0" in line for line in lines):
        raise DataError(f"{path} is not a text file: it holds null characters; expected a file of another ending")
    # A comma may be that of a decimal number.
    counts = {mark: [line.count(mark) for line in lines] for mark in ("\t", ";", "|", ",")}
    there = [mark for mark, found in counts.items() if found and min(found) > 0]
    even = [mark for mark in there if len(set(counts[mark])) == 1]
    if even or there:
        return (even or there)[0]
    if lines and path.name.removesuffix(".gz").endswith(".csv") and not any(" " in line for line in lines):
        return ","  # one column
    return None


def memory() -> int:
    """The bytes of memory of this machine, where it says so."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else sys.maxsize


def require_memory(path: Path) -> None:
    """Refuse a file that surely does not fit into memory, before minutes are spent on it."""
    size, there = path.stat().st_size, memory()
    if size > _SHARE * there:
        raise DataError(
            f"{path} has {size:,} bytes, and this machine has {there:,} bytes of memory, of which a file may take half:"
            " divide it, or leave out what is not needed"
        )


@final
class ColumnarCells(Cells):
    """A Parquet or Arrow file, read by pyarrow; a cell may be a list, which is then a whole sequence."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._table = _arrow_table(path)
        if not self._table.num_rows:
            raise DataError(f"{path} has no rows")
        types = _package(path).types
        self.nested = tuple(
            field.name
            for field in self._table.schema
            if any(check(field.type) for check in (types.is_list, types.is_large_list, types.is_fixed_size_list))
        )

    @property
    def said(self) -> str:
        return f"columns of types, {self._table.num_rows} rows"

    @property
    def names(self) -> tuple[str, ...]:
        names = tuple(self._table.column_names)
        return tuple(name for name in names if not re.fullmatch(r"__index_level_\d+__", name))

    def read(self, numbers: Sequence[str], texts: Sequence[str]) -> Rows:
        block = np.empty((self._table.num_rows, len(numbers)))
        for k, name in enumerate(numbers):
            block[:, k] = self._numbers(name)
        _require_finite(self, block, numbers)
        kept = [["" if value is None else _as_text(value) for value in self.values(name)] for name in texts]
        return Rows(block, kept)

    def values(self, name: str) -> list[Any]:
        """The cells of a column as Python's values."""
        return self._table.column(name).to_pylist()

    def _numbers(self, name: str) -> Float64[np.ndarray, " rows"]:
        column, pyarrow = self._table.column(name), _package(self.path)
        kind, types = column.type, pyarrow.types
        if any(check(kind) for check in (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)):
            return column.cast(pyarrow.float64(), safe=False).to_numpy()
        raise DataError(
            f"{self.path}, column {name}: it holds {kind}, expected numbers; a column of text can be target or"
            " sequence, or be left out"
        )

    def where(self, row: int) -> str:
        return f"{self.path}, row {row + 1}"


def _as_text(value: Any) -> str:
    """A label or the name of a sequence as text; 3.0 is 3."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def _package(path: Path) -> Any:
    try:
        import pyarrow as package
        import pyarrow.types
    except ModuleNotFoundError:
        raise DataError(
            f"{path} is read by the package pyarrow: pip install 'compressm[data]', or write it as .csv or .npz"
        ) from None
    return package


def _arrow_table(path: Path) -> Any:
    """All columns of a Parquet file, or of an Arrow file or stream."""
    package = _package(path)
    from pyarrow import ipc, parquet

    try:
        if path.suffix in (".parquet", ".pq"):
            return parquet.read_table(path)
        try:
            return ipc.open_file(path).read_all()
        except package.ArrowInvalid:
            with package.OSFile(str(path)) as file:
                return ipc.open_stream(file).read_all()
    except (package.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read as {path.suffix[1:]}: {str(error).splitlines()[0]}") from None
