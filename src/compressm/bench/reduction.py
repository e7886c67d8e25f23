"""The cost of one reduction, stage by stage, beside the paper's plain formulas in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

from compressm.bench import plain_reduction as plain
from compressm.bench.systems import lru_at_initialisation, lru_trained_like
from compressm.bench.timing import median_seconds, threads_for
from compressm.control import DiagonalSystem, balanced_truncation, hankel_singular_values
from compressm.control.gramians import gramians
from compressm.runs.measurement import Measurement

SYSTEMS: dict[str, Callable[..., DiagonalSystem]] = {"initial": lru_at_initialisation, "trained": lru_trained_like}


@dataclass(frozen=True)
class Case:
    """Reduce `members` LRU systems of `width` channels from `order` to `rank` in one call."""

    order: int
    rank: int
    width: int = 8
    members: int = 1
    kind: str = "initial"


CPU_CASES = (
    *(Case(n, max(1, n // 4)) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)),
    Case(256, 64, kind="trained"),
    Case(384, 161, width=512),
)
GPU_CASES = (
    Case(256, 28),
    Case(384, 161, width=512, members=6),
    Case(161, 93, width=512, members=6),
    Case(384, 161, width=512, members=6, kind="trained"),
    Case(1024, 256),
)


def measure_reduction(
    cases: Iterable[Case] | None = None,
    *,
    device: str = "cpu",
    repeats: int = 9,
    compare: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Time each case; on the CPU with one thread and, if `compare`, beside the plain formulas."""
    where = torch.device(device)
    rows: list[dict[str, float | int | str]] = []
    with threads_for(where):
        for case in cases if cases is not None else (CPU_CASES if where.type == "cpu" else GPU_CASES):
            progress(f"n = {case.order} → {case.rank}, {case.width} channels, {case.members} system(s), {case.kind}")
            rows.append(_row(case, where, _affordable(repeats, case), compare and where.type == "cpu"))
        title = "One reduction: Gramians, Hankel singular values, balancing, truncation, diagonalisation"
        return Measurement("reduction", title, repeats, rows)


def _row(case: Case, device: torch.device, repeats: int, compare: bool) -> dict[str, float | int | str]:
    bank = (case.members,) if case.members > 1 else ()
    system = SYSTEMS[case.kind](case.order, case.width, bank=bank).to(device)
    stages: dict[str, Callable[[], object]] = {
        "gramians": lambda: gramians(system),
        "hankel": lambda: hankel_singular_values(system),
        "balance": lambda: balanced_truncation(system, case.rank),
        "reduction": lambda: balanced_truncation(system, case.rank).diagonalise(),
    }
    row: dict[str, float | int | str] = {
        "order": case.order,
        "rank": case.rank,
        "width": case.width,
        "members": case.members,
        "system": case.kind,
        "device": device.type,
        "repeats": repeats,
    }
    row |= {f"{name}_s": median_seconds(work, repeats=repeats, device=device) for name, work in stages.items()}
    if compare and case.members == 1:
        row |= _plain_columns(system, case.rank, repeats)
        row["speedup"] = float(row["plain_reduction_s"]) / float(row["reduction_s"])
    return row


def _plain_columns(system: DiagonalSystem, rank: int, repeats: int) -> dict[str, float | int | str]:
    given = plain.PlainSystem.of(system)
    P, Q = plain.plain_gramians(given)
    sigma, ours = plain.plain_hankel_values(P, Q), hankel_singular_values(system).numpy()
    return {
        "plain_gramians_s": median_seconds(lambda: plain.plain_gramians(given), repeats=repeats),
        "plain_hankel_s": median_seconds(
            lambda: plain.plain_hankel_values(*plain.plain_gramians(given)), repeats=repeats
        ),
        "plain_reduction_s": median_seconds(lambda: plain.plain_reduction(given, rank), repeats=repeats),
        "plain_hankel_difference": float(np.abs(sigma - ours).max() / ours[0]),
    }


def _affordable(repeats: int, case: Case) -> int:
    """Fewer repeats where one takes seconds, more where it takes milliseconds and noise is large."""
    if case.order >= 1024:
        return max(3, repeats // 3)
    return 3 * repeats if case.order <= 256 and repeats > 1 else repeats
