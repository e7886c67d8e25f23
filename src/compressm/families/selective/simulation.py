"""Simulation of a selective system on real inputs: its states, its outputs, and how both change with a cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from compressm.control.linear_algebra import exponential
from compressm.control.selective import Resized, SelectiveSystem, before_norm, rms_normed
from compressm.families import observing
from compressm.families.fitting import fitted
from compressm.families.observing import Sample, sequences_at_once
from compressm.ops.selective import selective_scan

# Numbers that a scan holds for each state: the state itself, and B and C if channels have their own, all complex.
_PER_STATE = 4
# States per block: a few megabytes, which fit into a cache, or as many as keep a GPU busy. And the states of one step
# above which chunks of time do not pay off: a call costs 5 µs.
_BLOCK, _BLOCK_ON_GPU = 2**18, 2**25
_ENOUGH, _ENOUGH_ON_GPU = 2**13, 2**20


def states(system: SelectiveSystem, u: Float[Tensor, "batch length channels"], steps: int) -> Iterator[Tensor]:
    """The states h[0], h[1], … in blocks of `steps`: (steps, batch, channels, n)."""
    delta, B, _ = system.selected(u)
    h = torch.zeros_like(system.rates).expand(len(u), -1, -1)
    for start in range(0, u.shape[1], steps):
        part = slice(start, start + steps)
        block = _walked(system, u[:, part], delta[:, part], B[:, part], h)
        h = block[-1]
        yield block


def steps_at_once(*systems: SelectiveSystem, batch: int) -> int:
    """The number of steps whose states fit into the memory of a block."""
    most = _BLOCK_ON_GPU if systems[0].rates.is_cuda else _BLOCK
    return max(1, most // (batch * max(system.rates.numel() for system in systems)))


def _walked(system: SelectiveSystem, u: Tensor, delta: Tensor, B: Tensor, h: Tensor) -> Tensor:
    """All states of a block, which starts from h.

    If a step has few numbers, chunks of time run in parallel, each from zeros; afterwards exp(a Σ Δ) h[before the
    chunk] is added to h[t]. K chunks of T steps take T + K calls instead of K T.
    """
    length = u.shape[1]
    enough = _ENOUGH_ON_GPU if h.is_cuda else _ENOUGH
    chunks = max(1, min(round(length**0.5), enough // h.numel()))
    drive, delta, B = (_in_chunks(x, chunks) for x in (delta * u, delta, B))
    decay = exponential(delta[..., None] * system.rates)
    found = drive[..., None] * _of_channels(system, B)
    found[0, 0].addcmul_(decay[0, 0], h)
    for t in range(1, len(found)):
        found[t].addcmul_(decay[t], found[t - 1])
        if chunks > 1:
            decay[t].mul_(decay[t - 1])  # the decay since the start of the chunk
    for k in range(1, chunks):
        found[:, k].addcmul_(decay[:, k], found[-1, k - 1])
    return found.transpose(0, 1).flatten(0, 1)[:length]


def _in_chunks(x: Float[Tensor, "batch length _"], chunks: int) -> Float[Tensor, "steps chunks batch _"]:
    """Split time into chunks; zeros, which change no state, fill the last one."""
    batch, length, _ = x.shape
    steps = -(-length // chunks)
    return pad(x, (0, 0, 0, steps * chunks - length)).reshape(batch, chunks, steps, -1).permute(2, 1, 0, 3)


def _of_channels(system: SelectiveSystem, B: Float[Tensor, "steps chunks batch m"]) -> Tensor:
    """B in the coordinates of every channel: (steps, chunks, batch, channels or 1, n)."""
    if system.maps is None:
        return B[..., None, :]
    return torch.einsum("cnm,tkbm->tkbcn", system.maps.B, B.to(system.maps.B.dtype))


def outputs(system: SelectiveSystem, u: Float[Tensor, "batch length channels"]) -> Tensor:
    """Re(C h), the output of the scan without skip and gate.

    A GPU computes it in float32 by the training kernels, which have no float64; without them it would be a loop.
    """
    chosen = (_for_kernels(part) for part in (u, *system.selected(u)))
    u, delta, B, C = chosen
    rates = _for_kernels(system.rates)
    if system.maps is None:
        y, _ = selective_scan(u, delta, rates, B, C, keep_state=False)
        return y.double()
    maps = [_for_kernels(part) for part in (system.maps.B, system.maps.C.mT)]
    B, C = (torch.einsum("cnm,blm->blcn", rows, x.to(rows.dtype)) for rows, x in zip(maps, (B, C), strict=True))
    if rates.is_complex():
        rates = torch.stack([rates.real, rates.imag])
        B, C = torch.stack([B.real, B.imag], dim=-2), torch.stack([C.real, C.imag], dim=-2)
    y, _ = selective_scan(u, delta, rates, B, C, orders=system.maps.orders, keep_state=False)
    return y.double()


def _for_kernels(part: Tensor) -> Tensor:
    """The tensor in single precision if it is on a GPU."""
    if not part.is_cuda:
        return part
    return part.to(torch.complex64 if part.is_complex() else torch.float32)


def _at_once(system: SelectiveSystem, length: int) -> int:
    """The number of sequences to simulate together; on a GPU kernels store no states, only B and C of every channel."""
    held = system.channels if system.rates.is_cuda and system.maps is None else system.rates.numel()
    return sequences_at_once(length, _PER_STATE * held)


def squared_change(old: SelectiveSystem, new: SelectiveSystem, sample: Sample) -> Float[Tensor, "2"]:
    """‖y_new − y_old‖² and ‖y_old‖² of the scan's output, scaled up to all observed steps."""
    share, scales = min(_at_once(system, sample.longest) for system in (old, new)), old.scales
    old, new = old.divided(*scales), new.divided(*scales)  # their squares do not underflow
    return observing.squared_change(outputs, old, new, sample, share)


