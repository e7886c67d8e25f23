"""The kernels as differentiable functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from compressm.ops.column_sums.triton import column_sums
from compressm.ops.gated_residual import triton as kernels
from compressm.ops.launch import Launch, rows_of
from compressm.ops.products import product_in


class Flags(NamedTuple):
    """Which entries to keep before and after the gate, over how many rows that repeats, and 1 / (1 − rate)."""

    first: Tensor | None
    second: Tensor | None
    period: int
    scale: float


def _flags(keep: Tensor | None, rate: float, tokens: int) -> Flags:
    if keep is None:
        return Flags(None, None, tokens, 1.0)
    first, second = keep.contiguous().view(torch.uint8)
    return Flags(first, second, keep.shape[1] * keep.shape[2], 1 / (1 - rate))


class WideGatedResidual(torch.autograd.Function):
    """Activation, product, gate; the product in `dtype`, its gradient for a float32 weight in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        u: Tensor | None,
        D: Tensor | None,
        link: Tensor | None,
        totals: Tensor | None,
        keep: Tensor | None,
        rate: float,
        dtype: torch.dtype,
        measured: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, x, u, H = y.contiguous(), x.contiguous(), None if u is None else u.contiguous(), y.shape[-1]
        tokens = y.numel() // H
        flags = _flags(keep, rate, tokens)
        grid, sizes, options = _wide_plan(tokens, flags, y, _ACTIVATE)
        z, out, cast = torch.empty(tokens, H, dtype=dtype, device=y.device), torch.empty_like(x), weight.to(dtype)
        kernels.activate[grid](y, u, D, flags.first, z, *sizes, **options)
        with torch.autocast(y.device.type, enabled=False):
            vg = z @ cast.mT
        grid, sizes, options = _wide_plan(tokens, flags, y, _GATE)
        workers = grid[0] // triton.cdiv(H, options["COLS"])
        moments = torch.empty(workers, 3, H, dtype=torch.float32, device=y.device) if measured else None
        kernels.gate[grid](vg, x, bias, flags.second, out, moments, *sizes, **options)
        ctx.save_for_backward(y, u, D, cast, bias, keep, z, vg)
        ctx.rate, ctx.weight_dtype = rate, weight.dtype
        if moments is None:
            return out
        ctx.mark_non_differentiable(moments)
        ctx.set_materialize_grads(False)
        return out, moments

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        y, u, D, cast, bias, keep, z, vg = ctx.saved_tensors
        needs_y, _, needs_weight, needs_bias, needs_u, needs_D, needs_link, needs_totals = ctx.needs_input_grad[:8]
        tokens, H = z.shape
        flags = _flags(keep, ctx.rate, tokens)
        grid, sizes, options = _wide_plan(tokens, flags, y, _BACKWARD)
        workers = grid[0] // triton.cdiv(H, options["COLS"])
        onwards = needs_y or needs_u or needs_D or needs_link
        allocate = torch.empty if onwards else torch.zeros  # half of it is written by the second kernel
        partial = allocate(workers, 4 * H, dtype=torch.float32, device=y.device)
        (dense, steps), dvg = rows_of(dout), torch.empty_like(vg)
        given = (dense, vg, bias, flags.second, dvg, partial, steps)
        kernels.gate_backward[grid](*given, *sizes, SHARED=steps > 0, **options)
        dy = du = dweight = dbias = dD = totals = None
        with torch.autocast(y.device.type, enabled=False):
            if needs_weight:
                dweight = product_in(ctx.weight_dtype, dvg.mT, z)
            if onwards:
                dz, dy = dvg @ cast, torch.empty_like(y)
                du = torch.empty_like(u) if needs_u else None
                # Twice as many programs of half the columns: three sequences and two sums fill the registers.
                options["COLS"] = min(options["COLS"], 64)
                grid = (workers * triton.cdiv(H, options["COLS"]),)
                kernels.activate_backward[grid](dz, y, u, D, flags.first, dy, du, partial, *sizes, **options)
        if needs_bias or needs_D or needs_totals:
            sums = column_sums(partial)
            dbias, dD = sums[: 2 * H].to(bias.dtype), sums[3 * H :].to(D.dtype) if needs_D else None
            totals = sums[2 * H :].view(2, H) if needs_totals else None
        return dy, dout, dweight, dbias, du, dD, dy if needs_link else None, totals, None, None, None, None


