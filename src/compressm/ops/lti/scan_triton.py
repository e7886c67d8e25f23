"""The recurrence on the GPU, alone or driven by B u, in segments of time that run in parallel.

A thread owns a mode in one segment of one sequence and walks through it step by step, loading a few steps ahead. A
first kernel finds the state at the end of every segment, started from zero; the second starts each segment with the
state that all earlier segments leave. Inside a span of steps λ is multiplied up in float32; from span to span the state
is carried in float64 by powers formed from log λ, so that slow poles keep their phase. Inputs and outputs are any
float. The backward pass is the same walk from the end with λ̄.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compressm.ops.block.norm import Link
from compressm.ops.dispatch import once_differentiable
from compressm.ops.launching_triton import Planned, kinds_of, launched, plan_of
from compressm.ops.memory import cdiv, product_in
from compressm.ops.sums_triton import column_sums


class ScanLaunch(NamedTuple):
    """The modes of a program, the steps that are loaded before the first is used, and the warps."""

    MODES: int
    ROWS: int
    num_warps: int


# Launches for up to `_FEW` modes (True) and more: loading further ahead takes registers, so fewer programs run at once.
_FEW = 64
_FORWARD = {True: ScanLaunch(64, 8, 2), False: ScanLaunch(64, 8, 2)}
_ENDS = {True: ScanLaunch(64, 8, 2), False: ScanLaunch(64, 4, 2)}
_BACKWARD = {True: ScanLaunch(64, 4, 2), False: ScanLaunch(64, 4, 2)}
_SPAN = 64  # steps between two states in float64: at most 64 · 6e-8 is lost inside
_THREADS = 160_000  # threads that a launch should have if the sequence is long enough
_SEGMENTS = 128  # segments at most: each reads the ends of all earlier ones


@triton.jit
def _poles(logs, mode, n):
    log_modulus = tl.load(logs + mode, mask=mode < n, other=-1.0).to(tl.float64)
    return log_modulus, tl.load(logs + n + mode, mask=mode < n, other=0.0).to(tl.float64)


@launched
@triton.jit(do_not_specialize=["n", "segment"])
def _powers(logs, table, n, segment, STRIDE: tl.constexpr, SPAN: tl.constexpr, MODES: tl.constexpr):
    """Write λ, λ^SPAN and λ^segment in float64, (3, 2, n): float64 sines are too slow to compute in every program.

    A STRIDE replaces λ by λ^STRIDE.
    """
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    log_modulus, phase = _poles(logs, mode, n)
    k = tl.program_id(1)
    exponent = STRIDE * tl.where(k == 0, 1, tl.where(k == 1, SPAN, segment)).to(tl.float64)
    modulus, at = tl.exp(log_modulus * exponent), table + k * 2 * n + mode
    tl.store(at, modulus * tl.cos(phase * exponent), mask=mode < n)
    tl.store(at + n, modulus * tl.sin(phase * exponent), mask=mode < n)


@triton.jit
def _power(table, k: tl.constexpr, mode, n, SIGN: tl.constexpr):
    """Load one row of the table; SIGN −1 conjugates it."""
    at = table + k * 2 * n + mode
    return tl.load(at, mask=mode < n, other=0.0), SIGN * tl.load(at + n, mask=mode < n, other=0.0)


@triton.jit
def _times(a_re, a_im, b_re, b_im):
    return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re


@triton.jit
def _rows(source, mode, stride, n, start, stop, inside, FLIP: tl.constexpr, ROWS: tl.constexpr):
    """Load real and imaginary parts of the next ROWS steps, from the row at `source` on; 0 from `stop` on."""
    re, im = (), ()
    for k in tl.static_range(ROWS):
        live = inside & (start + k < stop)
        re += (tl.load(source + k * stride + mode, mask=live, other=0.0).to(tl.float32),)
        im += (FLIP * tl.load(source + k * stride + n + mode, mask=live, other=0.0).to(tl.float32),)
    return re, im


@triton.jit
def _carried(c_re, c_im, ends, table, earlier, batch, mode, n, SIGN: tl.constexpr):
    """The state at the start of a segment: the given state and the ends of the `earlier` segments, all decayed."""
    s_re, s_im = _power(table, 2, mode, n, SIGN)
    stride = tl.num_programs(2).to(tl.int64) * 2 * n
    ends += batch * 2 * n
    for start in range(0, earlier, 8):
        e_re, e_im = _rows(ends, mode, stride, n, start, earlier, mode < n, 1, 8)
        for k in tl.static_range(8):
            t_re, t_im = _times(s_re, s_im, c_re, c_im)
            c_re = tl.where(start + k < earlier, t_re + e_re[k].to(tl.float64), c_re)
            c_im = tl.where(start + k < earlier, t_im + e_im[k].to(tl.float64), c_im)
        ends += 8 * stride
    return c_re, c_im


@triton.jit
def _next_span(c_re, c_im, l_re, l_im, s_re, s_im):
    """The state after a span: the carry times λ^SPAN, plus the end of the span from zero."""
    c_re, c_im = _times(s_re, s_im, c_re, c_im)
    return c_re + l_re.to(tl.float64), c_im + l_im.to(tl.float64)


@launched
@triton.jit(do_not_specialize=["length", "n", "segment"])
def _ends(x, table, last, ends, length, n, segment, SIGN: tl.constexpr, FLIP: tl.constexpr,
          HAS_LAST: tl.constexpr, MODES: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """Write the state at the end of each whole segment, started from zero: (segments − 1, batch, 2, n).

    SIGN −1 walks from the end, where `last` is added to the first step.
    """
    batch, batches = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    inside = mode < n
    q_re, q_im = _power(table, 0, mode, n, SIGN)
    s_re, s_im = _power(table, 1, mode, n, SIGN)
    o_re, o_im = q_re.to(tl.float32), q_im.to(tl.float32)
    c_re, c_im = tl.zeros((MODES,), tl.float64), tl.zeros((MODES,), tl.float64)
    v_re, v_im = tl.zeros((MODES,), tl.float32), tl.zeros((MODES,), tl.float32)
    if HAS_LAST:
        v_re = tl.load(last + batch * 2 * n + mode, mask=inside, other=0.0).to(tl.float32)
        v_im = tl.load(last + batch * 2 * n + n + mode, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(1) * segment
    stop, stride = first + segment, SIGN * 2 * n
    x += (batch * length + (first if SIGN == 1 else length - 1 - first)) * (2 * n)
    for span in range(first, stop, SPAN):
        l_re, l_im = tl.zeros((MODES,), tl.float32), tl.zeros((MODES,), tl.float32)
        for start in range(span, span + SPAN, ROWS):
            x_re, x_im = _rows(x, mode, stride, n, start, stop, inside, FLIP, ROWS)
            for k in tl.static_range(ROWS):
                l_re, l_im = _times(o_re, o_im, l_re, l_im)
                l_re, l_im = l_re + x_re[k], l_im + x_im[k]
                if HAS_LAST:
                    begin = start + k == 0
                    l_re, l_im = tl.where(begin, l_re + v_re, l_re), tl.where(begin, l_im + v_im, l_im)
            x += ROWS * stride
        c_re, c_im = _next_span(c_re, c_im, l_re, l_im, s_re, s_im)
    to = ends + (tl.program_id(1).to(tl.int64) * batches + batch) * 2 * n + mode
    tl.store(to, c_re.to(tl.float32), mask=inside)
    tl.store(to + n, c_im.to(tl.float32), mask=inside)


@launched
@triton.jit(do_not_specialize=["length", "n", "segment"])
def _forward(x, table, state, ends, h, last, length, n, segment, HAS_STATE: tl.constexpr, KEEP_LAST: tl.constexpr,
             EXCLUSIVE: tl.constexpr, FLIP: tl.constexpr, MODES: tl.constexpr, ROWS: tl.constexpr,
             SPAN: tl.constexpr):  # fmt: skip
    """Write h[t] = l[t] + λᵗ c: the recurrence inside the span, and the state before it. EXCLUSIVE writes h[t − 1]."""
    batch = tl.program_id(2).to(tl.int64)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    inside = mode < n
    q_re, q_im = _power(table, 0, mode, n, 1)
    s_re, s_im = _power(table, 1, mode, n, 1)
    o_re, o_im = q_re.to(tl.float32), q_im.to(tl.float32)
    c_re, c_im = tl.zeros((MODES,), tl.float64), tl.zeros((MODES,), tl.float64)
    at_state = batch * 2 * n + mode
    if HAS_STATE:
        c_re = tl.load(state + at_state, mask=inside, other=0.0).to(tl.float64)
        c_im = tl.load(state + at_state + n, mask=inside, other=0.0).to(tl.float64)
    c_re, c_im = _carried(c_re, c_im, ends, table, tl.program_id(1), batch, mode, n, 1)
    first = tl.program_id(1) * segment
    stop = tl.minimum(first + segment, length)
    x += (batch * length + first) * (2 * n)
    h += (batch * length + first) * (2 * n)
    for span in range(first, stop, SPAN):
        l_re, l_im = tl.zeros((MODES,), tl.float32), tl.zeros((MODES,), tl.float32)
        f_re, f_im = c_re.to(tl.float32), c_im.to(tl.float32)
        for start in range(span, tl.minimum(span + SPAN, stop), ROWS):
            x_re, x_im = _rows(x, mode, 2 * n, n, start, stop, inside, 1, ROWS)
            for k in tl.static_range(ROWS):
                e_re, e_im, live = l_re + f_re, l_im + f_im, inside & (start + k < stop)
                l_re, l_im = _times(o_re, o_im, l_re, l_im)
                l_re, l_im = l_re + x_re[k], l_im + x_im[k]
                f_re, f_im = _times(o_re, o_im, f_re, f_im)
                h_re, h_im = l_re + f_re, l_im + f_im
                # Here a branch is cheaper than two selections; in the backward pass selections are cheaper.
                if KEEP_LAST and start + k == length - 1:
                    tl.store(last + at_state, h_re, mask=inside)
                    tl.store(last + at_state + n, h_im, mask=inside)
                if EXCLUSIVE:
                    h_re, h_im = e_re, e_im
                tl.store(h + k * 2 * n + mode, h_re.to(h.dtype.element_ty), mask=live)
                tl.store(h + k * 2 * n + n + mode, (FLIP * h_im).to(h.dtype.element_ty), mask=live)
            x += ROWS * 2 * n
            h += ROWS * 2 * n
        c_re, c_im = _next_span(c_re, c_im, l_re, l_im, s_re, s_im)


@launched
@triton.jit(do_not_specialize=["length", "n", "segment"])
def _backward(dh, h, table, state, dlast, ends, dx, dlog, dstate, length, n, segment, HAS_STATE: tl.constexpr,
              HAS_LAST: tl.constexpr, SUMMED: tl.constexpr, EXCLUSIVE: tl.constexpr, FLIP: tl.constexpr,
              MODES: tl.constexpr, ROWS: tl.constexpr, SPAN: tl.constexpr):  # fmt: skip
    """g[t] = dh[t] + λ̄ g[t+1] from the end, and Σ conj(g[t]) λ h[t−1] on the way, one row of `dlog` a segment.

    EXCLUSIVE: h holds h[t − 1] at t and dh its gradient, so that the gradient of x[t] is g[t + 1]. SUMMED adds Σ g[t].
    """
    batch, batches = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    mode = tl.program_id(0) * MODES + tl.arange(0, MODES)
    inside = mode < n
    q_re, q_im = _power(table, 0, mode, n, -1)
    s_re, s_im = _power(table, 1, mode, n, -1)
    o_re, o_im = q_re.to(tl.float32), q_im.to(tl.float32)
    at_state, earlier = batch * 2 * n + mode, tl.program_id(1)
    c_re, c_im = tl.zeros((MODES,), tl.float64), tl.zeros((MODES,), tl.float64)
    v_re, v_im = tl.zeros((MODES,), tl.float32), tl.zeros((MODES,), tl.float32)
    if HAS_LAST:
        v_re = tl.load(dlast + at_state, mask=inside, other=0.0).to(tl.float32)
        v_im = tl.load(dlast + at_state + n, mask=inside, other=0.0).to(tl.float32)
    c_re, c_im = _carried(c_re, c_im, ends, table, earlier, batch, mode, n, -1)
    sum_re, sum_im = tl.zeros((MODES,), tl.float32), tl.zeros((MODES,), tl.float32)
    w_re, w_im = tl.zeros((MODES,), tl.float32), tl.zeros((MODES,), tl.float32)
    all_re, all_im = tl.zeros((MODES,), tl.float32), tl.zeros((MODES,), tl.float32)
    first = earlier * segment
    stop = tl.minimum(first + segment, length)
    known = stop if EXCLUSIVE else tl.minimum(stop, length - 1)
    row = (batch * length + length - 1 - first) * (2 * n)
    dh += row
    dx += row
    # The state one step earlier; before the first step it is the given state, or zero.
    h += row - (0 if EXCLUSIVE else 2 * n)
    for span in range(first, stop, SPAN):
        l_re, l_im = tl.zeros((MODES,), tl.float32), tl.zeros((MODES,), tl.float32)
        f_re, f_im = c_re.to(tl.float32), c_im.to(tl.float32)
        for start in range(span, tl.minimum(span + SPAN, stop), ROWS):
            d_re, d_im = _rows(dh, mode, -2 * n, n, start, stop, inside, FLIP, ROWS)
            b_re, b_im = _rows(h, mode, -2 * n, n, start, known, inside, FLIP, ROWS)
            for k in tl.static_range(ROWS):
                e_re, e_im, live = l_re + f_re, l_im + f_im, inside & (start + k < stop)
                l_re, l_im = _times(o_re, o_im, l_re, l_im)
                l_re, l_im = l_re + d_re[k], l_im + d_im[k]
                if HAS_LAST:
                    begin = start + k == 0
                    l_re, l_im = tl.where(begin, l_re + v_re, l_re), tl.where(begin, l_im + v_im, l_im)
                f_re, f_im = _times(o_re, o_im, f_re, f_im)
                g_re, g_im = l_re + f_re, l_im + f_im
                if HAS_STATE:
                    end = start + k == length - 1
                    w_re, w_im = tl.where(end, g_re, w_re), tl.where(end, g_im, w_im)
                if EXCLUSIVE:
                    g_re, g_im = e_re, e_im
                tl.store(dx - k * 2 * n + mode, g_re.to(dx.dtype.element_ty), mask=live)
                tl.store(dx - k * 2 * n + n + mode, g_im.to(dx.dtype.element_ty), mask=live)
                sum_re += g_re * b_re[k] + g_im * b_im[k]
                sum_im += g_re * b_im[k] - g_im * b_re[k]
                if SUMMED:
                    all_re += tl.where(start + k < stop, g_re, 0.0)
                    all_im += tl.where(start + k < stop, g_im, 0.0)
            dh -= ROWS * 2 * n
            dx -= ROWS * 2 * n
            h -= ROWS * 2 * n
        c_re, c_im = _next_span(c_re, c_im, l_re, l_im, s_re, s_im)
    if HAS_STATE and stop == length:
        if not EXCLUSIVE:
            z_re = tl.load(state + at_state, mask=inside, other=0.0).to(tl.float32)
            z_im = tl.load(state + at_state + n, mask=inside, other=0.0).to(tl.float32)
            sum_re += w_re * z_re + w_im * z_im
            sum_im += w_re * z_im - w_im * z_re
            w_re, w_im = _times(o_re, o_im, w_re, w_im)
        tl.store(dstate + at_state, w_re, mask=inside)
        tl.store(dstate + at_state + n, w_im, mask=inside)
    # ∂L/∂log|λ| = Re, ∂L/∂arg λ = −Im of the sum times λ.
    to = dlog + (earlier.to(tl.int64) * batches + batch) * (4 if SUMMED else 2) * n + mode
    tl.store(to, o_re * sum_re + o_im * sum_im, mask=inside)
    tl.store(to + n, o_im * sum_re - o_re * sum_im, mask=inside)
    if SUMMED:
        tl.store(to + 2 * n, all_re, mask=inside)
        tl.store(to + 3 * n, all_im, mask=inside)


def triton_recurrence(
    x: Tensor, log_poles: Tensor, state: Tensor | None = None, *, conjugate: bool = False, keep_last: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return every h (or its conjugate) in the dtype of x, and with `keep_last` the last h in float32."""
    return TritonRecurrence.apply(x, log_poles, state, conjugate, keep_last)


