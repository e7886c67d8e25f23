"""Time a training step where the user is: in a plain loop, compiled, captured; beside the model in plain PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compressm.layers import Mamba
from compressm.models import LanguageModel, RMSNorm
from compressm.running import CapturedStep
from compressm_lab.bench.plain import (
    PlainClassifier,
    PlainLanguageModel,
    take_weights_,
    transformers_mamba,
    transformers_name,
)
from compressm_lab.bench.timing import Progress, capture, columns, median_seconds, seconds, silent, threads_for
from compressm_lab.bench.train_step import StepCase, build_batch, build_model, paper_case
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.training.building import products_in

Step = Callable[[Tensor, Tensor], Tensor]
# Ours, the fastest to measure first: `laboratory` is a graph of one step on one batch, the least that a loop can reach.
# `reduce_overhead` is torch's mode of that name: compiled, and replayed as CUDA graphs.
WAYS = ("eager", "captured", "laboratory", "compiled", "reduce_overhead")
# What a user would write or take instead; `transformers` is a way of the Mamba model alone.
OTHERS = ("plain", "plain_compiled", "plain_reduce_overhead", "transformers")
# CUDA graphs are there on a GPU alone.
_ON_CPU = ("eager", "compiled", "plain", "plain_compiled", "transformers")
MODELS = ("smnist", "scifar", "mamba")
_NOTE = 160


@dataclass(frozen=True, kw_only=True)
class LoopCase:
    """A model with its order, batch and precision, made anew for every way to run it."""

    model: str
    order: int
    batch: int
    length: int
    precision: str
    classifier: StepCase | None = None
    depth: int = 4
    width: int = 256
    vocabulary: int = 256

    def has(self, way: str) -> bool:
        """True if the model can run in this way."""
        return way != "transformers" or self.classifier is None

    def build(self, way: str = "eager") -> nn.Module:
        """Our model, or that of another way with the same weights."""
        sizes: dict[str, Any] = columns(self.classifier or self, "depth", "width", "order")
        if self.classifier is None:
            sizes |= {"vocabulary": self.vocabulary}
            ours: nn.Module = LanguageModel(Mamba, norm=RMSNorm(), **sizes)
        else:
            ours = build_model(self.classifier)
        if way in WAYS:
            return ours
        if way == "transformers":
            theirs = transformers_mamba(**sizes)
            take_weights_(theirs, ours, transformers_name)
            return theirs
        if self.classifier is None:
            plain: nn.Module = PlainLanguageModel(**sizes)
        else:
            sizes |= columns(self.classifier, "classes", "dropout") | {"inputs": self.classifier.inputs or 1}
            plain = PlainClassifier(**sizes)
        take_weights_(plain, ours)
        return plain

    def data(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random inputs and targets."""
        if self.classifier is not None:
            return build_batch(self.classifier, device)
        tokens = torch.randint(self.vocabulary, (self.batch, self.length + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:]


def loop_cases(device: str, models: Iterable[str] | None = None) -> tuple[LoopCase, ...]:
    """The models of a device: sMNIST and a small Mamba language model on a CPU; on a GPU also sCIFAR, and all large."""
    cpu = device == "cpu"
    sizes = [("smnist", n, "float32" if cpu else "tf32") for n in (256, 13)]
    sizes += [] if cpu else [("scifar", n, "bfloat16") for n in (384, 57)]
    cases = [_classifier(paper_case(task, n, precision=precision)) for task, n, precision in sizes]
    language = LoopCase(model="mamba", order=128, batch=16, length=1024, precision="bfloat16")
    if cpu:
        language = replace(language, order=64, batch=4, length=128, precision="float32", depth=2, width=64)
    cases += [language, replace(language, order=16)]
    return tuple(case for case in cases if not models or case.model in models)


def _classifier(case: StepCase) -> LoopCase:
    return LoopCase(
        model=case.task,
        order=case.order,
        batch=case.batch,
        length=case.length,
        precision=case.precision,
        classifier=case,
        depth=case.depth,
        width=case.width,
    )


def measure_loops(
    cases: Iterable[LoopCase] | None = None,
    *,
    device: str = "cpu",
    ways: Iterable[str] | None = None,
    repeats: int = 9,
    progress: Progress = silent,
    keep: Callable[[Measurement], object] = lambda measurement: None,
) -> Measurement:
    """Time a step of each case in every way; on the CPU with one thread.

    Compilers take minutes: ways that need none come first, and `keep` gets what there is after every row.
    """
    where = torch.device(device)
    chosen = list(ways or (WAYS + OTHERS if where.type == "cuda" else _ON_CPU))
    wanted = list(cases if cases is not None else loop_cases(where.type))
    with threads_for(where):
        found = Measurement("loop", "A training step in a user's own loop", repeats, [])
        for way in chosen:
            for case in (case for case in wanted if case.has(way)):
                progress(f"{case.model}, n = {case.order}, {way}")
                found = replace(found, rows=[*found.rows, _row(case, way, where, repeats)])
                keep(found)
    return found


def _row(case: LoopCase, way: str, device: torch.device, repeats: int) -> Row:
    row: Row = columns(case, "model", "order", "precision") | {"way": way}
    row |= columns(case, "batch", "length", "depth", "width") | {"device": device.type}
    gc.collect()
    torch.compiler.reset()
    try:
        # What compilers have kept on the disk would make the first step look short.
        anew = torch.compiler.config.patch(force_disable_caches=True)  # type: ignore[attr-defined]
        with products_in(case.precision), anew:
            return row | _times(case, way, device, repeats)
    # Plain code and compilers may fail in any way, and then the reason is the result; our eager code may not.
    except Exception as error:
        if way in ("eager", "captured", "laboratory"):
            raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return row | {"note": f"{type(error).__name__}: {first}"[:_NOTE]}


def _times(case: LoopCase, way: str, device: torch.device, repeats: int) -> Row:
    """The time of a step, and that of the first one, in which compilers work."""
    torch.manual_seed(0)
    model = case.build(way).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=way == "laboratory")
    step: Step = _step(_called(model, way), optimizer, case.precision == "bfloat16")
    x, target = case.data(device)
    work: Callable[[], object] = partial(CapturedStep(step) if way == "captured" else step, x, target)
    first = seconds(work, device)
    if way == "laboratory":
        work = capture(work)
    for _ in range(4):  # compilers look at a shape twice, and a captured step is recorded after three calls
        work()
    return {"step_s": median_seconds(work, repeats=repeats, device=device, within=20.0), "first_s": first}


def _called(model: nn.Module, way: str) -> Callable[..., Any]:
    """The model as the loop calls it: compiled, in some ways; ours must compile whole."""
    mode = "reduce-overhead" if way.endswith("reduce_overhead") else None
    if mode is None and not way.endswith("compiled"):
        return model
    compiled: Callable[..., Any] = torch.compile(model, fullgraph=way in WAYS, mode=mode)
    return compiled


def _step(model: Callable[..., Any], optimizer: torch.optim.Optimizer, half: bool) -> Step:
    """One step as people write it."""

    def step(x: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            out = model(x)
        logits = out[0] if isinstance(out, tuple) else getattr(out, "logits", out)
        loss = cross_entropy(logits.float().flatten(0, -2), target.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
