"""What all data sets have in common: a form, files or none, and a parsed copy that loads fast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, final

from compressm.data.cache import Cache
from compressm.data.fetch import Progress, Store, Wanted
from compressm.data.splitting import Splits
from compressm.data.task import Task, TaskKind


@final
@dataclass(frozen=True, kw_only=True)
class Form:
    """What is known of a task before a file is read; the fields are those of `Task`."""

    length: int
    classes: int
    kind: TaskKind = TaskKind.CLASSIFY
    channels: int | None = None
    vocabulary: int | None = None
    towers: int = 1
    shift: tuple[float, ...] = (0.0,)
    scale: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class DataSet(ABC):
    """Options are fields; `load` gives the task they describe."""

    name: ClassVar[str]
    # Of the parsed form: raised when `parse` gives something else for the same files and options.
    version: ClassVar[int] = 1

    @property
    @abstractmethod
    def form(self) -> Form:
        """Sizes of the task."""

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """The files it is read from; none where it is generated."""
        return ()

    @abstractmethod
    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        """The splits, from the files of `wanted` in their order."""

    @final
    def present(self, store: Store) -> bool:
        """It can be loaded without a network."""
        found = [store.find(wanted) for wanted in self.wanted]
        return None not in found or self._cache(store).holds()

    @final
    def load(self, store: Store) -> Task:
        """Read from the cache, from files, or fetched first."""
        cache = self._cache(store)
        splits = cache.read()
        if splits is None:
            paths = [store.get(wanted) for wanted in self.wanted]
            splits = self.parse(paths, store.progress)
            cache.write(splits, paths)
        form = {key: value for key, value in vars(self.form).items() if key != "length"}
        return Task(name=self.name, **splits._asdict(), **form)

    def _cache(self, store: Store) -> Cache:
        return Cache(store.cache, self.name, {"version": self.version, **asdict(self)})
