"""A cut in the middle of training, and the loss around it: on the same batches as without a cut, in several ways."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from command import Progress, run, silent
from compressm.compression import PAPER, Compressor, EnergyTolerance, Restart
from compressm.models import SequenceClassifier
from compressm_lab.runs.measurement import Measurement, Row
from digits import DigitsSetting, DigitsSplits, load_digits, train_step

KEEP = EnergyTolerance(0.01)
_CALIBRATION_BATCHES = 4
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Continuation:
    """A training of `setting.steps` steps until the cut, of which the last `shown` are recorded, and `after` it.

    It has many states for few channels, so that 1 % of the energy is many states.
    """

    setting: DigitsSetting
    shown: int
    after: int


PLAN = Continuation(
    DigitsSetting("digits", side=8, depth=2, width=8, order=128, steps=500, learning_rate=2e-3), shown=20, after=60
)
QUICK = Continuation(
    DigitsSetting("digits", side=8, depth=1, width=4, order=24, steps=30, learning_rate=1e-2), shown=5, after=12
)


@dataclass
class Continued:
    """Everything that the next step depends on."""

    model: SequenceClassifier
    optimizer: torch.optim.Optimizer
    random_state: Tensor

    def copied(self) -> Continued:
        """Make an independent copy."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        return Continued(model, optimizer, self.random_state.clone())

    def run(self, batches: Iterator[Batch], steps: int) -> list[float]:
        """Train and return the loss of each step; dropout masks continue where they were."""
        torch.set_rng_state(self.random_state)
        losses = [train_step(self.model, self.optimizer, *next(batches)) for _ in range(steps)]
        self.random_state = torch.get_rng_state()
        return losses


def measure_loss_continuity(
    *, seeds: int = 5, quick: bool = False, progress: Progress = silent, plan: Continuation | None = None
) -> Measurement:
    """Measure one row a seed and way: states before and after, and the loss of each step; +1 follows the cut."""
    plan = plan or (QUICK if quick else PLAN)
    data = load_digits(plan.setting.side)
    rows = [row for seed in range(seeds) for row in _one_seed(plan, data, seed, progress)]
    return Measurement("loss_continuity", "The loss around a cut", seeds, rows)


def ways(data: DigitsSplits, batch: int) -> dict[str, Mapping[str, Any] | None]:
    """Options of `Compressor` by way, beside when and how much; None: no cut."""

    def calibrate(model: nn.Module) -> None:
        for k in range(_CALIBRATION_BATCHES):
            model(data.train_x[k * batch : (k + 1) * batch])

    return {
        "uncut": None,
        "paper": PAPER,
        "restart": {"moments": Restart()},
        "transport": {},
        "measured": {"calibrate": calibrate},
    }


def _one_seed(plan: Continuation, data: DigitsSplits, seed: int, progress: Progress) -> list[Row]:
    setting = plan.setting
    rows: list[Row] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = setting.model()
        training = Continued(model, setting.optimizer(model), torch.get_rng_state())
        before = training.run(data.batches(setting.batch, seed=seed), setting.steps)[-plan.shown :]
        progress(f"seed {seed}: {setting.steps} steps, loss {before[-1]:.4f}")
        for way, options in ways(data, setting.batch).items():
            continued = training.copied()
            states, kept = _cut(continued, setting.steps, options)
            batches = data.batches(setting.batch, seed=seed + 1000)  # the same for every way
            losses = before + continued.run(batches, plan.after)
            curve = {f"{k:+d}": round(loss, 6) for k, loss in enumerate(losses, start=1 - plan.shown)}
            row: Row = {"way": way, "seed": seed, "states": states, "kept": kept, "device": "cpu"}
            rows.append({**row, **curve})
            progress(f"seed {seed}, {way}: {states} → {kept} states, loss {_mean(losses[plan.shown :][:10]):.4f} after")
    return rows


def _cut(training: Continued, step: int, options: Mapping[str, Any] | None) -> tuple[int, int]:
    """Cut the model; returns the states of all layers together, before and after."""
    before = _states(training.model)
    if options is not None:
        Compressor(training.model, training.optimizer, when=[step], keep=KEEP, **options).step(step)
    return before, _states(training.model)


def _states(model: SequenceClassifier) -> int:
    return sum(block.ssm.order for block in model.blocks)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    run(measure_loss_continuity, seeds=5, description=__doc__ or "")
