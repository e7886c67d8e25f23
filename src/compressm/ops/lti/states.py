"""Every state of the recurrence on any device, and the same as an op for torch.compile, with its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressm.ops.dispatch import has_triton, once_differentiable
from compressm.ops.lti.cost import walks_pairs
from compressm.ops.lti.recurrence import pair_gradient, pair_recurrence, two_level_gradient, two_level_recurrence
from compressm.ops.memory import keep_freed_memory
from compressm.ops.opaque import define, inside


def runs_kernels(u: Tensor) -> bool:
    """True on a GPU with Triton, up to float32."""
    return u.is_cuda and u.dtype != torch.float64 and has_triton()


def raised(tensor: Tensor) -> Tensor:
    """Raise half precision to float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def every_state(
    x: Tensor, log_poles: Tensor, state: Tensor | None, *, keep_last: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Compute every h and the last one, by Triton on a GPU; by plain torch elsewhere and for float64."""
    if runs_kernels(x):
        from compressm.ops.lti.scan_triton import triton_recurrence

        return triton_recurrence(x, log_poles, state, keep_last=keep_last)
    if not x.is_cuda:
        keep_freed_memory()
    batch, length, _, n = x.shape
    on_pairs = not x.is_cuda and walks_pairs(batch, length, n, driven=False)
    h, last = (pair_recurrence if on_pairs else two_level_recurrence)(raised(x), log_poles, state)
    return h.to(x.dtype), last if keep_last else None


def scan(x: Tensor, log_poles: Tensor, state: Tensor | None, keep_last: bool, order: int) -> tuple[Tensor, Tensor]:
    """Compute every h, and of the last one the first `order` modes, or nothing, as an op of torch.compile."""
    return torch.ops.compressm.scan(x, log_poles, state, keep_last, order)


class _Scan(torch.autograd.Function):
    """The recurrence, which keeps every h for its gradient."""

    @staticmethod
    def forward(
        x: Tensor, log_poles: Tensor, state: Tensor | None, keep_last: bool, order: int
    ) -> tuple[Tensor, Tensor]:
        with inside():
            return torch.ops.compressm.scan(x, log_poles, state, keep_last, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[0], inputs[1], inputs[2])
        ctx.keep_last = inputs[3]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        h, log_poles, state = ctx.saved_tensors
        given = (dh, dlast if ctx.keep_last else None, h, log_poles, state)
        dx, dlog, dstate = torch.ops.compressm.scan_back(*given)
        return dx, dlog, None if state is None else dstate, None, None


def _scan(x: Tensor, log_poles: Tensor, state: Tensor | None, keep_last: bool, order: int) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        h, last = every_state(x, log_poles, state, keep_last=keep_last)
    # The last h may be a part of all, which an op may not return.
    return h, x.new_empty(0) if last is None else last[..., :order].clone(memory_format=torch.contiguous_format)


def _fake_scan(
    x: Tensor, log_poles: Tensor, state: Tensor | None, keep_last: bool, order: int
) -> tuple[Tensor, Tensor]:
    last = x.new_empty((x.shape[0], 2, order), dtype=raised(x).dtype) if keep_last else x.new_empty(0)
    return x.new_empty(x.shape), last


def _scan_back(
    dh: Tensor, dlast: Tensor | None, h: Tensor, log_poles: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dh, log_poles, start = dh.contiguous(), log_poles.contiguous(), None if state is None else state.contiguous()
    dlast = None if dlast is None else pad(dlast, (0, h.shape[3] - dlast.shape[2])).contiguous()
    dstate: Tensor | None
    if runs_kernels(h):
        from compressm.ops.lti.scan_triton import Walk

        dx, dlog, dstate, _ = Walk(h, log_poles).backward(dh, h, start, dlast)
    else:
        on_pairs = not h.is_cuda and walks_pairs(h.shape[0], h.shape[1], h.shape[3], driven=False)
        gradient = pair_gradient if on_pairs else two_level_gradient
        dx, dlog, dstate = gradient(raised(dh), dlast, raised(h), log_poles, start)
    dstate = h.new_empty(0) if state is None or dstate is None else dstate.to(state.dtype)
    return dx.to(h.dtype), dlog.to(log_poles.dtype), dstate


def _fake_scan_back(
    dh: Tensor, dlast: Tensor | None, h: Tensor, log_poles: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dstate = h.new_empty(0) if state is None else state.new_empty(state.shape)
    return h.new_empty(h.shape), log_poles.new_empty(log_poles.shape), dstate


define(
    "scan(Tensor x, Tensor log_poles, Tensor? state, bool keep_last, SymInt order) -> (Tensor, Tensor)",
    _scan,
    _fake_scan,
    _Scan.apply,
)
define(
    "scan_back(Tensor dh, Tensor? dlast, Tensor h, Tensor log_poles, Tensor? state) -> (Tensor, Tensor, Tensor)",
    _scan_back,
    _fake_scan_back,
)
