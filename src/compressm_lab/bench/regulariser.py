"""Time a penalty on Hankel singular values beside a plain training step, and the paper's way in the same run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from compressm.adapters import find
from compressm.adapters.base import linear_adapter
from compressm.compression.distributed import Processes
from compressm.models import SequenceClassifier
from compressm_lab.baselines import HankelMajoriser, HankelNuclearNorm
from compressm_lab.bench.timing import Progress, measure_each, median_seconds, silent
from compressm_lab.bench.train_step import StepCase, build_batch, build_model, captured_step, eager_step, paper_case
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.training.building import products_in
from compressm_lab.training.clock import Clock
from compressm_lab.training.config import RegulariserConfig
from compressm_lab.training.penalty import HeldPenalty, Penalty

ORDERS = (32, 64, 128, 256, 512)
EVERY = 20  # the interval of the recipe `smnist-hnn`
_SHIFT = 1e-9  # that the paper adds to the diagonals of the Gramians
_WITHIN = 20.0  # seconds for one median: autograd through 512 states takes some


@dataclass(frozen=True)
class PenaltyCase:
    """A model with phases up to `max_phase` at the start: π/10 is the recipe's, where Gramians are nearly singular."""

    step: StepCase
    max_phase: float = 0.314

    def model(self) -> SequenceClassifier:
        """The model as a recipe builds it."""
        return build_model(self.step, max_phase=self.max_phase)

    def __str__(self) -> str:
        return f"{self.step.task}, n = {self.step.order}, phases up to {self.max_phase:g}"


def default_cases(device: str, orders: Iterable[int] = ORDERS) -> tuple[PenaltyCase, ...]:
    """sMNIST at all orders, with few and with all phases; on a GPU also the deep model of sCIFAR."""
    cases = [PenaltyCase(paper_case("smnist", n), phase) for phase in (0.314, 6.28) for n in orders]
    deep = PenaltyCase(paper_case("scifar", precision="bfloat16"), 6.28)
    return (*cases, deep) if device == "cuda" else tuple(cases)


def measure_regulariser(
    cases: Iterable[PenaltyCase] | None = None, *, device: str = "cpu", repeats: int = 9, progress: Progress = silent
) -> Measurement:
    """Time value and gradient of each penalty, and a step; on the CPU with one thread and the paper's way beside."""
    chosen = default_cases(device) if cases is None else cases
    title = "A penalty on Hankel singular values beside a step"
    return measure_each("regulariser", title, chosen, _row, device, repeats, progress)


def _row(case: PenaltyCase, device: torch.device, repeats: int) -> Row:
    torch.manual_seed(0)
    model, step = case.model().to(device), case.step
    batch = build_batch(step, device)
    with products_in(step.precision):
        run = (captured_step if device.type == "cuda" else eager_step)(model, *batch, step)
        plain = median_seconds(run, repeats=repeats, device=device)
    row: Row = {"task": step.task, "layers": step.depth, "order": step.order, "max_phase": case.max_phase}
    row |= {"device": device.type, "every": EVERY, "step_s": plain}
    # What the steps above have learned from noise is not what is asked here.
    torch.manual_seed(0)
    model = case.model().to(device)
    penalties: dict[str, Penalty] = {"norm": HankelNuclearNorm(), "majoriser": HankelMajoriser()}
    penalties |= {"autograd": norm_by_autograd} if device.type == "cpu" else {}
    for name, penalty in penalties.items():
        row |= _timed(name, model, penalty, repeats, device)
    norm = float(row["norm_s"])
    return row | {"ratio": 1 + norm / plain, "ratio_every": 1 + norm / (EVERY * plain)}


def _timed(name: str, model: nn.Module, penalty: Penalty, repeats: int, device: torch.device) -> Row:
    """Time a penalty as training computes it; on a GPU with a CUDA graph if one could be made, and without one."""
    seconds, recorded = _seconds(model, penalty, repeats, device, record=True)
    if device.type != "cuda":
        return {f"{name}_s": seconds}
    launched, _ = _seconds(model, penalty, repeats, device, record=False)
    return {f"{name}_s": seconds, f"{name}_launched_s": launched, f"{name}_recorded": int(recorded)}


def _seconds(
    model: nn.Module, penalty: Penalty, repeats: int, device: torch.device, *, record: bool
) -> tuple[float, bool]:
    config = RegulariserConfig(kind="hankel-nuclear-norm", beta=1.0)  # the kind is not looked at
    held = HeldPenalty(model, penalty, config, Clock(device), Processes(), record=record)
    steps = count(1)
    held.ready(next(steps))  # by which a graph is made
    seconds = median_seconds(lambda: held.ready(next(steps)), repeats=repeats, device=device, within=_WITHIN)
    return seconds, held.recorded


def norm_by_autograd(model: nn.Module) -> Tensor:
    """Σσ as the paper has it (app:hnn_det): shifted Gramians, eigenvalues of their product; then autograd."""
    norms = []
    for module, adapter in find(model).values():
        system = linear_adapter(module, adapter).read(module)
        gaps = 1 - system.poles[:, None] * system.poles.conj()[None, :]
        shift = _SHIFT * torch.eye(system.order, dtype=gaps.dtype, device=gaps.device)
        P, Q = (system.B @ system.B.mH) / gaps + shift, (system.C.mH @ system.C) / gaps.conj() + shift
        squares = torch.linalg.eigvals(P @ Q).real
        norms.append(torch.sqrt(squares.clamp_min(torch.finfo(torch.float64).tiny)).sum())
    return torch.stack(norms).sum()
