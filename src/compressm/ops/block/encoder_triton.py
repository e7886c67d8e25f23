"""A linear map of few channels and the rows of a table on the GPU: one pass over memory each way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.dispatch import once_differentiable
from compressm.ops.launching_triton import Planned, kinds_of, launched, plan_of
from compressm.ops.memory import Launch, cdiv, next_power_of_2
from compressm.ops.sums_triton import column_sums


@launched
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


@launched
@triton.jit(do_not_specialize=["rows"])
def _backward(
    x, dz, partial, rows, H: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write each program's Σ dz and Σ dz xₖ over its rows: one row of `partial`, (1 + inputs) H."""
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
    """The linear map of x in `dtype`; x itself gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        x, weight, bias, (H, inputs) = x.contiguous(), weight.contiguous(), bias.contiguous(), weight.shape
        z = torch.empty(*x.shape[:-1], H, dtype=dtype, device=x.device)
        plan = _linear_plan(x.numel() // inputs, inputs, H, kinds_of(x, weight, bias, z), x.device)
        plan.forward(x, weight, bias, z)
        ctx.save_for_backward(x)
        ctx.dtypes = weight.dtype, bias.dtype
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        (x,), dz, H = ctx.saved_tensors, dz.contiguous(), dz.shape[-1]
        inputs = x.shape[-1]
        plan = _linear_plan(x.numel() // inputs, inputs, H, (x.dtype, *ctx.dtypes, dz.dtype), x.device)
        partial = torch.empty(plan.programs, (1 + inputs) * H, dtype=torch.float32, device=x.device)
        plan.backward(x, dz, partial)
        dbias, dweight = column_sums(partial).split_with_sizes([H, inputs * H])
        return None, dweight.view(inputs, H).mT.to(ctx.dtypes[0]), dbias.to(ctx.dtypes[1]), None


class _LinearPlan(NamedTuple):
    """The kernels of both passes, and the programs backward, each with a row of sums."""

    forward: Planned
    backward: Planned
    programs: int


@plan_of
def _linear_plan(rows: int, inputs: int, H: int, kinds: tuple[Any, ...], device: torch.device) -> _LinearPlan:
    columns = min(next_power_of_2(H), 128)
    launch = Launch(ROWS=2048 // columns, COLS=columns, num_warps=4, programs=264)
    tiles, blocks = cdiv(rows, launch.ROWS), cdiv(H, columns)
    programs = launch.workers(tiles)
    forward = Planned(_forward, (tiles * blocks,), rows, **launch.options(H=H, INPUTS=inputs))
    backward = Planned(_backward, (programs * blocks,), rows, **launch.options(H=H, INPUTS=inputs, STAGES=3))
    return _LinearPlan(forward, backward, programs)


_VALUES = 4096  # numbers in a tile of the forward pass
_ENTRIES = 64  # vocabulary entries in a tile: the rows of the smallest product of four warps
_PROGRAMS = 264  # programs, two for each multiprocessor of an H200
# The largest vocabulary before torch's sort takes over: products and reads grow with it, a sort does not. At 1024
# entries, 32768 gradients of 128 channels are 8.6 GFLOP and 134 MB from the cache; float32 uses no tensor cores.
_LARGEST = {torch.bfloat16: 1024, torch.float16: 1024, torch.float32: 512}


@launched
@triton.jit(do_not_specialize=["count", "vocabulary"])
def _look_up(tokens, table, out, count, vocabulary, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Copy each token's row; a token outside the table gives NaN, since nothing else checks it in a CUDA graph."""
    row = (tl.program_id(0) // tl.cdiv(H, COLS)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % tl.cdiv(H, COLS) * COLS + tl.arange(0, COLS)
    here, inside = row < count, (col < H)[None, :]
    token = tl.load(tokens + row, mask=here, other=-1).to(tl.int64)
    known = (token >= 0) & (token < vocabulary)
    value = tl.load(table + token[:, None] * H + col[None, :], mask=known[:, None] & inside, other=float("nan"))
    to = out + row[:, None] * H + col[None, :]
    tl.store(to, value.to(tl.float32).to(out.dtype.element_ty), mask=here[:, None] & inside)


@launched
@triton.jit(do_not_specialize=["count", "vocabulary"])
def _sum_by_token(
    tokens, dout, partial, count, vocabulary, H: tl.constexpr, ENTRIES: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum one-hot(token) doutᵀ over a program's tokens for a tile of the table; each share of tokens has its own table.

    Zeros are multiplied too: a gradient that is not finite leaves NaN in its channel of the whole table.
    """
    parts = tl.cdiv(vocabulary, ENTRIES)
    tiles = parts * tl.cdiv(H, COLS)
    # Programs that read the same tokens are neighbours: all but the first find them in the cache.
    run, runs, place = tl.program_id(0) // tiles, tl.num_programs(0) // tiles, tl.program_id(0) % tiles
    entry = place % parts * ENTRIES + tl.arange(0, ENTRIES)
    col = place // parts * COLS + tl.arange(0, COLS)
    inside = (col < H)[None, :]
    total = tl.zeros((ENTRIES, COLS), tl.float32)
    for tile in tl.range(run, tl.cdiv(count, ROWS), runs, num_stages=STAGES):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        here = row < count
        token = tl.load(tokens + row, mask=here, other=-1).to(tl.int32)
        gradient = tl.load(dout + row[:, None] * H + col[None, :], mask=here[:, None] & inside, other=0.0)
        is_entry = tl.where(entry[:, None] == token[None, :], 1.0, 0.0).to(dout.dtype.element_ty)
        total = tl.dot(is_entry, gradient, total, input_precision="ieee")
    to = partial + (run * vocabulary + entry)[:, None] * H + col[None, :]
    tl.store(to, total, mask=(entry < vocabulary)[:, None] & inside)


class TokenFeatures(torch.autograd.Function):
    """Rows of the table in `dtype`; gradients are summed in float32, and the same gradient gives the same bits."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        tokens, table, (vocabulary, H) = tokens.contiguous(), table.contiguous(), table.shape
        out = torch.empty(*tokens.shape, H, dtype=dtype, device=table.device)
        columns = min(next_power_of_2(H), 128)
        rows = _VALUES // columns
        grid = (cdiv(tokens.numel(), rows) * cdiv(H, columns),)
        _look_up[grid](tokens, table, out, tokens.numel(), vocabulary, H=H, ROWS=rows, COLS=columns, num_warps=4)
        ctx.save_for_backward(tokens)
        ctx.vocabulary, ctx.dtype = vocabulary, table.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor, None]:
        (tokens,) = ctx.saved_tensors
        if ctx.vocabulary <= _LARGEST[dout.dtype]:
            return None, _gradient(tokens, dout.contiguous(), ctx.vocabulary).to(ctx.dtype), None
        dout, tokens = dout.to(ctx.dtype), tokens.clamp(0, ctx.vocabulary - 1)  # others would write outside the table
        return None, torch.ops.aten.embedding_dense_backward(dout, tokens, ctx.vocabulary, -1, False), None


def _gradient(tokens: Tensor, dout: Tensor, vocabulary: int) -> Tensor:
    """The gradient of the table: (vocabulary, width), float32."""
    H = dout.shape[-1]
    columns = min(max(next_power_of_2(H), 16), 128)
    tiles = cdiv(vocabulary, _ENTRIES) * cdiv(H, columns)
    # Without tensor cores a thread holds its share of both factors of a product in registers.
    rows = 16 if dout.dtype is torch.float32 else 64
    launch = Launch(ROWS=rows, COLS=columns, num_warps=4, programs=max(_PROGRAMS // tiles, 1))
    runs = launch.workers(cdiv(tokens.numel(), rows))
    partial = torch.empty(runs, vocabulary * H, dtype=torch.float32, device=dout.device)
    options = launch.options(H=H, ENTRIES=_ENTRIES, STAGES=4)
    _sum_by_token[(runs * tiles,)](tokens, dout, partial, tokens.numel(), vocabulary, **options)
    return column_sums(partial).view(vocabulary, H)
