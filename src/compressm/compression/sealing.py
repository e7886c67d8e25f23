"""Archives that end with their own SHA-256, where zip files have a comment: every reader of them still reads them."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import BinaryIO

from compressm.errors import SavingError

_MARK = b"compressm sha256 "
_SEAL = len(_MARK) + hashlib.sha256().digest_size * 2
_END = struct.Struct("<4s16xH")  # the last record of an archive: its signature, and the length of the comment
_END_SIGNATURE = b"PK\x05\x06"


def seal(path: Path) -> None:
    """Make the digest of a zip file that has no comment its comment."""
    with path.open("r+b") as file:
        file.seek(-_END.size, os.SEEK_END)
        signature, comment = _END.unpack(file.read(_END.size))
        assert (signature, comment) == (_END_SIGNATURE, 0)
        file.seek(-2, os.SEEK_END)
        file.write(struct.pack("<H", _SEAL))
        digest = _digest(file, file.tell())
        file.write(_MARK + digest)


def require_sealed(path: Path) -> None:
    """Refuse a file that is not, to the last bit, what was sealed."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(size - _SEAL, 0))
        found = file.read()
        if size < _SEAL or not found.startswith(_MARK):
            raise SavingError(
                f"{path} is not a whole checkpoint: {size} bytes that begin with {start!r} and do not end with their "
                "digest, so that the end is missing or save_checkpoint did not write it"
            )
        if _digest(file, size - _SEAL) != found.removeprefix(_MARK):
            raise SavingError(f"{path} is damaged: its {size} bytes do not have the SHA-256 at their end")


def _digest(file: BinaryIO, size: int) -> bytes:
    """Of the first `size` bytes; the file is left there."""
    total = hashlib.sha256()
    file.seek(0)
    while size > 0:
        part = file.read(min(size, 1 << 20))
        total.update(part)
        size -= len(part)
    return total.hexdigest().encode()
