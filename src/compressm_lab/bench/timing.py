"""Clocks and ceilings of a device: medians of repeats, one thread, nothing else in the process."""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.training.building import DTYPES, products_in

Progress = Callable[[str], None]
_Case = TypeVar("_Case")
# Waiting for a GPU costs some 20 µs, more than a small kernel: a sample is as many calls in a row as fill this.
_SAMPLE_S = 5e-3


def silent(line: str) -> None:
    """Show no progress."""


def measure_each(
    name: str,
    title: str,
    cases: Iterable[_Case],
    row: Callable[[_Case, torch.device, int], Row],
    device: str,
    repeats: int,
    progress: Progress,
    label: Callable[[_Case], str] = str,
) -> Measurement:
    """Measure the row of every case, whose label is shown first; on the CPU with one thread."""
    where = torch.device(device)
    rows = []
    with threads_for(where):
        for case in cases:
            progress(label(case))
            rows.append(row(case, where, repeats))
        return Measurement(name, title, repeats, rows)


def columns(of: object, *names: str) -> Row:
    """The named attributes as columns of a row."""
    return {name: getattr(of, name) for name in names}


def median_seconds(
    work: Callable[[], object], *, repeats: int, device: torch.device | None = None, within: float = math.inf
) -> float:
    """The median wall-clock time of a call of `work` after one to warm up, of `repeats` or what fits in `within` s.

    On a GPU calls follow each other without waiting, as steps of a training do, until a sample is 5 ms long.
    """
    return statistics.median(_samples(work, repeats, device, within))


def best_seconds(work: Callable[[], object], *, repeats: int, device: torch.device | None = None) -> float:
    """The shortest time instead: what a device can do, whatever else it is doing."""
    return min(_samples(work, repeats, device, math.inf))


def _samples(work: Callable[[], object], repeats: int, device: torch.device | None, within: float) -> list[float]:
    begin = time.perf_counter()
    seconds(work, device)
    gpu = device is not None and device.type == "cuda"
    calls = min(100, math.ceil(_SAMPLE_S / seconds(work, device))) if gpu else 1
    times = [seconds(work, device, calls)]
    while len(times) < repeats and time.perf_counter() - begin < within:
        times.append(seconds(work, device, calls))
    return times


def seconds(work: Callable[[], object], device: torch.device | None, calls: int = 1) -> float:
    """The mean time of `calls` calls in a row; on a GPU, earlier work and their own is waited for."""
    wait = torch.cuda.synchronize if device is not None and device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    wait()
    return (time.perf_counter() - start) / calls


def threads_for(device: torch.device) -> AbstractContextManager[None]:
    """One thread where the CPU is measured; where it only feeds a GPU, as many as there are."""
    return threads(1 if device.type == "cpu" else torch.get_num_threads())


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Exactly `count` threads in torch, NumPy and SciPy: two can be slower than one on a shared machine."""
    blas: AbstractContextManager[object] = nullcontext()
    with suppress(ImportError):
        from threadpoolctl import threadpool_limits  # comes with scikit-learn, in the extra `cli`

        blas = threadpool_limits(count, user_api="blas")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with blas:
            yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Captured:
    """A recorded CUDA graph to call again: `kernels` counts its launches, `peak_bytes` is its peak of memory."""

    replay: Callable[[], None]
    kernels: int
    peak_bytes: int

    def __call__(self) -> None:
        self.replay()


def capture(work: Callable[[], object], *, warm_up: int = 3) -> Captured:
    """Record one call of `work`, after some calls on a stream of their own that compile and allocate what they need."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    # A replay allocates nothing: the peak shows while recording only.
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        work()
    peak = torch.cuda.max_memory_allocated()
    kernels = node_count(graph)
    graph.instantiate()
    return Captured(graph.replay, kernels, peak)


def node_count(graph: torch.cuda.CUDAGraph) -> int:
    """Kernels, copies and fills in a graph that was captured with `keep_graph`; torch itself does not say."""
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(handle, None, ctypes.byref(count))
    if status:
        raise RuntimeError(f"cuGraphGetNodes returned error {status}")
    return count.value


# Large enough that neither grows when doubled; on a CPU still some 20 ms each on one thread.
_PRODUCT = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
_LAUNCHES = 500


@dataclass(frozen=True)
class Ceilings:
    """Flops and bytes a second, and seconds a launch inside a CUDA graph (0 on a CPU, which launches nothing)."""

    flops: float
    bytes: float
    launch: float


def measure_ceilings(device: torch.device, precision: str, *, repeats: int = 9) -> Ceilings:
    """Time a large square product in `precision`, a large copy, and a row of tiny kernels; the best of `repeats`.

    A CPU uses the threads that torch has now. What fits in a cache can move faster than the copy.
    """
    size = _PRODUCT[device.type]
    matrix = torch.randn(size, size, device=device, dtype=DTYPES[precision])
    with products_in(precision):
        flops = 2 * size**3 / best_seconds(lambda: matrix @ matrix, repeats=repeats, device=device)
    return Ceilings(flops, copy_rate(device, repeats), _launch_seconds(device))


def copy_rate(device: torch.device, repeats: int) -> float:
    """Bytes a second of a large copy; every byte is read and written."""
    source = torch.zeros(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source), repeats=repeats, device=device)


def _launch_seconds(device: torch.device) -> float:
    if device.type == "cpu":
        return 0.0
    counter = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            counter.add_(1)

    return best_seconds(capture(launches), repeats=5, device=device) / _LAUNCHES
