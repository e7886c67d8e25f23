"""The result file of a benchmark: named rows of numbers, with the environment they were measured in."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from compressm.runs.atomic import replacing
from compressm.runs.environment import Environment

Row = dict[str, float | int | str]


class MeasurementError(ValueError):
    """A file that is not a measurement."""


@dataclass(frozen=True)
class Measurement:
    """`rows` share one set of columns; times are seconds, medians of `repeats`."""

    name: str
    title: str
    repeats: int
    rows: list[Row]
    environment: Environment = field(default_factory=Environment.here)

    def write(self, path: Path | str) -> Path:
        """As JSON, whole or not at all."""
        with replacing(path) as scratch:
            scratch.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return Path(path)

    @classmethod
    def read(cls, path: Path | str) -> Measurement:
        """The inverse of `write`; anything else is refused by name."""
        try:
            stored = json.loads(Path(path).read_text())
            _require_types(stored)
            return cls(**{**stored, "environment": Environment(**stored["environment"])})
        except FileNotFoundError:
            raise MeasurementError(f"{path}: no such file; expected a result of `compressm bench`") from None
        except OSError as error:
            raise MeasurementError(f"{path}: {error.strerror}; expected a result of `compressm bench`") from None
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            raise MeasurementError(f"{path} is not a result of `compressm bench`: {error}") from None

    def require(self, name: str, *, needed: Iterable[str], words: Iterable[str], command: str | None = None) -> None:
        """A result of `command`, or of `compressm bench NAME`: rows with the columns `needed`, text in `words`.

        All else are numbers. A row may say when, at which commit and on which machine it was measured.
        """
        command = command or f"compressm bench {name}"
        words = {*words, "date", "commit", "machine"}
        if self.name != name or not self.rows:
            raise MeasurementError(f"{self.name} is not a result of `{command}` with rows")
        for k, row in enumerate(self.rows):
            if missing := [column for column in needed if column not in row]:
                raise MeasurementError(f"not a result of `{command}`: row {k} lacks {', '.join(missing)}")
            for column, value in row.items():
                if isinstance(value, str) != (column in words):
                    expected = "text" if column in words else "a number"
                    raise MeasurementError(f"row {k} has {value!r} as {column}, expected {expected}")


def _require_types(stored: Any) -> None:
    """What JSON held is of the types declared above, or a TypeError says what is not."""
    _require_type("the whole", stored, dict)
    for name, kind in (("name", str), ("title", str), ("repeats", int), ("rows", list), ("environment", dict)):
        _require_type(name, stored.get(name), kind)
    for k, row in enumerate(stored["rows"]):
        _require_type(f"rows[{k}]", row, dict)
        for name, value in row.items():
            _require_type(f"rows[{k}][{name!r}]", value, float | int | str)
    for name, kind in get_type_hints(Environment).items():
        _require_type(f"environment.{name}", stored["environment"].get(name), kind)


def _require_type(name: str, value: object, kind: Any) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r:.80}, expected {getattr(kind, '__name__', kind)}")
