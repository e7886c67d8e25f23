"""What the host does in a training step of a plain loop: times of its parts, operations, launches, autograd nodes.

On a GPU the models are those of `compressm bench loop`, and the times are those in which Python hands out work: nothing
waits for the device between the parts. Without one, small models of the same kinds run on the CPU by the code of the
GPU, with kernels replaced by nothing: results are nonsense, and what remains is the host's work.

    python benchmarks/host_time.py [smnist-256 smnist-13 scifar-384 scifar-57 mamba-128 mamba-16]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter_ns, thread_time_ns
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from compressm.layers import LRU, Mamba
from compressm.models import LanguageModel, OneMask, RMSNorm, SequenceClassifier
from compressm.ops import dispatch, launching_triton, memory

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
NAMES = ("smnist-256", "smnist-13", "scifar-384", "scifar-57", "mamba-128", "mamba-16")
PARTS = ("forward", "loss", "backward", "optimizer", "zero_grad")
# Batch, length, width, order on a GPU; without one, sizes that take the same path: as many segments of time, as many
# blocks of states, and products that take no time.
SIZES = {
    "smnist-256": ((50, 784, 8, 256), (1, 160, 8, 72)),
    "smnist-13": ((50, 784, 8, 13), (2, 160, 8, 13)),
    "scifar-384": ((50, 1024, 512, 384), (1, 72, 40, 72)),
    "scifar-57": ((50, 1024, 512, 57), (1, 72, 40, 7)),
    "mamba-128": ((16, 1024, 256, 128), (2, 32, 16, 40)),
    "mamba-16": ((16, 1024, 256, 16), (2, 32, 16, 16)),
}


class Step:
    """A training step as people write it, in parts."""

    def __init__(self, name: str) -> None:
        batch, length, width, order = SIZES[name][0 if GPU else 1]
        task = name.partition("-")[0]
        self.half = task != "smnist"
        torch.manual_seed(0)
        if task == "mamba":
            rank = {} if GPU else {"dt_rank": 16}
            sizes: dict[str, Any] = {"depth": 4, "width": width, "order": order, "layer_options": rank}
            model: nn.Module = LanguageModel(Mamba, vocabulary=256, norm=RMSNorm(), **sizes)
            tokens = torch.randint(256, (batch, length + 1), device=DEVICE)
            self.x, self.target = tokens[:, :-1], tokens[:, 1:]
        else:
            inputs, depth = (1, 1) if task == "smnist" else (3, 6)
            sizes = {"depth": depth, "width": width, "order": order, "inputs": inputs, "classes": 10}
            model = SequenceClassifier(LRU, dropout=OneMask(0.1), **sizes)
            self.x = torch.randn(batch, length, inputs, device=DEVICE)
            self.target = torch.randint(10, (batch,), device=DEVICE)
        self.model = model.to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4 if GPU else 0.0, fused=True)

    def forward(self) -> Tensor:
        """The outputs, under autocast."""
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.half):
            out = self.model(self.x)
        return out[0] if isinstance(out, tuple) else out

    def loss(self, out: Tensor) -> Tensor:
        """The loss of a user's own loop."""
        return cross_entropy(out.float().flatten(0, -2), self.target.flatten())

    def parts(self, now: Callable[[], int]) -> list[int]:
        """Make a step; return the nanoseconds of its parts."""
        marks = [now()]
        out = self.forward()
        marks.append(now())
        loss = self.loss(out)
        marks.append(now())
        loss.backward()
        marks.append(now())
        self.optimizer.step()
        marks.append(now())
        self.optimizer.zero_grad(set_to_none=True)
        marks.append(now())
        return [after - before for before, after in pairwise(marks)]


