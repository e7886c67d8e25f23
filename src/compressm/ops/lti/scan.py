"""The diagonal recurrence h[t] = λ h[t−1] + x[t]: its definition as plain loops, and the choice of a path by shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.ops.block.norm import Link
from compressm.ops.dispatch import (
    full_precision,
    is_transformed,
    require_floats_on_one_device,
    require_given,
    require_lengths,
    require_path,
    require_shapes,
)
from compressm.ops.lti import forms as bank_forms
from compressm.ops.lti import forms as layer_forms
from compressm.ops.lti.chunked import chunked
from compressm.ops.lti.cost import NARROW, Path, cheapest_path, layer_chunk
from compressm.ops.lti.recurrence import by_doublings, complex_dtype, to_complex, to_pair
from compressm.ops.lti.states import every_state, raised, runs_kernels, scan
from compressm.ops.memory import keep_freed_memory
from compressm.ops.opaque import define_recomputed, recomputed

Recurrence = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
_PATHS = tuple(Path)  # torch.compile of torch 2.11 cannot unpack an Enum


def recurrence_loop(
    x: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    state: Float[Tensor, "batch 2 n"] | None = None,
) -> tuple[Float[Tensor, "batch length 2 n"], Float[Tensor, "batch 2 n"]]:
    """Compute h[t] = λ h[t−1] + x[t] in a loop; return every h and the last one."""
    poles = torch.exp(to_complex(log_poles, 0)).to(complex_dtype(x.dtype))
    h = torch.zeros_like(to_complex(x[:, 0], -2)) if state is None else to_complex(state, -2)
    history = []
    for t in range(x.shape[1]):
        h = poles * h + to_complex(x[:, t], -2)
        history.append(h)
    return to_pair(torch.stack(history, dim=1), -2), to_pair(h, -2)


def lti_loop(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None = None,
    recurrence: Recurrence = recurrence_loop,
) -> tuple[Float[Tensor, "batch length q"], Float[Tensor, "batch 2 n"]]:
    """Compute y[t] = Re(C h[t]) in a loop, with h driven by B u."""
    x = torch.einsum("blp,rnp->blrn", u, B)
    h, last = recurrence(x, log_poles, state)
    return torch.einsum("bln,qn->blq", h[:, :, 0], C[0]) - torch.einsum("bln,qn->blq", h[:, :, 1], C[1]), last


def bank_loop(
    u: Float[Tensor, "batch length width"],
    log_poles: Float[Tensor, "2 width n"],
    B: Float[Tensor, "2 width n"],
    C: Float[Tensor, "2 width n"],
    state: Float[Tensor, "batch 2 width n"] | None = None,
    recurrence: Recurrence = recurrence_loop,
) -> tuple[Float[Tensor, "batch length width"], Float[Tensor, "batch 2 width n"]]:
    """Compute one system a channel in a loop: y[t, i] = Re(Cᵢ hᵢ[t]), hᵢ driven by Bᵢ uᵢ."""
    x = torch.einsum("blw,rwn->blrwn", u, B).flatten(-2)
    h, last = recurrence(x, log_poles.flatten(-2), None if state is None else state.flatten(-2))
    shape = (*h.shape[:-1], *B.shape[-2:])
    h = h.reshape(shape)
    y = (h[:, :, 0] * C[0] - h[:, :, 1] * C[1]).sum(-1)
    return y, last.reshape(len(u), *B.shape)


def linear_recurrence(
    x: Float[Tensor, "batch length 2 n"],
    log_poles: Float[Tensor, "2 n"],
    state: Float[Tensor, "batch 2 n"] | None = None,
    *,
    path: Path | None = None,
) -> tuple[Float[Tensor, "batch length 2 n"], Float[Tensor, "batch 2 n"]]:
    """Compute h[t] = λ ⊙ h[t−1] + x[t]: every h and the last one, with pairs (re, im) on the axis of size two."""
    require_path(path, Path.LOOP, Path.SCAN)
    require_given(x=x, log_poles=log_poles)
    require_shapes(
        x=(x, ("batch", "length", 2, "n")), log_poles=(log_poles, (2, "n")), state=(state, ("batch", 2, "n"))
    )
    require_floats_on_one_device(x=x, log_poles=log_poles, state=state)
    if path is Path.LOOP:
        return recurrence_loop(x, log_poles, state)
    if is_transformed():
        h, last = by_doublings(raised(x), log_poles, None if state is None else raised(state))
        return h.to(x.dtype), last
    if torch.compiler.is_compiling():
        return scan(x, log_poles, None if state is None else raised(state), True, x.shape[3])
    with full_precision(x):
        h, end = every_state(x, log_poles, None if state is None else raised(state))
    assert end is not None
    return h, end


def lti_layer(
    u: Float[Tensor, "batch length p"],
    log_poles: Float[Tensor, "2 n"],
    B: Float[Tensor, "2 n p"],
    C: Float[Tensor, "2 q n"],
    state: Float[Tensor, "batch 2 n"] | None = None,
    lengths: Int[Tensor, " batch"] | None = None,
    *,
    D: Float[Tensor, " p"] | None = None,
    keep_state: bool = True,
    path: Path | None = None,
    drive: Link | None = None,
) -> tuple[Float[Tensor, "batch length q"], Float[Tensor, "batch 2 n"] | None]:
    """y = Re(C h) + D ⊙ u with h driven by B u, and the state at each sequence's end (None without `keep_state`).

    Steps at and after `lengths` have no effect, and their y is 0. `drive`, if given, is a link of u that takes the
    gradient of B u where that is cheaper.
    """
    require_path(path, *_PATHS)
    require_given(u=u, log_poles=log_poles, B=B, C=C)
    sizes = require_shapes(
        u=(u, ("batch", "length", "p")),
        log_poles=(log_poles, (2, "n")),
        B=(B, (2, "n", "p")),
        C=(C, (2, "q" if D is None else "p", "n")),
        state=(state, ("batch", 2, "n")),
        D=(D, ("p",)),
    )
    require_floats_on_one_device(u=u, log_poles=log_poles, B=B, C=C, state=state, D=D)
    require_lengths(lengths, sizes["batch"], sizes["length"])
    if is_transformed():
        return _transformed(lti_loop, u, log_poles, B, C, state, lengths, D, keep_state)
    if torch.compiler.is_compiling():
        return _compiled_layer(u, log_poles, B, C, state, lengths, D, keep_state, path)
    return _any_layer(u, log_poles, B, C, state, lengths, D, keep_state, path, drive)


def _any_layer(
    u: Tensor,
    log_poles: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    lengths: Tensor | None,
    D: Tensor | None,
    keep_state: bool,
    path: Path | None,
    drive: Link | None = None,
) -> tuple[Tensor, Tensor | None]:
    (batch, length, p), (_, q, n) = u.shape, C.shape
    path = path or cheapest_path(batch, length, n, p, q, gpu=u.is_cuda)
    wanted = layer_dtype(u, n, q, path)
    with full_precision(u):
        work = _masked(u if _fits_narrow_kernels(u, q, path) else u.to(wanted), lengths)
        B, C, state = B.to(wanted), C.to(wanted), None if state is None else raised(state)
        drive, D = None if lengths is not None else drive, None if D is None else D.to(wanted)
        y, last = _layer(path, work, log_poles, B, C, state, D, drive, keep_state and lengths is None)
        if keep_state and (last is None or lengths is not None):
            last = layer_forms.final_state(raised(work), log_poles, raised(B), state, lengths)
        return _masked(y, lengths).to(u.dtype), last if keep_state else None


def _transformed(
    definition: Callable[..., tuple[Tensor, Tensor]],
    u: Tensor,
    log_poles: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    lengths: Tensor | None,
    D: Tensor | None,
    keep_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute a layer or bank inside torch.func, by operations of torch alone."""
    with full_precision(u):
        work = _masked(raised(u), lengths)
        B, C, state = B.to(work.dtype), C.to(work.dtype), None if state is None else raised(state)
        y, last = definition(work, log_poles, B, C, state, partial(by_doublings, lengths=lengths))
        y = y if D is None else torch.addcmul(y, D.to(y.dtype), work)
        return _masked(y, lengths).to(u.dtype), last if keep_state else None


