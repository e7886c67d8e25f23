"""One pass over z forward; one over its gradient backward, for W and b together."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from compressm.ops.column_sums.triton import column_sums
from compressm.ops.launch import Launch


@triton.jit(do_not_specialize=["rows"])
def _forward(x, weight, bias, z, rows, H: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) // tl.cdiv(H, COLS) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % tl.cdiv(H, COLS) * COLS + tl.arange(0, COLS)
    inside, here = col < H, row < rows
    value = tl.load(bias + col, mask=inside, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(INPUTS):
        w = tl.load(weight + col * INPUTS + k, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + row.to(tl.int64) * INPUTS + k, mask=here, other=0.0).to(tl.float32)
        value = value + v[:, None] * w[None, :]
    to = z + row.to(tl.int64)[:, None] * H + col[None, :]
    tl.store(to, value.to(z.dtype.element_ty), mask=here[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def _backward(
    x, dz, partial, rows, H: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Each program's Σ dz and Σ dz xₖ over its rows: one row of `partial`, (1 + inputs) H."""
    program, programs = tl.program_id(0) // tl.cdiv(H, COLS), tl.num_programs(0) // tl.cdiv(H, COLS)
    col = tl.program_id(0) % tl.cdiv(H, COLS) * COLS + tl.arange(0, COLS)
    inside = col < H
    sums = (tl.zeros((ROWS, COLS), tl.float32),) * (1 + INPUTS)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        here = row < rows
        at = dz + row.to(tl.int64)[:, None] * H + col[None, :]
        gradient = tl.load(at, mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32)
        new = (sums[0] + gradient,)
        for k in tl.static_range(INPUTS):
            v = tl.load(x + row.to(tl.int64) * INPUTS + k, mask=here, other=0.0).to(tl.float32)
            new += (sums[1 + k] + gradient * v[:, None],)
        sums = new
    to = partial + program * ((1 + INPUTS) * H) + col
    for k in tl.static_range(1 + INPUTS):
        tl.store(to + k * H, tl.sum(sums[k], 0), mask=inside)


class LinearOfFew(torch.autograd.Function):
    """z in `dtype`; x itself gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        x, weight, bias, (H, inputs) = x.contiguous(), weight.contiguous(), bias.contiguous(), weight.shape
        z, rows = torch.empty(*x.shape[:-1], H, dtype=dtype, device=x.device), x.numel() // inputs
        launch = _launch(H)
        grid = (triton.cdiv(rows, launch.ROWS) * triton.cdiv(H, launch.COLS),)
        _forward[grid](x, weight, bias, z, rows, **launch.options(H=H, INPUTS=inputs))
        ctx.save_for_backward(x)
        ctx.dtypes = weight.dtype, bias.dtype
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        (x,), dz, H = ctx.saved_tensors, dz.contiguous(), dz.shape[-1]
        inputs, launch, rows = x.shape[-1], _launch(H), dz.numel() // H
        workers = launch.workers(triton.cdiv(rows, launch.ROWS))
        partial = torch.empty(workers, (1 + inputs) * H, dtype=torch.float32, device=x.device)
        grid = (workers * triton.cdiv(H, launch.COLS),)
        _backward[grid](x, dz, partial, rows, **launch.options(H=H, INPUTS=inputs, STAGES=3))
        dbias, dweight = column_sums(partial).split([H, inputs * H])
        return None, dweight.view(inputs, H).mT.to(ctx.dtypes[0]), dbias.to(ctx.dtypes[1]), None


def _launch(H: int) -> Launch:
    columns = min(triton.next_power_of_2(H), 128)
    return Launch(ROWS=2048 // columns, COLS=columns, num_warps=4, programs=264)
