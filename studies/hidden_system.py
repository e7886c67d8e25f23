"""A test of the error bound: does it find the order of a hidden system, if a student has far more states?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from command import Progress, run, silent
from compressm.adapters import LRUAdapter
from compressm.compression import ErrorBound, compress_
from compressm.control import error_bounds, fold, hankel_singular_values
from compressm.layers import LRU
from compressm_lab.runs.measurement import Measurement, Row

KEEP = ErrorBound(0.01)  # 2 Σ of the dropped σ may be 1 % of σ₁
_TEST_SEQUENCES = 64


@dataclass(frozen=True)
class HiddenSystem:
    """A hidden LRU of `order` poles, a student of `states` states, and options of its training.

    Each phase is a number of L-BFGS iterations on one batch of white noise, and the weight decay of B and C in it.
    Decay removes modes that the output does not need; as it falls towards 0, so does its cost in accuracy.
    """

    order: int = 12
    states: int = 64
    width: int = 4
    length: int = 128
    batch: int = 32
    phases: tuple[tuple[int, float], ...] = ((300, 1e-3), (500, 1e-4), (600, 1e-5), (600, 1e-6))
    more: tuple[int, float] = (20, 0.0)


QUICK = HiddenSystem(order=3, states=12, width=2, length=64, phases=((60, 1e-2), (60, 1e-3), (60, 1e-4), (60, 1e-5)))


def measure_hidden_system(
    *, seeds: int = 5, quick: bool = False, progress: Progress = silent, task: HiddenSystem | None = None
) -> Measurement:
    """Measure one row a seed: the order found, and mean squared errors before the cut, after it and steps later."""
    rows = [_one_seed(task or (QUICK if quick else HiddenSystem()), seed, progress) for seed in range(seeds)]
    return Measurement("hidden_system", "The order of a hidden system", seeds, rows)


def _one_seed(task: HiddenSystem, seed: int, progress: Progress) -> Row:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        teacher, student = hidden(task), learner(task)
        for phase in task.phases:
            loss = learn(teacher, student, task, *phase)
            progress(f"seed {seed}: {phase[0]} iterations with decay {phase[1]:g}, mean squared error {loss:.2e}")
        noise = _noise(task, _TEST_SEQUENCES)
        sigma = hankel_singular_values(fold(LRUAdapter().read(student).detach()))
        errors = {"error": mean_squared_error(teacher, student, noise)}
        compress_(student, keep=KEEP)
        errors["error_cut"] = mean_squared_error(teacher, student, noise)
        learn(teacher, student, task, *task.more)
        errors["error_more"] = mean_squared_error(teacher, student, noise)
        progress(f"seed {seed}: {task.states} → {student.order} states, {errors}")
    return {
        "seed": seed,
        "hidden": task.order,
        "states": task.states,
        "found": student.order,
        "tail": float(error_bounds(sigma)[task.order] / sigma[0]),
        **errors,
        "device": "cpu",
    }


def hidden(task: HiddenSystem) -> LRU:
    """Make a hidden system: phases evenly from 0.3 to 2.85, two radii, no skip, and outputs of mean square 1."""
    layer = LRU(task.width, task.order).double().requires_grad_(False)
    phases = torch.linspace(0.3, 2.85, task.order, dtype=torch.float64)
    radii = torch.where(torch.arange(task.order) % 2 == 0, 0.88, 0.92).double()
    layer.nu_log.copy_(torch.log(-torch.log(radii)))
    layer.theta_log.copy_(torch.log(phases))
    layer.gamma_log.copy_(torch.log1p(-(radii**2)) / 2)
    layer.D.zero_()
    size = math.sqrt(float(layer(_noise(task, _TEST_SEQUENCES))[0].square().mean()))
    layer.C_re.div_(size)
    layer.C_im.div_(size)
    return layer


def learner(task: HiddenSystem) -> LRU:
    """Make a student with poles in a ring around those of the hidden system."""
    return LRU(task.width, task.states, r_min=0.5, r_max=0.9).double()


def learn(teacher: LRU, student: LRU, task: HiddenSystem, iterations: int, decay: float) -> float:
    """Minimise mean (y − ŷ)² + decay ‖B, C‖² on one batch of white noise; returns the last mean (y − ŷ)²."""
    noise = _noise(task, task.batch)
    wanted = teacher(noise)[0]
    matrices = (student.B_re, student.B_im, student.C_re, student.C_im)
    optimizer = torch.optim.LBFGS(
        student.parameters(),
        max_iter=iterations,
        max_eval=2 * iterations,
        history_size=100,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )
    error = 0.0

    def closure() -> Tensor:
        nonlocal error
        optimizer.zero_grad()
        misfit = (student(noise)[0] - wanted).square().mean()
        loss = misfit + decay * sum(matrix.square().sum() for matrix in matrices)
        loss.backward()
        error = float(misfit.detach())
        return loss.detach()

    optimizer.step(closure)
    return error


@torch.no_grad()
def mean_squared_error(teacher: LRU, student: LRU, noise: Float[Tensor, "batch length width"]) -> float:
    """Compute the error of outputs whose mean square is 1."""
    return float((student(noise)[0] - teacher(noise)[0]).square().mean())


def _noise(task: HiddenSystem, batch: int) -> Float[Tensor, "batch length width"]:
    return torch.randn(batch, task.length, task.width, dtype=torch.float64)


if __name__ == "__main__":
    run(measure_hidden_system, seeds=5, description=__doc__ or "")
