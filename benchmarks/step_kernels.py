"""List the kernels of one training step in their order, and time the step as one CUDA graph; needs a GPU.

python benchmarks/step_kernels.py [smnist-256 smnist-13 ...] [--precision high]
"""

from __future__ import annotations

import argparse
import json

import torch
from host_time import NAMES, Step
from torch.profiler import ProfilerActivity, profile


def recorded(step: Step) -> torch.cuda.CUDAGraph:
    """The step as a graph, after steps that compile what it needs."""
    step.optimizer = torch.optim.AdamW(step.model.parameters(), lr=1e-4, fused=True, capturable=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step.parts(int)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.parts(int)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, repeats: int = 200) -> float:
    """The time of a step, the least mean of five rounds."""
    rounds = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) * 1e3 / repeats)
    return round(min(rounds), 1)


def kernels_of(graph: torch.cuda.CUDAGraph, repeats: int = 10) -> list[tuple[float, str]]:
    """The microseconds and the name of every kernel, in order; a time is the least of its repeats."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            graph.replay()
        torch.cuda.synchronize()
    found = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found.sort(key=lambda event: event.time_range.start)
    count = len(found) // repeats
    times = [[event.time_range.elapsed_us() for event in found[k::count]] for k in range(count)]
    return [(min(each), event.name) for each, event in zip(times, found, strict=False)]


def main() -> None:
    """Print the kernels of each model, and a line of JSON with the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=NAMES[:2], help=", ".join(NAMES))
    parser.add_argument("--precision", default="high", help="of float32 products: highest, high (TF32) or medium")
    given = parser.parse_args()
    torch.set_float32_matmul_precision(given.precision)
    for name in given.models:
        graph = recorded(Step(name))
        row = {"model": name, "step": microseconds(graph)}
        kernels = kernels_of(graph)
        for time, kernel in kernels:
            print(f"{time:8.1f} {kernel[:100]}")
        print(json.dumps(row | {"kernels": len(kernels), "in kernels": round(sum(time for time, _ in kernels), 1)}))


if __name__ == "__main__":
    main()
