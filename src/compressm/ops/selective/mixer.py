"""A whole Mamba layer in training as one op of torch.compile: inside are the functions of `mixer_triton`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compressm.ops.opaque import define_kept


def compiled_mixer(
    x: Tensor, weights: Sequence[Tensor | None], *, keep_state: bool
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The outputs, and with `keep_state` the last inputs of the convolution and the states, as `mix` gives them."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    out, before, last, *_ = torch.ops.compressm.mamba_mixer(x, *weights, dtype, keep_state)
    return out, (before, last) if keep_state else None


def _mixer(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    from compressm.ops.selective.gpu import most_marks
    from compressm.ops.selective.mixer_triton import MixerWeights, mixer_forward

    weights, (dtype, keep_state) = MixerWeights(*given[:-2]), given[-2:]
    batch, length, _ = x.shape
    marks = torch.empty(most_marks(batch, length, *weights.A_log.shape), dtype=torch.float32, device=x.device)
    out, before, last, kept, (_, scan, gate) = mixer_forward(x, dtype, (keep_state, True), weights, marks)
    none = x.new_empty(0)
    step, y = scan.saved_tensors[1], gate.saved_tensors[0]
    return (
        *(out, none if before is None else before, none.clone() if last is None else last),
        *(kept.vz, kept.u, kept.chosen, kept.g, step, y, marks),
    )


def _fake(x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    from compressm.ops.selective.gpu import most_marks

    *weights, dtype, keep_state = given
    conv, x_proj, A_log, out_proj = weights[2], weights[4], weights[7], weights[9]
    (batch, length, _), (inner, n) = x.shape, A_log.shape

    def made(*sizes: Any, kind: torch.dtype = dtype) -> Tensor:
        return x.new_empty(sizes, dtype=kind)

    states = (made(batch, conv.shape[-1] - 1, inner), made(batch, inner, n, kind=torch.float32))
    before, last = states if keep_state else (made(0, kind=x.dtype), made(0, kind=x.dtype))
    u, g, y = (made(batch, length, inner) for _ in range(3))
    step = made(batch, length, inner, kind=torch.float32)
    marks = made(most_marks(batch, length, inner, n), kind=torch.float32)
    vz, chosen = made(batch, length, 2 * inner), made(batch, length, x_proj.shape[0])
    return made(batch, length, out_proj.shape[0]), before, last, vz, u, chosen, g, step, y, marks


def _pull(grads: Sequence[Tensor], saved: Sequence[Tensor], x: Tensor, *given: Any) -> tuple[Tensor | None, ...]:
    from compressm.ops.selective.gpu import resume
    from compressm.ops.selective.mixer_triton import Kept, MixerWeights, learned_kinds, mixer_backward, prepared, stages

    weights, (dtype, keep_state) = MixerWeights(*given[:-2]), given[-2:]
    vz, u, chosen, g, step, y, marks = saved
    inner, rank = u.shape[-1], weights.dt_proj.shape[1]
    n = weights.A_log.shape[1]
    rows, A, casts = prepared(x, weights, dtype)
    conv, scan, gate = parts = stages()
    conv.saved_tensors = (vz[..., :inner], weights.conv.contiguous(), weights.conv_bias)
    gate.saved_tensors = (y, vz[..., inner:])
    B, C = chosen[..., rank:].split_with_sizes([n, n], dim=-1)
    resume(scan, u, step, weights.dt_bias, A, B, C, weights.D, marks)
    dout, dbefore, dlast = grads if keep_state else (grads[0], None, None)
    kept = Kept(rows, vz, u, chosen, g, A, *casts)
    return mixer_backward((dout, dbefore, dlast), kept, parts, learned_kinds(x, weights))


_TENSORS = (
    "Tensor x, Tensor in_proj, Tensor? in_bias, Tensor conv, Tensor? conv_bias, Tensor x_proj, Tensor dt_proj,"
    " Tensor dt_bias, Tensor A_log, Tensor D, Tensor out_proj, Tensor? out_bias"
)
define_kept("mamba_mixer", _TENSORS, "", "ScalarType dtype, bool keep_state", _mixer, _fake, _pull, (3, 7))