def refitted_readout(
    old: SelectiveSystem, new: SelectiveSystem, sample: Sample, E_C: Float[Tensor, "n r"]
) -> Float[Tensor, "n r"]:
    """F = E[h h'ᵀ] E[h' h'ᵀ]⁻¹, the best estimate F h' of the old states h from the new ones h'; E_C without a sample.

    It minimises Σ E[(C h − C F h')²] over all channels if C and h are independent, because then E[C Cᵀ] cancels.
    """
    if not sample.sequences:
        return E_C
    scales = old.scales
    old, new = old.divided(*scales), new.divided(*scales)
    shape = (old.order, new.order)
    crossed, squares = (torch.zeros(size, new.order, dtype=torch.float64, device=old.device) for size in shape)
    for u, counts in sample.parts(sequences_at_once(sample.longest, old.rates.numel())):
        steps = steps_at_once(old, new, batch=len(u))
        for h, small, here in zip(
            states(old, u, steps), states(new, u, steps), torch.split(counts.mT, steps), strict=True
        ):
            kept = (small * here[..., None, None]).flatten(0, 2)
            crossed, squares = crossed + h.flatten(0, 2).mT @ kept, squares + kept.mT @ kept
    # E_C does not change in directions without data.
    rest = crossed - E_C @ squares
    return E_C + rest @ torch.linalg.pinv(squares, hermitian=True, rtol=1e-10)


def resized(
    system: SelectiveSystem, E_B: Float[Tensor, "r n"], E_C: Float[Tensor, "n r"], sample: Sample
) -> tuple[Resized, Resized] | None:
    """Factors for B and for C with which norms of fewer states give the sizes they have; None without norms.

    Rows get the mean square over states that they had, so that ε counts as much. The weight of a state is the best one
    for the sample, Σ x x' / Σ x'² over its x = E_B B or C E_C and x' with weight 1; tied weights share one.
    """
    if system.norms is None:
        return None
    of_B = _resized(system, E_B, system.W_B, system.norms.B, sample)
    return of_B, _resized(system, E_C.mT, system.W_C, system.norms.C, sample)


