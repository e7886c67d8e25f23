"""Selective scans to test, and their truth: every state as a sum over all that came before, in float64."""

from typing import NamedTuple

import torch


class Case(NamedTuple):
    """The sizes of a scan and which of its arguments there are."""

    batch: int = 2
    length: int = 21
    channels: int = 3
    n: int = 4
    own: bool = False
    complex: bool = False
    skip: bool = True
    gate: bool = True
    softplus: bool = True
    state: bool = False
    lengths: tuple[int, ...] | None = None
    orders: tuple[int, ...] | None = None


VARIANTS = {
    "real": {},
    "bare": {"skip": False, "gate": False, "softplus": False},
    "own B and C": {"own": True, "state": True},
    "complex": {"complex": True, "state": True},
    "own and complex": {"own": True, "complex": True, "gate": False},
    "lengths": {"lengths": (5, 21), "state": True},
    "orders": {"orders": (4, 0, 2), "state": True},
    "own and orders": {"own": True, "orders": (1, 4, 2)},
    "all": {"own": True, "complex": True, "orders": (3, 1, 4), "lengths": (21, 8), "state": True},
}


def inputs(case, *, dtype=torch.float32, device="cpu", slowest=0.01, fastest=3.0):
    """u, delta, A, B, C, D, z, state and delta_bias; None where the case has none."""
    b, length, d, n = case[:4]
    pair = (2,) if case.complex else ()
    matrices = (b, length, *([d] if case.own else []), *pair, n)
    rates = -slowest * (fastest / slowest) ** torch.rand(d, n, generator=torch.Generator().manual_seed(9))
    delta = drawn(b, length, d, seed=1)
    made = (
        drawn(b, length, d, seed=0).to(dtype),
        (delta if case.softplus else delta.abs()).to(dtype),
        torch.stack([rates, drawn(d, n, seed=10)]) if case.complex else rates,
        drawn(*matrices, seed=2).to(dtype),
        drawn(*matrices, seed=3).to(dtype),
        drawn(d, seed=4) if case.skip else None,
        drawn(b, length, d, seed=5).to(dtype) if case.gate else None,
        drawn(b, *pair, d, n, seed=6) if case.state else None,
        drawn(d, seed=7) - 1 if case.softplus else None,
    )
    return [None if x is None else x.to(device) for x in made]


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def options(case, device="cpu"):
    """Lengths, orders and whether delta goes through softplus."""
    lengths, orders = (None if x is None else torch.tensor(x, device=device) for x in (case.lengths, case.orders))
    return {"lengths": lengths, "orders": orders, "softplus": case.softplus}


def truth(u, delta, A, B, C, D, z, state, bias, *, lengths, orders, softplus):
    """y and the last state: h[t] = exp(a S[t,0]) h₀ + Σₛ exp(a S[t,s]) Δ[s] B[s] u[s], S[t,s] = Δ[s+1] + … + Δ[t]."""
    step = delta if bias is None else delta + bias
    step = torch.log1p(torch.exp(step)) if softplus else step
    time = torch.arange(u.shape[1], device=u.device)
    if lengths is not None:
        step = step * (time < lengths[:, None])[..., None]
    A, B, C, state = as_complex(A, B, C, state)
    own = B.ndim == 4
    there = torch.ones(A.shape, device=u.device)
    if orders is not None:
        there = there * (torch.arange(A.shape[1], device=u.device) < orders[:, None])
    B, C = (M * there if own else M[:, :, None] * there for M in (B, C))
    after, until = time[None, :, None] < time, time <= time[:, None, None]
    passed = torch.einsum("tsr,brd->btsd", (after & until).to(step.dtype), step)
    weights = torch.exp(passed[..., None] * A) * (time <= time[:, None])[..., None, None]
    h = torch.einsum("btsdn,bsdn->btdn", weights, (step * u)[..., None] * B)
    if state is not None:
        h = h + torch.exp(step.cumsum(1)[..., None] * A) * (state * there)[:, None]
    y = (C * h).sum(-1).real
    y = y if D is None else y + D * u
    y = y if z is None else y * z / (1 + torch.exp(-z))
    last = h[:, -1]
    return y, torch.stack([last.real, last.imag], dim=1) if last.is_complex() else last


def as_complex(A, B, C, state):
    if A.ndim == 2:
        return A, B, C, state
    moved = A, B.movedim(-2, 0), C.movedim(-2, 0), None if state is None else state.movedim(1, 0)
    return tuple(None if pairs is None else torch.complex(pairs[0], pairs[1]) for pairs in moved)


def results(scan, given, case, **more):
    """y, the last state and the gradients of all that is given."""
    leaves = [None if x is None else x.clone().requires_grad_() for x in given]
    y, last = scan(*leaves, **options(case, leaves[0].device), **more)
    heard = sum((x.double() * drawn(*x.shape, seed=20).to(x.device)).sum() for x in (y, last))
    return y, last, *torch.autograd.grad(heard, [leaf for leaf in leaves if leaf is not None])


def exact(given, case):
    """The same by definition, in float64."""
    return results(truth, [None if x is None else x.double() for x in given], case)


def largest_error(got, wanted):
    """Of each tensor the largest error over its largest entry, 1 at least: sums may cancel to almost nothing."""
    errors = []
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == other.shape
        errors.append(((one.double() - other).abs().max() / other.abs().max().clamp_min(1.0)).item())
    return max(errors)
