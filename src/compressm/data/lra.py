"""Where the files of the Long Range Arena lie (Tay et al. 2021)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path

from compressm.data.archives import members, place, require_members
from compressm.data.errors import DataError
from compressm.data.fetch import Wanted
from compressm.data.splitting import Splits
from compressm.data.task import Split

ARCHIVE = "https://storage.googleapis.com/long-range-arena/lra_release.gz"


def released(*folders: str) -> Wanted:
    """A folder of the release, alone or unpacked with the rest, or the archive: no checksum of it was published."""
    around = ("", "lra_release/", "lra_release/lra_release/")
    places = tuple(f"{before}{folder}" for folder in folders for before in around)
    advice = (
        f"get {ARCHIVE} and put it, or what is in it, there: it has no published checksum, so it is not fetched; "
        "listops and pathfinder can also be made here, with generated=True"
    )
    return Wanted((*places, "lra_release.tar.gz", "lra_release.gz"), advice=advice)


def read_each(path: Path, files: Mapping[str, str], read: Callable[[BufferedReader, str], Split]) -> Splits:
    """One split a file, in whatever order an archive has them; `files` says which is which."""
    found: dict[str, Split] = {}
    for name, stream in members(path, rf"(^|/)({'|'.join(map(re.escape, files))})$"):
        file, where = name.split("/")[-1], place(path, name)
        found[file] = read(stream, where)
        if not len(found[file]):
            raise DataError(f"{where} holds no examples; broken or only half there")
    require_members(path, set(found), set(files))
    return Splits(**{files[file]: split for file, split in found.items()})
