"""Results of benchmarks and studies, and the machine, date and commit of every number."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import torch

from compressm.files import replacing
from compressm_lab.runs.records import why_not_json


@dataclass(frozen=True)
class Environment:
    """Machine, date, commit and versions, stored with every measurement."""

    date: str
    commit: str
    processor: str
    cores: int
    accelerator: str | None
    python: str
    torch: str
    threads: int

    @classmethod
    def here(cls) -> Environment:
        """The environment of this process, now."""
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=_commit(),
            processor=_processor(),
            cores=os.cpu_count() or 1,
            accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            python=platform.python_version(),
            torch=torch.__version__,
            threads=torch.get_num_threads(),
        )

    @classmethod
    def from_dict(cls, stored: Any) -> Environment:
        """Make an environment of what JSON held; a TypeError says what is missing, unknown or of another type."""
        kinds = get_type_hints(cls)
        if not isinstance(stored, dict) or set(stored) != set(kinds):
            came = ", ".join(map(str, stored)) if isinstance(stored, dict) else f"{stored!r:.80}"
            raise TypeError(f"environment holds {came or 'nothing'}, expected {', '.join(kinds)}")
        for name, kind in kinds.items():
            _require(f"environment.{name}", stored[name], kind)
        return cls(**stored)

    @property
    def machine(self) -> str:
        """The accelerator that computed, or the processor where there is none."""
        return self.accelerator or self.processor


def _commit() -> str:
    """The commit of the source tree, marked where it has changed since; `COMPRESSM_COMMIT` where there is no git."""
    if given := os.environ.get("COMPRESSM_COMMIT"):
        return given
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changes = ["git", "status", "--porcelain", "--", "."]
        state = subprocess.run(changes, cwd=here.parent, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip()[:12] + ("+changes" if state.stdout.strip() else "")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    return named or platform.processor() or platform.machine()


Row = dict[str, float | int | str]
Needed = Iterable[str] | Callable[[Row], Iterable[str]]


class MeasurementError(ValueError):
    """A file that is not a measurement."""


@dataclass(frozen=True)
class Measurement:
    """A table of numbers; `rows` share one set of columns, times are seconds, medians of `repeats`."""

    name: str
    title: str
    repeats: int
    rows: list[Row]
    environment: Environment = field(default_factory=Environment.here)

    def write(self, path: Path | str) -> Path:
        """Write JSON, whole or not at all."""
        with replacing(path) as scratch:
            scratch.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return Path(path)

    @classmethod
    def read(cls, path: Path | str) -> Measurement:
        """Read what `write` wrote; anything else is refused by name."""
        try:
            stored = json.loads(Path(path).read_text())
            _require_types(stored)
            return cls(**{**stored, "environment": Environment.from_dict(stored["environment"])})
        except FileNotFoundError:
            raise MeasurementError(f"{path}: no such file; expected a result of `compressm bench`") from None
        except OSError as error:
            raise MeasurementError(f"{path}: {error.strerror}; expected a result of `compressm bench`") from None
        except (ValueError, RecursionError) as error:
            raise MeasurementError(
                f"{path} is not a result of `compressm bench`: it is {why_not_json(error)}"
            ) from None
        except TypeError as error:
            raise MeasurementError(f"{path} is not a result of `compressm bench`: {error}") from None

    def require(self, name: str, *, needed: Needed, words: Iterable[str], command: str | None = None) -> None:
        """Refuse what is not a result of `command`, by default `compressm bench NAME`.

        Its rows have the columns `needed`, which may depend on the row, text in `words` and numbers in all others. A
        row may say when, at which commit and on which machine it was measured.
        """
        command = command or f"compressm bench {name}"
        words = {*words, "date", "commit", "machine"}
        if self.name != name or not self.rows:
            raise MeasurementError(f"{self.name} is not a result of `{command}` with rows")
        for k, row in enumerate(self.rows):
            wanted = needed(row) if callable(needed) else needed
            if missing := [column for column in wanted if column not in row]:
                raise MeasurementError(f"not a result of `{command}`: row {k} lacks {', '.join(missing)}")
            for column, value in row.items():
                if isinstance(value, str) != (column in words):
                    expected = "text" if column in words else "a number"
                    raise MeasurementError(f"row {k} has {value!r} as {column}, expected {expected}")


def _require_types(stored: Any) -> None:
    """Check what JSON held against the types declared above; a TypeError says what differs."""
    _require("the whole", stored, dict)
    for name, kind in (("name", str), ("title", str), ("repeats", int), ("rows", list), ("environment", dict)):
        _require(name, stored.get(name), kind)
    for k, row in enumerate(stored["rows"]):
        _require(f"rows[{k}]", row, dict)
        for name, value in row.items():
            _require(f"rows[{k}][{name!r}]", value, float | int | str)


def _require(name: str, value: object, kind: Any) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r:.80}, expected {getattr(kind, '__name__', kind)}")
