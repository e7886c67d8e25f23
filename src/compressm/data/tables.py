"""Tab-separated files, row by row, with the line in every complaint."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader

from compressm.data.archives import BROKEN, half_there
from compressm.data.errors import DataError

LONGEST_FIELD = 1 << 27  # characters; Python's own limit is 2¹⁷, below some papers of AAN


def rows(stream: BufferedReader, where: str, columns: int) -> Iterator[tuple[int, list[str]]]:
    """The line a row ends on, and its fields; quotes are taken off."""
    reader = csv.reader((line.decode("utf-8", "replace") for line in stream), delimiter="\t", strict=True)
    with _long_fields():
        try:
            for row in reader:
                if len(row) != columns:
                    raise DataError(f"{where}, line {reader.line_num}: {len(row)} columns, expected {columns}")
                yield reader.line_num, row
        except csv.Error as error:
            raise DataError(f"{where}, line {reader.line_num}: {error}; broken or only half there") from None
        except BROKEN as error:
            raise half_there(where, error) from None


@contextmanager
def _long_fields() -> Iterator[None]:
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)
