"""SIGINT and SIGTERM are heard between two steps; a second one ends the process at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stop:
    """Called, it says whether a signal has come; `signal` is its name."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __call__(self) -> bool:
        return self.signal is not None


@contextmanager
def heard() -> Iterator[Stop]:
    """Within it the first signal is remembered; afterwards, and outside the main thread, all is as before."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: dict[signal.Signals, Any] = {}

    def remember(number: int, frame: FrameType | None) -> None:
        stop.signal = signal.Signals(number).name
        for which, handler in before.items():
            signal.signal(which, handler)

    for which in (signal.SIGINT, signal.SIGTERM):
        before[which] = signal.signal(which, remember)
    try:
        yield stop
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