class TritonRecurrence(torch.autograd.Function):
    """The recurrence on the GPU; gradients are as in `TwoLevelRecurrence`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, log_poles: Tensor, state: Tensor | None, conjugate: bool, keep_last: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        x, state = x.contiguous(), None if state is None else state.contiguous()
        flip, learning = -1 if conjugate else 1, any(ctx.needs_input_grad)
        compile_walks(x.dtype, log_poles.dtype, x.device, flip, state is not None, keep_last, learning, False)
        walk = Walk(x, log_poles.contiguous(), flip=flip)
        h, last = walk.forward(x, state, keep_last=keep_last)
        ctx.save_for_backward(h, walk.table, state)
        ctx.walk, ctx.log_dtype = walk, log_poles.dtype
        return h, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        h, _, state = ctx.saved_tensors
        dh = torch.zeros_like(h) if grads[0] is None else grads[0].contiguous()
        dlast = None if grads[1] is None else grads[1].contiguous()
        dx, dlog, dstate, _ = ctx.walk.backward(dh, h, state, dlast)
        return dx, dlog.to(ctx.log_dtype), None if state is None else dstate.to(state.dtype), None, None


class Walk:
    """The sizes and powers of one recurrence, which both passes share.

    flip −1 stores conjugates of h; `exclusive` stores the h before every step; a step multiplies by λ^stride.
    """

    def __init__(self, x: Tensor, logs: Tensor, *, flip: int = 1, exclusive: bool = False, stride: int = 1) -> None:
        self.plan = _walk_plan(x.shape, x.dtype, logs.dtype, flip, exclusive, stride, x.device)
        self.table = torch.empty(3, 2, self.plan.n, dtype=torch.float64, device=x.device)
        self.plan.powers(logs, self.table)

    def forward(self, x: Tensor, state: Tensor | None, *, keep_last: bool) -> tuple[Tensor, Tensor | None]:
        """Return every h, and with `keep_last` the last one."""
        plan = self.plan
        h, ends = torch.empty_like(x), torch.empty(plan.ends, dtype=torch.float32, device=x.device)
        if plan.segments > 1:
            plan.end(x, self.table, ends, 1)
        last = torch.empty(plan.state, dtype=torch.float32, device=x.device) if keep_last else None
        walk = plan.forward(None if state is None else state.dtype, keep_last)
        walk(x, self.table, ends if state is None else state, ends, h, ends if last is None else last)
        return h, last

    def backward(
        self, dh: Tensor, h: Tensor, state: Tensor | None, dlast: Tensor | None, *, summed: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return ∂L/∂x, ∂L/∂log λ (2, n), ∂L/∂state, and if `summed` Σ ∂L/∂x over batch and time (2, n)."""
        plan, device = self.plan, h.device
        ends = torch.empty(plan.ends, dtype=torch.float32, device=device)
        if plan.segments > 1:
            plan.end(dh, self.table, ends, -1, dlast)
        dx = torch.empty_like(h)
        dlog = torch.empty(plan.rows, (4 if summed else 2) * plan.n, dtype=torch.float32, device=device)
        dstate = None if state is None else torch.empty(plan.state, dtype=torch.float32, device=device)
        kinds = kinds_of(state, dlast)
        walk = plan.backward(kinds[0], kinds[1], summed)
        first, last, from_start = (ends if tensor is None else tensor for tensor in (state, dlast, dstate))
        walk(dh, h, self.table, first, last, ends, dx, dlog, from_start)
        sums = column_sums(dlog).view(-1, plan.n)
        return (dx, sums[:2], dstate, sums[2:]) if summed else (dx, sums, dstate, None)


