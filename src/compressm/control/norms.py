"""Distances between systems: the H∞ norm on an adaptive frequency grid, the H₂ norm in closed form.

`with_poles` gives the system with other poles that is nearest in the H₂ norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from compressm.control.factors import cauchy_factor
from compressm.control.gramians import lyapunov_factor
from compressm.control.hankel import hankel_singular_values
from compressm.control.linear_algebra import eigh
from compressm.control.system import DiagonalSystem, LinearSystem, require_system
from compressm.control.truncation import diagonalise
from compressm.control.validation import DefectiveSystemError, DeviceError, ShapeError

_UNIFORM_POINTS = 128
_PEAKS = 8
# Each round tries eight points a quarter of the width apart, then shrinks the width to 0.3 of it: 18 rounds place a
# peak to 4e-10 of a grid interval.
_SHRINK = 0.3
_ROUNDS = 18
_CHUNK = 2**22  # complex numbers in memory at once


def h_infinity_error(first: LinearSystem, second: LinearSystem) -> Float[Tensor, "*bank"]:
    """max over ω of ‖G(e^{iω}) − G'(e^{iω})‖₂."""
    _require_comparable("h_infinity_error", first, second)
    pair, scale = _normalised(_modal(first), _modal(second))

    def response(omega: Tensor) -> Tensor:
        return pair[0].frequency_response(omega) - pair[1].frequency_response(omega)

    return scale * _peak_gain(response, torch.cat([_resonances(system) for system in pair], dim=-1), first)


def h_infinity_norm(system: LinearSystem) -> Float[Tensor, "*bank"]:
    """max over ω of ‖G(e^{iω})‖₂: the largest ratio of output norm to input norm, ‖y‖₂ / ‖u‖₂."""
    (modal,), scale = _normalised(_modal(require_system("h_infinity_norm", system)))
    return scale * _peak_gain(modal.frequency_response, _resonances(modal), system)


def h2_error(first: LinearSystem, second: LinearSystem) -> Float[Tensor, "*bank"]:
    """‖G − G'‖₂ = ‖[C, −C'] L‖_F, where L Lᴴ is the controllability Gramian of both systems side by side.

    L is computed without the Gramian: this resolves differences down to 1e-13 of the norm, tr(C P Cᴴ) only to 1e-8.
    """
    _require_comparable("h2_error", first, second)
    (one, two), scale = _normalised(_modal(first), _modal(second))
    dtype = torch.promote_types(one.dtype, two.dtype)
    B = torch.cat([one.B.to(dtype), two.B.to(dtype)], dim=-2)
    C = torch.cat([one.C.to(dtype), -two.C.to(dtype)], dim=-1)
    if isinstance(one, DiagonalSystem) and isinstance(two, DiagonalSystem):
        return scale * _h2_norm_of(_joined(one, two, B, C))
    return scale * torch.linalg.matrix_norm(C @ lyapunov_factor(_block_diagonal(one.A.to(dtype), two.A.to(dtype)), B))


def h2_norm(system: LinearSystem) -> Float[Tensor, "*bank"]:
    """√(Σₖ ‖g[k]‖²_F): the root mean square of the output for white noise at the input."""
    (modal,), scale = _normalised(_modal(require_system("h2_norm", system)))
    if isinstance(modal, DiagonalSystem):
        return scale * _h2_norm_of(modal)
    return scale * torch.linalg.matrix_norm(modal.C @ lyapunov_factor(modal.A, modal.B))


def _normalised(*systems: LinearSystem) -> tuple[tuple[LinearSystem, ...], Float[Tensor, "*bank"]]:
    """The systems with B and C scaled to size one, so that squares cannot underflow, and the factor for their norms."""
    largest = [
        torch.stack([getattr(system, name).abs().amax((-2, -1)) for system in systems]).amax(0) for name in ("B", "C")
    ]
    b, c = (torch.where(size > 0, size, 1) for size in largest)
    return tuple(system.divided(b, c) for system in systems), b * c


