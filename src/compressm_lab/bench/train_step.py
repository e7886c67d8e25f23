"""Time a training step at the sizes of the paper's models, beside the least time it could take."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from compressm import layers
from compressm.models import OneMask, SequenceClassifier
from compressm.ops import Path
from compressm_lab.bench.timing import (
    Captured,
    Ceilings,
    Progress,
    capture,
    columns,
    measure_ceilings,
    median_seconds,
    silent,
    threads_for,
)
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.training.building import DTYPES, largest_first, products_in


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """A classifier of LRUs or of other linear layers, its batch, and how a step of it runs."""

    task: str
    depth: int
    width: int
    order: int
    batch: int
    length: int
    classes: int
    inputs: int | None = None
    vocabulary: int | None = None
    towers: int = 1
    dropout: float = 0.1
    precision: str = "float32"
    path: Path | None = None
    compiled: bool = False
    layer: str = "LRU"

    @property
    def sequences(self) -> int:
        """Sequences in a batch: two for every pair where there are two towers."""
        return self.batch * self.towers

    @property
    def tokens(self) -> int:
        """Steps of all sequences in a batch."""
        return self.sequences * self.length

    @property
    def activation_bytes(self) -> int:
        return DTYPES[self.precision].itemsize


# Depth, width, order, batch and dropout: tab:hyperparameters. The rest: the tasks.
PAPER = {
    case.task: case
    for case in (
        StepCase(task="smnist", depth=1, width=8, order=256, batch=50, length=784, inputs=1, classes=10),
        StepCase(task="scifar", depth=6, width=512, order=384, batch=50, length=1024, inputs=3, classes=10),
        StepCase(
            task="listops", depth=6, width=128, order=256, batch=32, length=2048, vocabulary=18, classes=10, dropout=0.0
        ),
        StepCase(task="imdb", depth=1, width=256, order=192, batch=32, length=4096, vocabulary=257, classes=2),
        StepCase(task="aan", depth=6, width=128, order=256, batch=64, length=4000, vocabulary=257, classes=2, towers=2),
        StepCase(
            task="pathfinder", depth=6, width=192, order=256, batch=64, length=1024, inputs=1, classes=2, dropout=0.0
        ),
    )
}


def paper_case(task: str, order: int | None = None, *, precision: str = "float32", compiled: bool = False) -> StepCase:
    """A row of the paper's table of hyper-parameters, at its own order or another."""
    return replace(PAPER[task], order=order or PAPER[task].order, precision=precision, compiled=compiled)


