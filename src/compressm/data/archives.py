"""The files of a folder or of a tar archive, one after the other."""

from __future__ import annotations

import gzip
import re
import tarfile
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from compressm.data.errors import DataError

BROKEN = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile)


def members(path: Path, pattern: str) -> Iterator[tuple[str, BufferedReader]]:
    """Names that the pattern is found in, and their bytes; an archive is read once, in its own order."""
    wanted = re.compile(pattern)
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if wanted.search(name) and file.is_file():
                with file.open("rb") as stream:
                    yield name, stream
        return
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                if not wanted.search(member.name):
                    continue
                if isinstance(content := archive.extractfile(member), BufferedReader):
                    yield member.name, content
    except BROKEN as error:
        raise half_there(path, error) from None


def contents(stream: BufferedReader, where: str) -> bytes:
    """All bytes of a member."""
    try:
        return stream.read()
    except BROKEN as error:
        raise half_there(where, error) from None


def half_there(where: Path | str, error: Exception) -> DataError:
    """What a file that ends too early is called."""
    return DataError(
        f"{where} is broken or only half there ({type(error).__name__}: {error}); delete it and get it again"
    )


def place(path: Path, name: str) -> str:
    """How to call a member in a complaint."""
    return str(path / name) if path.is_dir() else f"{name} in {path}"


def require_members(path: Path, found: set[str], expected: set[str]) -> None:
    """All that a data set needs were there."""
    if missing := sorted(expected - found):
        raise DataError(f"{path} has no {', '.join(missing)}; expected {', '.join(sorted(expected))}")
