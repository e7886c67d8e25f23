"""One function for the recurrence, one for a layer, one for a bank; each picks its path from the shapes or is told."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.ops.diagonal_scan import bank_forms, layer_forms
from compressm.ops.diagonal_scan.checks import require_floats_on_one_device, require_lengths, require_shapes
from compressm.ops.diagonal_scan.cost import Path, cheapest_path, layer_chunk
from compressm.ops.diagonal_scan.reference import bank_loop, lti_loop, recurrence_loop
from compressm.ops.diagonal_scan.two_level import two_level_recurrence
from compressm.ops.errors import SequenceError


@torch.compiler.disable
def linear_recurrence(
    x: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    state: Float[Tensor, "batch 2 n"] | None = None,
    *,
    path: Path | None = None,
) -> tuple[Float[Tensor, "batch length 2 n"], Float[Tensor, "batch 2 n"]]:
    """h[t] = λ ⊙ h[t−1] + x[t]: every h, and the last; pairs (re, im) on the axis of size two."""
    require_shapes(
        x=(x, ("batch", "length", 2, "n")), log_poles=(log_poles, (2, "n")), state=(state, ("batch", 2, "n"))
    )
    require_floats_on_one_device(x=x, log_poles=log_poles, state=state)
    if path is Path.LOOP:
        return recurrence_loop(x, log_poles, state)
    if path not in (None, Path.SCAN):
        raise SequenceError(f"path is {path}, a recurrence is computed by {Path.LOOP} or {Path.SCAN}")
    with _full_precision(x):
        return _recurrence(x, log_poles, None if state is None else _raised(state))


@torch.compiler.disable
def lti_layer(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None = None,
    lengths: Int[Tensor, " batch"] | None = None,
    *,
    keep_state: bool = True,
    path: Path | None = None,
) -> tuple[Float[Tensor, "batch length q"], Float[Tensor, "batch 2 n"] | None]:
    """y = Re(C h) with h driven by B u, and the state at the end of each sequence (None if `keep_state` is False).

    Steps at and after `lengths` neither count nor matter: their y is 0.
    """
    sizes = require_shapes(
        u=(u, ("batch", "length", "p")),
        log_poles=(log_poles, (2, "n")),
        B=(B, (2, "n", "p")),
        C=(C, (2, "q", "n")),
        state=(state, ("batch", 2, "n")),
    )
    require_floats_on_one_device(u=u, log_poles=log_poles, B=B, C=C, state=state)
    require_lengths(lengths, sizes["batch"], sizes["length"])
    path = path or cheapest_path(*(sizes[axis] for axis in ("batch", "length", "n", "p", "q")), gpu=u.is_cuda)
    wanted = _working_dtype(u, path)
    with _full_precision(u):
        work = _masked(u.to(wanted), lengths)
        B, C, state = B.to(wanted), C.to(wanted), None if state is None else _raised(state)
        y, last = _layer(path, work, log_poles, B, C, state)
        if keep_state and (last is None or lengths is not None):
            last = layer_forms.final_state(_raised(work), log_poles, _raised(B), state, lengths)
        return _masked(y, lengths).to(u.dtype), last if keep_state else None


def _layer(
    path: Path, u: Tensor, log_poles: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if path is Path.LOOP:
        return lti_loop(u, log_poles, B, C, state)
    if path is Path.SCAN:
        n = B.shape[1]
        if u.is_cuda:
            log_poles, B, C, state = layer_forms.padded_order(log_poles, B, C, state, multiple=8)
        y, last = layer_forms.through_states(u, log_poles, B, C, state, _recurrence)
        return y, last[..., :n]
    if path is Path.CHUNKED:
        chunk = layer_chunk(u.shape[1], B.shape[1], B.shape[2], C.shape[1])
        return layer_forms.chunked(u, log_poles, B, C, state, _recurrence, chunk), None
    return layer_forms.convolution(u, log_poles, B, C, state), None


@torch.compiler.disable
def lti_bank(
    u: Float[Tensor, "batch length width"],
    log_poles: Float[Tensor, "2 width n"],
    B: Float[Tensor, "2 width n"],
    C: Float[Tensor, "2 width n"],
    state: Float[Tensor, "batch 2 width n"] | None = None,
    lengths: Int[Tensor, " batch"] | None = None,
    *,
    keep_state: bool = True,
    path: Path | None = None,
) -> tuple[Float[Tensor, "batch length width"], Float[Tensor, "batch 2 width n"] | None]:
    """One single-input single-output system a channel; otherwise as `lti_layer`."""
    bank = (2, "width", "n")
    sizes = require_shapes(
        u=(u, ("batch", "length", "width")),
        log_poles=(log_poles, bank),
        B=(B, bank),
        C=(C, bank),
        state=(state, ("batch", *bank)),
    )
    require_floats_on_one_device(u=u, log_poles=log_poles, B=B, C=C, state=state)
    require_lengths(lengths, sizes["batch"], sizes["length"])
    if path not in (None, Path.LOOP, Path.CONVOLUTION):
        raise SequenceError(f"path is {path}, a bank is computed by {Path.LOOP} or {Path.CONVOLUTION}")
    with _full_precision(u):
        work = _masked(_raised(u), lengths)
        B, C, state = B.to(work.dtype), C.to(work.dtype), None if state is None else _raised(state)
        if path is Path.LOOP:
            y = bank_loop(work, log_poles, B, C, state)[0]
        else:
            y = bank_forms.bank_convolution(work, log_poles, B, C, state)
        last = bank_forms.bank_final_state(work, log_poles, B, state, lengths) if keep_state else None
        return _masked(y, lengths).to(u.dtype), last


def _recurrence(x: Tensor, log_poles: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scan of this device: Triton on a GPU, two loops elsewhere and for float64."""
    if x.is_cuda and x.dtype != torch.float64 and has_triton():
        from compressm.ops.diagonal_scan.triton import triton_recurrence

        return triton_recurrence(x, log_poles, state)
    h, last = two_level_recurrence(_raised(x), log_poles, state)
    return h.to(x.dtype), last


@cache
def has_triton() -> bool:
    """Whether the kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None


def _working_dtype(u: Tensor, path: Path) -> torch.dtype:
    """Half precision stays only where the GPU scans: products then run on its matrix units, sums are float32."""
    scanning = u.is_cuda and path is Path.SCAN and has_triton()
    if scanning and torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    return u.dtype if scanning else _raised(u).dtype


def _raised(tensor: Tensor) -> Tensor:
    """Half precision is computed in float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _masked(sequence: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return sequence
    counts = torch.arange(sequence.shape[1], device=sequence.device) < lengths[:, None]
    return torch.where(counts[..., None], sequence, 0)


def _full_precision(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)
