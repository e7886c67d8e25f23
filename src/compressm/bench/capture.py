"""Work as one CUDA graph: how steps and scans are timed on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Captured:
    """A recording to call again; `kernels` is how many launches it holds, `peak_bytes` its peak of memory."""

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
