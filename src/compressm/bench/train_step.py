"""One whole training step at the sizes of the paper's models, on random data: forward, backward and AdamW.

On a GPU the step is one CUDA graph; on the CPU it runs as it is. Beside each stands its floor (`floors.py`).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from compressm.bench.capture import Captured, capture
from compressm.bench.ceilings import Ceilings, measure_ceilings
from compressm.bench.floors import floor
from compressm.bench.step_cases import StepCase, default_cases
from compressm.bench.timing import median_seconds, threads_for
from compressm.layers import LRU
from compressm.models import OneMask, SequenceClassifier
from compressm.runs.measurement import Measurement, Row
from compressm.training.optimizers import largest_first
from compressm.training.precision import products_in


def measure_steps(
    cases: Iterable[StepCase] | None = None,
    *,
    device: str = "cpu",
    repeats: int = 9,
    progress: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Time one step of each case; on the CPU with one thread."""
    where = torch.device(device)
    rows: list[Row] = []
    with threads_for(where):
        ceilings = ceilings_here(where, progress)
        for case in cases if cases is not None else default_cases(where.type):
            progress(f"{case.task}, n = {case.order}, {case.precision}")
            row: Row = {
                "task": case.task,
                "order": case.order,
                "precision": case.precision,
                "path": case.path.name if case.path else "chosen",
                "compiled": case.compiled,
                "device": where.type,
            }
            rows.append(row | measure_step(case, where, repeats, ceilings(case.precision)))
        return Measurement("step", "One training step: forward, backward, AdamW", repeats, rows)


def ceilings_here(device: torch.device, progress: Callable[[str], None]) -> Callable[[str], Ceilings]:
    """From a precision to the ceilings of `device`, each measured when it is first asked for."""

    @cache
    def of(precision: str) -> Ceilings:
        progress(f"ceilings of this device in {precision}")
        return measure_ceilings(device, precision)

    return of


def measure_step(
    case: StepCase, device: torch.device, repeats: int, ceilings: Ceilings, *, within: float = math.inf
) -> Row:
    """The time of a step, its floor and what both are made of; on a GPU also its peak of memory and its kernels."""
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
    """As the case says; where it is compiled, block by block: the regions around the SSM layers."""
    model = SequenceClassifier(
        LRU,
        depth=case.depth,
        width=case.width,
        order=case.order,
        classes=case.classes,
        inputs=case.inputs,
        vocabulary=case.vocabulary,
        towers=case.towers,
        dropout=OneMask(case.dropout),
        layer_options={"path": case.path, **layer_options},
    )
    if case.compiled:
        for block in model.blocks:
            block.compile()
    return model


def build_batch(case: StepCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random inputs and targets."""
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
    model: SequenceClassifier,
    x: Tensor,
    target: Tensor,
    case: StepCase,
    optimizer: torch.optim.Optimizer | None = None,
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
