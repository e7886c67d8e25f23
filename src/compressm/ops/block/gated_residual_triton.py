"""Gated and dropped residuals on the GPU: every elementwise stage is one pass over memory, forward and backward.

Wide: `activate`, a product by cuBLAS, `gate`. Narrow: one kernel, with the product in registers. Each program writes
its sums over rows as one row of `partial`; these rows are added in a fixed order: the same input gives the same bits.

A wide kernel's work is cut into items, tiles of rows in one repeat of the flags; a program takes consecutive items.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.dispatch import full_precision, once_differentiable
from compressm.ops.launching_triton import Planned, kinds_of, launched, plan_of
from compressm.ops.memory import Launch, cdiv, next_power_of_2, product_in, rows_of
from compressm.ops.sums_triton import column_sums


@triton.jit
def _tail(x):
    """1 − Φ(|x|) within 1e-7 and φ(x) (Abramowitz and Stegun 26.2.17): half the work of `tl.erf`."""
    bell = tl.exp2(x * x * -0.7213475204444817)
    a = 1.0 + 0.2316418882 * tl.abs(x)
    # 1 / a: a root is one instruction, a division many.
    t = tl.rsqrt(a * a)
    sum = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
    return t * sum * bell, 0.3989422804014327 * bell


@triton.jit
def _sigmoid(x):
    a = 1.0 + tl.exp2(x * -1.4426950408889634)
    return tl.rsqrt(a * a)


@triton.jit
def _share(x):
    """(1 + tanh(√(2/π) (x + 0.044715 x³))) / 2, which is a sigmoid."""
    # Below −40 the square in the sigmoid would overflow; it is 4e-18 there.
    return _sigmoid(tl.maximum(x * (1.5957691216057308 + 0.07135481282723096 * x * x), -40.0))


@triton.jit
def _gelu(x, scale, TANH: tl.constexpr):
    """scale x Φ(x); TANH: with an approximation of Φ."""
    if TANH:
        return scale * x * _share(x)
    tail, _ = _tail(x)
    return scale * (tl.maximum(x, 0.0) - tl.abs(x) * tail)


@triton.jit
def _gelu_slope(x, TANH: tl.constexpr):
    """Φ(x) + x φ(x), or the derivative of the other form."""
    if TANH:
        s = _share(x)
        return s + x * s * (1.0 - s) * (1.5957691216057308 + 0.21406443848169288 * x * x)
    tail, bell = _tail(x)
    return tl.where(x >= 0.0, 1.0 - tail, tail) + x * bell


@triton.jit
def _column(pointer, col, inside):
    return tl.load(pointer + col, mask=inside, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _loaded(pointer, at, live):
    return tl.load(pointer + at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _kept(value, keep, at, live, VECTOR: tl.constexpr):
    """Zero the values whose flag is 0."""
    if keep is not None:
        # One-byte flags in the layout of the values: otherwise every tile is rearranged in shared memory.
        flag = tl.load(tl.max_contiguous(keep + at, [1, VECTOR]), mask=live, other=0)
        value = tl.where(flag != 0, value, 0.0)
    return value


@triton.jit
def _next(start, repeat, repeats, ROWS: tl.constexpr):
    """Move on to the same rows of the mask in the next repeat; after the last repeat, to the next rows."""
    repeat += 1
    last = repeat == repeats
    return tl.where(last, start + ROWS, start), tl.where(last, 0, repeat)


@launched
@triton.jit(do_not_specialize=["period", "repeats", "items"])
def activate(
    y, u, D, keep, z, period, repeats, items, scale,
    H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    TANH: tl.constexpr,
):  # fmt: skip
    """z = k ⊙ gelu(y + D ⊙ u)."""
    worker, row = tl.program_id(0) // tl.cdiv(H, COLS), tl.arange(0, ROWS)
    col = tl.program_id(0) % tl.cdiv(H, COLS) * COLS + tl.arange(0, COLS)
    inside, at = col < H, row[:, None] * H + col[None, :]
    share = tl.cdiv(items, tl.num_programs(0) // tl.cdiv(H, COLS))
    start, repeat = worker * share // repeats * ROWS, worker * share % repeats
    weight = _column(D, col, inside) if u is not None else 0.0
    for _ in tl.range(worker * share, tl.minimum(worker * share + share, items), num_stages=STAGES):
        here = start.to(tl.int64) + repeat.to(tl.int64) * period
        live = (row < period - start)[:, None] & inside[None, :]
        value = _loaded(y + here * H, at, live)
        if u is not None:
            value += weight * _loaded(u + here * H, at, live)
        value = _gelu(value, scale, TANH)
        if keep is not None:
            value = _kept(value, keep + start.to(tl.int64) * H, at, live, VECTOR)
        tl.store(z + here * H + at, value.to(z.dtype.element_ty), mask=live)
        start, repeat = _next(start, repeat, repeats, ROWS)


@launched
@triton.jit(do_not_specialize=["period", "repeats", "items"])
def gate(
    vg, x, bias, keep, out, moments, period, repeats, items, scale,
    H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out = x + k ⊙ v ⊙ sigmoid(g), with the bias of v and g added here.

    `moments` takes the mean, sum of squared deviations and number of each program's rows (Welford 1962).
    """
    worker, row = tl.program_id(0) // tl.cdiv(H, COLS), tl.arange(0, ROWS)
    col = tl.program_id(0) % tl.cdiv(H, COLS) * COLS + tl.arange(0, COLS)
    inside, at, two = col < H, row[:, None] * H + col[None, :], row[:, None] * (2 * H) + col[None, :]
    share = tl.cdiv(items, tl.num_programs(0) // tl.cdiv(H, COLS))
    start, repeat = worker * share // repeats * ROWS, worker * share % repeats
    v_bias, g_bias = _column(bias, col, inside), _column(bias + H, col, inside)
    if moments is not None:
        count = tl.zeros((ROWS, 1), tl.float32)
        mean = tl.zeros((ROWS, COLS), tl.float32)
        spread = tl.zeros((ROWS, COLS), tl.float32)
    for _ in tl.range(worker * share, tl.minimum(worker * share + share, items), num_stages=STAGES):
        here = start.to(tl.int64) + repeat.to(tl.int64) * period
        live = (row < period - start)[:, None] & inside[None, :]
        v = _loaded(vg + here * (2 * H), two, live) + v_bias
        g = _loaded(vg + here * (2 * H) + H, two, live) + g_bias
        value = scale * v * _sigmoid(g)
        if keep is not None:
            value = _kept(value, keep + start.to(tl.int64) * H, at, live, VECTOR)
        value += _loaded(x + here * H, at, live)
        written = value.to(out.dtype.element_ty)
        tl.store(out + here * H + at, written, mask=live)
        if moments is not None:
            full = (row < period - start)[:, None]
            count += full.to(tl.float32)
            off = tl.where(full, written.to(tl.float32) - mean, 0.0)
            mean += off * (1.0 / tl.maximum(count, 1.0))
            spread += off * (written.to(tl.float32) - mean)
        start, repeat = _next(start, repeat, repeats, ROWS)
    if moments is not None:
        total = tl.sum(tl.sum(count, 1), 0)
        centre = tl.sum(count * mean, 0) / tl.maximum(total, 1.0)
        off = mean - centre[None, :]
        to = moments + worker * (3 * H) + col
        tl.store(to, centre, mask=inside)
        tl.store(to + H, tl.sum(spread + count * off * off, 0), mask=inside)
        tl.store(to + 2 * H, tl.zeros((COLS,), tl.float32) + total, mask=inside)


@launched
@triton.jit(do_not_specialize=["steps", "period", "repeats", "items"])
def gate_backward(
    dout, vg, bias, keep, dvg, partial, steps, period, repeats, items, scale, SHARED: tl.constexpr,
    H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dv = k ⊙ dout ⊙ s, dg = k ⊙ dout ⊙ v ⊙ s (1 − s), and their sums over the rows of each program.

    SHARED: `steps` steps share one row of `dout`.
    """
    worker, row = tl.program_id(0) // tl.cdiv(H, COLS), tl.arange(0, ROWS)
    col = tl.program_id(0) % tl.cdiv(H, COLS) * COLS + tl.arange(0, COLS)
    inside, at, two = col < H, row[:, None] * H + col[None, :], row[:, None] * (2 * H) + col[None, :]
    share = tl.cdiv(items, tl.num_programs(0) // tl.cdiv(H, COLS))
    start, repeat = worker * share // repeats * ROWS, worker * share % repeats
    v_bias, g_bias = _column(bias, col, inside), _column(bias + H, col, inside)
    v_sum = tl.zeros((ROWS, COLS), tl.float32)
    g_sum = tl.zeros((ROWS, COLS), tl.float32)
    for _ in tl.range(worker * share, tl.minimum(worker * share + share, items), num_stages=STAGES):
        here = start.to(tl.int64) + repeat.to(tl.int64) * period
        live = (row < period - start)[:, None] & inside[None, :]
        if SHARED:
            d = scale * _loaded(dout, ((here + row) // steps)[:, None] * H + col[None, :], live)
        else:
            d = scale * _loaded(dout + here * H, at, live)
        if keep is not None:
            d = _kept(d, keep + start.to(tl.int64) * H, at, live, VECTOR)
        v = _loaded(vg + here * (2 * H), two, live) + v_bias
        s = _sigmoid(_loaded(vg + here * (2 * H) + H, two, live) + g_bias)
        dv = d * s
        dg = dv * v * (1.0 - s)
        tl.store(dvg + here * (2 * H) + two, dv.to(dvg.dtype.element_ty), mask=live)
        tl.store(dvg + here * (2 * H) + H + two, dg.to(dvg.dtype.element_ty), mask=live)
        v_sum += dv
        g_sum += dg
        start, repeat = _next(start, repeat, repeats, ROWS)
    to = partial + worker * (4 * H) + col
    tl.store(to, tl.sum(v_sum, 0), mask=inside)
    tl.store(to + H, tl.sum(g_sum, 0), mask=inside)


@launched
@triton.jit(do_not_specialize=["period", "repeats", "items"])
def activate_backward(
    dz, y, u, D, keep, dy, du, partial, period, repeats, items, scale,
    H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
    TANH: tl.constexpr,
):  # fmt: skip
    """dy = k ⊙ dz ⊙ gelu'(y + D ⊙ u), du = D ⊙ dy if wanted, and Σ dy, Σ dy ⊙ u over the rows of each program."""
    worker, row = tl.program_id(0) // tl.cdiv(H, COLS), tl.arange(0, ROWS)
    col = tl.program_id(0) % tl.cdiv(H, COLS) * COLS + tl.arange(0, COLS)
    inside, at = col < H, row[:, None] * H + col[None, :]
    share = tl.cdiv(items, tl.num_programs(0) // tl.cdiv(H, COLS))
    start, repeat = worker * share // repeats * ROWS, worker * share % repeats
    weight = _column(D, col, inside) if u is not None else 0.0
    plain = tl.zeros((ROWS, COLS), tl.float32)
    along = tl.zeros((ROWS, COLS), tl.float32)
    for _ in tl.range(worker * share, tl.minimum(worker * share + share, items), num_stages=STAGES):
        here = start.to(tl.int64) + repeat.to(tl.int64) * period
        live = (row < period - start)[:, None] & inside[None, :]
        d = scale * _loaded(dz + here * H, at, live)
        if keep is not None:
            d = _kept(d, keep + start.to(tl.int64) * H, at, live, VECTOR)
        value = _loaded(y + here * H, at, live)
        if u is not None:
            other = _loaded(u + here * H, at, live)
            d *= _gelu_slope(value + weight * other, TANH)
            along += d * other
        else:
            d *= _gelu_slope(value, TANH)
        plain += d
        tl.store(dy + here * H + at, d.to(dy.dtype.element_ty), mask=live)
        if du is not None:
            tl.store(du + here * H + at, (d * weight).to(du.dtype.element_ty), mask=live)
        start, repeat = _next(start, repeat, repeats, ROWS)
    to = partial + worker * (4 * H) + 2 * H + col
    tl.store(to, tl.sum(plain, 0), mask=inside)
    tl.store(to + H, tl.sum(along, 0), mask=inside)


@triton.jit
def _block(weight, col, H: tl.constexpr, PACK: tl.constexpr):
    """Half of the weight on a diagonal of blocks, one for each of the rows packed into one."""
    live = (col // H == (col // H)[:, None]) & (col < PACK * H)
    return tl.load(weight + (col % H)[:, None] * H + col % H, mask=live, other=0.0).to(tl.float32)


@launched
@triton.jit(do_not_specialize=["rows", "period"])
def narrow(
    y, u, D, x, weight, bias, keep_in, keep_out, out, vg, rows, period, scale,
    H: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
    PRECISION: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """The whole gated residual, with `PACK` rows of H in a row of PACK H: the matrix units take at least 16."""
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    inside, channel = col < PACK * H, col % H
    live = (row < rows)[:, None] & inside[None, :]
    at = row[:, None] * (PACK * H) + col[None, :]
    flags = (row % period)[:, None] * (PACK * H) + col[None, :]
    old, value = _loaded(x, at, live), _loaded(y, at, live)
    if u is not None:
        value += _column(D, channel, inside) * _loaded(u, at, live)
    z = _kept(_gelu(value, scale, TANH), keep_in, flags, live, VECTOR)
    v = tl.dot(z, tl.trans(_block(weight, col, H, PACK)), input_precision=PRECISION)
    g = tl.dot(z, tl.trans(_block(weight + H * H, col, H, PACK)), input_precision=PRECISION)
    v += _column(bias, channel, inside)
    g += _column(bias + H, channel, inside)
    if vg is not None:
        tl.store(vg + at, v.to(vg.dtype.element_ty), mask=live)
        tl.store(vg + rows * (PACK * H) + at, g.to(vg.dtype.element_ty), mask=live)
    value = old + _kept(scale * v * _sigmoid(g), keep_out, flags, live, VECTOR)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=live)


@launched
@triton.jit(do_not_specialize=["steps", "rows", "period"])
def narrow_backward(
    dout, vg, y, u, D, weight, keep_in, keep_out, dy, du, partial, steps, rows, period, scale, SHARED: tl.constexpr,
    H: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, VECTOR: tl.constexpr,
    PRECISION: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    """dy, du if wanted, and each program's dW, db and dD as `PACK` rows of `partial`."""
    program, col = tl.program_id(0), tl.arange(0, COLS)
    inside, channel = col < PACK * H, col % H
    skip = _column(D, channel, inside) if u is not None else 0.0
    v_weight, g_weight = _block(weight, col, H, PACK), _block(weight + H * H, col, H, PACK)
    v_square = tl.zeros((COLS, COLS), tl.float32)
    g_square = tl.zeros((COLS, COLS), tl.float32)
    v_sum = tl.zeros((ROWS, COLS), tl.float32)
    g_sum = tl.zeros((ROWS, COLS), tl.float32)
    skip_sum = tl.zeros((ROWS, COLS), tl.float32)
    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=1):
        row = tile * ROWS + tl.arange(0, ROWS)
        live = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * (PACK * H) + col[None, :]
        flags = (row % period)[:, None] * (PACK * H) + col[None, :]
        v, g = _loaded(vg, at, live), _loaded(vg + rows * (PACK * H), at, live)
        if SHARED:
            d = _loaded(dout, (row[:, None] * PACK + (col // H)[None, :]) // steps * H + channel[None, :], live)
        else:
            d = _loaded(dout, at, live)
        value = _loaded(y, at, live)
        if u is not None:
            other = _loaded(u, at, live)
            value += skip * other
        s = _sigmoid(g)
        dv = _kept(scale * d, keep_out, flags, live, VECTOR) * s
        dg = dv * v * (1.0 - s)
        d = tl.dot(dv, v_weight, input_precision=PRECISION)
        d = tl.dot(dg, g_weight, acc=d, input_precision=PRECISION)
        d = _kept(scale * d, keep_in, flags, live, VECTOR) * _gelu_slope(value, TANH)
        tl.store(dy + at, d.to(dy.dtype.element_ty), mask=live)
        if du is not None:
            tl.store(du + at, (d * skip).to(du.dtype.element_ty), mask=live)
        z = _kept(_gelu(value, scale, TANH), keep_in, flags, live, VECTOR)
        v_square = tl.dot(tl.trans(dv), z, acc=v_square, input_precision=PRECISION)
        g_square = tl.dot(tl.trans(dg), z, acc=g_square, input_precision=PRECISION)
        v_sum += dv
        g_sum += dg
        if u is not None:
            skip_sum += d * other
    to = partial + (program * PACK + col // H) * (2 * H * H + 3 * H)
    square = (to + channel * H)[:, None] + channel[None, :]
    same = ((col // H)[:, None] == (col // H)[None, :]) & inside[:, None] & inside[None, :]
    tl.store(square, v_square, mask=same)
    tl.store(square + H * H, g_square, mask=same)
    to += 2 * H * H + channel
    tl.store(to, tl.sum(v_sum, 0), mask=inside)
    tl.store(to + H, tl.sum(g_sum, 0), mask=inside)
    tl.store(to + 2 * H, tl.sum(skip_sum, 0), mask=inside)


class Flags(NamedTuple):
    """Flags of the entries to keep before and after the gate, the rows until they repeat, and 1 / (1 − rate)."""

    first: Tensor | None
    second: Tensor | None
    period: int
    scale: float


def flags_of(keep: Tensor | None, rate: float, tokens: int) -> Flags:
    """The flags of a mask (2, rows, length, width)."""
    if keep is None:
        return Flags(None, None, tokens, 1.0)
    first, second = keep.contiguous().view(torch.uint8).unbind(0)
    return Flags(first, second, keep.shape[1] * keep.shape[2], 1 / (1 - rate))


def wide_gate(
    y: Tensor, x: Tensor, cast: Tensor, bias: Tensor, u: Tensor | None, D: Tensor | None, flags: Flags, measured: bool,
    tanh: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The output, z and (v, g) for the gradient, and moments if `measured`; `cast` is W in the dtype of the product."""
    H = y.shape[-1]
    tokens = y.numel() // H
    kinds = kinds_of(y, x, cast, bias, u, D, flags.first)
    plan = _wide_plan(tokens, H, flags.period, flags.scale, kinds, measured, 0, tanh, y.device)
    z, out = torch.empty(tokens, H, dtype=cast.dtype, device=y.device), torch.empty_like(x)
    plan.activate(y, u, D, flags.first, z)
    vg = z @ cast.mT
    moments = torch.empty(plan.moments, 3, H, dtype=torch.float32, device=y.device) if measured else None
    plan.gate(vg, x, bias, flags.second, out, moments)
    return out, z, vg, moments


def gate_gradient(
    dout: Tensor, y: Tensor, cast: Tensor, bias: Tensor, u: Tensor | None, D: Tensor | None, flags: Flags,
    z: Tensor, vg: Tensor, *, onwards: bool = True, of_u: bool = False, tanh: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """∂L/∂(v, g), and if `onwards` those of y and, if wanted, u; with the rows of sums of all programs.

    A row holds Σ ∂L/∂v, Σ ∂L/∂g, Σ ∂L/∂y and Σ ∂L/∂y ⊙ u.
    """
    tokens, H = z.shape
    dense, steps = rows_of(dout)
    kinds = kinds_of(y, dense, cast, bias, u, D, flags.first)
    plan = _wide_plan(tokens, H, flags.period, flags.scale, kinds, of_u, steps, tanh, y.device)
    # Half of a row is written by the second kernel.
    partial = (torch.empty if onwards else torch.zeros)(plan.programs, 4 * H, dtype=torch.float32, device=y.device)
    dvg = torch.empty_like(vg)
    plan.gate_backward(dense, vg, bias, flags.second, dvg, partial)
    if not onwards:
        return dvg, None, None, partial
    dz, dy, du = dvg @ cast, torch.empty_like(y), torch.empty_like(u) if of_u and u is not None else None
    plan.activate_backward(dz, y, u, D, flags.first, dy, du, partial)
    return dvg, dy, du, partial


class WideGatedResidual(torch.autograd.Function):
    """Activation, product and gate in turn; the product is in `dtype`, its gradient for a float32 weight in float32."""

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
        tanh: bool = False,
        measured: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, x, u = y.contiguous(), x.contiguous(), None if u is None else u.contiguous()
        flags, cast = flags_of(keep, rate, y.numel() // y.shape[-1]), weight.to(dtype)
        with full_precision(y):
            out, z, vg, moments = wide_gate(y, x, cast, bias, u, D, flags, measured, tanh)
        ctx.save_for_backward(y, u, D, cast, bias, keep, z, vg)
        ctx.rate, ctx.weight_dtype, ctx.tanh = rate, weight.dtype, tanh
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
        H, flags = z.shape[1], flags_of(keep, ctx.rate, len(z))
        onwards = needs_y or needs_u or needs_D or needs_link
        dweight = dbias = dD = totals = None
        with full_precision(y):
            given = (y, cast, bias, u, D, flags, z, vg)
            dvg, dy, du, partial = gate_gradient(dout, *given, onwards=onwards, of_u=needs_u, tanh=ctx.tanh)
            if needs_weight:
                dweight = product_in(ctx.weight_dtype, dvg.mT, z)
        if needs_bias or needs_D or needs_totals:
            sums = column_sums(partial)
            dbias, dD = sums[: 2 * H].to(bias.dtype), sums[3 * H :].to(D.dtype) if needs_D else None
            totals = sums[2 * H :].view(2, H) if needs_totals else None
        return dy, dout, dweight, dbias, du, dD, dy if needs_link else None, totals, *[None] * 5


class NarrowGatedResidual(torch.autograd.Function):
    """The gated residual in one kernel forward; backward in one kernel, and one more for the sums."""

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
        tanh: bool = False,
    ) -> Tensor:
        y, x, u, H = y.contiguous(), x.contiguous(), None if u is None else u.contiguous(), y.shape[-1]
        weight, out = weight.contiguous(), torch.empty_like(x)
        vg = torch.empty(2, *y.shape, dtype=y.dtype, device=y.device) if any(ctx.needs_input_grad) else None
        flags = flags_of(keep, rate, y.numel() // H)
        kinds = kinds_of(y, u, D, x, weight, bias, keep, vg)
        plan = _narrow_plan(y.numel() // H, flags.period, flags.scale, H, kinds, 0, tanh, y.device)
        plan.forward(y, u, D, x, weight, bias, flags.first, flags.second, out, vg)
        ctx.save_for_backward(y, u, D, weight, bias, keep, vg)
        ctx.rate, ctx.tanh = rate, tanh
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        y, u, D, weight, bias, keep, vg = ctx.saved_tensors
        H, needs_u, needs_link = y.shape[-1], ctx.needs_input_grad[4], ctx.needs_input_grad[6]
        flags, (dense, steps) = flags_of(keep, ctx.rate, y.numel() // H), rows_of(dout)
        dy, du = torch.empty_like(y), torch.empty_like(u) if needs_u else None
        kinds = kinds_of(y, u, D, dense, weight, du, keep)
        plan = _narrow_plan(y.numel() // H, flags.period, flags.scale, H, kinds, steps, ctx.tanh, y.device)
        partial = torch.empty(plan.rows, 2 * H * H + 3 * H, dtype=torch.float32, device=y.device)
        plan.backward(dense, vg, y, u, D, weight, flags.first, flags.second, dy, du, partial)
        dweight, dbias, dD = column_sums(partial).split_with_sizes([2 * H * H, 2 * H, H])
        dweight, dbias = dweight.view(2 * H, H).to(weight.dtype), dbias.to(bias.dtype)
        dD = None if D is None else dD.to(D.dtype)
        return dy, dout, dweight, dbias, du, dD, dy if needs_link else None, *[None] * 5


# Measured on an H200 with 512 columns in bfloat16.
_ACTIVATE = Launch(ROWS=8, COLS=128, num_warps=2, programs=792)
_GATE = Launch(ROWS=8, COLS=128, num_warps=2, programs=264)
_BACKWARD = Launch(ROWS=8, COLS=128, num_warps=2, programs=1056)
# Sixteen packed rows a warp: as many as the matrix units take at once. Backward, five such programs run at once on each
# of 132 multiprocessors.
_NARROW = Launch(ROWS=16, COLS=16, num_warps=1, programs=660)


class _WidePlan(NamedTuple):
    """The kernels of both passes; each program of `gate` has its moments, each of the backward pass a row of sums."""

    activate: Planned
    gate: Planned
    moments: int
    gate_backward: Planned
    activate_backward: Planned
    programs: int


@plan_of
def _wide_plan(
    tokens: int,
    H: int,
    period: int,
    scale: float,
    kinds: tuple[Any, ...],
    variant: bool,
    steps: int,
    tanh: bool,
    device: torch.device,
) -> _WidePlan:
    """Plan both passes; `variant` says if there are moments forward or a gradient of u backward."""
    # One-byte flags are read as many at a time as values of y.
    vector = 16 // kinds[0].itemsize

    def planned(kernel: Any, launch: Launch, *first: int, **more: Any) -> tuple[Planned, int]:
        columns = min(next_power_of_2(H), launch.COLS)
        launch = launch._replace(ROWS=launch.ROWS * launch.COLS // columns, COLS=columns)
        repeats = tokens // period
        items = cdiv(period, launch.ROWS) * repeats
        workers = launch.workers(items)
        options = launch.options(H=H, VECTOR=vector, STAGES=3) | more
        grid = (workers * cdiv(H, options["COLS"]),)
        return Planned(kernel, grid, *first, period, repeats, items, scale, **options), workers

    forward, _ = planned(activate, _ACTIVATE, TANH=tanh)
    closing, moments = planned(gate, _GATE)
    back, programs = planned(gate_backward, _BACKWARD, steps, SHARED=steps > 0)
    # Twice as many programs with half the columns: three sequences and two sums fill the registers.
    last, _ = planned(activate_backward, _BACKWARD, COLS=min(next_power_of_2(H), _BACKWARD.COLS, 64), TANH=tanh)
    return _WidePlan(forward, closing, moments, back, last, programs)


class _NarrowPlan(NamedTuple):
    """The kernels of both passes, and the rows of sums of the programs backward."""

    forward: Planned
    backward: Planned
    rows: int


@plan_of
def _narrow_plan(
    tokens: int, period: int, scale: float, H: int, kinds: tuple[Any, ...], steps: int, tanh: bool, device: torch.device
) -> _NarrowPlan:
    """Plan both passes; packed rows fit into 16 columns and divide the flags' period."""
    pack = next(count for count in range(max(16 // H, 1), 0, -1) if period % count == 0)
    rows, columns = tokens // pack, max(16, next_power_of_2(H))
    launch = _NARROW._replace(COLS=columns, num_warps=columns // 16)
    options = launch.options(H=H, PACK=pack, VECTOR=16 // kinds[0].itemsize, PRECISION="tf32x3", TANH=tanh)
    tiles, sizes = cdiv(rows, launch.ROWS), (rows, period // pack, scale)
    workers = launch.workers(tiles)
    forward = Planned(narrow, (tiles,), *sizes, **options)
    backward = Planned(narrow_backward, (workers,), steps, *sizes, SHARED=steps > 0, **options)
    return _NarrowPlan(forward, backward, workers * pack)


_TILE = {"VALUES": 2048, "num_warps": 4}


@launched
@triton.jit
def _add_kept(x, y, keep, out, total, drawn, scale, SHARED: tl.constexpr, VALUES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    live = at < total
    stays = tl.load(keep + (at % drawn if SHARED else at), mask=live, other=0)
    value = tl.where(stays != 0, tl.load(y + at, mask=live, other=0.0).to(tl.float32) * scale, 0.0)
    if x is not None:
        value += tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=live)


class DroppedResidual(torch.autograd.Function):
    """`dropped_residual` in one kernel each way; the gradient of x is the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, keep: Tensor, rate: float) -> Tensor:
        keep = keep.contiguous().view(torch.uint8)
        ctx.save_for_backward(keep)
        ctx.rate, ctx.dtype = rate, y.dtype
        return _launched(x.contiguous(), y.contiguous(), keep, rate, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return dout, _launched(None, dout.contiguous(), keep, ctx.rate, ctx.dtype), None, None


def _launched(x: Tensor | None, y: Tensor, keep: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    out = torch.empty(y.shape, dtype=dtype, device=y.device)
    shared = keep.numel() < y.numel()
    grid = (cdiv(y.numel(), _TILE["VALUES"]),)
    _add_kept[grid](x, y, keep, out, y.numel(), keep.numel(), 1 / (1 - rate), SHARED=shared, **_TILE)
    return out
