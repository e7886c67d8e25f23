"""Time one cut of one of the paper's models, stage by stage, with the training step before and after it."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn

from compressm.compression import Compressor, Cut, Restart, Transport
from compressm.compression.planning import STAGES, watching
from compressm_lab.bench.timing import Captured, Progress, capture, columns, median_seconds, silent, threads_for
from compressm_lab.bench.train_step import StepCase, build_batch, build_model, eager_step, make_optimizer, paper_case
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.training.building import products_in

# The orders that the paper's runs pass through (tab:smnist, tab:scifar); elsewhere a quarter.
RANKS = {"smnist": 28, "scifar": 161}
# The default of a compressor without data, the same without moments to carry, and the default with data.
VARIANTS = (("white noise", "Transport"), ("white noise", "Restart"), ("measured", "Transport"))


@dataclass(frozen=True, kw_only=True)
class CutCase:
    """A model with its batch, cut to `rank` states in every layer, or to one less in each than in the one before.

    Layers that fall to the same order go through one batched call, others side by side.
    """

    model: StepCase
    rank: int
    gramian: str = "white noise"
    moments: str = "Transport"
    unequal: bool = False
    # Batches of a calibration, and the sequences of each; 2 to 10 sequences are enough for a good Gramian.
    calibration: tuple[int, int] = (1, 8)

    @property
    def ranks(self) -> list[int]:
        """The orders of all layers after the cut."""
        return [max(1, self.rank - k) if self.unequal else self.rank for k in range(self.model.depth)]


def cut_cases(models: Iterable[StepCase], rank: int | None = None) -> tuple[CutCase, ...]:
    """Every model in every variant, and models of several layers also with unequal orders."""
    cases = []
    for model in models:
        one = CutCase(model=model, rank=rank or default_rank(model))
        cases += [replace(one, gramian=gramian, moments=moments) for gramian, moments in VARIANTS]
        cases += [replace(one, unequal=True)] if model.depth > 1 else []
    return tuple(cases)


# A bank of S4D, as large as a small model has it, measured on as many batches as a compressor takes by default.
_BANK = StepCase(
    task="bank", layer="S4D", depth=1, width=16, order=64, batch=50, length=250, inputs=1, classes=10, dropout=0.0
)
BANK_CASES = tuple(
    CutCase(model=_BANK, rank=32, gramian=gramian, calibration=(4, 50)) for gramian in ("white noise", "measured")
)


def default_cases(device: str) -> tuple[CutCase, ...]:
    """Cuts of the default models; on a CPU also of a bank."""
    return cut_cases(default_models(device)) + (BANK_CASES if device == "cpu" else ())


def default_rank(model: StepCase) -> int:
    """The order that the paper cuts this model to, elsewhere a quarter."""
    return min(RANKS.get(model.task, max(1, model.order // 4)), model.order)


def default_models(device: str) -> tuple[StepCase, ...]:
    """The sMNIST model on a CPU; on a GPU also that of sCIFAR, six layers, in bfloat16."""
    small = paper_case("smnist")
    return (small,) if device == "cpu" else (paper_case("scifar", precision="bfloat16"), small)


_MOMENTS = {"Transport": Transport(), "Restart": Restart()}
_STEPS_BEFORE = 3
_DUE, _CALLS = 1_000_000, 1000  # the step of the cut, and the calls of `step` before it


def measure_cuts(
    cases: Iterable[CutCase] | None = None, *, device: str = "cpu", repeats: int = 5, progress: Progress = silent
) -> Measurement:
    """Time one cold and `repeats` warm cuts of each case; on the CPU with one thread."""
    rows: list[Row] = []
    for case in cases if cases is not None else default_cases(device):
        progress(f"{case.model.task}, n = {case.model.order} → {case.rank}, {case.gramian}, {case.moments}")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            rows += process.submit(measure_cut, case, device, repeats).result()
    with threads_for(torch.device(device)):
        return Measurement("cut", "One cut of a model: from reading it to the first step afterwards", repeats, rows)


def measure_cut(case: CutCase, device: str, repeats: int) -> list[Row]:
    """Two rows: the first cut of this process, and the medians of those after it."""
    where = torch.device(device)
    with threads_for(where), products_in(case.model.precision):
        cold = cut_once(case, where)
        later = [cut_once(case, where) for _ in range(repeats)]
    warm = {name: statistics.median(times[name] for times in later) for name in cold}
    model = case.model
    named: Row = {"task": model.task, "layers": model.depth, "order": model.order, "rank": case.rank}
    named |= {**columns(model, "width", "precision"), **columns(case, "gramian", "moments")}
    named |= columns(model, "layer") if model.layer != StepCase.layer else {}
    named |= {"ranks": "unequal" if case.unequal else "equal", "device": where.type}
    return [{**named, "run": run, **times} for run, times in (("cold", cold), ("warm", warm))]


def cut_once(case: CutCase, device: torch.device) -> dict[str, float]:
    """Seconds of every stage of a cut of a new model that has trained a little, and of a step before and after."""
    gc.collect()
    torch.manual_seed(0)
    model = build_model(case.model).to(device)
    x, target = build_batch(case.model, device)
    optimizer = make_optimizer(model, device)
    step = eager_step(model, x, target, case.model, optimizer)
    options: dict[str, Any] = {"gate": 1.0, "moments": _MOMENTS[case.moments]}
    options["keep"] = lambda spectra: dict(zip(spectra, case.ranks, strict=True))
    if case.gramian == "measured":
        batches, sequences = case.calibration
        data = [x[:sequences].roll(k, 1) for k in range(batches)]
        options["calibrate"] = partial(_calibrate, batches=data, half=case.model.precision == "bfloat16")
    compressor = Compressor(model, optimizer, when=[_DUE], **options)
    training = _train(step, device, _STEPS_BEFORE)
    times = {"step_before_s": median_seconds(training, repeats=3, device=device), "between_s": _between(compressor)}
    watch = Stopwatch(device)
    with watch("cut"), watching(watch):
        events = compressor.step(_DUE)
    assert [event.rank for event in events if isinstance(event, Cut)] == case.ranks
    with watch("first_step"):
        del training  # a graph keeps its memory, and what it would replay has gone
        training = _train(step, device, 1)
        if isinstance(training, Captured):
            training()
    times |= {f"{name}_s": watch.seconds.get(name, 0.0) for name in ("cut", *STAGES, "first_step")}
    times["total_s"] = watch.seconds["cut"] + watch.seconds["first_step"]
    return times | {"step_after_s": median_seconds(training, repeats=3, device=device)}


def _calibrate(model: nn.Module, batches: Iterable[Tensor], half: bool) -> None:
    """Run a model on some batches, in the precision of the training."""
    for x in batches:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            model(x)


def _between(compressor: Compressor) -> float:
    """Seconds of a call of `step` when nothing is due."""
    compressor.step(1)
    start = time.perf_counter()
    for step in range(2, 2 + _CALLS):
        compressor.step(step)
    return (time.perf_counter() - start) / _CALLS


def _train(step: Callable[[], None], device: torch.device, count: int) -> Callable[[], object]:
    """Take `count` steps; on a GPU, record a step after them."""
    if device.type == "cuda":
        return capture(step, warm_up=count)
    for _ in range(count):
        step()
    return step


class Stopwatch:
    """Add up the seconds of named pieces of work, on a GPU until they are done."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._gpu = device.type == "cuda"

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start

    def _now(self) -> float:
        if self._gpu:
            torch.cuda.synchronize()
        return time.perf_counter()
