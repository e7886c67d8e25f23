"""How much faster a training gets by cuts, from what steps, evaluations and cuts cost at every order (app:time).

T_base = E (s t_train(n₀) + t_eval(n₀))
T_red = Σₖ Eₖ (s t_train(nₖ) + t_eval(nₖ)) + Σᵢ (t_cut(nᵢ₋₁) + t_recapture)          S = T_base / T_red
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Costs:
    """Seconds at the orders that were measured, rising; between them on straight lines, outside as at the end.

    `train` is one gradient step, `evaluate` one evaluation, `cut` one cut from that order; `recapture` is what a CUDA
    graph takes to be recorded anew, in the place of the paper's compilation, and 0 on a CPU.
    """

    orders: tuple[float, ...]
    train: tuple[float, ...]
    evaluate: tuple[float, ...]
    cut: tuple[float, ...]
    recapture: float = 0.0

    def __post_init__(self) -> None:
        lengths = {len(column) for column in (self.orders, self.train, self.evaluate, self.cut)}
        if len(lengths) != 1 or list(self.orders) != sorted(set(self.orders)):
            raise ValueError(f"costs of orders {self.orders}: expected rising orders and one value for each")

    def at(self, column: Sequence[float], order: float) -> float:
        """One of the columns at any order."""
        return float(np.interp(order, self.orders, column))


@dataclass(frozen=True)
class Stretch:
    """Training at one order: so many gradient steps and evaluations."""

    order: float
    steps: int
    evaluations: float


@dataclass(frozen=True)
class Prediction:
    """Seconds of the training that is never cut, and of the one that is, by what it does."""

    whole: float
    training: float
    evaluation: float
    cuts: float
    recapture: float

    @property
    def reduced(self) -> float:
        return self.training + self.evaluation + self.cuts + self.recapture

    @property
    def speed_up(self) -> float:
        return self.whole / self.reduced


def predict(costs: Costs, stretches: Sequence[Stretch]) -> Prediction:
    """Of a training whose orders fall from stretch to stretch."""
    first = stretches[0].order
    steps = sum(stretch.steps for stretch in stretches)
    evaluations = sum(stretch.evaluations for stretch in stretches)
    return Prediction(
        whole=steps * costs.at(costs.train, first) + evaluations * costs.at(costs.evaluate, first),
        training=sum(stretch.steps * costs.at(costs.train, stretch.order) for stretch in stretches),
        evaluation=sum(stretch.evaluations * costs.at(costs.evaluate, stretch.order) for stretch in stretches),
        cuts=sum(costs.at(costs.cut, stretch.order) for stretch in stretches[:-1]),
        recapture=costs.recapture * (len(stretches) - 1),
    )


def stretches_of(path: Sequence[tuple[int, float]], steps: int, evaluations: Sequence[int]) -> list[Stretch]:
    """From (step, order from there on), the first at step 0; at the step of a cut the evaluation comes after it."""
    ends = [step for step, _ in path[1:]] + [steps]
    found = []
    for (begin, order), end in zip(path, ends, strict=True):
        last = end == steps
        inside = [step for step in evaluations if begin <= step and (step <= end if last else step < end)]
        found.append(Stretch(order, end - begin, len(inside)))
    return found
