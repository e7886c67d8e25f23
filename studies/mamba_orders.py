"""How many states of a Mamba channel the paper's rule keeps with τ = 0.001, by readings of the rule and by precision.

The paper ends with 12 to 14 of 128 states (app:mamba), ours with 3 to 5. Each way below computes the Hankel values of
every channel's mean system once more, from the same averages over data, before any training and after some of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import softplus

from command import Progress, run, silent
from compressm.control import DiagonalSystem, hankel_singular_values, numerical_rank
from compressm.layers import Mamba
from compressm_lab.runs.measurement import Measurement, Row
from selective_cuts import QUICK, SETTINGS, TrainedModel, learn, load

TAU = 1e-3
SETTING = replace(SETTINGS[1], order=128)  # digits, with the paper's number of states
STEPS = (0, 150)
_EXAMPLES = 200
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Choices:
    """What a layer chose on data: Δ before and after the softplus, B and C at every step, and its rates."""

    before: Array
    step: Array
    B: Array
    C: Array
    rates: Array


@dataclass(frozen=True)
class MeanSystems:
    """A system of one input and one output for every channel: poles, B and C, all (channels, n)."""

    poles: Array
    B: Array
    C: Array

    @classmethod
    def of(cls, choices: Choices, step: Array | None = None, B: Array | None = None, C: Array | None = None):
        """The paper's mean systems: exp(E[Δ] a), E[Δ] E[B], E[C]; each average may be another one."""
        step = choices.step.mean(0) if step is None else step
        B, C = (own.mean(0) if given is None else given for own, given in ((choices.B, B), (choices.C, C)))
        poles = np.exp(step[:, None] * choices.rates)
        return cls(poles, step[:, None] * B, np.broadcast_to(C, poles.shape))

    def hankel_values(self) -> Array:
        """σ in double precision, without the squares that P Q is made of."""
        poles, B, C = (torch.tensor(part) for part in (self.poles, self.B, self.C))
        return hankel_singular_values(DiagonalSystem(poles, B[..., None], C[:, None, :])).numpy()

    def in_single_precision(self, values: Callable[[NDArray[np.float32]], Array]) -> Array:
        """σ as square roots of values of P Q, which is computed in single precision."""
        poles, B, C = (part.astype(np.float32) for part in (self.poles, self.B, self.C))
        decay = 1 - poles[:, :, None] * poles[:, None, :]
        P, Q = (part[:, :, None] * part[:, None, :] / decay for part in (B, C))
        return np.sqrt(np.maximum(values(P @ Q), 0)).astype(np.float64)


def orders(sigma: Array, tau: float = TAU) -> Array:
    """The least number of states whose σ have the share 1 − τ of the sum, of every channel."""
    sums = np.cumsum(-np.sort(-sigma, axis=-1), axis=-1)
    return 1 + (sums < (1 - tau) * sums[:, -1:]).sum(-1)


def ways(choices: Choices) -> Mapping[str, Array]:
    """The orders of all channels by way; the first is ours."""
    mean = MeanSystems.of(choices)
    sigma = mean.hankel_values()
    rms = [np.sqrt((part**2).mean(0)) for part in (choices.B, choices.C)]
    before = np.asarray(softplus(torch.tensor(choices.before.mean(0))))
    averaged = np.stack([np.exp(d[:, None] * a).mean(0) for d, a in zip(choices.step.T, choices.rates, strict=True)])
    weighed = choices.step.T @ choices.B / len(choices.B)
    share = (sigma / sigma.sum(-1, keepdims=True)).mean(0, keepdims=True)
    return {
        "double precision": orders(sigma),
        "τ = 0.0001": orders(sigma, 1e-4),
        "energy σ²": orders(sigma**2),
        "one order for all channels": orders(share),
        "softplus of the mean": orders(MeanSystems.of(choices, step=before).hankel_values()),
        "E[exp(Δ a)] and E[Δ B]": orders(replace(mean, poles=averaged, B=weighed).hankel_values()),
        "root mean squares of B and C": orders(MeanSystems.of(choices, B=rms[0], C=rms[1]).hankel_values()),
        "single precision, eigenvalues": orders(mean.in_single_precision(lambda PQ: np.linalg.eigvals(PQ).real)),
        "single precision, singular values": orders(mean.in_single_precision(partial(np.linalg.svd, compute_uv=False))),
        "numerical rank, double precision": numerical_rank(torch.tensor(sigma)).numpy(),
    }


def choices_of(model: nn.Module, inputs: Tensor, lengths: Tensor | None) -> list[Choices]:
    """What every Mamba layer of a model chooses on these inputs."""
    layers = [module for module in model.modules() if isinstance(module, Mamba)]
    seen: dict[int, Tensor] = {}
    hooks = [
        layer.x_proj.register_forward_pre_hook(lambda _, given, k=k: seen.__setitem__(k, given[0]))
        for k, layer in enumerate(layers)
    ]
    with torch.no_grad():
        model.eval()(inputs, lengths)
    for hook in hooks:
        hook.remove()
    return [_choices(layer, seen[k].double().flatten(0, -2)) for k, layer in enumerate(layers)]


def _choices(layer: Mamba, u: Tensor) -> Choices:
    rank, n = layer.dt_proj.in_features, layer.order
    step_in, B, C = (u @ layer.x_proj.weight.detach().double().mT).split([rank, n, n], dim=-1)
    before = step_in @ layer.dt_proj.weight.detach().double().mT + layer.dt_proj.bias.detach().double()
    rates = -torch.exp(layer.A_log.detach().double())
    return Choices(*(part.numpy() for part in (before, softplus(before), B, C, rates)))


def measure_mamba_orders(*, seeds: int = 2, quick: bool = False, progress: Progress = silent) -> Measurement:
    """Measure one row a seed, number of steps, layer and way: the orders of the channels."""
    setting, steps = (replace(QUICK[0], steps=6), (0, 6)) if quick else (SETTING, STEPS)
    rows = [row for seed in range(seeds) for row in _rows(setting, steps, seed, progress)]
    return Measurement("mamba_orders", "States of a Mamba channel that τ = 0.001 keeps", seeds, rows)


def _rows(setting: TrainedModel, steps: tuple[int, ...], seed: int, progress: Progress) -> list[Row]:
    rows: list[Row] = []
    with torch.random.fork_rng(devices=[]):
        task = load(setting.data)
        learner, done = setting.learner(task, seed), 0
        batch = task.batch(task.train, torch.arange(min(_EXAMPLES, len(task.train))))
        for step in steps:
            if step > done:
                learn(learner, done + 1, step)
                done = step
            for layer, choices in enumerate(choices_of(learner.model, batch.inputs, batch.lengths)):
                for way, found in ways(choices).items():
                    row: Row = {"seed": seed, "steps": step, "layer": layer, "way": way, "states": setting.order}
                    row |= {"mean": float(found.mean()), "least": int(found.min()), "most": int(found.max())}
                    rows.append(row)
            progress(f"seed {seed}, {step} steps: {len(rows)} rows")
    return rows


if __name__ == "__main__":
    run(measure_mamba_orders, seeds=2, description=(__doc__ or "").split("\n", 1)[0])
