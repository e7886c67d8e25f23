"""The stages of a cut, by name, for whoever wants to time them; unwatched they cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeAlias

STAGES = ("calibrate", "read", "spectra", "reduce", "encode", "optimizer", "write")

Watch: TypeAlias = Callable[[str], AbstractContextManager[object]]

_watch: ContextVar[Watch] = ContextVar("watch", default=lambda name: nullcontext())


def stage(name: str) -> AbstractContextManager[object]:
    """Around the work of one of `STAGES`; those do not nest."""
    return _watch.get()(name)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Within it every stage of a cut runs inside `watch(name)`."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)
