"""The result file of a benchmark: named rows of numbers, with the environment they were measured in."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from compressm.runs.atomic import replacing
from compressm.runs.environment import Environment


class MeasurementError(ValueError):
    """A file that is not a measurement."""


@dataclass(frozen=True)
class Measurement:
    """`rows` share one set of columns; times are seconds, medians of `repeats`."""

    name: str
    title: str
    repeats: int
    rows: list[dict[str, float | int | str]]
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
            return cls(**{**stored, "environment": Environment(**stored["environment"])})
        except FileNotFoundError:
            raise MeasurementError(f"{path}: no such file; expected a result of `compressm bench`") from None
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise MeasurementError(f"{path} is not a result of `compressm bench`: {error}") from None
