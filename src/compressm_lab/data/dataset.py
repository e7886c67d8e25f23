"""Data sets with options, and the cache of parsed ones: one safetensors file each, made again when broken."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from compressm_lab.data.files import Progress, Store, Wanted
from compressm_lab.data.task import Split, Splits, Task, TaskKind


@final
@dataclass(frozen=True)
class Cache:
    """The parsed splits in `folder`/`name`-(hash of the options).safetensors."""

    folder: Path
    name: str
    options: Mapping[str, Any]

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(self.options, sort_keys=True, default=str).encode()).hexdigest()
        return self.folder / f"{self.name}-{digest[:16]}.safetensors"

    def read(self) -> Splits | None:
        """The splits; None if nothing is stored, it is broken, or a file it was read from has changed since."""
        if not self.path.is_file():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                notes = json.loads((file.metadata() or {}).get("notes", "{}"))
                if not notes or _changed(notes["sources"]):
                    return None
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, json.JSONDecodeError):
            return None
        if any(_sum(tensor) != notes["sums"].get(key) for key, tensor in tensors.items()):
            return None
        found: dict[str, dict[str, Tensor]] = {which: {} for which in Splits._fields}
        for key, tensor in tensors.items():
            which, field = key.split(".")
            found[which][field] = tensor
        return Splits(**{which: Split(**fields) for which, fields in found.items()})

    def write(self, splits: Splits, sources: Iterable[Path]) -> None:
        """Write the file whole or not at all; a folder that cannot be written costs time only."""
        tensors = {
            f"{which}.{field}": tensor.contiguous()
            for which, split in zip(Splits._fields, splits, strict=True)
            for field, tensor in vars(split).items()
            if tensor is not None
        }
        notes = {
            "sums": {key: _sum(tensor) for key, tensor in tensors.items()},
            "sources": {str(path.absolute()): _stamp(path) for path in sources},
        }
        scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, scratch, {"notes": json.dumps(notes)})
            os.replace(scratch, self.path)
        except (OSError, SafetensorError) as error:
            warnings.warn(f"{self.path} could not be written, {self.name} is parsed every time: {error}", stacklevel=3)
            with contextlib.suppress(OSError):
                scratch.unlink()


def _sum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data)


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _changed(sources: Mapping[str, list[int]]) -> bool:
    """True if a file is another one now; a file that is gone is no reason to parse again."""
    return any(Path(path).exists() and _stamp(Path(path)) != stamp for path, stamp in sources.items())


@final
@dataclass(frozen=True, kw_only=True)
class Form:
    """The sizes of a task, known before a file is read; the fields are those of `Task`."""

    length: int
    classes: int
    kind: TaskKind = TaskKind.CLASSIFY
    channels: int | None = None
    vocabulary: int | None = None
    towers: int = 1
    shift: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = (1.0,)
    time: bool = False


class Source(ABC):
    """The source of a recipe's task: `load` gives it."""

    name: ClassVar[str]

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """The files it is read from that can be fetched or are published; none where it is made here."""
        return ()

    @property
    def form(self) -> Form | None:
        """Sizes of the task; None if only its data tell them."""
        return None

    @abstractmethod
    def load(self, store: Store) -> Task:
        """Read or make the task."""

    def present(self, store: Store) -> bool:
        """True if it can be loaded without a network."""
        return True


@dataclass(frozen=True)
class DataSet(Source):
    """A data set whose options are its fields; `load` gives the task they describe."""

    # Of the parsed form: raised when `parse` gives something else for the same files and options.
    version: ClassVar[int] = 1
    # Options of batches alone: examples are parsed and stored in the same way without them.
    of_batches: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def form(self) -> Form:
        """Sizes of the task."""

    @abstractmethod
    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        """The splits, from the files of `wanted` in their order."""

    @final
    def present(self, store: Store) -> bool:
        """True if it can be loaded without a network."""
        return all(map(store.find, self.wanted)) or self._cache(store).path.is_file()

    @final
    def load(self, store: Store) -> Task:
        """Read the task from the cache, or parse its files, which are fetched first if need be."""
        cache = self._cache(store)
        splits = cache.read()
        if splits is None:
            paths = [store.get(wanted) for wanted in self.wanted]
            splits = self.parse(paths, store.progress)
            cache.write(splits, paths)
        form = {key: value for key, value in vars(self.form).items() if key != "length"}
        return Task(name=self.name, **splits._asdict(), **form)

    def _cache(self, store: Store) -> Cache:
        options = {name: value for name, value in asdict(self).items() if name not in self.of_batches}
        return Cache(store.cache, self.name, {"version": self.version, **options})