def _h2_norm_of(system: DiagonalSystem) -> Tensor:
    return torch.linalg.matrix_norm(system.C @ cauchy_factor(system))


def _joined(one: DiagonalSystem, two: DiagonalSystem, B: Tensor, C: Tensor) -> DiagonalSystem:
    poles = torch.cat([one.poles.to(B.dtype), two.poles.to(B.dtype)], dim=-1)
    if one.log_poles is None or two.log_poles is None:
        return DiagonalSystem._unchecked(poles, None, B, C)
    return DiagonalSystem._unchecked(poles, torch.cat([one.log_poles, two.log_poles], dim=-1).to(B.dtype), B, C)


def _block_diagonal(one: Tensor, two: Tensor) -> Tensor:
    n, m = one.shape[-1], two.shape[-1]
    joined = one.new_zeros(*one.shape[:-2], n + m, n + m)
    joined[..., :n, :n], joined[..., n:, n:] = one, two
    return joined


def _modal(system: LinearSystem) -> LinearSystem:
    """The system with a diagonal A, if the eigenvectors allow it: a frequency then costs O(npq) instead of O(n³)."""
    if isinstance(system, DiagonalSystem):
        return system
    try:
        return diagonalise(system)
    except DefectiveSystemError:
        return system


def _resonances(system: LinearSystem) -> Float[Tensor, "*bank m"]:
    """The frequencies where a gain can peak: the angle of every pole, and one half-width 1 − |λ| to either side."""
    poles = system.poles if isinstance(system, DiagonalSystem) else torch.linalg.eigvals(system.A)
    width = 1 - poles.abs()
    angle = torch.angle(poles)
    return torch.cat([angle, angle - width, angle + width], dim=-1)


def _peak_gain(
    response: Callable[[Tensor], Tensor], resonances: Tensor, system: LinearSystem
) -> Float[Tensor, "*bank"]:
    """Evaluate on a uniform grid and at the resonances, then search around the highest peaks of each member."""
    uniform = torch.linspace(-math.pi, math.pi, _UNIFORM_POINTS + 1, dtype=torch.float64, device=system.device)
    omega = torch.cat([uniform.expand(*system.bank, -1), resonances.clamp(-math.pi, math.pi)], dim=-1)
    omega = omega.sort(dim=-1).values
    centre, width, best = _highest_peaks(omega, _gains(response, omega, system))
    steps = torch.tensor([-1, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1], dtype=torch.float64, device=system.device)
    for _ in range(_ROUNDS):
        tried = centre[..., None] + width[..., None] * steps
        gains = _gains(response, tried.flatten(-2), system).reshape(tried.shape)
        highest, which = gains.max(dim=-1)
        found = tried.gather(-1, which[..., None])[..., 0]
        centre, best = torch.where(highest > best, found, centre), torch.maximum(best, highest)
        width = width * _SHRINK
    return best.amax(-1)