def paper_orders(task: str) -> tuple[int, ...]:
    """The orders that tables compare: sMNIST at those the paper cuts it to, the others whole and at a quarter."""
    whole = PAPER[task].order
    return (256, 28, 13) if task == "smnist" else (whole, whole // 4)


def default_cases(device: str, *, compiled: bool = False) -> tuple[StepCase, ...]:
    """The sMNIST model on a CPU; on a GPU every model of the paper, the larger ones in bfloat16."""
    if device == "cpu":
        sizes = [("smnist", n, "float32") for n in paper_orders("smnist")]
    else:
        sizes = [("smnist", n, precision) for precision in ("float32", "tf32") for n in (256, 13)]
        sizes += [("scifar", n, "bfloat16") for n in (384, 57)]
        others = ("listops", "aan", "imdb", "pathfinder")
        sizes += [(task, n, "bfloat16") for task in others for n in paper_orders(task)]
    return tuple(paper_case(task, n, precision=precision, compiled=compiled) for task, n, precision in sizes)


_BLOCK_PASSES, _PARAMETER_PASSES = 15, 10


@dataclass(frozen=True)
class Work:
    """The flops of one training step, and the bytes it moves."""

    flops: int
    bytes: int

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def seconds(self, ceilings: Ceilings) -> float:
        """The least time on a device that multiplies while it moves."""
        return max(self.flops / ceilings.flops, self.bytes / ceilings.bytes)


@dataclass(frozen=True)
class Floor:
    """The cheapest form of the states, its work and its time."""

    form: str
    work: Work
    seconds: float


def floor(case: StepCase, parameters: int, ceilings: Ceilings) -> Floor:
    """The least time of a step of `case`, whose model has so many parameters."""
    around = around_work(case, parameters)
    forms = {name: around + states for name, states in states_work(case).items()}
    best = min(forms, key=lambda name: forms[name].seconds(ceilings))
    return Floor(best, forms[best], forms[best].seconds(ceilings))


def states_work(case: StepCase) -> dict[str, Work]:
    """The work of all SSM layers in each form, without the passes over their inputs and outputs."""
    tokens, width, n, element = case.tokens, case.width, case.order, case.activation_bytes
    drive = 4 * tokens * width * n
    transforms = round(5 * case.length * math.log2(2 * case.length)) * (2 * case.sequences * width + width**2)
    response = case.length * width**2
    filtering = 4 * response * n + 8 * tokens * width**2 + transforms
    one_layer = {
        "kept": Work(6 * drive, 4 * n * tokens * element),
        "recomputed": Work(7 * drive, 0),
        "convolution": Work(3 * filtering, 4 * 4 * response),
    }
    return {name: Work(case.depth * work.flops, case.depth * work.bytes) for name, work in one_layer.items()}


def around_work(case: StepCase, parameters: int) -> Work:
    """The work of everything but the states."""
    tokens, width, element = case.tokens, case.width, case.activation_bytes
    gates = 3 * case.depth * 4 * tokens * width**2
    encoder = 2 * 2 * tokens * (case.inputs or 0) * width
    compared = 4 * width * width if case.towers == 2 else 0
    head = 3 * 2 * case.batch * (compared + width * case.classes)
    passes = _BLOCK_PASSES * case.depth + 1  # encoder 2 and pooling 1 more, the last block 2 fewer
    read = 2 * tokens * (8 if case.inputs is None else 4 * case.inputs)
    moved = passes * tokens * width * element + read + _PARAMETER_PASSES * 4 * parameters
    return Work(gates + encoder + head, moved)


def measure_steps(
    cases: Iterable[StepCase] | None = None, *, device: str = "cpu", repeats: int = 9, progress: Progress = silent
) -> Measurement:
    """Time one step of each case; on the CPU with one thread."""
    where = torch.device(device)
    rows: list[Row] = []
    with threads_for(where):
        ceilings = ceilings_here(where, progress)
        for case in cases if cases is not None else default_cases(where.type):
            progress(f"{case.task}, n = {case.order}, {case.precision}")
            row = columns(case, "task", "order", "precision")
            row |= {"path": case.path.name if case.path else "chosen", "compiled": case.compiled, "device": where.type}
            rows.append(row | measure_step(case, where, repeats, ceilings(case.precision)))
        return Measurement("step", "One training step: forward, backward, AdamW", repeats, rows)


def ceilings_here(device: torch.device, progress: Progress) -> Callable[[str], Ceilings]:
    """A function from a precision to the ceilings of `device`, each measured when it is first asked for."""

    @cache
    def of(precision: str) -> Ceilings:
        progress(f"ceilings of this device in {precision}")
        return measure_ceilings(device, precision)

    return of


def measure_step(
    case: StepCase, device: torch.device, repeats: int, ceilings: Ceilings, *, within: float = math.inf
) -> Row:
    """Time a step and compute its floor; on a GPU, also count its kernels and find its peak of memory."""
    gc.collect()  # what the case before left behind would count as memory of this one
    torch.manual_seed(0)
    model = build_model(case).to(device)
    x, target = build_batch(case, device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with products_in(case.precision):
        step = (captured_step if device.type == "cuda" else eager_step)(model, x, target, case)
        seconds = median_seconds(step, repeats=repeats, device=device, within=within)
    least = floor(case, parameters, ceilings)
    row: Row = {
        "parameters": parameters,
        "step_s": seconds,
        "floor_s": least.seconds,
        "flops": least.work.flops,
        "bytes": least.work.bytes,
        "states": least.form,
        "ceiling_flops": ceilings.flops,
        "ceiling_bytes": ceilings.bytes,
    }
    if isinstance(step, Captured):
        row |= {"peak_bytes": step.peak_bytes, "kernels": step.kernels, "launch_s": ceilings.launch}
    return row


def build_model(case: StepCase, **layer_options: Any) -> SequenceClassifier:
    """The model of a case; where it is compiled, block by block."""
    names = ("depth", "width", "order", "classes", "inputs", "vocabulary", "towers")
    sizes: dict[str, Any] = {name: getattr(case, name) for name in names}
    options = layer_options if case.path is None else {"path": case.path, **layer_options}
    kind = getattr(layers, case.layer)
    model = SequenceClassifier(kind, dropout=OneMask(case.dropout), layer_options=options, **sizes)
    if case.compiled:
        for block in model.blocks:
            block.compile()
    return model


def build_batch(case: StepCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random inputs and targets of a case."""
    shape = (case.batch, case.length) if case.towers == 1 else (case.batch, case.towers, case.length)
    if case.vocabulary is None:
        x = torch.randn(*shape, case.inputs or 1, device=device)
    else:
        x = torch.randint(case.vocabulary, shape, device=device)
    return x, torch.randint(case.classes, (case.batch,), device=device)


def make_optimizer(model: SequenceClassifier, device: torch.device) -> torch.optim.Optimizer:
    """AdamW in few kernels, ready for a CUDA graph where there is one."""
    return torch.optim.AdamW(largest_first(model.parameters()), lr=1e-4, fused=True, capturable=device.type == "cuda")


def eager_step(
    model: SequenceClassifier, x: Tensor, target: Tensor, case: StepCase, optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], None]:
    """A step as a plain training loop does it."""
    optimizer = optimizer or make_optimizer(model, x.device)
    half = case.precision == "bfloat16"

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            loss = cross_entropy(model(x).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def captured_step(model: SequenceClassifier, x: Tensor, target: Tensor, case: StepCase) -> Captured:
    """The same step as one CUDA graph."""
    return capture(eager_step(model, x, target, case))


RANGES = {
    "order": tuple(2**k for k in range(3, 11)),
    "length": tuple(4**k for k in range(4, 9)),
    "width": tuple(2**k for k in range(3, 11)),
}
MIDDLE = StepCase(task="growth", depth=2, width=64, order=64, batch=16, length=1024, inputs=1, classes=10)
# The batch stays the same along every axis. 16 sequences of 65536 steps need some 10 GB, and a GPU is still busy at the
# small end; one thread of a CPU would take minutes at the large one, so it gets 2.
BATCH = {"cpu": 2, "cuda": 16}
_LONGEST_S = 10.0  # for one point, after one repeat


def measure_growth(
    axes: Iterable[str] | None = None,
    *,
    device: str = "cpu",
    precisions: Iterable[str] | None = None,
    repeats: int = 9,
    compiled: bool = False,
    progress: Progress = silent,
) -> Measurement:
    """Time a step at every point of every axis; on the CPU with one thread, in float32, on a GPU in bfloat16 too."""
    where = torch.device(device)
    chosen = tuple(precisions or (("float32",) if where.type == "cpu" else ("float32", "bfloat16")))
    rows: list[Row] = []
    measured: dict[StepCase, Row] = {}
    with threads_for(where):
        ceilings = ceilings_here(where, progress)
        for axis, case in growth_cases(axes or RANGES, where.type, chosen, compiled):
            if case not in measured:  # the middle point is on every axis
                progress(f"{axis}: n = {case.order}, L = {case.length}, H = {case.width}, {case.precision}")
                measured[case] = measure_step(case, where, repeats, ceilings(case.precision), within=_LONGEST_S)
            sizes = columns(case, "order", "length", "width", "depth", "batch", "precision", "compiled")
            rows.append({"axis": axis, **sizes, "device": where.type, **measured[case]})
        return Measurement("growth", "One training step against n, L and H", repeats, rows)


def growth_cases(
    axes: Iterable[str], device: str, precisions: Iterable[str], compiled: bool = False
) -> list[tuple[str, StepCase]]:
    """Every point of every axis in every precision."""
    middle = replace(MIDDLE, batch=BATCH[device], compiled=compiled)
    return [
        (axis, replace(middle, precision=precision, **{axis: size}))
        for precision in precisions
        for axis in axes
        for size in RANGES[axis]
    ]
