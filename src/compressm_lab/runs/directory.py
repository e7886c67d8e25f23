"""A run directory: what training writes, step by step, and a report reads back.

config.json        the recipe as it was resolved           metrics.jsonl    `Evaluation`
environment.json   machine, date, commit, versions         cuts.jsonl       `CutRecord` and `RestoredRecord`
status.json        `Status`                                spectra.jsonl    `Spectrum`
task.json          sizes, classes, files, normalisation    timings.jsonl    `Timing`
checkpoints/       what --resume goes on from              truncations.jsonl  `TruncationRecord`
penalties.jsonl    `PenaltyRecord`                         decisions.jsonl  `DecisionRecord`, of automatic cuts
lock/              the process that trains here      together.json    trainings at a time, where it is known
model/             the final model, for `load_model`       tensorboard/     events, where asked for
"""

from __future__ import annotations

import hashlib
import json
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from compressm.errors import SavingError
from compressm.files import remove_scratch, replacing
from compressm_lab.runs import lock
from compressm_lab.runs.measurement import Environment
from compressm_lab.runs.records import Record, RestoredRecord, RunError, RunWriteError, require_kind, why_not_json

RunState = Literal["running", "finished", "interrupted", "failed"]
TOGETHER = "together.json"  # the number of trainings at a time
_Kind = TypeVar("_Kind", bound=Record)
_MOST_HEADER = 100_000_000  # bytes, as safetensors allows


@dataclass(frozen=True)
class Status:
    """State and step of a run; `message` says why where it failed.

    `recipe` is the digest of what was trained, `model` that of the model it ended with, `records` those of its files.
    """

    state: RunState
    step: int
    steps: int
    message: str = ""
    recipe: str = field(default="", compare=False)
    model: str = field(default="", compare=False)
    records: Mapping[str, str] = field(default_factory=dict, compare=False)


def recipe_digest(config: dict[str, Any]) -> str:
    """The digest of a recipe as plain values; keys that are not set do not count, as other versions may lack them."""
    return hashlib.sha256(json.dumps(_set_keys(config), sort_keys=True).encode()).hexdigest()[:16]


def _set_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _set_keys(entry) for key, entry in value.items() if entry is not None}
    return value