class _WalkPlan:
    """The segments of a recurrence and the kernels that walk through them, for one shape, dtype and device.

    Kernels ignore a state that they are not given: any memory stands in for it.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        log_dtype: torch.dtype,
        flip: int,
        exclusive: bool,
        stride: int,
        device: torch.device,
    ) -> None:
        batch, length, _, self.n = shape
        self.segments, segment = _segments(batch, length, self.n)
        self.rows, self.batch, self.flip = self.segments * batch, batch, flip
        self.ends, self.state = (max(1, self.segments - 1), batch, 2, self.n), (batch, 2, self.n)
        self.sizes, self.options = (length, self.n, segment), {"FLIP": flip, "EXCLUSIVE": exclusive}
        powers = {"STRIDE": stride, "SPAN": _SPAN, "MODES": 32, "num_warps": 1}
        self.powers = Planned(_powers, (cdiv(self.n, 32), 3), self.n, segment, **powers)
        self._walks: dict[object, Planned] = {}

    def end(self, x: Tensor, table: Tensor, ends: Tensor, sign: int, last: Tensor | None = None) -> None:
        """Write the states at the ends of segments."""
        kind = None if last is None else last.dtype
        walk = self._walks.get((sign, kind))
        if walk is None:
            flags = {"SIGN": sign, "FLIP": 1 if sign == 1 else self.flip, "HAS_LAST": last is not None}
            walk = self._walks[sign, kind] = self._planned(_ends, _ENDS, self.segments - 1, flags)
        walk(x, table, ends if last is None else last, ends)

    def forward(self, state: torch.dtype | None, keep_last: bool) -> Planned:
        """The forward walk, for a state of this dtype or none."""
        walk = self._walks.get((state, keep_last))
        if walk is None:
            flags = {"HAS_STATE": state is not None, "KEEP_LAST": keep_last}
            walk = self._planned(_forward, _FORWARD, self.segments, flags | self.options)
            self._walks[state, keep_last] = walk
        return walk

    def backward(self, state: torch.dtype | None, last: torch.dtype | None, summed: bool) -> Planned:
        """The walk back."""
        walk = self._walks.get((state, last, summed))
        if walk is None:
            flags = {"HAS_STATE": state is not None, "HAS_LAST": last is not None, "SUMMED": summed}
            walk = self._planned(_backward, _BACKWARD, self.segments, flags | self.options)
            self._walks[state, last, summed] = walk
        return walk

    def _planned(self, kernel: Any, launches: dict[bool, ScanLaunch], segments: int, flags: dict[str, Any]) -> Planned:
        launch = launches[self.n <= _FEW]
        grid = (cdiv(self.n, launch.MODES), segments, self.batch)
        return Planned(kernel, grid, *self.sizes, **flags, **launch._asdict(), SPAN=_SPAN)


_walk_plan = plan_of(_WalkPlan)


def _segments(batch: int, length: int, n: int) -> tuple[int, int]:
    """The number of segments, and the steps in each: whole spans."""
    wanted = max(1, min(_SEGMENTS, _THREADS // (batch * n)))
    segment = cdiv(cdiv(length, _SPAN), wanted) * _SPAN
    return cdiv(length, segment), segment


@cache
def compile_walks(
    dtype: torch.dtype,
    log_dtype: torch.dtype,
    device: torch.device,
    flip: int,
    given: bool,
    keep_last: bool,
    learning: bool,
    summed: bool,
) -> None:
    """Compile the kernels for few and for many modes on a short sequence, so that no later cut waits for a compiler.

    A variant takes about a second, once on a machine: variants that nobody asked for are left out.
    """
    for n in (1, _FEW + 1):
        x, state = (torch.zeros(1, 2 * _SPAN, 2, n, dtype=dtype, device=device), torch.zeros(1, 2, n, device=device))
        walk = Walk(x, torch.full((2, n), -1.0, dtype=log_dtype, device=device), flip=flip)
        walk.forward(x, state if given else None, keep_last=keep_last)
        if learning:
            walk.backward(x, x, state if given else None, None, summed=summed)


@launched
@triton.jit(do_not_specialize=["rows", "width"])
def _totals(B, dB, sums, totals, out, rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Write Σ over rows of B times `sums` and of B ⊙ dB; copy dB to `out` in its dtype."""
    col, row = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, ROWS)
    plain = tl.zeros((ROWS, COLS), tl.float32)
    along = tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.range(0, rows, ROWS, loop_unroll_factor=2):
        at = (start + row)[:, None] * width + col[None, :]
        live = (start + row < rows)[:, None] & (col < width)[None, :]
        weight = tl.load(B + at, mask=live, other=0.0).to(tl.float32)
        plain += weight * tl.load(sums + start + row, mask=start + row < rows, other=0.0)[:, None]
        gradient = tl.load(dB + at, mask=live, other=0.0)
        along += weight * gradient
        if out is not None:
            tl.store(out + at, gradient.to(out.dtype.element_ty), mask=live)
    tl.store(totals + col, tl.sum(plain, 0), mask=col < width)
    tl.store(totals + width + col, tl.sum(along, 0), mask=col < width)