def host_row(name: str, steps: int) -> dict[str, Any]:
    """The counts and the times, in microseconds, of one model."""
    step, clock = Step(name), perf_counter_ns if GPU else thread_time_ns
    for _ in range(5):
        step.parts(clock)
    gc.collect()
    gc.freeze()
    times = []
    for _ in range(steps):
        if GPU:  # never a full queue, which would make the host wait
            torch.cuda.synchronize()
        times.append(step.parts(clock))
    row: dict[str, Any] = {"model": name, **counts(step)}
    # On a shared machine the tenth part is closest to a quiet one.
    low = [sorted(part)[len(part) // 10] / 1e3 for part in zip(*times, strict=True)]
    return row | dict(zip(PARTS, map(round, low), strict=True)) | {"all": round(sum(low))}


def counts(step: Step) -> dict[str, int]:
    """Kernels of ours, operations of torch and among them allocations, autograd nodes and Python calls of a step."""
    with counted_launches() as launches:
        loss = step.loss(step.forward())
        nodes = count_nodes(loss.grad_fn)
        loss.backward()
        step.optimizer.step()
        step.optimizer.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step.parts(perf_counter_ns)
    operations: Counter[str] = Counter(event.name for event in seen.events() if event.name.startswith("aten::"))
    calls = Counter[str]()
    sys.setprofile(lambda frame, event, of: calls.update((event,)))
    try:
        step.parts(perf_counter_ns)
    finally:
        sys.setprofile(None)
    return {
        "launches": launches["kernels"],
        "aten": sum(operations.values()),
        "allocations": operations["aten::empty"] + operations["aten::empty_strided"],
        "nodes": nodes,
        "calls": calls["call"],  # those of the backward pass run in another thread on a GPU
    }


def count_nodes(root: Any) -> int:
    """The nodes of a graph of autograd."""
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return len(seen)


@contextmanager
def counted_launches() -> Iterator[Counter[str]]:
    """Count the launches of our kernels."""
    found: Counter[str] = Counter()
    kinds = (launching_triton.Planned, "__call__"), (launching_triton.Launched, "_launch")
    before = [getattr(kind, name) for kind, name in kinds]

    def counting(launch: Callable[..., None]) -> Callable[..., None]:
        def launched(*given: Any, **options: Any) -> None:
            found["kernels"] += 1
            launch(*given, **options)

        return launched

    for (kind, name), launch in zip(kinds, before, strict=True):
        setattr(kind, name, counting(launch))
    try:
        yield found
    finally:
        for (kind, name), launch in zip(kinds, before, strict=True):
            setattr(kind, name, launch)


class _Nothing:
    """A compiled kernel that does nothing."""

    function, packed_metadata = 0, ()
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    @property
    def run(self) -> _Nothing:
        return self

    def launch(self, *given: Any) -> None:
        """Take the arguments of a launch."""

    __call__ = launch


def replace_kernels_() -> None:
    """Let this process take CPU tensors for those of a GPU, under an autocast of the GPU, and compile nothing."""
    dispatch._DEVICES = ("cpu",)
    # Functions of C that take as many arguments.
    torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream = int, abs  # type: ignore[assignment]
    nothing = _Nothing()
    triton.JITFunction.__getitem__ = lambda kernel, grid: lambda *given, **options: nothing
    product = memory.product_in
    for module in list(sys.modules.values()):
        if getattr(module, "product_in", None) is product:
            vars(module)["product_in"] = lambda dtype, a, b: torch.mm(a, b).to(dtype)
    is_on, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    torch.is_autocast_enabled = lambda kind="cpu": is_on("cpu")  # type: ignore[assignment]
    torch.get_autocast_dtype = lambda kind: dtype_of("cpu")  # type: ignore[assignment]


def single_costs() -> dict[str, float]:
    """Microseconds that the host takes for one small operation of each kind."""
    x, y = torch.zeros(64, 64, device=DEVICE), torch.zeros(64, 64, device=DEVICE, requires_grad=True)
    partial = torch.zeros(64, 64, device=DEVICE)
    from compressm.ops.sums_triton import _plan

    out, plan = torch.empty(64, device=DEVICE), _plan(64, 64, partial.device)
    works: dict[str, Callable[[], object]] = {
        "launch of a planned kernel": lambda: plan(partial, out),
        "empty": lambda: torch.empty(64, 64, device=DEVICE),
        "view": lambda: x.view(32, 128),
        "add": lambda: x.add_(1),
        "product": lambda: x @ x,
        "backward of one node": lambda: y.sum().backward(),
    }
    found = {}
    for name, work in works.items():
        times = []
        for _ in range(20):
            if GPU:
                torch.cuda.synchronize()
            begin = perf_counter_ns()
            for _ in range(50):
                work()
            times.append((perf_counter_ns() - begin) / 50e3)
        found[name] = round(min(times), 2)
    with torch.autograd.set_multithreading_enabled(False):
        begin = perf_counter_ns()
        for _ in range(50):
            works["backward of one node"]()
        found["the same in the calling thread"] = round((perf_counter_ns() - begin) / 50e3, 2)
    return found


def main() -> None:
    """Print a line of JSON for each model, and one for single operations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=NAMES, help=", ".join(NAMES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--calling-thread", action="store_true", help="run the backward pass in the calling thread")
    given = parser.parse_args()
    if not GPU:
        torch.set_num_threads(1)
        import compressm.ops.block.lru_block_triton
        import compressm.ops.selective.mixer_triton  # noqa: F401

        replace_kernels_()
    with torch.autograd.set_multithreading_enabled(not given.calling_thread):
        for name in given.models:
            print(json.dumps(host_row(name, given.steps)), flush=True)
    print(json.dumps(single_costs()))


if __name__ == "__main__":
    main()