class RunDirectory:
    """A folder of one run: paths, whole small files, and lines that are appended one by one."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock: lock.Lock | None = None
        self._unsynced: set[Path] = set()  # files with lines that may not be on disk yet
        self._hashed: dict[Path, tuple[int, Any]] = {}  # the first bytes of files, by number, and their digest

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def exists(self) -> bool:
        """True where a run began."""
        return (self.path / "config.json").is_file()

    def other_files(self) -> list[str]:
        """The names of files and folders that do not belong to a run that is about to begin here."""
        # Of a run that was killed before it had a config, or that a study is about to begin.
        begun = {"lock", "environment.json", "task.json", TOGETHER}
        names = sorted(path.name for path in self.path.iterdir()) if self.path.is_dir() else []
        return [name for name in names if name not in begun and not name.startswith(".")]

    @property
    def finished(self) -> bool:
        """True where it was trained to its last step, and its model is there."""
        try:
            return self.status().state == "finished" and (self.model / "model.safetensors").is_file()
        except RunError:
            return False

    def begin(self, config: dict[str, Any]) -> None:
        """Begin a new run; one that is there already is refused."""
        if self.exists:
            raise RunError(f"{self.path} already holds a run: resume it, or choose another folder")
        self.describe_here()
        self._write("config.json", config)

    def write_task(self, notes: dict[str, Any]) -> None:
        """Write down what the data of the run are."""
        self._write("task.json", notes)

    def task(self) -> dict[str, Any]:
        """The description of the run's data; empty for runs of earlier versions."""
        return self._read("task.json") if (self.path / "task.json").is_file() else {}

    def describe_here(self) -> None:
        """Write down the machine, the commit and the versions."""
        self._write("environment.json", asdict(Environment.here()))

    @property
    def together(self) -> int | None:
        """The most trainings that ran at a time with this one; None if it is not known."""
        try:
            return int(json.loads((self.path / TOGETHER).read_text())["together"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def note_together(self, count: int) -> None:
        """Write down that so many trainings run at a time; a run that is resumed keeps the largest number."""
        most = max(count, self.together or 1) if self.exists else count
        self.path.mkdir(parents=True, exist_ok=True)
        with replacing(self.path / TOGETHER) as scratch:
            scratch.write_text(json.dumps({"together": most}))

    def require_free(self, *, take_over: bool = False) -> str:
        """Refuse a folder in which another process trains; otherwise as `locked`, and nothing is taken."""
        with _named(self._place):
            return lock.require_free(self._place, take_over=take_over)

    @contextmanager
    def locked(self, *, take_over: bool = False) -> Iterator[str]:
        """A context in which no other process trains here; the sentence names a stale lock that was taken over.

        The lock of a process of this machine that has ended is stale. With `take_over` so is one of another machine
        that has been silent for two minutes. Any other lock is refused, and nothing is changed.
        """
        if self._place.exists() and not self._place.is_dir():
            raise RunError(f"{self._place} is a file, expected the folder of the lock: move it away")
        with _named(self._place):
            self.path.mkdir(parents=True, exist_ok=True)
            held = lock.Lock.take(self._place, take_over=take_over)
        self._lock = held
        try:
            self._remove_left_over()
            yield held.sentence
        finally:
            self._lock = None
            held.release()

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """A context that writes a file of the run, which the lock must allow; a failure is a `RunWriteError`."""
        if self._lock is not None:
            self._lock.require_held()
        with _named(path):
            yield

    def _remove_left_over(self) -> None:
        """Remove half-written files of processes that were killed."""
        with self.writing(self.path):
            lock.remove_left_over(self._place)
            for folder in (self.path, *(path for path in self.path.iterdir() if path.is_dir())):
                remove_scratch(folder, alone=True)

    @property
    def _place(self) -> Path:
        return self.path / "lock"

    def write_status(self, status: Status) -> None:
        """Write the status, after all lines that it counts on are on disk."""
        self.sync()
        self._write("status.json", asdict(status))

    def write_last_status(self, status: Status) -> None:
        """Write the status of a run that ends by an error, if it can be written at all: that error matters more."""
        path = self.path / "status.json"
        try:
            self.write_status(status)
        except RunWriteError:
            # A full disk has no room for a new file, but the old one has its own.
            with suppress(RunWriteError), self.writing(path), path.open("r+", encoding="utf-8") as file:
                file.write(_json(asdict(status)))
                file.truncate()

    def append(self, *records: Record) -> None:
        """Append one line a record."""
        by_file: dict[str, list[str]] = {}
        for record in records:
            by_file.setdefault(record.file, []).append(_line(record))
        for name, lines in by_file.items():
            path = self.path / name
            if not path.exists():  # so that the name is on disk too
                with self.writing(path), replacing(path) as scratch:
                    scratch.touch()
            with self.writing(path), path.open("a", encoding="utf-8") as file:
                self._unsynced.add(path)
                file.writelines(lines)

    def replace(self, kind: type[Record], records: Iterable[Record]) -> None:
        """Write the whole file of a kind of record, or leave it as it was."""
        path = self.path / kind.file
        self._hashed.pop(path, None)
        with self.writing(path), replacing(path) as scratch:
            scratch.write_text("".join(map(_line, records)), encoding="utf-8")

    def rewind(self, step: int) -> None:
        """Forget the lines of steps after `step`, and one that a crash cut short."""
        for path in map(_plain_file, self._lines):
            text = path.read_text(encoding="utf-8", errors="replace")
            kept = [line for line in text.splitlines() if _step(line) <= step]
            self._hashed.pop(path, None)
            with self.writing(path), replacing(path) as scratch:
                scratch.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def sync(self) -> None:
        """Wait until all lines are on disk, before the checkpoint or the status that counts on them.

        Not after every line: that takes 0.2 ms on a fast disk, 20 times as long as the line, and 10 ms on a slow one.
        """
        for path in sorted(self._unsynced):
            with self.writing(path), path.open("ab") as file:
                os.fsync(file.fileno())
            self._unsynced.discard(path)

    def digests(self) -> dict[str, tuple[int, str]]:
        """The size and the SHA-256 of every file of records, so that lines of another run are noticed later."""
        for path in self._lines:
            size, total = self._hashed.pop(path, (0, hashlib.sha256()))
            with self.writing(path), path.open("rb") as file:
                file.seek(size)
                while part := file.read(1 << 20):
                    total.update(part)
                    size += len(part)
            self._hashed[path] = size, total
        return {path.name: (size, total.hexdigest()) for path, (size, total) in sorted(self._hashed.items())}

    def require_begun(self, written: Mapping[str, tuple[int, str]], step: int) -> None:
        """Refuse files that do not begin with what `digests` told when the checkpoint of a step was written."""
        for name, (size, digest) in written.items():
            path = _plain_file(self.path / name)
            if (_digest_of(path, size) if path.exists() else "") != digest:
                raise RunError(
                    f"{path} does not begin with the lines that were there when the checkpoint of step {step} was"
                    " written: it was changed since, or is of another run; put it back as it was, or delete"
                    f" {self.checkpoints}, and --resume trains the run from its beginning"
                )

    def require_own_records(self, *names: str) -> None:
        """Refuse files of records other than those that this run ended with; earlier versions did not write digests."""
        ended = self.status().records
        for name in names if ended else ():
            path = _plain_file(self.path / name)
            if (_digest_of(path) if path.exists() else _EMPTY) != ended.get(name, _EMPTY):
                raise RunError(
                    f"{path} is not the file that the run ended with: it was changed afterwards, or is of another run;"
                    " put it back as it was"
                )

    @property
    def _lines(self) -> list[Path]:
        """The files of records that are there."""
        names = sorted({kind.file for kind in Record.__subclasses__()})
        return [self.path / name for name in names if (self.path / name).exists()]

    def config(self) -> dict[str, Any]:
        return self._read("config.json")

    def environment(self) -> Environment:
        stored = self._read("environment.json")
        try:
            return Environment.from_dict(stored)
        except TypeError as error:
            raise RunError(f"{self.path / 'environment.json'}: {error}") from None

    def status(self) -> Status:
        path, stored = self.path / "status.json", self._read("status.json")
        kinds = {"state": "str", "step": "Count", "steps": "Count", "message": "str", "recipe": "str", "model": "str"}
        kinds["records"] = "Mapping[str, str]"
        # Earlier versions did not write the digests.
        if {*stored, "recipe", "model", "records"} != set(kinds):
            raise RunError(f"{path} holds {stored!r:.80}, expected state, step, steps and message")
        try:
            for name, value in stored.items():
                require_kind(name, value, kinds[name])
        except RunError as error:
            raise RunError(f"{path}: {error}") from None
        found = Status(**stored)
        if found.state not in get_args(RunState):
            raise RunError(f"{path}: state is {found.state!r:.80}, expected {', '.join(get_args(RunState))}")
        if found.step > found.steps or (found.state == "finished" and found.step < found.steps):
            raise RunError(f"{path}: {found.state} at step {found.step} of {found.steps}, which cannot be")
        return found

    def require_own_recipe(self) -> None:
        """Refuse a recipe that was changed after it was trained; earlier versions did not write its digest."""
        trained = self.status().recipe
        if trained and trained != recipe_digest(self.config()):
            raise RunError(
                f"{self.path / 'config.json'} is not the recipe that was trained: it was changed afterwards, or is of "
                "another run; put it back as it was"
            )

    def saved_model(self) -> str:
        """The digest of the saved model, from the header of its file; empty if there is none to read."""
        try:
            with (self.model / "model.safetensors").open("rb") as file:
                header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _MOST_HEADER)))
            return str(json.loads(header["__metadata__"]["compressm"])["sha256"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""

    def require_own_model(self) -> None:
        """Refuse a model that is not the one this run ended with; earlier versions did not write its digest."""
        ended, there = self.status().model, self.saved_model()
        if ended and there and ended != there:
            raise RunError(
                f"{self.model} is not the model that the run ended with: it was written afterwards, or is of another"
                " run; put it back as it was, or delete it, and --resume writes it again"
            )

    def model_sizes(self) -> dict[str, Any]:
        """The sizes of the final model, as saved beside its weights; empty without one."""
        return self._read("model/config.json") if (self.model / "config.json").is_file() else {}

    def records(self, kind: type[_Kind], *, up_to: int | None = None) -> list[_Kind]:
        """All records of one kind, in the order they were written; a last line that a crash cut short is left out.

        With `up_to` only those that `rewind` to this step keeps.
        """
        path = _plain_file(self.path / kind.file)
        try:
            errors = "strict" if up_to is None else "replace"
            lines = path.read_text(encoding="utf-8", errors=errors).split("\n") if path.exists() else []
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise RunError(f"{path} cannot be read: it is {why_not_json(error)}") from None
        found = []
        for number, line in enumerate(lines[:-1], start=1):
            if up_to is not None and _step(line) > up_to:
                continue
            try:
                stored = json.loads(line)
                # Cuts and restorations share a file: each kind knows its own by the fields.
                restored = isinstance(stored, dict) and "reason" in stored
                if kind.file != "cuts.jsonl" or restored == (kind is RestoredRecord):
                    found.append(kind.from_dict(stored))
            except RunError as error:
                raise RunError(f"{path}, line {number}: {error}") from None
            except (ValueError, RecursionError):
                raise RunError(f"{path}, line {number}: it is not JSON") from None
        return found

    def _write(self, name: str, contents: dict[str, Any]) -> None:
        with self.writing(self.path / name), replacing(self.path / name) as scratch:
            scratch.write_text(_json(contents), encoding="utf-8")

    def _read(self, name: str) -> dict[str, Any]:
        path = _plain_file(self.path / name)
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(f"{path} does not exist: {self.path} is not the folder of a run") from None
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path} cannot be read: it is {why_not_json(error)}") from None
        if not isinstance(stored, dict):
            raise RunError(f"{path} holds {stored!r:.80}, expected an object")
        return stored


def _plain_file(path: Path) -> Path:
    """The path, if it is not something as a pipe, from which reading may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise RunError(f"{path} is no regular file, expected one of a run: move it away")
    return path


_EMPTY = hashlib.sha256().hexdigest()


def _digest_of(path: Path, size: int = -1) -> str:
    """The SHA-256 of the first bytes of a file, by default of all."""
    try:
        with path.open("rb") as file:
            return hashlib.sha256(file.read(size)).hexdigest()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None


def _line(record: Record) -> str:
    return json.dumps(record.as_dict(), allow_nan=True) + "\n"


def _json(contents: dict[str, Any]) -> str:
    return json.dumps(contents, indent=1) + "\n"


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """A context that writes a file, in which what the disk or the folder refuses becomes a `RunWriteError`."""
    try:
        yield
    except (OSError, SavingError, RuntimeError) as error:  # torch's writer raises the last on a full disk
        _close_files_of(error)
        why = str(error)
        if isinstance(error, OSError) and error.strerror:
            why = f"{error.strerror} ({error.filename or path})"
        raise RunWriteError(why if "cannot be written" in why else f"{path} cannot be written: {why}") from error


def _close_files_of(error: BaseException | None) -> None:
    """Close files that failed functions have open: the room of a removed file is free only after that."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def find_runs(paths: Iterable[Path | str], most: int = 20_000) -> list[RunDirectory]:
    """Every run at or below the paths once, whatever paths lead to it, by name; a path without any is refused.

    So is one with more than `most` folders, such as the root of a disk: to look into 20 000 takes about a second.
    """
    found: dict[Path, RunDirectory] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise RunError(f"{path} does not exist, expected the folder of a run or of several")
        if not (below := _runs_below(path, most)):
            raise RunError(f"{path} holds no run: no config.json with a status.json beside it")
        for folder in below:
            found.setdefault(folder.resolve(), RunDirectory(folder))
    return list(found.values())


def _runs_below(path: Path, most: int) -> list[Path]:
    below: list[Path] = []
    for count, (folder, inside, files) in enumerate(os.walk(path), start=1):
        inside.sort()  # so that a search that ends early is the same every time
        if {"config.json", "status.json"} <= set(files):
            below.append(Path(folder))
        if count > most:
            known = f"; the first run in it is {below[0]}" if below else ""
            raise RunError(
                f"{path} has more than {most} folders, too many to look for runs: expected the folder of a run or of"
                f" several{known}"
            )
    return sorted(below)


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (TypeError, KeyError, ValueError, OverflowError, RecursionError):
        return float("inf")
