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
from compressm.models import LanguageModel
from compressm.running import CapturedStep
from compressm_lab.bench.timing import Progress, capture, median_seconds, silent, threads_for
from compressm_lab.bench.train_step import StepCase, build_batch, build_model, paper_case
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.training.building import products_in

Step = Callable[[Tensor, Tensor], Tensor]
# `laboratory` is a graph of one step on one batch, the least that a user's own loop can reach.
WAYS = ("eager", "compiled", "captured", "laboratory")
PLAIN = ("plain", "plain_compiled")
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

    def build(self, device: torch.device) -> nn.Module:
        """Our model."""
        if self.classifier is not None:
            return build_model(self.classifier).to(device)
        sizes: dict[str, Any] = {
            "depth": self.depth,
            "width": self.width,
            "order": self.order,
            "vocabulary": self.vocabulary,
        }
        return LanguageModel(Mamba, **sizes).to(device)

    def plain(self, device: torch.device) -> nn.Module:
        """The same in plain PyTorch, or the module of another package."""
        if self.classifier is not None:
            return PlainClassifier(self.classifier).to(device)
        return _transformers_mamba(self).to(device)

    def data(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random inputs and targets."""
        if self.classifier is not None:
            return build_batch(self.classifier, device)
        tokens = torch.randint(self.vocabulary, (self.batch, self.length + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:]


def loop_cases(device: str) -> tuple[LoopCase, ...]:
    """The sMNIST model on a CPU; on a GPU also that of sCIFAR, and a Mamba language model."""
    sizes = [("smnist", n, "float32" if device == "cpu" else "tf32") for n in (256, 13)]
    sizes += [] if device == "cpu" else [("scifar", n, "bfloat16") for n in (384, 57)]
    cases = [_classifier(paper_case(task, n, precision=precision)) for task, n, precision in sizes]
    if device != "cpu":
        language = LoopCase(model="mamba", order=128, batch=16, length=1024, precision="bfloat16")
        cases += [language, replace(language, order=16)]
    return tuple(cases)


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
) -> Measurement:
    """Time a step of each case in every way; on the CPU with one thread."""
    where = torch.device(device)
    chosen = list(ways or (WAYS + PLAIN if where.type == "cuda" else ("eager", "compiled", *PLAIN)))
    rows: list[Row] = []
    with threads_for(where):
        for case in cases if cases is not None else loop_cases(where.type):
            for way in chosen:
                progress(f"{case.model}, n = {case.order}, {way}")
                rows.append(_row(case, way, where, repeats))
        return Measurement("loop", "A training step in a user's own loop", repeats, rows)


def _row(case: LoopCase, way: str, device: torch.device, repeats: int) -> Row:
    row: Row = {"model": case.model, "order": case.order, "precision": case.precision, "way": way}
    row |= {"batch": case.batch, "length": case.length, "device": device.type}
    gc.collect()
    torch.compiler.reset()
    try:
        with products_in(case.precision):
            return row | {"step_s": _seconds(case, way, device, repeats)}
    # Plain code and compilers may fail in any way, and then the reason is the result; our eager code may not.
    except Exception as error:
        if way in ("eager", "captured", "laboratory"):
            raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return row | {"note": f"{type(error).__name__}: {first}"[:_NOTE]}


def _seconds(case: LoopCase, way: str, device: torch.device, repeats: int) -> float:
    torch.manual_seed(0)
    plain = way.startswith("plain")
    model = case.plain(device) if plain else case.build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=way == "laboratory")
    called: Callable[..., Any] = model
    if way.endswith("compiled"):
        called = torch.compile(model) if plain else torch.compile(model, fullgraph=True)
    step: Step = _step(called, optimizer, case.precision == "bfloat16")
    x, target = case.data(device)
    work: Callable[[], object] = partial(CapturedStep(step) if way == "captured" else step, x, target)
    if way == "laboratory":
        work = capture(work)
    for _ in range(5):  # compilers look at a shape twice, and a captured step is recorded after three calls
        work()
    return median_seconds(work, repeats=repeats, device=device, within=20.0)


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


class PlainLRU(nn.Module):
    """An LRU as people write it without a library: h by an FFT convolution with λᵗ along time."""

    def __init__(self, width: int, order: int) -> None:
        super().__init__()
        self.nu = nn.Parameter(torch.log(-torch.log(0.9 + 0.099 * torch.rand(order))))
        self.theta = nn.Parameter(torch.log(6.28 * torch.rand(order)))
        self.B = nn.Parameter(torch.randn(2, order, width) / width**0.5)
        self.C = nn.Parameter(torch.randn(2, width, order) / order**0.5)
        self.D = nn.Parameter(torch.randn(width))

    def forward(self, u: Tensor) -> Tensor:
        length = u.shape[1]
        steps = torch.arange(length, device=u.device)[:, None]
        with torch.autocast(u.device.type, enabled=False):
            u = u.float()
            powers = torch.exp(torch.complex(-torch.exp(self.nu), torch.exp(self.theta)) * steps)
            x = torch.complex(u @ self.B[0].mT, u @ self.B[1].mT)
            spectrum = torch.fft.fft(x, n=2 * length, dim=1) * torch.fft.fft(powers, n=2 * length, dim=0)
            h = torch.fft.ifft(spectrum, dim=1)[:, :length]
            return h.real @ self.C[0].mT - h.imag @ self.C[1].mT + self.D * u


class PlainClassifier(nn.Module):
    """The classifier of the paper around `PlainLRU`."""

    def __init__(self, case: StepCase) -> None:
        super().__init__()
        width = case.width
        self.encoder = nn.Linear(case.inputs or 1, width)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(case.depth))
        self.layers = nn.ModuleList(PlainLRU(width, case.order) for _ in range(case.depth))
        self.gates = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(case.depth))
        self.dropout = nn.Dropout(case.dropout)
        self.head = nn.Linear(width, case.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        for norm, layer, gate in zip(self.norms, self.layers, self.gates, strict=True):
            y = layer(norm(x.mT).mT)
            y = self.dropout(nn.functional.gelu(y))
            x = x + self.dropout(nn.functional.glu(gate(y)))
        logits: Tensor = self.head(x.mean(1))
        return logits


def _transformers_mamba(case: LoopCase) -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=case.vocabulary,
        hidden_size=case.width,
        state_size=case.order,
        num_hidden_layers=case.depth,
        use_cache=False,
    )
    return MambaForCausalLM(config)
