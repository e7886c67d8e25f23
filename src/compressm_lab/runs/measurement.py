"""On which machine, when and at which commit a number was measured."""

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


@dataclass(frozen=True)
class Environment:
    """Stored with every measurement."""

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
        """Of this process, now."""
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

    @property
    def machine(self) -> str:
        """What computed: the accelerator, where there is one."""
        return self.accelerator or self.processor


def _commit() -> str:
    """The commit of the source tree, marked where it has changed since; `COMPRESSM_COMMIT` where there is no git."""
    if given := os.environ.get("COMPRESSM_COMMIT"):
        return given
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        state = subprocess.run(
            ["git", "status", "--porcelain", "--", "."], cwd=here.parent, capture_output=True, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip()[:12] + ("+changes" if state.stdout.strip() else "")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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

    def require(
        self,
        name: str,
        *,
        needed: Iterable[str] | Callable[[Row], Iterable[str]],
        words: Iterable[str],
        command: str | None = None,
    ) -> None:
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
