"""Our recurrence beside other people's scans: forward, forward with backward, and how right both are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from compressm.bench.capture import capture
from compressm.bench.peer_scans import PEERS, Ours, Peer, Problem
from compressm.bench.timing import median_seconds, threads_for
from compressm.runs.measurement import Measurement, Row
from compressm.training.precision import DTYPES

# (batch, length, n): sMNIST small and whole, sCIFAR, and a long sequence.
SHAPES = ((50, 784, 16), (50, 784, 256), (50, 1024, 384), (8, 16384, 64))
_LONGEST_S = 3.0  # for one time, after one repeat: a loop over 16384 steps takes a second
_NOTE = 160


@dataclass(frozen=True)
class Truth:
    """Every h, and the gradient of Re Σ w̄ h with respect to x, by a loop in complex128."""

    weight: Tensor
    h: Tensor
    gradient: Tensor


def measure_peers(
    shapes: Iterable[tuple[int, int, int]] = SHAPES,
    *,
    device: str = "cpu",
    peers: Iterable[Peer] = PEERS,
    repeats: int = 9,
    progress: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Time each peer at each shape in every precision it has; on the CPU with one thread."""
    where, chosen = torch.device(device), tuple(peers)
    rows: list[Row] = []
    with threads_for(where):
        for shape in shapes:
            problem = random_problem(*shape, where)
            truth = solve(problem)
            for precision in ("float32", "bfloat16") if where.type == "cuda" else ("float32",):
                for peer in (peer for peer in chosen if precision in peer.precisions):
                    progress(f"batch {shape[0]}, length {shape[1]}, n = {shape[2]}, {precision}: {peer.name}")
                    rows.append(_row(peer, problem, truth, precision, repeats))
        return Measurement("peers", "The recurrence beside other scans", repeats, rows)


def random_problem(batch: int, length: int, n: int, device: torch.device) -> Problem:
    """Poles of an LRU at initialisation: |λ| in [0.9, 0.999], every phase."""
    generator = torch.Generator().manual_seed(0)
    modulus = 0.9 + 0.099 * torch.rand(n, generator=generator)
    log_poles = torch.stack([torch.log(modulus), 6.28 * torch.rand(n, generator=generator)])
    x = torch.randn(batch, length, n, generator=generator, dtype=torch.complex64)
    return Problem(x.to(device), log_poles.to(device))


def solve(problem: Problem) -> Truth:
    """With random w; the gradient g[t] = w[t] + λ̄ g[t+1] is the same loop backwards."""
    poles = torch.exp(torch.complex(*problem.log_poles.double()))
    weight = problem.x.roll(1, dims=1)
    gradient = _loop(poles.conj(), weight.flip(1)).flip(1)
    return Truth(weight, _loop(poles, problem.x), gradient)


def _loop(poles: Tensor, x: Tensor) -> Tensor:
    h = x.to(torch.complex128)
    for t in range(1, h.shape[1]):
        h[:, t] += poles * h[:, t - 1]
    return h


def _row(peer: Peer, problem: Problem, truth: Truth, precision: str, repeats: int) -> Row:
    batch, length, n = problem.x.shape
    device = problem.x.device.type
    row: Row = {"peer": peer.name, "precision": precision, "device": device}
    row |= {"batch": batch, "length": length, "order": n}
    if peer.gpu_only and device == "cpu":
        return row | {"note": "needs a GPU"}
    if peer.longest is not None and length > peer.longest:
        return row | {"note": f"left out beyond length {peer.longest}: it compiles for minutes"}
    try:
        return row | _measured(peer, problem, truth, precision, repeats)
    except ModuleNotFoundError as error:
        return row | {"note": f"not installed: {error.name}"}
    # A foreign scan can fail in any way, and then its reason is the result; ours may not.
    except Exception as error:
        if isinstance(peer, Ours):
            raise
        return row | {"note": _reason(error)}


def _measured(peer: Peer, problem: Problem, truth: Truth, precision: str, repeats: int) -> Row:
    device, dtype = problem.x.device, DTYPES[precision]
    x, weight = (peer.pack(z) for z in (problem.x, truth.weight))
    poles = peer.poles(problem)
    if dtype != torch.float32:
        x, weight = x.to(dtype), weight.to(dtype)
        poles = poles if isinstance(peer, Ours) else poles.to(dtype)
    x, poles = x.requires_grad_(), poles.detach().clone().requires_grad_()
    scan = peer.scan(problem)

    def forward() -> Tensor:
        with torch.no_grad():
            return scan(poles, x)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(scan(poles, x), (x, poles), weight)

    row: Row = {
        "error": _difference(peer.unpack(forward()), truth.h),
        "gradient_error": _difference(peer.unpack(both()[0]), truth.gradient),
    }
    for name, work in (("forward_s", forward), ("both_s", both)):
        row[name], row["timed"] = _seconds(work, device, repeats)
    return row


def _seconds(work: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, str]:
    """As a CUDA graph where that can be recorded, so that kernels are compared and not the Python around them."""
    timed = "eager"
    if device.type == "cuda":
        try:
            work, timed = capture(work), "graph"
        except RuntimeError:  # something in it waits for the device
            torch.cuda.synchronize()
    return median_seconds(work, repeats=repeats, device=device, within=_LONGEST_S), timed


def _difference(got: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest expected."""
    return float((got.to(expected.dtype) - expected).abs().max() / expected.abs().max())


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_NOTE]