def _resized(system: SelectiveSystem, E: Float[Tensor, "r n"], W: Tensor, weight: Tensor, sample: Sample) -> Resized:
    """The factors for B or for C."""
    assert system.norms is not None
    (r, n), norms = E.shape, system.norms
    mixing, after = before_norm(E, weight)
    sizes, sums = W.new_zeros(2), W.new_zeros(2, r)
    parts = [(u @ W.mT, counts[..., None]) for u, counts in sample.parts(sequences_at_once(sample.longest, n))]
    for x, counts in parts:
        sizes = sizes + torch.stack([(part * counts).square().sum() for part in (x, x @ mixing.mT)])
    least = torch.finfo(torch.float64).tiny
    known = bool((sizes > least).all())
    factor = torch.sqrt(sizes[0] / n / (sizes[1] / r)) if known else W.new_tensor((r / n) ** 0.5)
    for x, counts in parts:
        target = rms_normed(x, weight, norms.eps) @ E.mT * counts
        found = rms_normed(factor * x @ mixing.mT, after, norms.eps) * counts
        sums = sums + torch.stack([(target * found).flatten(0, 1).sum(0), found.square().flatten(0, 1).sum(0)])
    if norms.tied:
        sums = sums.sum(1, keepdim=True).expand(-1, r)
    usable = (sums[1] > least) & (sums[0] > 0)
    return Resized(factor, torch.where(usable, sums[0] / torch.where(usable, sums[1], 1), (n / r) ** 0.5))


def output_gain(old: SelectiveSystem, new: SelectiveSystem, sample: Sample) -> Float[Tensor, ""]:
    """The factor with which the outputs of the new system are nearest to those of the old one; 1 if it is none."""
    share, scales = min(_at_once(system, sample.longest) for system in (old, new)), old.scales
    old, new = old.divided(*scales), new.divided(*scales)
    crossed, square = (torch.zeros((), dtype=torch.float64, device=old.device) for _ in range(2))
    for u, counts in sample.parts(share):
        before, after = (outputs(system, u) * counts[..., None] for system in (old, new))
        crossed, square = crossed + (before * after).sum(), square + after.square().sum()
    return torch.where((crossed > 0) & (square > 0), crossed / torch.where(square > 0, square, 1), 1)


def fitted_system(old: SelectiveSystem, start: SelectiveSystem, sample: Sample, steps: int) -> SelectiveSystem:
    """A system near `start` whose outputs are nearest to those of the old one on the sample, by `steps` of Adam.

    Rows of B and C, rates, and the weights of norms change.
    """
    scales, share = old.scales, min(_at_once(system, sample.longest) for system in (old, start))
    small, units = start.divided(*scales), start.divided(*scales).norms
    parts = [(u, counts[..., None], outputs(old.divided(*scales), u)) for u, counts in sample.parts(share)]
    whole = sum(float((y * counts).square().sum()) for _, counts, y in parts)
    if not whole > 0:
        return start
    leaves = [small.W_B, small.W_C, torch.log(-small.rates)]
    if units is not None:
        leaves += [weight[:1] if units.tied else weight for weight in (units.B, units.C)]

    def of(values: Sequence[Tensor]) -> SelectiveSystem:
        W_B, W_C, logs, *weights = values
        norms = units
        if norms is not None:
            B, C = (weight.expand(len(W_B)) for weight in weights)
            norms = replace(norms, B=B, C=C)
        return replace(small, rates=-torch.exp(logs), W_B=W_B, W_C=W_C, norms=norms)

    def error(values: Sequence[Tensor], part: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        u, counts, target = part
        return ((outputs(of(values), u) - target) * counts).square().sum() / whole

    return of(fitted(leaves, parts, error, steps)).divided(*(1 / scale for scale in scales))