def _compiled_layer(
    u: Tensor,
    log_poles: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    lengths: Tensor | None,
    D: Tensor | None,
    keep_state: bool,
    path: Path | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `lti_layer` inside torch.compile, by decisions that hold for every order."""
    wide = u.is_cuda and max(u.shape[2], C.shape[1]) > NARROW
    if (path is Path.SCAN or (wide and path is None)) and (lengths is None or not keep_state):
        y, last = _compiled_scan(u, log_poles, B, C, state, lengths, keep_state, multiple=8 if u.is_cuda else 1)
    else:
        given = (u, log_poles, B, C, state, lengths)
        y, last = recomputed("lti_layer", given, keep_state, "" if path is None else path.name)
    y = y if D is None else torch.addcmul(y, D.to(u.dtype), _masked(u, lengths))
    return y, last if keep_state else None


def _compiled_scan(
    u: Tensor,
    log_poles: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    lengths: Tensor | None,
    keep_state: bool,
    *,
    multiple: int,
) -> tuple[Tensor, Tensor]:
    """Compute B u, scan and multiply by C; only the scan is hidden from the compiler."""
    n, dtype = B.shape[1], raised(u).dtype
    if u.is_cuda:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else u.dtype
    if multiple > 1:
        log_poles, B, C, padded = recomputed("padded_order", (log_poles, B, C, state), multiple)
        state = None if state is None else padded
    with full_precision(u):
        B, C, state = B.to(dtype), C.to(dtype), None if state is None else raised(state)
        x = (_masked(u.to(dtype), lengths) @ B.flatten(0, 1).mT).reshape(*u.shape[:2], *B.shape[:2])
        h, last = scan(x, log_poles, state, keep_state, n)
        y = h.flatten(-2) @ torch.cat([C[0], -C[1]], dim=1).mT
        return _masked(y, lengths).to(u.dtype), last


def _layer(
    path: Path,
    u: Tensor,
    log_poles: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    D: Tensor | None,
    drive: Link | None,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    if not u.is_cuda:
        keep_freed_memory()
    if path is Path.CONVOLUTION:
        return layer_forms.convolution(u, log_poles, B, C, state, D), None
    if path is Path.CHUNKED and not _fits_narrow_kernels(u, C.shape[1], path):
        chunk = layer_chunk(*u.shape[:2], B.shape[1], B.shape[2], C.shape[1])
        return chunked(u, log_poles, B, C, state, D, chunk), None
    if path is Path.SCAN and runs_kernels(u):
        y, last = _scan_on_gpu(u, log_poles, B, C, state, drive, keep)
    else:
        y, last = _without_skip(path, u, log_poles, B, C, state)
    return y if D is None else torch.addcmul(y, D.to(y.dtype), u), last


def _without_skip(
    path: Path, u: Tensor, log_poles: Tensor, B: Tensor, C: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    if path is Path.LOOP:
        return lti_loop(u, log_poles, B, C, state)
    if path is Path.SCAN:
        return layer_forms.through_states(u, log_poles, B, C, state)
    from compressm.ops.lti.layer_triton import ChunkedLayer

    return ChunkedLayer.apply(u, log_poles, B, C, state), None


def _scan_on_gpu(
    u: Tensor, log_poles: Tensor, B: Tensor, C: Tensor, state: Tensor | None, drive: Link | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute B u, scan and multiply by C; the scan gives conjugates: Re(C h) = [C_re, C_im] · [h̄_re, h̄_im]."""
    from compressm.ops.lti.scan_triton import driven_recurrence, triton_recurrence

    n = B.shape[1]
    log_poles, B, C, state = layer_forms.padded_order(log_poles, B, C, state, 8)
    if drive is None:
        x = (u @ B.flatten(0, 1).mT).reshape(*u.shape[:2], 2, -1)
        h, last = triton_recurrence(x, log_poles, state, conjugate=True, keep_last=keep)
    else:
        h, last = driven_recurrence(drive, log_poles, B, state, conjugate=True, keep_last=keep)
    return h.flatten(-2) @ C.transpose(0, 1).flatten(1).mT, None if last is None else last[..., :n]


# The paths that `lti_bank` knows.
BANK_PATHS = (Path.LOOP, Path.CONVOLUTION)


def lti_bank(
    u: Float[Tensor, "batch length width"],
    log_poles: Float[Tensor, "2 width n"],
    B: Float[Tensor, "2 width n"],
    C: Float[Tensor, "2 width n"],
    state: Float[Tensor, "batch 2 width n"] | None = None,
    lengths: Int[Tensor, " batch"] | None = None,
    *,
    D: Float[Tensor, " width"] | None = None,
    keep_state: bool = True,
    path: Path | None = None,
) -> tuple[Float[Tensor, "batch length width"], Float[Tensor, "batch 2 width n"] | None]:
    """Compute one single-input single-output system a channel; arguments and results are as in `lti_layer`."""
    require_path(path, *BANK_PATHS)
    require_given(u=u, log_poles=log_poles, B=B, C=C)
    bank = (2, "width", "n")
    sizes = require_shapes(
        u=(u, ("batch", "length", "width")),
        log_poles=(log_poles, bank),
        B=(B, bank),
        C=(C, bank),
        state=(state, ("batch", *bank)),
        D=(D, ("width",)),
    )
    require_floats_on_one_device(u=u, log_poles=log_poles, B=B, C=C, state=state, D=D)
    require_lengths(lengths, sizes["batch"], sizes["length"])
    if is_transformed():
        return _transformed(bank_loop, u, log_poles, B, C, state, lengths, D, keep_state)
    if not torch.compiler.is_compiling():
        return _any_bank(u, log_poles, B, C, state, lengths, D, keep_state, path)
    given = (u, log_poles, B, C, state, lengths)
    y, last = recomputed("lti_bank", given, keep_state, "" if path is None else path.name)
    return y if D is None else torch.addcmul(y, D.to(u.dtype), _masked(u, lengths)), last if keep_state else None


def _any_bank(
    u: Tensor,
    log_poles: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    lengths: Tensor | None,
    D: Tensor | None,
    keep_state: bool,
    path: Path | None,
) -> tuple[Tensor, Tensor | None]:
    with full_precision(u):
        work = _masked(raised(u), lengths)
        B, C, state = B.to(work.dtype), C.to(work.dtype), None if state is None else raised(state)
        if path is Path.LOOP:
            y = bank_loop(work, log_poles, B, C, state)[0]
            y = y if D is None else y + D * work
        else:
            y = bank_forms.bank_convolution(work, log_poles, B, C, state, D)
        last = bank_forms.bank_final_state(work, log_poles, B, state, lengths) if keep_state else None
        return _masked(y, lengths).to(u.dtype), last


def _opaque(function: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function of a layer or bank as an op takes it: without D, with the name of a path."""

    def op(
        u: Tensor,
        log_poles: Tensor,
        B: Tensor,
        C: Tensor,
        state: Tensor | None,
        lengths: Tensor | None,
        keep_state: bool,
        path: str,
    ) -> tuple[Tensor, Tensor | None]:
        return function(u, log_poles, B, C, state, lengths, None, keep_state, Path[path] if path else None)

    return op


def _fake(
    u: Tensor,
    log_poles: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    lengths: Tensor | None,
    keep_state: bool,
    path: str,
) -> tuple[Tensor, Tensor | None]:
    y = u.new_empty(*u.shape[:2], C.shape[1])
    return y, u.new_empty(u.shape[0], *log_poles.shape, dtype=raised(u).dtype) if keep_state else None


_ARGUMENTS = "Tensor u, Tensor log_poles, Tensor B, Tensor C, Tensor? state, Tensor? lengths, bool keep_state, str path"
define_recomputed("lti_layer", _ARGUMENTS, _opaque(_any_layer), _fake)
define_recomputed("lti_bank", _ARGUMENTS, _opaque(_any_bank), _fake)


def layer_dtype(u: Tensor, n: int, q: int, path: Path | None = None) -> torch.dtype:
    """The dtype in which `lti_layer` multiplies by B and C: half precision only in a GPU scan, with float32 sums."""
    if torch.compiler.is_compiling():
        return raised(u).dtype
    batch, length, p = u.shape
    path = path or cheapest_path(batch, length, n, p, q, gpu=u.is_cuda)
    if not (path is Path.SCAN and runs_kernels(u)):
        return raised(u).dtype
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else u.dtype


def _fits_narrow_kernels(u: Tensor, q: int, path: Path) -> bool:
    return path is Path.CHUNKED and runs_kernels(u) and max(u.shape[2], q) <= NARROW


def _masked(sequence: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return sequence
    counts = torch.arange(sequence.shape[1], device=sequence.device) < lengths[:, None]
    return torch.where(counts[..., None], sequence, 0)
