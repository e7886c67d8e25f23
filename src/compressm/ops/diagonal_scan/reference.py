"""The definitions, as plain loops over time."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compressm.ops.diagonal_scan.pairs import complex_dtype, to_complex, to_pair


def recurrence_loop(
    x: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    state: Float[Tensor, "batch 2 n"] | None = None,
) -> tuple[Float[Tensor, "batch length 2 n"], Float[Tensor, "batch 2 n"]]:
    """h[t] = λ h[t−1] + x[t], all h and the last."""
    poles = torch.exp(to_complex(log_poles, 0)).to(complex_dtype(x.dtype))
    h = torch.zeros_like(to_complex(x[:, 0], -2)) if state is None else to_complex(state, -2)
    history = []
    for t in range(x.shape[1]):
        h = poles * h + to_complex(x[:, t], -2)
        history.append(h)
    return to_pair(torch.stack(history, dim=1), -2), to_pair(h, -2)


def lti_loop(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None = None,
) -> tuple[Float[Tensor, "batch length q"], Float[Tensor, "batch 2 n"]]:
    """y[t] = Re(C h[t]) with h driven by B u."""
    x = torch.einsum("blp,rnp->blrn", u, B)
    h, last = recurrence_loop(x, log_poles, state)
    return torch.einsum("bln,qn->blq", h[:, :, 0], C[0]) - torch.einsum("bln,qn->blq", h[:, :, 1], C[1]), last


def bank_loop(
    u: Float[Tensor, "batch length width"],
    log_poles: Float[Tensor, "2 width n"],
    B: Float[Tensor, "2 width n"],
    C: Float[Tensor, "2 width n"],
    state: Float[Tensor, "batch 2 width n"] | None = None,
) -> tuple[Float[Tensor, "batch length width"], Float[Tensor, "batch 2 width n"]]:
    """One system a channel: y[t, i] = Re(Cᵢ hᵢ[t]), hᵢ driven by Bᵢ uᵢ."""
    x = torch.einsum("blw,rwn->blrwn", u, B).flatten(-2)
    h, last = recurrence_loop(x, log_poles.flatten(-2), None if state is None else state.flatten(-2))
    shape = (*h.shape[:-1], *B.shape[-2:])
    h = h.reshape(shape)
    y = (h[:, :, 0] * C[0] - h[:, :, 1] * C[1]).sum(-1)
    return y, last.reshape(len(u), *B.shape)
