"""Batch norm in training and RMS norm on the GPU; batch norm is one pass for statistics and one to apply them.

A program of batch norm owns some columns and every k-th tile of rows for k programs. It writes its sums as one row of
`partial`; these rows are merged in a fixed order: the same input gives the same bits. Up to `_NARROW` columns every
program of the second pass merges them by itself, which is cheaper than one more launch. Backward has the same passes.

A running norm normalises by the running averages, which a kernel between the passes moves. Of its four rows of
statistics the first two are those of batch norm, the other two the batch's own mean and the share of the batch in the
averages that gradients go through, 0 for averages that are constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.dispatch import once_differentiable
from compressm.ops.launching_triton import Planned, kinds_of, launched, plan_of
from compressm.ops.memory import Launch, cdiv, next_power_of_2, rows_of
from compressm.ops.sums_triton import column_sums

_NARROW = 32


@triton.jit
def _column(pointer, col, inside):
    return tl.load(pointer + col, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _merged(
    x, partial, tokens, programs, col, inside,
    COUNTED: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Mean and variance of all rows from those of each program (Chan et al. 1979).

    COUNTED: each program also wrote its number of rows, and its mean is not relative to the first row of x.
    """
    zeroth = _column(partial, col, inside)
    tiles = tl.cdiv(tokens, ROWS)
    one = tl.zeros((CHUNK, col.shape[0]), tl.float32)
    two = tl.zeros((CHUNK, col.shape[0]), tl.float32)
    for start in tl.range(0, programs, CHUNK, loop_unroll_factor=2):
        program = start + tl.arange(0, CHUNK)
        live = (program < programs)[:, None] & inside[None, :]
        at = partial + program[:, None] * ((3 if COUNTED else 2) * H) + col[None, :]
        mean, spread = tl.load(at, mask=live, other=0.0), tl.load(at + H, mask=live, other=0.0)
        if COUNTED:
            count = tl.load(at + 2 * H, mask=live, other=0.0)
        else:
            # Program p owns the tiles p, p + programs, …; only the last tile of all may be short.
            missing = tl.where(program == (tiles - 1) % programs, tiles * ROWS - tokens, 0)
            count = ((tiles - program + programs - 1) // programs * ROWS - missing).to(tl.float32)[:, None]
        off = tl.where(live, mean - zeroth[None, :], 0.0)
        one += count * off
        two += spread + count * off * off
    count = tokens.to(tl.float32)
    off = tl.sum(one, 0) / count
    variance = tl.maximum(tl.sum(two, 0) / count - off * off, 0.0)
    return (zeroth if COUNTED else _column(x, col, inside) + zeroth) + off, variance


@triton.jit
def _track(running, batch, momentum, col, inside, value):
    """running ← running + share (value − running); without a momentum, share is 1 / batch."""
    share = 1.0 / batch.to(tl.float32) if momentum is None else momentum
    before = _column(running, col, inside)
    tl.store(running + col, (before + share * (value - before)).to(running.dtype.element_ty), mask=inside)


@triton.jit
def _move(running, share, col, inside, value):
    """running ← running + share (value − running), which is returned too."""
    before = _column(running, col, inside)
    after = before + share * (value - before)
    tl.store(running + col, after.to(running.dtype.element_ty), mask=inside)
    return after


@triton.jit
def _settle(
    mean, variance, statistics, zero, running_mean, running_var, batch, momentum, eps, tokens, col, inside,
    AVERAGES: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Write once for all programs: the statistics, the running statistics, and a zero if asked for.

    AVERAGES: 0 for batch norm; for a running norm 1 if gradients take the averages as constants, 2 if they go through.
    """
    if AVERAGES > 0:
        share = tl.where(batch == 1, 1.0, momentum)
        tl.store(statistics + 2 * H + col, mean, mask=inside)
        through = share if AVERAGES == 2 else 0.0
        tl.store(statistics + 3 * H + col, tl.zeros(col.shape, tl.float32) + through, mask=inside)
        mean = _move(running_mean, share, col, inside, mean)
        variance = _move(running_var, share, col, inside, variance)
    else:
        count = tokens.to(tl.float32)
        _track(running_mean, batch, momentum, col, inside, mean)
        _track(running_var, batch, momentum, col, inside, variance * (count / (count - 1.0)))
    tl.store(statistics + col, mean, mask=inside)
    tl.store(statistics + H + col, tl.rsqrt(variance + eps), mask=inside)
    if zero is not None:
        tl.store(zero, 0.0)


@launched
@triton.jit(do_not_specialize=["tokens"])
def _statistics(
    x, partial, batches, tokens, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Mean, relative to the first row of x, and sum of squared deviations of each program's rows (Welford 1962)."""
    program, programs = tl.program_id(0) // tl.cdiv(H, COLS), tl.num_programs(0) // tl.cdiv(H, COLS)
    row, col = tl.arange(0, ROWS), tl.program_id(0) % tl.cdiv(H, COLS) * COLS + tl.arange(0, COLS)
    inside = col < H
    at = row[:, None] * H + col[None, :]
    # Subtracting one value of the column keeps the digits below a mean that is far from zero.
    first = _column(x, col, inside)[None, :]
    count = tl.zeros((ROWS, 1), tl.float32)
    mean = tl.zeros((ROWS, COLS), tl.float32)
    spread = tl.zeros((ROWS, COLS), tl.float32)
    for tile in tl.range(program, tl.cdiv(tokens, ROWS), programs, num_stages=STAGES):
        start = tile * ROWS
        live = (row < tokens - start)[:, None]
        value = tl.load(x + start.to(tl.int64) * H + at, mask=live & inside[None, :], other=0.0).to(tl.float32) - first
        count += live.to(tl.float32)
        off = tl.where(live, value - mean, 0.0)
        mean += off * (1.0 / tl.maximum(count, 1.0))
        spread += off * (value - mean)
    centre = tl.sum(count * mean, 0) / tl.sum(tl.sum(count, 1), 0)
    off = mean - centre[None, :]
    to = partial + program * (2 * H) + col
    tl.store(to, centre, mask=inside)
    tl.store(to + H, tl.sum(spread + count * off * off, 0), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@launched
@triton.jit(do_not_specialize=["tokens", "programs"])
def _combine(
    x, partial, statistics, zero, running_mean, running_var, batches, momentum, eps, tokens, programs,
    COUNTED: tl.constexpr, AVERAGES: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = col < H
    mean, variance = _merged(x, partial, tokens, programs, col, inside, COUNTED, H, ROWS, CHUNK)
    # The kernel that counts the batches runs before this one, or after it if rows were COUNTED.
    batch = tl.load(batches) + (1 if COUNTED else 0)
    _settle(
        mean, variance, statistics, zero, running_mean, running_var, batch, momentum, eps, tokens, col, inside,
        AVERAGES, H,
    )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["tokens", "programs"])
def _apply(
    x, weight, bias, u, partial, statistics, zero, running_mean, running_var, batches, momentum, eps, tokens, programs,
    COUNTED: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """u = (x − μ) / √(σ² + ε) · weight + bias; with `partial`, μ and σ² are merged first."""
    start = tl.program_id(0) // tl.cdiv(H, COLS) * ROWS
    row, col = tl.arange(0, ROWS), tl.program_id(0) % tl.cdiv(H, COLS) * COLS + tl.arange(0, COLS)
    inside = col < H
    at, live = row[:, None] * H + col[None, :], (row < tokens - start)[:, None] & inside[None, :]
    here = start.to(tl.int64) * H
    value = tl.load(x + here + at, mask=live, other=0.0).to(tl.float32)
    if partial is not None:
        mean, variance = _merged(x, partial, tokens, programs, col, inside, False, H, ROWS, CHUNK)
        scale = tl.rsqrt(variance + eps)
        if start == 0:
            batch = tl.load(batches)
            _settle(
                mean, variance, statistics, zero, running_mean, running_var, batch, momentum, eps, tokens, col,
                inside, 0, H,
            )  # fmt: skip
    else:
        mean, scale = _column(statistics, col, inside), _column(statistics + H, col, inside)
    if weight is not None:
        scale *= _column(weight, col, inside)
    if COUNTED and tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)
    value = (value - mean[None, :]) * scale[None, :]
    if bias is not None:
        value += _column(bias, col, inside)[None, :]
    tl.store(u + here + at, value.to(u.dtype.element_ty), mask=live)


@triton.jit
def _arriving(du, dlink, D, here, at, live):
    """The gradient that arrives at u: du + D ⊙ dlink."""
    total = tl.zeros(at.shape, tl.float32)
    if du is not None:
        total += tl.load(du + here + at, mask=live, other=0.0).to(tl.float32)
    if dlink is not None:
        total += D * tl.load(dlink + here + at, mask=live, other=0.0).to(tl.float32)
    return total


@launched
@triton.jit(do_not_specialize=["tokens"])
def _backward_sums(
    du, dlink, skip, x, statistics, partial, tokens, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g x̂ over each program's rows, g = du + D ⊙ dlink."""
    program, programs = tl.program_id(0) // tl.cdiv(H, COLS), tl.num_programs(0) // tl.cdiv(H, COLS)
    row, col = tl.arange(0, ROWS), tl.program_id(0) % tl.cdiv(H, COLS) * COLS + tl.arange(0, COLS)
    inside = col < H
    at = row[:, None] * H + col[None, :]
    mean, scale = _column(statistics, col, inside)[None, :], _column(statistics + H, col, inside)[None, :]
    D = _column(skip, col, inside)[None, :] if skip is not None else 1.0
    plain = tl.zeros((ROWS, COLS), tl.float32)
    along = tl.zeros((ROWS, COLS), tl.float32)
    for tile in tl.range(program, tl.cdiv(tokens, ROWS), programs, num_stages=STAGES):
        start = tile * ROWS
        here, live = start.to(tl.int64) * H, (row < tokens - start)[:, None] & inside[None, :]
        value = tl.load(x + here + at, mask=live, other=0.0).to(tl.float32)
        gradient = _arriving(du, dlink, D, here, at, live)
        plain += gradient
        along += gradient * (value - mean)
    to = partial + program * (2 * H) + col
    tl.store(to, tl.sum(plain, 0), mask=inside)
    tl.store(to + H, tl.sum(along * scale, 0), mask=inside)


@triton.jit
def _hidden(weight, bias, col, inside):
    """The columns where u = weight x̂ + bias does not determine x̂, or not without losing two digits."""
    least = 0.01 * tl.abs(_column(bias, col, inside)) if bias is not None else 0.0
    return inside & (tl.abs(_column(weight, col, inside)) <= least)


@triton.jit
def _sum_along(
    du, dlink, D, x, statistics, tokens, col, inside, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Σ g x̂ over all rows."""
    row = tl.arange(0, ROWS)
    mean, scale = _column(statistics, col, inside), _column(statistics + H, col, inside)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for tile in tl.range(0, tl.cdiv(tokens, ROWS)):
        start = tile * ROWS
        here, live = start.to(tl.int64) * H, (row < tokens - start)[:, None] & inside[None, :]
        at = row[:, None] * H + col[None, :]
        value = tl.load(x + here + at, mask=live, other=0.0).to(tl.float32)
        total += _arriving(du, dlink, D[None, :], here, at, live) * (value - mean[None, :])
    return tl.sum(total, 0) * scale


@launched
@triton.jit(do_not_specialize=["tokens"])
def _known_sums(
    drive, link, du, dlink, skip, x, weight, bias, statistics, sums, tokens,
    H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g x̂ from the sums that came with du and dlink: Σ of each, and Σ of each times u."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = col < H
    D = _column(skip, col, inside)
    plain = _column(drive, col, inside) + D * _column(link, col, inside)
    along = _column(drive + H, col, inside) + D * _column(link + H, col, inside)
    if weight is not None:
        hidden = _hidden(weight, bias, col, inside)
        if bias is not None:
            along -= _column(bias, col, inside) * plain
        along /= tl.where(hidden | (col >= H), 1.0, _column(weight, col, inside))
        if tl.max(hidden.to(tl.int32), 0) > 0:
            made = _sum_along(du, dlink, D, x, statistics, tokens, col, inside, H, ROWS, COLS)
            along = tl.where(hidden, made, along)
    tl.store(sums + col, plain, mask=inside)
    tl.store(sums + H + col, along, mask=inside)


@triton.jit
def _summed(partial, programs, col, inside, H: tl.constexpr, CHUNK: tl.constexpr):
    total = tl.zeros((CHUNK, col.shape[0]), tl.float32)
    for start in tl.range(0, programs, CHUNK, loop_unroll_factor=2):
        program = start + tl.arange(0, CHUNK)
        live = (program < programs)[:, None] & inside[None, :]
        total += tl.load(partial + program[:, None] * (2 * H) + col[None, :], mask=live, other=0.0)
    return tl.sum(total, 0)


@launched
@triton.jit(do_not_specialize=["tokens", "programs", "steps"])
def _backward_apply(
    du, dlink, skip, residual, x, weight, statistics, partial, sums, dx, tokens, programs, steps,
    SHARED: tl.constexpr, AVERAGED: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """dx = weight / √(σ² + ε) · (g − mean(g) − x̂ mean(g x̂)) + residual; with `partial` the sums are merged first.

    SHARED: `steps` steps share one row of `residual`. AVERAGED: of a running norm, whose x̂ is by the averages; both
    means count by the share of the batch in them, and x̂ before the second is centred by the batch's own mean.
    """
    start = tl.program_id(0) // tl.cdiv(H, COLS) * ROWS
    row, col = tl.arange(0, ROWS), tl.program_id(0) % tl.cdiv(H, COLS) * COLS + tl.arange(0, COLS)
    inside = col < H
    at, live = row[:, None] * H + col[None, :], (row < tokens - start)[:, None] & inside[None, :]
    here = start.to(tl.int64) * H
    mean, scale = _column(statistics, col, inside), _column(statistics + H, col, inside)
    D = _column(skip, col, inside)[None, :] if skip is not None else 1.0
    value = tl.load(x + here + at, mask=live, other=0.0).to(tl.float32)
    gradient = _arriving(du, dlink, D, here, at, live)
    if partial is not None:
        plain = _summed(partial, programs, col, inside, H, CHUNK)
        along = _summed(partial + H, programs, col, inside, H, CHUNK)
        if start == 0:
            tl.store(sums + col, plain, mask=inside)
            tl.store(sums + H + col, along, mask=inside)
    else:
        plain, along = _column(sums, col, inside), _column(sums + H, col, inside)
    count = tokens.to(tl.float32)
    if AVERAGED:
        mean, share = _column(statistics + 2 * H, col, inside), _column(statistics + 3 * H, col, inside)
        plain *= share
        along *= share
    outer = scale * _column(weight, col, inside) if weight is not None else scale
    normal = (value - mean[None, :]) * scale[None, :]
    value = outer[None, :] * (gradient - (plain / count)[None, :] - normal * (along / count)[None, :])
    if residual is not None:
        if SHARED:
            shared = ((start + row) // steps)[:, None] * H + col[None, :]
            value += tl.load(residual + shared, mask=live, other=0.0).to(tl.float32)
        else:
            value += tl.load(residual + here + at, mask=live, other=0.0).to(tl.float32)
    tl.store(dx + here + at, value.to(dx.dtype.element_ty), mask=live)


def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor, Tensor],
    momentum: float | None,
    eps: float,
    moments: Tensor | None,
    zero: Tensor | None = None,
    *,
    through: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """u and the statistics that its gradient needs; x is dense, and H > 32 where its moments are given.

    `through` is None for batch norm; a running norm says by it if gradients go through its averages.
    """
    H, averages = x.shape[-1], 0 if through is None else 1 + through
    rows = 4 if averages else 2
    u, statistics = torch.empty_like(x), torch.empty(rows, H, dtype=torch.float32, device=x.device)
    kinds = kinds_of(x, weight, bias, *running, zero)
    counted = 0 if moments is None else len(moments)
    plan = _forward_plan(x.numel() // H, H, counted, momentum, eps, averages, kinds, x.device)
    if moments is None:
        moments = torch.empty(plan.programs, 2, H, dtype=torch.float32, device=x.device)
    if plan.statistics is not None:
        plan.statistics(x, moments, running[2])
    if plan.combine is not None:
        plan.combine(x, moments, statistics, zero, *running)
        plan.apply(x, weight, bias, u, None, statistics, zero, *running)
    else:
        plan.apply(x, weight, bias, u, moments, statistics, zero, *running)
    return u, statistics


def norm_gradient(
    du: Tensor | None,
    dlink: Tensor | None,
    dresidual: Tensor | None,
    known: tuple[Tensor, Tensor] | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    skip: Tensor | None,
    statistics: Tensor,
    *,
    of_x: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """The gradient of x, if wanted, and the sums Σ g and Σ g x̂; `known` are the sums that came with dlink and du."""
    H = x.shape[-1]
    residual, steps = (None, 0) if dresidual is None else rows_of(dresidual)
    kinds = kinds_of(du, dlink, skip, residual, x, weight, bias)
    averaged = len(statistics) == 4
    plan = _backward_plan(x.numel() // H, H, steps, known is not None, of_x, averaged, kinds, x.device)
    partial = None
    if known is not None:
        link, drive = known
        sums = torch.empty_like(statistics[:2])
        plan.sums(drive, link, du, dlink, skip, x, weight, bias, statistics, sums)
    else:
        partial = torch.empty(plan.programs, 2, H, dtype=torch.float32, device=x.device)
        plan.sums(du, dlink, skip, x, statistics, partial)
        sums = torch.empty_like(statistics[:2]) if plan.merges else column_sums(partial.view(-1, 2 * H)).view(2, H)
    if not of_x:
        return None, sums
    dx = torch.empty_like(x)
    plan.apply(du, dlink, skip, residual, x, weight, statistics, partial if plan.merges else None, sums, dx)
    return dx, sums


class _ForwardPlan(NamedTuple):
    """The kernels of the forward pass; up to `_NARROW` columns `apply` does the work of `combine` for batch norm."""

    programs: int
    statistics: Planned | None
    combine: Planned | None
    apply: Planned


class _BackwardPlan(NamedTuple):
    """The kernels of the backward pass; `apply` also merges the sums of all programs if it `merges`."""

    programs: int
    merges: bool
    sums: Planned
    apply: Planned


@plan_of
def _forward_plan(
    tokens: int,
    H: int,
    counted: int,
    momentum: float | None,
    eps: float,
    averages: int,
    kinds: tuple[Any, ...],
    device: torch.device,
) -> _ForwardPlan:
    tiles, columns, programs, options = _tiles(tokens, H)
    sizes = (momentum, eps, tokens, counted or programs)
    statistics = combine = None
    if not counted:
        stages = 3 if H > _NARROW else 1
        statistics = Planned(_statistics, (programs * columns,), tokens, STAGES=stages, **options)
    # Programs that read the averages must not run beside the one that moves them.
    if H > _NARROW or averages:
        few = options | {"COLS": 8, "CHUNK": 256, "num_warps": 8}
        combine = Planned(_combine, (cdiv(H, 8),), *sizes, COUNTED=counted > 0, AVERAGES=averages, **few)
    apply = Planned(_apply, (tiles * columns,), *sizes, COUNTED=counted > 0, CHUNK=128, **options)
    return _ForwardPlan(programs, statistics, combine, apply)


@plan_of
def _backward_plan(
    tokens: int,
    H: int,
    steps: int,
    known: bool,
    of_x: bool,
    averaged: bool,
    kinds: tuple[Any, ...],
    device: torch.device,
) -> _BackwardPlan:
    tiles, columns, programs, options = _tiles(tokens, H)
    merges = not known and H <= _NARROW and of_x
    if known:
        sums = Planned(_known_sums, (cdiv(H, 16),), tokens, H=H, ROWS=128, COLS=16, num_warps=4)
    else:
        stages = 3 if H > _NARROW else 1
        sums = Planned(_backward_sums, (programs * columns,), tokens, STAGES=stages, **options)
    sizes = (tokens, programs, steps)
    variant = {"SHARED": steps > 0, "AVERAGED": averaged, "CHUNK": 128}
    apply = Planned(_backward_apply, (tiles * columns,), *sizes, **variant, **options)
    return _BackwardPlan(programs, merges, sums, apply)


def _tiles(tokens: int, H: int) -> tuple[int, int, int, dict[str, Any]]:
    """Tiles of rows, blocks of columns, programs with a row of sums each, and the options of the kernels."""
    columns = min(next_power_of_2(H), 128)
    # Measured on an H200.
    launch = Launch(ROWS=4096 // columns, COLS=columns, num_warps=8, programs=128)
    if H > _NARROW:
        launch = Launch(ROWS=2048 // columns, COLS=columns, num_warps=4, programs=132)
    tiles = cdiv(tokens, launch.ROWS)
    return tiles, cdiv(H, columns), launch.workers(tiles), launch.options(H=H)


class FusedBatchNorm(torch.autograd.Function):
    """Batch norm, or a running norm: u, x again, and zeros for two links; all gradients arrive together and are added.

    The zeros take no memory. With u₀ the value of u as a constant, the zeros of the first link stand for D ⊙ (u − u₀)
    and receive the gradient of D ⊙ u; the zeros of the second link stand for u − u₀.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        skip: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
        batches: Tensor,
        momentum: float | None,
        eps: float,
        moments: Tensor | None = None,
        through: bool | None = None,
    ) -> tuple[Tensor | None, ...]:
        dense, H = x.contiguous(), x.shape[-1]
        zero, moments = x.new_empty(1, dtype=torch.float32), moments if H > _NARROW else None
        running = (running_mean, running_var, batches)
        u, statistics = normalise(dense, weight, bias, running, momentum, eps, moments, zero, through=through)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dense, weight, bias, skip, statistics)
        if skip is None:
            return u, x, None, None, None, None
        carrier, totals = zero.view(x.dtype)[:1].expand(x.shape), zero.expand(2, H)
        if H <= _NARROW:
            return u, x, carrier, None, None, None
        return u, x, carrier, totals, carrier.view_as(carrier), totals.view_as(totals)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, skip, statistics = ctx.saved_tensors
        du, dresidual, dlink, link, ddrive, drive = grads
        # A gradient that reaches u directly comes without sums.
        known = (link, drive) if du is None and link is not None and drive is not None else None
        du = ddrive if du is None else du if ddrive is None else du + ddrive
        du, dlink = (None if grad is None else grad.contiguous() for grad in (du, dlink))
        if du is None and dlink is None:
            return dresidual, *[None] * 10
        given = (known, x, weight, bias, None if dlink is None else skip, statistics)
        dx, sums = norm_gradient(du, dlink, dresidual, *given, of_x=ctx.needs_input_grad[0])
        dbias = None if bias is None else sums[0].to(bias.dtype)
        return dx, None if weight is None else sums[1].to(weight.dtype), dbias, *[None] * 8


_VALUES = 4096  # numbers in a tile
_PROGRAMS = 1024  # programs of the backward pass, each with a row of sums


@launched
@triton.jit
def _normalise(x, weight, out, rows, width, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    live = (row < rows)[:, None] & (col < width)[None, :]
    at = row[:, None] * width + col[None, :]
    value = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    value = value * scale[:, None]
    if weight is not None:
        value *= tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=live)


@launched
@triton.jit
def _normalise_back(x, weight, dout, beside, dx, sums, rows, width, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    """dx = s (g − n mean(g n)) + beside, where n = x s and g = weight dout; dweight is the sum of dout n."""
    col = tl.arange(0, COLS)
    factor = tl.full((COLS,), 1.0, tl.float32)
    if weight is not None:
        factor = tl.load(weight + col, mask=col < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        live = (row < rows)[:, None] & (col < width)[None, :]
        at = row[:, None] * width + col[None, :]
        value = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
        given = tl.load(dout + at, mask=live, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        value *= scale
        total += given * value
        given *= factor[None, :]
        mean = (tl.sum(given * value, 1) / width)[:, None]
        change = scale * (given - value * mean)
        if beside is not None:
            change += tl.load(beside + at, mask=live, other=0.0).to(tl.float32)
        tl.store(dx + at, change.to(dx.dtype.element_ty), mask=live)
    if sums is not None:
        tl.store(sums + tl.program_id(0) * width + col, tl.sum(total, 0), mask=col < width)


class RMSNormRows(torch.autograd.Function):
    """RMS norm as in `plain_rms_norm`, and x again: gradients of other uses of x are added in the same pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        dense = x.contiguous()
        out, width = torch.empty_like(dense), dense.shape[-1]
        plan = _row_plan(dense.numel() // width, width, eps, kinds_of(dense, weight), dense.device)
        plan.forward(dense, weight, out)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(dense, weight)
        ctx.eps = eps
        return out, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, beside: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if dout is None:
            return beside, None, None
        x, weight = ctx.saved_tensors
        dx, width = torch.empty_like(x), x.shape[-1]
        dout, beside = dout.contiguous(), None if beside is None else beside.contiguous()
        plan = _row_plan(x.numel() // width, width, ctx.eps, kinds_of(x, weight), x.device)
        sums = None if weight is None else torch.empty(plan.programs, width, dtype=torch.float32, device=x.device)
        (plan.backward if beside is None else plan.backward_beside)(x, weight, dout, beside, dx, sums)
        return dx, None if sums is None else column_sums(sums).to(weight.dtype), None


class _RowPlan(NamedTuple):
    """The kernels of RMS norm; there are two for the gradient, without and with another one to add."""

    programs: int
    forward: Planned
    backward: Planned
    backward_beside: Planned


@plan_of
def _row_plan(rows: int, width: int, eps: float, kinds: tuple[Any, ...], device: torch.device) -> _RowPlan:
    COLS = next_power_of_2(width)
    tile = {"ROWS": max(1, _VALUES // COLS), "COLS": COLS, "num_warps": 4}
    tiles = cdiv(rows, tile["ROWS"])
    programs = min(_PROGRAMS, tiles)
    forward = Planned(_normalise, (tiles,), rows, width, eps, **tile)
    back = (Planned(_normalise_back, (programs,), rows, width, eps, **tile) for _ in range(2))
    return _RowPlan(programs, forward, *back)
