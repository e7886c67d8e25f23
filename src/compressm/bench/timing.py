"""Medians of repeats, one thread, nothing else in the process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def median_seconds(work: Callable[[], object], *, repeats: int, device: torch.device | None = None) -> float:
    """The median wall-clock time of `work` after one call to warm up; waits for the GPU where there is one."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Exactly `count` threads in torch, NumPy and SciPy: two can be slower than one on a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with _blas_threads(count):
            yield
    finally:
        torch.set_num_threads(before)


def _blas_threads(count: int) -> AbstractContextManager[object]:
    try:
        from threadpoolctl import threadpool_limits  # comes with scikit-learn, in the extra `cli`
    except ImportError:
        return nullcontext()
    return threadpool_limits(count, user_api="blas")
