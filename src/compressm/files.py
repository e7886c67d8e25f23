"""Atomic writing of files: a file is complete or absent, even after a crash of the machine."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yield a scratch path next to `path`; its file replaces `path` only if the block ends without an error."""
    target = Path(path).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.stem}.{uuid.uuid4().hex}{target.suffix}")
    try:
        yield scratch
        _to_disk(scratch)
        os.replace(scratch, target)
        _to_disk(target.parent)
    finally:
        scratch.unlink(missing_ok=True)


def _to_disk(path: Path) -> None:
    """Write a file's contents to disk: after a power cut, a renamed file still in memory would be empty."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a directory
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
