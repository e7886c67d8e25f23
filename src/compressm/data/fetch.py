"""Where files lie, and how those that can be fetched are: by pooch, checked, and on from where a connection broke."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from compressm.data.errors import DataError

ROOT_VARIABLE = "COMPRESSM_DATA"
ATTEMPTS = 3
_BLOCK = 1 << 18

# What is being worked on, how much of it is done, how much there is where that is known.
Progress = Callable[[str, int, int | None], None]


def silent(what: str, done: int, total: int | None) -> None:
    """No progress shown."""


def default_root() -> Path:
    """$COMPRESSM_DATA, or the platform's folder for what can be fetched again."""
    if given := os.environ.get(ROOT_VARIABLE):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "compressm"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "compressm"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compressm"


@final
@dataclass(frozen=True)
class Remote:
    """An official file: its address and the checksum its authors or torchvision publish, as `md5:…` or `sha256:…`."""

    url: str
    checksum: str


@final
@dataclass(frozen=True)
class Wanted:
    """A file or folder: the places below the root where it may lie, and where to get it.

    What is fetched goes to `place`, the last of them.
    """

    places: tuple[str, ...]
    remote: Remote | None = None
    advice: str = ""

    @property
    def place(self) -> str:
        return self.places[-1]


@final
@dataclass(frozen=True)
class Store:
    """The folder that holds data sets as they were published, and `cache/`, what was read from them."""

    root: Path = field(default_factory=default_root)
    offline: bool = False
    progress: Progress = field(default=silent, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root).expanduser())

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def find(self, wanted: Wanted) -> Path | None:
        """The first place where it lies."""
        paths = (self.root / place for place in wanted.places)
        return next((path for path in paths if path.exists()), None)

    def get(self, wanted: Wanted) -> Path:
        """Where it lies, fetched if need be."""
        if (path := self.find(wanted)) is not None:
            return path
        if wanted.remote is None:
            raise DataError(f"{self._missing(wanted)}; {wanted.advice}")
        if self.offline:
            raise DataError(f"{self._missing(wanted)}, and nothing is fetched offline; {self._by_hand(wanted)}")
        return self._fetched(wanted, wanted.remote)

    def _fetched(self, wanted: Wanted, remote: Remote) -> Path:
        try:
            import pooch
            import requests
        except ModuleNotFoundError as error:
            raise DataError(
                f"{self._missing(wanted)}, and fetching needs the package {error.name}: pip install 'compressm[cli]'"
            ) from None
        target = self.root / wanted.place
        pooch.get_logger().setLevel("WARNING")
        try:
            pooch.retrieve(
                remote.url, remote.checksum, target.name, target.parent, downloader=_Resuming(target, self.progress)
            )
        except (requests.RequestException, OSError) as error:
            raise DataError(
                f"{self._missing(wanted)}, and {remote.url} did not give it: {error}; {self._by_hand(wanted)}"
            ) from None
        except ValueError as error:  # pooch's answer to another checksum
            raise DataError(f"{target.name} from {remote.url} is not the official file: {error}") from None
        return target

    def _missing(self, wanted: Wanted) -> str:
        return f"{wanted.place} is not in {self.root} (nor as {', '.join(wanted.places[:-1]) or 'anything else'})"

    def _by_hand(self, wanted: Wanted) -> str:
        url = wanted.remote.url if wanted.remote else ""
        return f"put {url} at {self.root / wanted.place}, or set {ROOT_VARIABLE} to a folder that has it"


@final
class _Resuming:
    """A downloader for pooch that keeps what came before a connection broke, in a file `….part`."""

    def __init__(self, target: Path, progress: Progress) -> None:
        self.part = target.with_name(target.name + ".part")
        self.name, self.progress = target.name, progress

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        import requests

        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._go_on(url)
                break
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError, requests.Timeout):
                if attempt == ATTEMPTS:
                    raise
        os.replace(self.part, output_file)

    def _go_on(self, url: str) -> None:
        import requests

        have = self.part.stat().st_size if self.part.exists() else 0
        # Not compressed on the way: a range counts bytes of the file itself.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with requests.get(url, headers=headers, stream=True, timeout=30) as answer:
            if answer.status_code == requests.codes.requested_range_not_satisfiable:
                self.part.unlink()  # longer than the file: of another one
                raise requests.ConnectionError(f"{self.part} was longer than {url}; begun again")
            answer.raise_for_status()
            if answer.status_code != requests.codes.partial_content:
                have = 0
            self._receive(answer, have)

    def _receive(self, answer, have: int) -> None:
        import requests

        length = answer.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        with self.part.open("ab" if have else "wb") as file:
            for block in answer.iter_content(_BLOCK):
                file.write(block)
                have += len(block)
                self.progress(self.name, have, total)
        if total is not None and have != total:
            raise requests.ConnectionError(f"{self.name} ended after {have} of {total} bytes")
