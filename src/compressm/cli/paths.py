"""Where results go, checked before minutes of work are spent on them."""

from __future__ import annotations

import tempfile
from pathlib import Path

PICTURES = (".png", ".pdf", ".svg", ".eps", ".jpg", ".jpeg", ".webp")


class PathError(ValueError):
    """A path that cannot be written, or names no kind of picture."""


def require_writable(path: Path) -> Path:
    """A file that can be written, in a folder that is there or can be made; nothing is left behind."""
    folder = path.parent
    try:
        with tempfile.TemporaryFile(dir=_nearest(folder)):
            pass
    except OSError as error:
        raise PathError(f"{folder}: {error.strerror}; expected a folder that can be made and written") from None
    if path.is_dir():
        raise PathError(f"{path} is a folder; expected a file")
    return path


def _nearest(folder: Path) -> Path:
    """The folder itself, or of those above it the first that is there."""
    for place in (folder, *folder.parents):
        try:
            place.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return place
    return folder


def require_picture(path: Path) -> Path:
    """A file that can be written, with the suffix of a picture."""
    if path.suffix.lower() not in PICTURES:
        raise PathError(f"{path} ends in {path.suffix!r}; expected one of {', '.join(PICTURES)}")
    return require_writable(path)
