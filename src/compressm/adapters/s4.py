"""The adapter of S4: full matrices before a cut; after it the modes of S4D, with p = 0."""

from __future__ import annotations

import math
from typing import ClassVar, final

import torch
from torch import Tensor

from compressm.adapters.base import Growth, adapts, finite_doubles
from compressm.adapters.dense import DenseAdapter
from compressm.adapters.poles import continuous_poles, encodable
from compressm.control import DenseSystem, DiagonalSystem
from compressm.errors import AdapterError
from compressm.layers import S4, Bilinear
from compressm.layers.base import wide

# The rest of A that its structure does not explain, as a share of its largest entry: rounding of 2n × 2n matrices.
_ROUNDING = 1e-6


@adapts(S4)
@final
class S4Adapter(DenseAdapter[S4]):
    """A bank of `width` real systems of 2n states: the bilinear discretisation of diag(a, ā) − (p, p̄)(p, p̄)ᴴ.

    A cut reduces the full matrices. The smaller system has well-conditioned eigenvectors, so it is stored as modes,
    with p = 0. The gradient of p is 0 there: the layer remains an S4D. Each channel keeps its step.
    """

    RESTING: ClassVar[frozenset[str]] = frozenset({"p_re", "p_im"})

    def order(self, module: S4) -> int:
        return module.order

    def read(self, module: S4) -> DenseSystem:
        finite_doubles(module, [*S4.STATE_AXES, "log_step"])
        A, B, C = module.discrete()
        return DenseSystem(A, B[..., None], C[..., None, :])

    def modes(self, module: S4) -> DiagonalSystem:
        log_A_real, A_imag, B_re, B_im, C_re, C_im, log_step = finite_doubles(
            module, ["log_A_real", "A_imag", "B_re", "B_im", "C_re", "C_im", "log_step"]
        )
        step = torch.exp(log_step)[..., None].expand_as(A_imag)
        logarithms, scale = Bilinear()(torch.stack([-torch.exp(log_A_real), A_imag]), step)
        B, C = torch.complex(*scale) * torch.complex(B_re, B_im), 2 * torch.complex(C_re, C_im)
        return DiagonalSystem.from_log_poles(torch.complex(*logarithms), B[..., None], C[..., None, :])

    def encode(self, module: S4, system: DenseSystem | DiagonalSystem) -> dict[str, Tensor]:
        if isinstance(system, DenseSystem):
            return _of_matrices(module, system)
        B, C = encodable(module, system, bank=True)
        step = torch.exp(module.log_step.detach().double())[..., None].expand_as(system.decay)
        a = continuous_poles(Bilinear(), system, step)
        _, scale = Bilinear()(a, step)
        B, C = B[..., 0] / torch.complex(*scale), C[..., 0, :] / 2
        zero = torch.zeros_like(a[0].detach())
        return _named(a, (zero, zero), (B.real, B.imag), (C.real, C.imag))

    def growth(self, module: S4) -> dict[str, Growth]:
        # −½ as at the start; B = C = p = 0.
        idle = {"log_A_real": math.log(0.5)}
        return {name: Growth(axis, idle=idle.get(name, 0.0)) for name, axis in S4.STATE_AXES.items()}

    def state_bytes(self, module: S4, order: int) -> int:
        return 2 * order * module.width * wide(module.D.dtype).itemsize


def _named(a: Tensor, *pairs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    (p_re, p_im), (B_re, B_im), (C_re, C_im) = pairs
    return {
        "log_A_real": torch.log(-a[0]),
        "A_imag": a[1],
        "p_re": p_re,
        "p_im": p_im,
        "B_re": B_re,
        "B_im": B_im,
        "C_re": C_re,
        "C_im": C_im,
    }


def _of_matrices(module: S4, system: DenseSystem) -> dict[str, Tensor]:
    """The parameters of a dense system with the present p: A = 2R − I and B = ΔRb, R⁻¹ = I − Δ(rot a − 2ppᵀ)/2."""
    n, step = module.order, torch.exp(module.log_step.detach().double())[..., None, None]
    if system.order != 2 * n or system.bank != module.D.shape:
        raise AdapterError(f"{system!r} is not the system of this S4, of order {2 * n} and bank {(module.width,)}")
    p = torch.cat([module.p_re.detach().double(), module.p_im.detach().double()], -1)
    identity = torch.eye(2 * n, dtype=torch.float64, device=system.device)
    inverse = torch.linalg.inv((system.A + identity) / 2)
    turned = 2 / step * (identity - inverse) + 2 * p[..., :, None] * p[..., None, :]
    blocks = turned.unflatten(-2, (2, n)).unflatten(-1, (2, n)).diagonal(dim1=-3, dim2=-1)
    a = torch.stack([blocks[..., 0, 0, :] + blocks[..., 1, 1, :], blocks[..., 1, 0, :] - blocks[..., 0, 1, :]]) / 2
    _require_structure(turned.detach(), a.detach())
    B, C = (inverse @ system.B / step)[..., 0], system.C[..., 0, :] / 2
    (B_re, B_im), (C_re, C_im), (p_re, p_im) = (part.unflatten(-1, (2, n)).unbind(-2) for part in (B, C, p))
    return _named(a, (p_re, p_im), (B_re, B_im), (C_re, -C_im))


def _require_structure(turned: Tensor, a: Tensor) -> None:
    re, im = torch.diag_embed(a[0]), torch.diag_embed(a[1])
    rest = turned - torch.cat([torch.cat([re, -im], -1), torch.cat([im, re], -1)], -2)
    size = float(rest.abs().max() / turned.abs().max())
    if not size <= _ROUNDING:
        raise AdapterError(
            f"the dense system is another than the one that this S4 computes: A differs by {size:.2g} of its largest"
            " entry; expected modes, a DiagonalSystem: call pair_truncation"
        )