class NarrowGatedResidual(torch.autograd.Function):
    """One kernel forward; backward one, and one for the sums."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        u: Tensor | None,
        D: Tensor | None,
        link: Tensor | None,
        totals: Tensor | None,
        keep: Tensor | None,
        rate: float,
        dtype: torch.dtype,
    ) -> Tensor:
        y, x, u, H = y.contiguous(), x.contiguous(), None if u is None else u.contiguous(), y.shape[-1]
        weight, out = weight.contiguous(), torch.empty_like(x)
        vg = torch.empty(2, *y.shape, dtype=y.dtype, device=y.device) if any(ctx.needs_input_grad) else None
        flags = _flags(keep, rate, y.numel() // H)
        tiles, sizes, options = _narrow_plan(flags, y)
        kernels.narrow[(tiles,)](y, u, D, x, weight, bias, flags.first, flags.second, out, vg, *sizes, **options)
        ctx.save_for_backward(y, u, D, weight, bias, keep, vg)
        ctx.rate = rate
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        y, u, D, weight, bias, keep, vg = ctx.saved_tensors
        H, needs_u, needs_link = y.shape[-1], ctx.needs_input_grad[4], ctx.needs_input_grad[6]
        flags = _flags(keep, ctx.rate, y.numel() // H)
        tiles, sizes, options = _narrow_plan(flags, y)
        workers = _NARROW.workers(tiles)
        dy, du = torch.empty_like(y), torch.empty_like(u) if needs_u else None
        width = 2 * H * H + 3 * H
        partial = torch.empty(workers * options["PACK"], width, dtype=torch.float32, device=y.device)
        dense, steps = rows_of(dout)
        given = (dense, vg, y, u, D, weight, flags.first, flags.second, dy, du, partial, steps)
        kernels.narrow_backward[(workers,)](*given, *sizes, SHARED=steps > 0, **options)
        dweight, dbias, dD = column_sums(partial).split([2 * H * H, 2 * H, H])
        dweight, dbias = dweight.view(2 * H, H).to(weight.dtype), dbias.to(bias.dtype)
        dD = None if D is None else dD.to(D.dtype)
        return dy, dout, dweight, dbias, du, dD, dy if needs_link else None, None, None, None, None


# Measured on an H200 with 512 columns in bfloat16.
_ACTIVATE = Launch(ROWS=8, COLS=128, num_warps=2, programs=792)
_GATE = Launch(ROWS=8, COLS=128, num_warps=2, programs=264)
_BACKWARD = Launch(ROWS=8, COLS=128, num_warps=2, programs=1056)
# Sixteen packed rows a warp: what the matrix units take at once.
_NARROW = Launch(ROWS=16, COLS=16, num_warps=1, programs=528)


def _wide_plan(tokens: int, flags: Flags, y: Tensor, launch: Launch) -> tuple[tuple[int], tuple[Any, ...], dict]:
    """Tiles of as many entries whatever H is."""
    H = y.shape[-1]
    columns = min(triton.next_power_of_2(H), launch.COLS)
    launch = launch._replace(ROWS=launch.ROWS * launch.COLS // columns, COLS=columns)
    repeats = tokens // flags.period
    items = triton.cdiv(flags.period, launch.ROWS) * repeats
    grid = (launch.workers(items) * triton.cdiv(H, columns),)
    sizes = (flags.period, repeats, items, flags.scale)
    return grid, sizes, launch.options(H=H, VECTOR=16 // y.element_size(), STAGES=3)


def _narrow_plan(flags: Flags, y: Tensor) -> tuple[int, tuple[Any, ...], dict]:
    """Tiles; as many rows of H in one as fit into 16 columns and divide the rows after which the flags repeat."""
    H = y.shape[-1]
    pack = next(count for count in range(max(16 // H, 1), 0, -1) if flags.period % count == 0)
    rows, columns = y.numel() // H // pack, max(16, triton.next_power_of_2(H))
    launch = _NARROW._replace(COLS=columns, num_warps=columns // 16)
    options = launch.options(H=H, PACK=pack, VECTOR=16 // y.element_size(), PRECISION="tf32x3")
    return triton.cdiv(rows, launch.ROWS), (rows, flags.period // pack, flags.scale), options
