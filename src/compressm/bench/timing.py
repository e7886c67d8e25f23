"""Medians of repeats, one thread, nothing else in the process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

# Waiting for a GPU costs some 20 µs, more than a small kernel: a sample is as many calls in a row as fill this.
_SAMPLE_S = 5e-3


def median_seconds(
    work: Callable[[], object], *, repeats: int, device: torch.device | None = None, within: float = math.inf
) -> float:
    """The median wall-clock time of a call of `work` after one to warm up, of `repeats` or what fits in `within` s.

    On a GPU calls follow each other without waiting, as steps of a training do, until a sample is 5 ms long.
    """
    return statistics.median(_samples(work, repeats, device, within))


def best_seconds(work: Callable[[], object], *, repeats: int, device: torch.device | None = None) -> float:
    """The shortest instead: what a device can do, whatever else it is doing."""
    return min(_samples(work, repeats, device, math.inf))


def _samples(work: Callable[[], object], repeats: int, device: torch.device | None, within: float) -> list[float]:
    gpu = device is not None and device.type == "cuda"
    begin = time.perf_counter()
    _sample(work, 1, gpu)
    calls = min(100, math.ceil(_SAMPLE_S / _sample(work, 1, gpu))) if gpu else 1
    times = [_sample(work, calls, gpu)]
    while len(times) < repeats and time.perf_counter() - begin < within:
        times.append(_sample(work, calls, gpu))
    return times


def _sample(work: Callable[[], object], calls: int, gpu: bool) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    if gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def threads_for(device: torch.device) -> AbstractContextManager[None]:
    """One where the CPU is measured; where it only feeds a GPU, as many as there are."""
    return threads(1 if device.type == "cpu" else torch.get_num_threads())


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
