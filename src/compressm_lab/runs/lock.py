"""The lock of a run directory: only one process trains in a folder.

The folder `lock` holds one file, `TOKEN.json`, which says who the owner is. A folder that is renamed to `lock` with its
file inside is there whole or not at all, and cannot replace one that has a file: of several processes one wins. A stale
lock is removed by the name of its file, which no later lock shares, so nobody removes the lock of a living owner.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import final

from compressm_lab.runs.records import RunError

HEARTBEAT = 10.0  # seconds between two heartbeats
STALE = 120.0  # seconds after which a heartbeat is old
_TRIES = 100
_TOKEN = re.compile(r"[0-9a-f]{32}\.json")
# What a network disk keeps of a file that was removed while a process had it open.
_REMOVED = re.compile(r"\.nfs.*")
_THERE = (errno.EEXIST, errno.ENOTEMPTY)  # a folder cannot be renamed to one that has a file


class RunLockedError(RunError):
    """Another process trains in the folder; the message says which."""


class LockLostError(RunError):
    """Another process has taken the folder over; this one must not write to it any more."""


@final
@dataclass(frozen=True)
class Owner:
    """The process that holds a lock; `started` tells it from a later process with the same number.

    machine: the boot and the process table, where the system tells them; containers may share the name of a host.
    """

    host: str
    machine: str
    pid: int
    started: str
    command: str
    begun: str
    heartbeat: str

    @classmethod
    def here(cls) -> Owner:
        """This process, now."""
        pid, now = os.getpid(), _now()
        command = shlex.join(sys.argv)[:500]
        return cls(socket.gethostname(), _machine(), pid, _start_of(pid) or "", command, now, now)

    @classmethod
    def read(cls, path: Path) -> Owner:
        """The owner in a file; an unknown one if it cannot be read, with the file's time as its heartbeat."""
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe may never end
            raise RunLockedError(f"{path} is no regular file, expected that of a lock: move it away")
        stored: object = None
        with suppress(ValueError, RecursionError, PermissionError):
            stored = json.loads(path.read_text(encoding="utf-8"))
        kinds = {entry.name: int if entry.name == "pid" else str for entry in fields(cls)}
        changed = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        if isinstance(stored, dict) and {name: type(value) for name, value in stored.items()} == kinds:
            with suppress(ValueError, OverflowError):
                found = cls(**stored)
                # The time of the file is often by the clock of the disk, which may be right where the host's is wrong.
                return found if found.age >= -STALE else replace(found, heartbeat=changed)
        return cls("an unknown host", "", 0, "", "", changed, changed)

    @property
    def age(self) -> float:
        """Seconds since the last heartbeat, by the clock of this machine."""
        return time.time() - datetime.fromisoformat(self.heartbeat).timestamp()

    @property
    def is_silent(self) -> bool:
        """True where the heartbeat is old, or so far in the future that it tells nothing."""
        return abs(self.age) > STALE

    @property
    def is_here(self) -> bool:
        """True of this process."""
        here = Owner.here()
        return (self.host, self.machine, self.pid, self.started) == (here.host, here.machine, here.pid, here.started)

    def ended(self) -> bool | None:
        """True if the process has ended, False if it lives, None if that cannot be known from here."""
        if not self.machine or (self.host, self.machine) != (socket.gethostname(), _machine()):
            # A host of the same name was restarted since, or is another container.
            return True if self.host == socket.gethostname() and self.age > STALE else None
        start = _start_of(self.pid)
        return start is None or bool(start and self.started and start != self.started)

    def __str__(self) -> str:
        when = (
            f"{self.age:.0f} s ago" if self.age >= -STALE else f"{-self.age:.0f} s ahead of the clock of this machine"
        )
        since = f"since {self.begun}, last heartbeat {self.heartbeat} ({when})"
        return f"process {self.pid} on {self.host} {since}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _machine() -> str:
    """The present boot and the table of process numbers; empty if the system does not tell."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "" if os.name == "nt" else socket.gethostname()


def _start_of(pid: int) -> str | None:
    """The start of a living process; None if there is none of this number, empty if the system does not tell."""
    if pid < 1:  # 0 and -1 would ask for whole groups of processes
        return None
    if os.name == "nt":
        return ""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        pass  # somebody else's
    if not Path("/proc/self/stat").is_file():
        said = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
        return said.stdout.strip()
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # hidden
    return None if state in "ZX" else rest[18]


def holder(place: Path) -> tuple[Path, Owner] | None:
    """The file of the lock at a place, and its owner; None if nobody holds it."""
    for _ in range(_TRIES):
        try:
            found = [place / name for name in os.listdir(place) if _TOKEN.fullmatch(name)]
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not found:
            return None
        with suppress(FileNotFoundError):  # released, or taken over, since
            return found[0], Owner.read(found[0])
    return None


def require_free(place: Path, *, take_over: bool = False) -> str:
    """Refuse the lock of a process that may live; of one that has ended, a sentence about the take-over.

    `take_over` allows it for a process elsewhere whose heartbeat is old. Empty without a lock.
    """
    found = holder(place)
    return "" if found is None else _judged(*found, take_over)


# Names of the locks of this process. One of its own that is not here could not be removed, on a read-only disk.
_held: set[str] = set()


def _judged(path: Path, owner: Owner, take_over: bool) -> str:
    ended, folder = owner.ended(), path.parent.parent
    if owner.is_here and path.name not in _held:
        ended = True
    if ended or (ended is None and take_over and owner.is_silent):
        silent = f"has been silent for {owner.age:.0f} s" if owner.age > 0 else "tells no time that can be trusted"
        return f"{folder}: took over the lock of {owner}: that process {'has ended' if ended else silent}"
    said = f"{folder} is being trained by {owner}, command: {owner.command or 'unknown'}"
    removal = f"if you know that it has ended, delete {path.parent}"
    if ended is None and owner.is_silent:
        raise RunLockedError(
            f"{said}. It is on another machine, and may have ended: if so, --take-over (take_over=True) takes the run;"
            f" or, {removal}"
        )
    cure = "wait for it or stop it"
    if ended is None:
        cure = f"wait for it, or until it is silent for {STALE:.0f} s; {removal}"
    raise RunLockedError(f"{said}. Nothing was changed: {cure}, or choose another folder")


@final
class Lock:
    """A lock that this process holds, with a thread that writes its heartbeat; `sentence` names one taken over."""

    def __init__(self, path: Path, owner: Owner, sentence: str) -> None:
        self.path, self.owner, self.sentence = path, owner, sentence
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat of a run", daemon=True)
        self._thread.start()

    @classmethod
    def take(cls, place: Path, *, take_over: bool = False) -> Lock:
        """Take the lock at a place, or refuse and change nothing; of several processes one gets it."""
        token, owner = uuid.uuid4().hex, Owner.here()
        path, sentence = place / f"{token}.json", ""
        _held.add(path.name)
        try:
            for _ in range(_TRIES):
                found = holder(place)
                if found is not None:
                    sentence = _judged(*found, take_over)
                    found[0].unlink(missing_ok=True)
                if _created(path, owner):
                    return cls(path, owner, sentence)
                sentence = ""  # another process was faster
                _clear(place, token)
            raise RunLockedError(f"{place} changes its owner all the time; expected one training at a time")
        except BaseException:
            _held.discard(path.name)
            raise

    def require_held(self) -> None:
        """Refuse to go on if another process has taken over."""
        try:
            self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            found = holder(self.path.parent)
            folder, who = self.path.parent.parent, "its lock was removed"
            if found is not None:
                who = f"it was taken over by {found[1]}"
            elif not folder.is_dir():
                who = "the folder was moved or deleted; where it was moved to, --resume goes on"
            raise LockLostError(f"{folder}: {who}; process {self.owner.pid} on {self.owner.host} stops") from None

    def release(self) -> None:
        """Remove the lock; one that another process has taken over stays."""
        self._end.set()
        self._thread.join()
        # A folder that cannot be written any more keeps it: the process ends, so the next one takes it over.
        _held.discard(self.path.name)
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
            self.path.parent.rmdir()

    def _beat(self) -> None:
        while not self._end.wait(HEARTBEAT):
            # A disk that fails for a while must not end the training; a lock that is gone is not made again.
            with suppress(OSError), self.path.open("r+b") as file:
                file.write(_contents(replace(self.owner, heartbeat=_now())))


def _contents(owner: Owner) -> bytes:
    """The file of an owner; of the same length at every heartbeat, which is written over the last one."""
    return (json.dumps(asdict(owner), indent=1) + "\n").encode()


def _created(path: Path, owner: Owner) -> bool:
    """Create the lock with its file inside; False if another process was faster."""
    place = path.parent
    scratch = place.with_name(f"{place.name}.{path.stem}")
    try:
        scratch.mkdir()
        with (scratch / path.name).open("xb") as file:
            file.write(_contents(owner))
            file.flush()
            os.fsync(file.fileno())
        with suppress(OSError):
            place.rmdir()  # an empty one, whose owner was removed
        os.rename(scratch, place)
        return path.is_file()
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        # A new owner may also have removed the scratch folder as left over.
        swept = isinstance(error, FileNotFoundError) and place.parent.is_dir()
        if swept or error.errno in _THERE or (os.name == "nt" and place.is_dir()):
            return False
        raise


def _clear(place: Path, token: str) -> None:
    """Move a lock without an owner away if only a network disk keeps it; any other file in it is named."""
    names = []
    with suppress(FileNotFoundError, NotADirectoryError):
        names = [name for name in os.listdir(place) if not _TOKEN.fullmatch(name)]
    if foreign := sorted(name for name in names if not _REMOVED.fullmatch(name)):
        raise RunLockedError(f"{place} holds {foreign[0]!r}, which is not of a lock: move it away, or delete {place}")
    if not names or holder(place) is not None:
        return
    moved = place.with_name(f"{place.name}.{token}-moved")
    with suppress(OSError):
        os.rename(place, moved)
        if holder(moved) is not None:  # a new owner was faster
            os.rename(moved, place)


def remove_left_over(place: Path) -> None:
    """Remove what killed processes left beside a lock that this process holds."""
    for path in place.parent.glob(f"{place.name}.*"):
        shutil.rmtree(path, ignore_errors=True)
