"""Cuts of LinOSS, S4 and a bilinear system (Liquid-S4) without training: what each way of keeping the result loses."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from command import Progress, run, silent
from compressm.adapters import adapter_for
from compressm.control import (
    DenseSystem,
    DiagonalSystem,
    LinearSystem,
    balanced_truncation,
    controllability_gramian,
    measured_gramian,
)
from compressm.control.folding import pair_truncation
from compressm.families.linear.reduction import drop_modes, reduce_system
from compressm.layers import IM, S4, DampedIMEX, LinOSS
from compressm.layers.linoss import Scheme
from compressm_lab.runs.measurement import Measurement, Row

ORDER, RANKS, STEPS = 64, (32, 16, 8), 2000
_CHANNELS = 8

Ways = dict[str, Callable[[int], float]]


def measure_lti_newcomers(*, seeds: int = 5, quick: bool = False, progress: Progress = silent) -> Measurement:
    """Measure one row a seed, system, way and order: relative changes of impulse responses or of outputs."""
    order, ranks = (16, (8, 4)) if quick else (ORDER, RANKS)
    rows: list[Row] = []
    for seed in range(seeds):
        systems = {
            "LinOSS, implicit": oscillators(IM(), order, seed),
            "LinOSS, damped": oscillators(DampedIMEX(), order, seed),
            "S4 as it starts": hippo(order, seed),
            "a bilinear system": bilinear(order, seed),
        }
        for setting, ways in systems.items():
            for way, error_at in ways.items():
                rows += [
                    {
                        "setting": setting,
                        "seed": seed,
                        "way": way,
                        "order": order,
                        "rank": rank,
                        "error": error_at(rank),
                        "device": "cpu",
                    }
                    for rank in ranks
                ]
            progress(f"seed {seed}: {setting}")
    return Measurement("lti_newcomers", "Cuts of LinOSS, S4 and a bilinear system", seeds, rows)


def change_of_response(old: LinearSystem, new: LinearSystem) -> float:
    """‖g' − g‖ / ‖g‖ of the real impulse responses, over all channels."""
    before, after = (system.impulse_response(STEPS).real for system in (old, new))
    return float((after - before).norm() / before.norm())


def oscillators(scheme: Scheme, order: int, seed: int) -> Ways:
    """Ways to cut a LinOSS layer as it starts, with 8 channels."""
    torch.manual_seed(seed)
    layer = LinOSS(_CHANNELS, order, scheme=scheme).double()
    adapter = adapter_for(layer)
    assert adapter is not None
    system: DiagonalSystem = adapter.read(layer).detach()

    def balanced(rank: int) -> DiagonalSystem:
        return reduce_system(system, rank).system

    def moved(rank: int) -> DiagonalSystem:
        free = balanced(rank)
        return DiagonalSystem(adapter.nearest(layer, free).poles, free.B, free.C)

    ways: Ways = {
        "balanced truncation, any poles": lambda rank: change_of_response(system, balanced(rank)),
        "as the layer stores it": lambda rank: change_of_response(system, adapter.nearest(layer, balanced(rank))),
        "modal": lambda rank: change_of_response(system, drop_modes(system, rank).system),
    }
    if isinstance(scheme, IM):
        ways["on the circle, C as it was"] = lambda rank: change_of_response(system, moved(rank))
    return ways


def hippo(order: int, seed: int) -> Ways:
    """Ways to cut an S4 layer as it starts: HiPPO-LegS with random readouts. Impulses, or steps, which are slow."""
    torch.manual_seed(seed)
    A, B, C = (part.detach() for part in S4(_CHANNELS, order).double().discrete())
    system = DenseSystem(A, B[..., None], C[:, None])
    slow = torch.randn(4, STEPS // 4, 1, dtype=torch.float64).cumsum(1)
    states = system.states(slow[:, None].expand(-1, _CHANNELS, -1, -1))
    measured = measured_gramian(states.movedim(0, -3).flatten(-3, -2))

    def change(rank: int, P: Tensor | None) -> float:
        small = pair_truncation(system, rank, P=P).system
        u = slow[:, None].expand(-1, _CHANNELS, -1, -1)
        before, after = (one.simulate(u).real for one in (system, small))
        return float((after - before).norm() / before.norm())

    return {
        "white-noise P, its impulse response": lambda rank: change_of_response(
            system, pair_truncation(system, rank).system
        ),
        "white-noise P, slow inputs": lambda rank: change(rank, None),
        "P measured on slow inputs": lambda rank: change(rank, measured),
    }


def bilinear(order: int, seed: int) -> Ways:
    """Ways to cut h ← A h + N h u + B u, as a Liquid-S4 computes it, by linear or by measured controllability."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    A, N = normal(order, order), 0.15 * normal(order, order) / order**0.5
    A = 0.95 * A / torch.linalg.eigvals(A).abs().max()
    system = DenseSystem(A, normal(order, 1), normal(1, order))
    known, fresh = normal(8, 500), normal(8, 500)
    white, measured = controllability_gramian(system), measured_gramian(_states(A, N, system.B, known).flatten(0, 1))

    def change(rank: int, P: Tensor) -> float:
        cut = balanced_truncation(system, rank, P=P)
        left, right = cut.left, cut.right
        small = _states(left.mT @ A @ right, left.mT @ N @ right, left.mT @ system.B, fresh) @ (system.C @ right).mT
        whole = _states(A, N, system.B, fresh) @ system.C.mT
        return float((small - whole).norm() / whole.norm())

    return {"P of the linear part": lambda rank: change(rank, white), "measured P": lambda rank: change(rank, measured)}


def _states(A: Tensor, N: Tensor, B: Tensor, u: Float[Tensor, "batch length"]) -> Float[Tensor, "batch length n"]:
    h, found = torch.zeros(len(u), len(A), dtype=A.dtype), []
    for now in u.mT[..., None]:
        h = h @ A.mT + now * (h @ N.mT + B[:, 0])
        found.append(h)
    return torch.stack(found, 1)


if __name__ == "__main__":
    run(measure_lti_newcomers, seeds=5, description=__doc__ or "")