def _highest_peaks(omega: Tensor, gains: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The frequencies of the highest local maxima, the distance to the nearest other frequency, and their heights."""
    edge = torch.full_like(gains[..., :1], -torch.inf)
    before, after = torch.cat([edge, gains[..., :-1]], dim=-1), torch.cat([gains[..., 1:], edge], dim=-1)
    # Poles of two systems may coincide: a repeated frequency must neither count twice nor give a width of zero.
    repeated = torch.cat([torch.zeros_like(edge, dtype=torch.bool), omega[..., 1:] == omega[..., :-1]], dim=-1)
    height = torch.where((gains >= before) & (gains >= after) & ~repeated, gains, -1.0)
    best, peaks = height.topk(_PEAKS, dim=-1)
    centre, last = omega.gather(-1, peaks), omega.shape[-1] - 1
    above = torch.searchsorted(omega, centre, right=True).clamp_max(last)
    below = (torch.searchsorted(omega, centre) - 1).clamp_min(0)
    return centre, torch.maximum(omega.gather(-1, above) - centre, centre - omega.gather(-1, below)), best


def _gains(response: Callable[[Tensor], Complex[Tensor, "*bank f q p"]], omega: Tensor, system: LinearSystem) -> Tensor:
    """The largest singular value at each frequency, a few frequencies at a time."""
    per_point = system.bank.numel() * max(system.outputs, 1) * (system.order + system.inputs)
    pieces = torch.split(omega, max(1, _CHUNK // per_point), dim=-1)
    return torch.cat([_largest_singular_value(response(piece)) for piece in pieces], dim=-1)


def _largest_singular_value(matrices: Complex[Tensor, "*bank q p"]) -> Float[Tensor, "*bank"]:
    q, p = matrices.shape[-2:]
    if min(q, p) == 1:
        return torch.linalg.matrix_norm(matrices)
    gram = matrices @ matrices.mH if q <= p else matrices.mH @ matrices
    return torch.sqrt(torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0))


def _require_comparable(function: str, first: LinearSystem, second: LinearSystem) -> None:
    for system in (first, second):
        require_system(function, system)
    for what in ("bank", "inputs", "outputs"):
        a, b = getattr(first, what), getattr(second, what)
        if a != b:
            raise ShapeError(f"systems differ in {what}: {a} and {b}, expected the same")
    if first.device != second.device:
        raise DeviceError(f"systems are on {first.device} and {second.device}; move them to one device first")


def with_poles(system: DiagonalSystem, poles: Complex[Tensor, "*bank n"]) -> DiagonalSystem:
    """The system with other poles μ, the same B, and the C for which Re(C h) has the least H₂ distance.

    Re(C h) is the output of the modes and their conjugates together, and C + dC minimises for dC P = C (X − P), with P
    the Gramian of the new modes and X − P = (λᵢ − μᵢ) μ̄ⱼ bᵢ bⱼᴴ / ((1 − λᵢ μ̄ⱼ)(1 − μᵢ μ̄ⱼ)). The difference is
    small if poles move little, and nothing cancels in it.
    """
    b, c = system.scales()
    scaled = system.divided(b, c)
    old, new, B = (_with_conjugates(part, axis) for part, axis in ((system.poles, -1), (poles, -1), (scaled.B, -2)))
    C = _with_conjugates(scaled.C, -1)
    right = new.conj()[..., None, :]
    inner = 1 - new[..., :, None] * right
    products = B @ B.mH
    P = products / inner
    missing = (old - new)[..., :, None] * right * products / ((1 - old[..., :, None] * right) * inner)
    change = _solved(P, C @ missing)[..., : system.order]
    moved = (scaled.C + change) * c[..., None, None]
    return DiagonalSystem(poles, system.B, moved)


def _with_conjugates(part: Tensor, axis: int) -> Complex[Tensor, "..."]:
    part = part.to(torch.complex128)
    return torch.cat([part, part.conj()], dim=axis)


def _solved(P: Tensor, rows: Tensor) -> Tensor:
    """rows P⁺ for a Hermitian P ≥ 0, in which directions below rounding count as zeros."""
    size = torch.sqrt(torch.diagonal(P, dim1=-2, dim2=-1).real)
    size = torch.where(size > 0, size, 1)
    values, vectors = eigh(P / (size[..., :, None] * size[..., None, :]))
    usable = values > values.shape[-1] * torch.finfo(values.dtype).eps * values[..., -1:]
    inverse = torch.where(usable, 1 / torch.where(usable, values, 1), 0)
    return ((rows / size[..., None, :]) @ vectors * inverse[..., None, :]) @ vectors.mH / size[..., None, :]


def distance_bound(first: DiagonalSystem, second: DiagonalSystem) -> Float[Tensor, "*bank"]:
    """2 Σ σ of the difference of two systems, which bounds its H∞ norm."""
    poles = torch.cat([first.poles, second.poles], dim=-1)
    B, C = torch.cat([first.B, second.B], dim=-2), torch.cat([first.C, -second.C], dim=-1)
    return 2 * hankel_singular_values(DiagonalSystem(poles, B, C)).sum(-1)
