"""Atomic writing of files: a file is complete or absent, even after a crash of the machine."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, cast

from compressm.errors import SavingError, UnwritableFileError


@contextmanager
def replacing(path: Path | str, size: int | None = None) -> Iterator[Path]:
    """Yield a scratch path next to `path`; its file replaces `path` only if the block ends without an error.

    A full disk, a read-only folder and the like are an `UnwritableFileError`, with the number of bytes that the block
    writes if `size` says it; so is a `path` that is a pipe, a device or a folder. A file that is replaced keeps its
    mode. The first write of a process into a folder removes what killed processes left there.
    """
    target = Path(path)
    scratch: Path | None = None
    handled = sys.exception()  # the caller may save because of a Ctrl-C
    try:
        mode = _mode_of(target)
        target = target.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        _tidy(target.parent)
        scratch = target.with_name(_scratch_name(target))
        if mode is not None:
            scratch.touch(mode=0o600)  # nobody else reads a private file while it is written
        yield scratch
        _to_disk(scratch)
        if mode is not None:
            scratch.chmod(mode)
        os.replace(scratch, target)
        _to_disk(target.parent)
    except (OSError, RuntimeError) as error:
        if (stopped := _interruption(error, handled)) is not None:
            raise stopped from None
        cause = _from_system(error)
        if cause is None or isinstance(error, SavingError):
            raise
        raise _unwritable(target, _removed(scratch), size, cause) from error
    finally:
        _removed(scratch)


def write_by(save: Callable[[BinaryIO], object], path: Path) -> None:
    """Write a file by `torch.save`, whose writer may live longer than the file is open."""
    with path.open("wb") as file:
        save(cast(BinaryIO, _Outlet(file)))


class _Outlet:
    """An open file that drops what comes after it was closed.

    A writer of torch that was interrupted ends its archive when it is collected; an error there ends the process.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        return len(data) if self._file.closed else self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def remove_scratch(folder: Path, *, alone: bool = False) -> list[Path]:
    """Remove the scratch files of killed writers from a folder, not from folders in it, and return their paths.

    A file is removed if its process has ended, or, where that cannot be told (another machine, an earlier version of
    this package), if it was not written to for an hour. With `alone`, when no other process writes there, as the holder
    of a lock knows, all are removed.
    """
    return _remove(folder, lambda path: alone or _is_left(path), _SCRATCH, _EARLIER_SCRATCH)


def process_name() -> str:
    """A name of this process for files: `has_ended` tells, on this machine, whether it still runs."""
    return f"{os.getpid()}-{_machine()}"


def has_ended(process: str) -> bool:
    """True if the process of that name surely has ended; False if it runs, or on another machine."""
    number, _, machine = process.partition("-")
    return machine == _machine() and os.name != "nt" and number.isdecimal() and not _is_alive(int(number))


_SCRATCH = re.compile(r"\..*\.(?P<process>\d+)-(?P<machine>[0-9a-f]{12})-[0-9a-f]{32}\.scratch(\.[^.]*)?")
_EARLIER_SCRATCH = re.compile(r"\..*\.[0-9a-f]{32}(\.[^.]*)?")
_LONG_AGO = 3600.0  # seconds


def _scratch_name(target: Path) -> str:
    # The suffix stays last: some writers choose a format by it. A name may have 255 bytes.
    return f".{target.stem[:40]}.{process_name()}-{uuid.uuid4().hex}.scratch{target.suffix}"


@cache
def _machine() -> str:
    """The same text in all processes whose numbers can be compared: those of one machine, since it started."""
    told = [platform.node()]
    for source in (
        lambda: Path("/proc/sys/kernel/random/boot_id").read_text(),
        lambda: os.readlink("/proc/self/ns/pid"),
    ):
        with suppress(OSError):
            told.append(source())
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:12]


_tidied: set[Path] = set()


def _tidy(folder: Path) -> None:
    """Remove scratch files of killed writers once per process; only names that surely are ours."""
    if folder not in _tidied:
        _tidied.add(folder)
        _remove(folder, _is_left, _SCRATCH)


def _remove(folder: Path, is_left: Callable[[Path], bool], *patterns: re.Pattern[str]) -> list[Path]:
    removed = []
    with suppress(OSError):  # there is no such folder, or it cannot be read
        for path in sorted(Path(folder).iterdir()):
            # A file that another process has just removed, or that may not be removed, is left out.
            with suppress(OSError):
                if any(pattern.fullmatch(path.name) for pattern in patterns) and path.is_file() and is_left(path):
                    path.unlink()
                    removed.append(path)
    return removed


def _is_left(path: Path) -> bool:
    """True if the writer of a scratch file has ended, or has not written for an hour."""
    named = _SCRATCH.fullmatch(path.name)
    if named is not None and named["machine"] == _machine() and os.name != "nt":
        return not _is_alive(int(named["process"]))
    return time.time() - path.stat().st_mtime > _LONG_AGO


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _mode_of(target: Path) -> int | None:
    """The mode of the file that a path or link names, None if there is none; anything but a file is refused."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        kind = next((name for is_one, name in _OTHERS if is_one(mode)), "no ordinary file")
        raise UnwritableFileError(f"{target} is {kind}, expected a file, or a name that is free; it is as before")
    return stat.S_IMODE(mode)


_OTHERS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def _interruption(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """The Ctrl-C or exit behind an error: torch.save says "unexpected pos" when one stops it."""
    behind = error.__context__
    while behind is not None and behind is not handled:
        if isinstance(behind, KeyboardInterrupt | SystemExit):
            return behind
        behind = behind.__context__
    return None


def _from_system(error: OSError | RuntimeError) -> OSError | None:
    """The error of the system behind an error, if there is one."""
    # torch.save says "unexpected pos" in a RuntimeError after a failed write to its file.
    behind = error.__context__ if "inline_container" in str(error) else None
    return error if isinstance(error, OSError) else behind if isinstance(behind, OSError) else None


def _removed(scratch: Path | None) -> int:
    """Remove a scratch file and return its size; what cannot be removed now is removed by a later process."""
    size = 0
    with suppress(OSError):
        if scratch is not None and scratch.exists():
            size = scratch.stat().st_size
            scratch.unlink()
    return size


_FULL = (errno.ENOSPC, errno.EDQUOT)


def _unwritable(target: Path, written: int, size: int | None, error: OSError) -> UnwritableFileError:
    """The error with the path, the bytes needed, and the bytes free where the system tells."""
    needed = f"about {size:,} bytes" if size is not None else f"more than {written:,} bytes"
    found = next((folder for folder in target.parents if folder.is_dir()), None)
    free = ""
    with suppress(OSError):
        if found is not None:
            free = f", and {shutil.disk_usage(found).free:,} bytes are free in {found}"
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        needed, advice = f"{needed}{free}", "free some space, or write to another folder"
    elif error.errno == errno.EFBIG:
        advice = "raise the limit of file sizes (ulimit -f)"
    elif error.errno == errno.ENAMETOOLONG:
        advice = "choose a shorter name"
    else:
        advice = "make the folder writable, or write to another one"
    said = UnwritableFileError(
        f"{target} cannot be written: {reason}. It needs {needed}: {advice}; a file that was there is as before"
    )
    said.errno = error.errno
    return said


def _to_disk(path: Path) -> None:
    """Write a file's contents to disk: after a power cut, a renamed file still in memory would be empty."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a directory
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
