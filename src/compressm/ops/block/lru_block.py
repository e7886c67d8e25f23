"""The training step of a block around a linear recurrent unit as ops of torch.compile, for wide and narrow blocks.

Inside they are the functions of `lru_block_triton`. An op keeps what its gradient needs in shapes that follow from
those of its arguments. Of a narrow block the recurrence is computed again instead: it keeps views of its input, which
an op may not return.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compressm.ops.block.norm import RunningStatistics
from compressm.ops.lti.cost import NARROW
from compressm.ops.opaque import define_kept


def compiled_lru_block(
    x: Tensor,
    vectors: tuple[Tensor | None, Tensor | None, Tensor, Tensor, Tensor],
    keep: Tensor | None,
    rate: float,
    running: RunningStatistics,
    eps: float,
    parameters: tuple[Tensor, ...],
) -> Tensor:
    """The output of a block, as `train_lru_block` computes it."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    flags = (running.momentum, eps, rate, dtype)
    mean, variance, batches, _ = running
    # Narrow kernels count entries in 32 bits.
    narrow = x.shape[-1] <= NARROW and x.numel() < 2**31
    op = torch.ops.compressm.narrow_lru_block if narrow else torch.ops.compressm.wide_lru_block
    return op(x, *vectors, keep, *parameters, mean, variance, batches, *flags)[0]


def _split(given: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...], Tensor | None, tuple[Tensor, ...], Sequence[Any]]:
    """x, the vectors, the mask, the parameters and the rest; all but the mask are dense."""
    vectors = tuple(None if value is None else value.contiguous() for value in given[1:6])
    return given[0].contiguous(), vectors, given[6], tuple(value.contiguous() for value in given[7:14]), given[14:]


def _options(rest: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    from compressm.ops.block.lru_block_triton import BlockOptions

    *running, momentum, eps, rate, dtype = rest
    return BlockOptions(momentum, eps, rate, dtype, False), tuple(running)


def _wide(*given: Any) -> tuple[Tensor, ...]:
    from compressm.ops.block.lru_block_triton import wide_forward

    x, vectors, keep, parameters, rest = _split(given)
    options, running = _options(rest)
    out, _, kept, _ = wide_forward(x, vectors, keep, None, running, options, parameters)
    same, gate = options.dtype == x.dtype, vectors[3]
    kept = kept._replace(rows=x.new_empty(0) if same else kept.rows)
    return out, *kept._replace(cast=x.new_empty(0) if gate.dtype == options.dtype else kept.cast)


def _fake_wide(*given: Any) -> tuple[Tensor, ...]:
    x, gate, nu, dtype = given[0], given[4], given[7], given[-1]
    batch, length, H = x.shape
    tokens, m = batch * length, (nu.shape[0] + 7) // 8 * 8
    statistics, logs = (x.new_empty((2, size), dtype=torch.float32) for size in (H, m))
    B, C = (x.new_empty(shape, dtype=dtype) for shape in ((2 * m, H), (H, 2 * m)))
    z, vg = (x.new_empty((tokens, size), dtype=dtype) for size in (H, 2 * H))
    rows = x.new_empty(0) if dtype == x.dtype else x.new_empty((tokens, H), dtype=dtype)
    cast = x.new_empty(0) if gate.dtype == dtype else x.new_empty(gate.shape, dtype=dtype)
    out, u, y = (x.new_empty(x.shape) for _ in range(3))
    return out, statistics, u, rows, logs, B, C, x.new_empty((batch, length, 2, m), dtype=dtype), y, cast, z, vg


def _pull_wide(grads: Sequence[Tensor], saved: Sequence[Tensor], *given: Any) -> tuple[Tensor | None, ...]:
    from compressm.ops.block.lru_block_triton import WideKept, wide_backward
    from compressm.ops.lti.scan_triton import Walk

    x, vectors, keep, parameters, (*_, rate, _) = _split(given)
    kept = WideKept(*saved)
    kept = kept._replace(rows=kept.rows if kept.rows.numel() else kept.u.view(-1, x.shape[-1]))
    kept = kept._replace(cast=kept.cast if kept.cast.numel() else vectors[3])
    walk = Walk(kept.h, kept.logs, flip=-1)
    found = wide_backward(grads[0], x, vectors, keep, rate, kept, walk, parameters[:5])
    return *found[:6], None, *found[6:]


def _narrow(*given: Any) -> tuple[Tensor, ...]:
    from compressm.ops.block.lru_block_triton import narrow_forward

    x, vectors, keep, parameters, rest = _split(given)
    options, running = _options(rest)
    out, statistics, _, after = narrow_forward(x, vectors, keep, running, options, parameters)
    y, u, *_, vg = after.saved_tensors
    return out, statistics, u, y, vg


def _fake_narrow(*given: Any) -> tuple[Tensor, ...]:
    x = given[0]
    out, u, y = (x.new_empty(x.shape) for _ in range(3))
    return out, x.new_empty((2, x.shape[-1]), dtype=torch.float32), u, y, x.new_empty((2, *x.shape))


def _pull_narrow(grads: Sequence[Tensor], saved: Sequence[Tensor], *given: Any) -> tuple[Tensor | None, ...]:
    from compressm.ops.block.lru_block_triton import gate_stage, layer_stage, mixed, narrow_backward
    from compressm.ops.dispatch import full_precision

    x, vectors, keep, parameters, (*_, rate, _) = _split(given)
    statistics, u, y, vg = saved
    layer, after = layer_stage(), gate_stage()
    with full_precision(x):
        mixed(layer, u, parameters)
    after.saved_tensors, after.rate, after.tanh = (y, u, *vectors[2:], keep, vg), rate, False
    found = narrow_backward(grads[0], x, vectors, statistics, layer, after, parameters[:5])
    return *found[:6], None, *found[6:]


_TENSORS = (
    "Tensor x, Tensor? weight, Tensor? bias, Tensor D, Tensor gate, Tensor gate_bias, Tensor? keep,"
    " Tensor nu, Tensor theta, Tensor gamma, Tensor B_re, Tensor B_im, Tensor C_re, Tensor C_im"
)
_STATES = "Tensor(a!) mean, Tensor(b!) variance, Tensor(c!) batches"
_FLAGS = "float? momentum, float eps, float rate, ScalarType dtype"
define_kept("wide_lru_block", _TENSORS, _STATES, _FLAGS, _wide, _fake_wide, _pull_wide, (1, 11))
define_kept("narrow_lru_block", _TENSORS, _STATES, _FLAGS, _narrow, _fake_narrow, _pull_narrow, (1, 4))