def drive_gradient(g: Tensor, sums: Tensor, rows: Tensor, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of u, of B in its dtype, and Σ over steps, from the gradient g (tokens, 2n) of x = u Bᵀ and its sums.

    `flat` is B as (2n, p); the last are Σ ∂L/∂u and Σ ∂L/∂u ⊙ u, (2, p).
    """
    du, dB = g @ flat, product_in(torch.float32, g.mT, rows)
    totals = torch.empty(2, flat.shape[1], dtype=torch.float32, device=g.device)
    narrow = None if flat.dtype == torch.float32 else torch.empty_like(flat)
    _totals_plan(len(flat), flat.shape[1], flat.dtype, g.device)(flat, dB, sums, totals, narrow)
    return du, dB if narrow is None else narrow, totals


@plan_of
def _totals_plan(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Planned:
    return Planned(_totals, (cdiv(width, 16),), rows, width, ROWS=64, COLS=16, num_warps=4)


def driven_recurrence(
    drive: Link, log_poles: Tensor, B: Tensor, state: Tensor | None, *, conjugate: bool, keep_last: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return every h (or its conjugate) of x = B u in the dtype of B, and with `keep_last` the last h in float32."""
    u, carrier, totals = drive
    return DrivenRecurrence.apply(u.detach(), carrier, totals, log_poles, B, state, conjugate, keep_last)


class DrivenRecurrence(torch.autograd.Function):
    """The recurrence of x = B u for B of shape (2, n, p); u is cast to the dtype of B."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        carrier: Tensor,
        totals: Tensor,
        log_poles: Tensor,
        B: Tensor,
        state: Tensor | None,
        conjugate: bool,
        keep_last: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        B, flip = B.contiguous(), -1 if conjugate else 1
        state = None if state is None else state.contiguous()
        learning = any(ctx.needs_input_grad)
        compile_walks(B.dtype, log_poles.dtype, u.device, flip, state is not None, keep_last, learning, True)
        ctx.dtypes, rows = (u.dtype, log_poles.dtype), u.to(B.dtype).flatten(0, 1)
        x = (rows @ B.flatten(0, 1).mT).view(*u.shape[:2], *B.shape[:2])
        walk = Walk(x, log_poles.contiguous(), flip=flip)
        h, last = walk.forward(x, state, keep_last=keep_last)
        ctx.save_for_backward(rows, B, h, walk.table, state)
        ctx.walk = walk
        return h, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, B, h, _, state = ctx.saved_tensors
        dh = torch.zeros_like(h) if grads[0] is None else grads[0].contiguous()
        dlast = None if grads[1] is None else grads[1].contiguous()
        dx, dlog, dstate, sums = ctx.walk.backward(dh, h, state, dlast, summed=True)
        du, dB, totals = drive_gradient(dx.view(len(rows), -1), sums, rows, B.view(-1, B.shape[2]))
        du, dB = du.view(*h.shape[:2], -1), dB.view_as(B)
        u_dtype, log_dtype = ctx.dtypes
        dstate = None if state is None else dstate.to(state.dtype)
        return None, du.to(u_dtype), totals, dlog.to(log_dtype), dB, dstate, None, None
