"""Find and fetch the files of data sets, and read archives and tables."""

from __future__ import annotations

import csv
import gzip
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import final

from compressm_lab.data.task import DataError, Split, Splits

ROOT_VARIABLE = "COMPRESSM_DATA"
ATTEMPTS = 3
_BLOCK = 1 << 18

# What is being worked on, how much of it is done, how much there is where that is known.
Progress = Callable[[str, int, int | None], None]


def silent(what: str, done: int, total: int | None) -> None:
    """Show no progress."""


def default_root() -> Path:
    """The folder $COMPRESSM_DATA, or the platform's folder for what can be fetched again."""
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
    """The folder that holds data sets as they were published, and in `cache/` what was parsed from them."""

    root: Path = field(default_factory=default_root)
    offline: bool = False
    progress: Progress = field(default=silent, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root).expanduser())

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def find(self, wanted: Wanted) -> Path | None:
        """The first place where the file lies; None if there is none."""
        paths = (self.root / place for place in wanted.places)
        return next((path for path in paths if path.exists()), None)

    def get(self, wanted: Wanted) -> Path:
        """The path of the file, which is fetched if need be."""
        if (path := self.find(wanted)) is not None:
            return path
        if wanted.remote is None:
            raise DataError(f"{self._missing(wanted)}; {wanted.advice}")
        if self.offline:
            raise DataError(f"{self._missing(wanted)}, and nothing is fetched offline; {self._by_hand(wanted)}")
        return self._fetched(wanted, wanted.remote)

    def _fetched(self, wanted: Wanted, remote: Remote) -> Path:
        missing = self._missing(wanted)
        try:
            import pooch
            import requests
        except ModuleNotFoundError as error:
            raise DataError(
                f"{missing}, and fetching needs the package {error.name}: pip install 'compressm[lab]'"
            ) from None
        target = self.root / wanted.place
        pooch.get_logger().setLevel("WARNING")
        download = _Resuming(target, self.progress)
        try:
            pooch.retrieve(remote.url, remote.checksum, target.name, target.parent, downloader=download)
        except (requests.RequestException, OSError) as error:
            raise DataError(f"{missing}, and {remote.url} did not give it: {error}; {self._by_hand(wanted)}") from None
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
            length = answer.headers.get("Content-Length")
            total = None if length is None else have + int(length)
            with self.part.open("ab" if have else "wb") as file:
                for block in answer.iter_content(_BLOCK):
                    file.write(block)
                    have += len(block)
                    self.progress(self.name, have, total)
        if total is not None and have != total:
            raise requests.ConnectionError(f"{self.name} ended after {have} of {total} bytes")


BROKEN = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile)


def members(path: Path, pattern: str) -> Iterator[tuple[str, str, BufferedReader]]:
    """The files of an archive or folder whose names match: name, name in error messages, and bytes.

    An archive is read once, in its own order.
    """
    wanted = re.compile(pattern)
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if wanted.search(name) and file.is_file():
                with file.open("rb") as stream:
                    yield name, str(file), stream
        return
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                if not wanted.search(member.name):
                    continue
                if isinstance(content := archive.extractfile(member), BufferedReader):
                    yield member.name, f"{member.name} in {path}", content
    except BROKEN as error:
        raise half_there(path, error) from None


def contents(stream: BufferedReader, where: str) -> bytes:
    """All bytes of a member of an archive or folder."""
    try:
        return stream.read()
    except BROKEN as error:
        raise half_there(where, error) from None


def half_there(where: Path | str, error: Exception) -> DataError:
    """The error for a file that is damaged or ends too early."""
    return DataError(
        f"{where} is broken or only half there ({type(error).__name__}: {error}); delete it and get it again"
    )


def require_members(path: Path, found: set[str], expected: set[str]) -> None:
    """Refuse an archive or folder that lacks files of the data set."""
    if missing := sorted(expected - found):
        raise DataError(f"{path} has no {', '.join(missing)}; expected {', '.join(sorted(expected))}")


LONGEST_FIELD = 1 << 27  # characters; Python's own limit is 2¹⁷, below some papers of AAN


def rows(stream: BufferedReader, where: str, columns: int) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table: the line that each ends on, and its fields without quotes."""
    reader = csv.reader((line.decode("utf-8", "replace") for line in stream), delimiter="\t", strict=True)
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        for row in reader:
            if len(row) != columns:
                raise DataError(f"{where}, line {reader.line_num}: {len(row)} columns, expected {columns}")
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(f"{where}, line {reader.line_num}: {error}; broken or only half there") from None
    except BROKEN as error:
        raise half_there(where, error) from None
    finally:
        csv.field_size_limit(before)


ARCHIVE = "https://storage.googleapis.com/long-range-arena/lra_release.gz"


def released(*folders: str) -> Wanted:
    """A folder of the Long Range Arena, alone or unpacked with the rest, or its archive, which has no checksum."""
    around = ("", "lra_release/", "lra_release/lra_release/")
    places = tuple(f"{before}{folder}" for folder in folders for before in around)
    advice = (
        f"get {ARCHIVE} and put it, or what is in it, there: it has no published checksum, so it is not fetched; "
        "listops and pathfinder can also be made here, with generated=True"
    )
    return Wanted((*places, "lra_release.tar.gz", "lra_release.gz"), advice=advice)


def read_each(path: Path, files: Mapping[str, str], read: Callable[[BufferedReader, str], Split]) -> Splits:
    """Read one split a file, in whatever order an archive has them; `files` maps file names to splits."""
    found: dict[str, Split] = {}
    for name, where, stream in members(path, rf"(^|/)({'|'.join(map(re.escape, files))})$"):
        file = name.split("/")[-1]
        found[file] = read(stream, where)
        if not len(found[file]):
            raise DataError(f"{where} holds no examples; broken or only half there")
    require_members(path, set(found), set(files))
    return Splits(**{files[file]: split for file, split in found.items()})
