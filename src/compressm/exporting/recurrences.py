"""Recurrences of layers as exported graphs compute them: real arithmetic, states in and out, one path for any length.

A sequence of any length is cut into chunks of 32 steps, at the end of repeated rows that nobody reads. All chunks are
computed side by side, and then the state before each from the ends of those before it. Nothing but the number of chunks
depends on the length, and there is no branch at all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias, final

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu, softplus

from compressm.layers import SSMLayer
from compressm.layers.streaming import BankStepper, LowRankStepper, SelectiveStepper, Stepper, SystemStepper

# One tensor of real numbers, or the real and the imaginary parts of complex ones.
Parts: TypeAlias = tuple[Tensor, ...]


def times(a: Parts, h: Parts, of: Callable[[Tensor, Tensor], Tensor] = torch.mul) -> Parts:
    """The product a h."""
    if len(h) == 1:
        return (of(a[0], h[0]),)
    return of(a[0], h[0]) - of(a[1], h[1]), of(a[0], h[1]) + of(a[1], h[0])


def plus(g: Parts, h: Parts) -> Parts:
    """The sum g + h."""
    return tuple(left + right for left, right in zip(g, h, strict=True))


CHUNK = 32
_RADIX, _LEVELS = 8, 4
LONGEST = CHUNK * _RADIX**_LEVELS  # steps; what is longer ago is forgotten


def pieces(x: Float[Tensor, "*rest total"], sizes: Sequence[int]) -> list[Tensor]:
    """The tensor in pieces along the last axis; executorch 1.5 takes the batch of `split` as a constant."""
    ends = list(accumulate(sizes))
    return [x[..., end - size : end] for size, end in zip(sizes, ends, strict=True)]


def turned(x: Float[Tensor, "... n2"], same: Float[Tensor, "... n2"], crossed: Float[Tensor, "... n2"]) -> Tensor:
    """λ x for x = [re, im], same = [re λ, re λ] and crossed = [−im λ, im λ]; the other axes broadcast."""
    n = x.shape[-1] // 2
    return same * x + crossed * torch.cat([x[..., n:], x[..., :n]], -1)


def in_chunks(x: Float[Tensor, "batch length *rest"]) -> Float[Tensor, "batch chunks 32 *rest"]:
    """The sequence in chunks, two at least, so that no size is 1."""
    length = x.shape[1]
    # By places of two axes: that the length of a product can be taken apart again is more than tracers prove.
    start = CHUNK * torch.arange(length // CHUNK + 2)
    return x[:, (start[:, None] + torch.arange(CHUNK)).clamp_max(length - 1)]


def in_one(
    h: Float[Tensor, "batch chunks 32 *rest"], length: int | torch.SymInt
) -> Float[Tensor, "batch length *rest"]:
    """The inverse of `in_chunks`."""
    place = torch.arange(length)  # type: ignore[arg-type]
    return h[:, place // CHUNK, place % CHUNK]


def _delayed(h: Float[Tensor, "batch chunks *rest"]) -> Float[Tensor, "batch chunks *rest"]:
    """h of the chunk before, and zeros before the first."""
    place = torch.arange(h.shape[1])
    known = (place > 0).to(h.dtype).reshape(-1, *[1] * (h.ndim - 2))
    return h.index_select(1, (place - 1).clamp_min(0)) * known


def varying_scan(x: Parts, decay: Parts) -> Parts:
    """Every h[t] = a[t] h[t−1] + x[t] on axis 1, by doublings: h[t] takes up h[t − s] for s = 1, 2, 4, …"""
    length = x[0].shape[1]
    h, a = tuple(map(in_chunks, x)), tuple(map(in_chunks, decay))
    for s in (1, 2, 4, 8, 16):
        first, later = (tuple(part[:, :, at] for part in h) for at in (slice(s), slice(s, None)))
        before, left = (tuple(part[:, :, :-s] for part in parts) for parts in (h, a))
        shared = tuple(part[:, :, s:] for part in a)
        h = _joined(first, plus(later, times(shared, before)))
        a = _joined(tuple(part[:, :, :s] for part in a), times(shared, left))
    ends, left = (tuple(part[:, :, -1] for part in parts) for parts in (h, a))
    before = tuple(part[:, :, None] for part in map(_delayed, _carried(ends, left)))
    return tuple(in_one(part, length) for part in plus(h, times(a, before)))


def _carried(ends: Parts, left: Parts) -> Parts:
    """The state at the end of each chunk, from what its own inputs give and what is left of the state before it."""
    s = 1
    while s < LONGEST // CHUNK:
        place = torch.arange(ends[0].shape[1])
        known = (place >= s).to(ends[0].dtype).reshape(-1, *[1] * (ends[0].ndim - 2))
        earlier = (place - s).clamp_min(0)
        before, decay = (tuple(part.index_select(1, earlier) * known for part in parts) for parts in (ends, left))
        ends, left, s = plus(ends, times(left, before)), times(left, decay), 2 * s
    return ends


def _joined(first: Parts, later: Parts) -> Parts:
    return tuple(torch.cat(both, 2) for both in zip(first, later, strict=True))


def at_ends(x: Float[Tensor, "batch length *rest"], lengths: Int[Tensor, " batch"]) -> Float[Tensor, "batch *rest"]:
    """The last step of each sequence."""
    place = (lengths - 1).reshape(-1, *[1] * (x.ndim - 1)).expand(-1, 1, *x.shape[2:])
    return x.gather(1, place).squeeze(1)


def last_inputs(
    v: Float[Tensor, "batch length width"], chunk: Int[Tensor, " batch"], rest: Int[Tensor, " batch"]
) -> tuple[Float[Tensor, "batch 32 width"], Int[Tensor, "batch 32"]]:
    """The inputs of each sequence's last chunk, zeros after its `rest` steps, and the steps of each to the end."""
    steps = torch.arange(CHUNK)
    places = (CHUNK * chunk[:, None] + steps).clamp_max(v.shape[1] - 1)
    inputs = v.gather(1, places[..., None].expand(-1, -1, v.shape[2]))
    return inputs * (steps < rest[:, None]).to(v.dtype)[..., None], (rest[:, None] - 1 - steps).clamp_min(0)


@final
class Product(nn.Module):
    """x Wᵀ + b, in the dtype of W; the result is as wide as the bias and all else."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().to(dtype).contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().to(wide(dtype)))

    def forward(self, x: Float[Tensor, "*rest inputs"]) -> Float[Tensor, "*rest outputs"]:
        if self.weight.dtype == x.dtype:
            return linear(x, self.weight, self.bias)
        y = linear(x.to(self.weight.dtype), self.weight).to(x.dtype)
        return y if self.bias is None else y + self.bias


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and of all but matrix products: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class Recurrence(nn.Module, ABC):
    """gain · y of a layer from scale ⊙ x, with constants computed once; its state is that of the layer, flat."""

    size: int  # of the state
    scale: Tensor | None

    @abstractmethod
    def step(
        self, v: Float[Tensor, "batch width"], state: Float[Tensor, "batch size"]
    ) -> tuple[Float[Tensor, "batch width"], Float[Tensor, "batch size"]]:
        """One step, and the state after it."""

    @abstractmethod
    def sequence(
        self, v: Float[Tensor, "batch length width"], lengths: Int[Tensor, " batch"]
    ) -> tuple[Float[Tensor, "batch length width"], Float[Tensor, "batch size"]]:
        """All steps of a sequence from zeros, and the state at its end."""

    def _keep(self, dtype: torch.dtype, **constants: Tensor | None) -> None:
        for name, value in constants.items():
            self.register_buffer(name, None if value is None else value.detach().to(dtype).contiguous())


def recurrence_of(
    layer: SSMLayer, dtype: torch.dtype, *, sequences: bool, gain: float = 1.0, scaled: bool = False
) -> Recurrence:
    """The recurrence of a layer for steps or for sequences, with matrices in `dtype`.

    A layer of another package is traced as it is.
    """
    stepper = layer.stepper(torch.float64, gain=gain, scaled=scaled)
    if isinstance(stepper, SystemStepper):
        return System(stepper, dtype, sequences=sequences)
    if isinstance(stepper, BankStepper):
        return Bank(stepper, dtype, sequences=sequences)
    if isinstance(stepper, LowRankStepper):
        return LowRank(stepper, dtype, sequences=sequences)
    if isinstance(stepper, SelectiveStepper):
        return Selective(stepper, dtype)
    return Traced(layer, stepper, gain)


def _poles(stepper: SystemStepper | BankStepper) -> Complex[Tensor, "*bank n"]:
    assert stepper.poles is not None
    return stepper.poles.reshape(stepper.shape)


class FixedPoles(Recurrence):
    """A recurrence with constant poles; its states are [re, im] on the last axis here."""

    skip: Tensor | None
    decay: Tensor
    phase: Tensor

    def __init__(self, stepper: SystemStepper | BankStepper, dtype: torch.dtype, *, sequences: bool) -> None:
        super().__init__()
        self.size, self.scale, exact = stepper.size, stepper.scale, torch.float64
        poles = _poles(stepper)
        self._keep(wide(dtype), skip=stepper.skip)
        self.n = poles.shape[-1]
        if sequences:
            # A float32 power of 2¹⁷ would be off by 2¹⁷ roundings.
            self._keep(exact, decay=poles.abs().clamp_min(torch.finfo(exact).tiny).log(), phase=poles.angle())

    def _powers(self, exponents: Int[Tensor, " count"]) -> Parts:
        """λ to whole exponents: (re, im), each (count, …, n)."""
        steps = exponents.to(torch.float64).reshape(-1, *[1] * self.decay.ndim)
        size, angle = torch.exp(steps * self.decay), steps * self.phase
        # onnxruntime knows sines of float64, but no cosines.
        return size * torch.sin(angle + math.pi / 2), size * torch.sin(angle)

    def _before_chunks(self, ends: Float[Tensor, "batch chunks *rest n2"]) -> Float[Tensor, "batch chunks *rest n2"]:
        """The state before each chunk, from what the inputs of each give at its end."""
        for level in range(_LEVELS):
            # In one go what is 1 … 7 chunks ago, then what is 8, 16, … 56 ago, and so on.
            lags = torch.arange(1, _RADIX) * _RADIX**level
            re, im = (part.to(ends.dtype) for part in self._powers(CHUNK * lags))
            place = torch.arange(ends.shape[1])[:, None] - lags
            earlier = ends[:, place.clamp_min(0)]  # (batch, chunks, lags, …)
            known = (place >= 0).to(ends.dtype).reshape(*place.shape, *[1] * (ends.ndim - 2))
            moved = turned(earlier * known, torch.cat([re, re], -1), torch.cat([-im, im], -1))
            ends = ends + moved.sum(2)
        return _delayed(ends)

    def _skipped(self, v: Tensor) -> Tensor:
        return v if self.skip is None else v * self.skip


def _lags() -> tuple[Int[Tensor, "32 32"], Int[Tensor, "32 32"]]:
    """t − s, or 0 where s is after t; and 1, or 0 there."""
    lag = torch.arange(CHUNK)[:, None] - torch.arange(CHUNK)
    return lag.clamp_min(0), (lag >= 0).to(torch.int64)


@final
class System(FixedPoles):
    """One system for all channels; its state is (re, im) of all modes."""

    same: Tensor
    crossed: Tensor

    def __init__(self, stepper: SystemStepper, dtype: torch.dtype, *, sequences: bool) -> None:
        super().__init__(stepper, dtype, sequences=sequences)
        # The stepper has re and im of each mode side by side.
        apart = torch.arange(self.size).reshape(-1, 2).T.flatten()
        self.drive = Product(stepper.drive.T[apart], None, dtype)
        self.readout = Product(stepper.readout.T[:, apart], None, dtype)
        if not sequences:
            re, im = _poles(stepper).real, _poles(stepper).imag
            self._keep(wide(dtype), same=torch.cat([re, re]), crossed=torch.cat([-im, im]))

    def step(self, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h = turned(state, self.same, self.crossed) + self.drive(v)
        return self.readout(h) + self._skipped(v), h

    def sequence(self, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = in_chunks(self.drive(v))
        lag, known = _lags()
        # Inside a chunk h[t] = Σ λᵗ⁻ˢ x[s], for each mode a product with a matrix of 32 × 32.
        powers = self._powers(torch.arange(CHUNK))
        matrix = tuple((part[lag] * known[..., None]).movedim(-1, 0).to(x.dtype) for part in powers)
        columns = tuple(part.permute(0, 3, 2, 1) for part in pieces(x, [self.n] * 2))  # (batch, n, 32, chunks)
        own = torch.cat([part.permute(0, 3, 2, 1) for part in times(matrix, columns, torch.matmul)], -1)
        before = self._before_chunks(own[:, :, -1])[:, :, None]
        re, im = (part.to(x.dtype) for part in self._powers(torch.arange(1, CHUNK + 1)))
        h = own + turned(before, torch.cat([re, re], -1), torch.cat([-im, im], -1))
        h = in_one(h, v.shape[1])
        return self.readout(h) + self._skipped(v), at_ends(h, lengths)


@final
class Bank(FixedPoles):
    """One system for each channel; its state is (re, im) of width × n modes."""

    a: Tensor
    b: Tensor
    B: Tensor
    B_re: Tensor
    B_im: Tensor
    C: Tensor
    C_re: Tensor
    C_minus_im: Tensor

    def __init__(self, stepper: BankStepper, dtype: torch.dtype, *, sequences: bool) -> None:
        super().__init__(stepper, dtype, sequences=sequences)
        B, C, poles = stepper.basis, stepper.C, _poles(stepper)
        if sequences:
            self._keep(wide(dtype), B=torch.cat([B.real, B.imag], -1), C=torch.cat([C.real, -C.imag], -1))
        else:
            self._keep(
                wide(dtype), a=poles.real, b=poles.imag, B_re=B.real, B_im=B.imag, C_re=C.real, C_minus_im=-C.imag
            )

    def step(self, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        # re and im apart, as the state has them: to bring them together takes as long as all else.
        halves = state.unflatten(-1, (2, *self.a.shape))
        driven = tuple(part * v[..., None] for part in (self.B_re, self.B_im))
        h = plus(times((self.a, self.b), (halves[:, 0], halves[:, 1])), driven)
        y = (self.C_re * h[0] + self.C_minus_im * h[1]).sum(-1)
        return y + self._skipped(v), torch.cat([part.flatten(1) for part in h], -1)

    def sequence(self, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Form the states before chunks only, each of which takes as much memory as n steps of all channels."""
        x = in_chunks(v).permute(0, 3, 2, 1)  # (batch, width, 32, chunks)
        lag, known = _lags()
        kept = self._driven(torch.arange(CHUNK))  # (32, width, 2n): what is left of an input after some steps
        kernel = (self.C * kept).sum(-1)[lag] * known[..., None]  # (32, 32, width)
        ends = kept.flip(0).permute(1, 2, 0) @ x  # (batch, width, 2n, chunks)
        before = self._before_chunks(ends.permute(0, 3, 1, 2))
        re, im = (part.to(v.dtype) for part in self._powers(torch.arange(1, CHUNK + 1)))
        # Re(C λ h) = [C λ re, −C λ im] · [re h, im h]
        C_re, C_minus_im = self.C[:, : self.n], self.C[:, self.n :]
        read = torch.cat([C_re * re + C_minus_im * im, C_minus_im * re - C_re * im], -1).movedim(1, 0)
        y = kernel.movedim(-1, 0).to(v.dtype) @ x + read @ before.permute(0, 2, 3, 1)
        y = in_one(y.permute(0, 3, 2, 1), v.shape[1])
        return y + self._skipped(v), self._flat(self._at_ends(v, before, kept, lengths))

    def _driven(self, exponents: Int[Tensor, " count"]) -> Float[Tensor, "count width n2"]:
        """λ to whole exponents, times B."""
        re, im = (part.to(self.B.dtype) for part in self._powers(exponents))
        return turned(self.B, torch.cat([re, re], -1), torch.cat([-im, im], -1))

    def _at_ends(self, v: Tensor, before: Tensor, kept: Tensor, lengths: Tensor) -> Float[Tensor, "batch width n2"]:
        """The state at each sequence's end, from the one before the chunk that the end is in, and what this adds."""
        chunk, rest = lengths // CHUNK, lengths % CHUNK
        begin = at_ends(before, chunk + 1)
        re, im = (part.to(v.dtype) for part in self._powers(torch.arange(CHUNK)))
        begin = turned(begin, torch.cat([re, re], -1)[rest], torch.cat([-im, im], -1)[rest])
        inputs, place = last_inputs(v, chunk, rest)
        weights = kept[place]  # (batch, 32, width, 2n)
        return begin + (weights * inputs[..., None]).sum(1)

    def _flat(self, h: Float[Tensor, "batch width n2"]) -> Float[Tensor, "batch size"]:
        return h.unflatten(-1, (2, self.n)).transpose(1, 2).flatten(1)


@final
class LowRank(Recurrence):
    """S4 with its rank one: h ← decay h + drive x − left (rightᵀ h + own x) in each channel, h = [re, im].

    Sequences take its full matrices, whose powers are formed in float64.
    """

    same: Tensor
    crossed: Tensor
    left: Tensor
    right: Tensor
    drive: Tensor
    own: Tensor
    C: Tensor
    skip: Tensor

    def __init__(self, stepper: LowRankStepper, dtype: torch.dtype, *, sequences: bool) -> None:
        super().__init__()
        self.size, self.scale, self.n = stepper.size, stepper.scale, stepper.shape[-1]
        decay, left, drive = (
            torch.cat([part.real, part.imag], -1) for part in (stepper.decay, stepper.left, stepper.drive)
        )
        # Re(z h) = [Re z, −Im z] · [re h, im h]
        right, C = (torch.cat([part.real, -part.imag], -1) for part in (stepper.right, stepper.C))
        re, im = decay[:, : self.n], decay[:, self.n :]
        same, crossed = torch.cat([re, re], -1), torch.cat([-im, im], -1)
        inner = torch.float64 if sequences else wide(dtype)
        self._keep(inner, same=same, crossed=crossed, left=left, right=right, drive=drive, own=stepper.own, C=C)
        self._keep(wide(dtype), skip=stepper.D)

    def step(self, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h = state.unflatten(-1, (2, -1, self.n)).transpose(1, 2).flatten(2)
        h = self._moved(h) + (self.drive - self.left * self.own[:, None]) * v[..., None]
        return (self.C * h).sum(-1) + self.skip * v, self._flat(h)

    def _moved(self, h: Float[Tensor, "*rest width n2"]) -> Float[Tensor, "*rest width n2"]:
        return turned(h, self.same, self.crossed) - self.left * (self.right * h).sum(-1, keepdim=True)

    def sequence(self, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = in_chunks(v).permute(0, 3, 2, 1)  # (batch, width, 32, chunks)
        powers, columns, rows = self._powers()
        lag, known = _lags()
        kernel = (self.C[:, :, None] * columns).sum(1)[:, lag] * known  # (width, 32, 32)
        ends = columns.flip(-1).to(v.dtype) @ x  # (batch, width, 2n, chunks)
        before = _delayed(self._carried(ends, powers[5]).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        y = kernel.to(v.dtype) @ x + rows.to(v.dtype) @ before
        y = in_one(y.permute(0, 3, 2, 1), v.shape[1])
        last = self._at_ends(v, before.permute(0, 3, 1, 2), powers, columns, lengths)
        return y + self.skip * v, self._flat(last)

    def _powers(self) -> tuple[list[Tensor], Float[Tensor, "width n2 32"], Float[Tensor, "width 32 n2"]]:
        """A, A², …, A³²; Aʲ B for j = 0, …, 31; and C Aʲ for j = 1, …, 32."""
        states = torch.eye(2 * self.n, dtype=self.same.dtype)[:, None].expand(-1, len(self.same), -1)
        A = self._moved(states).permute(1, 2, 0)
        columns, rows = (self.drive - self.left * self.own[:, None])[..., None], self.C[:, None]
        powers = [A]
        for _ in range(5):
            columns = torch.cat([columns, powers[-1] @ columns], -1)
            rows = torch.cat([rows, rows @ powers[-1]], 1)
            powers.append(powers[-1] @ powers[-1])
        return powers, columns, rows @ A

    def _carried(self, ends: Float[Tensor, "batch width n2 chunks"], power: Tensor) -> Tensor:
        """The state at the end of each chunk, from what the inputs of each give there."""
        s = 1
        while s < LONGEST // CHUNK:
            place = torch.arange(ends.shape[3])
            earlier = ends.index_select(3, (place - s).clamp_min(0)) * (place >= s).to(ends.dtype)
            ends = ends + power.to(ends.dtype) @ earlier
            power, s = power @ power, 2 * s
        return ends

    def _at_ends(
        self, v: Tensor, before: Tensor, powers: list[Tensor], columns: Tensor, lengths: Tensor
    ) -> Float[Tensor, "batch width n2"]:
        """The state at each sequence's end, from the one before the chunk that the end is in, and what this adds."""
        chunk, rest = lengths // CHUNK, lengths % CHUNK
        h = at_ends(before, chunk + 1)
        for bit, power in enumerate(powers[:5]):
            moves = (rest // 2**bit % 2).to(h.dtype)[:, None, None]
            h = h + moves * ((power.to(h.dtype) @ h[..., None])[..., 0] - h)
        inputs, place = last_inputs(v, chunk, rest)
        weights = columns.movedim(-1, 0).to(v.dtype)[place]  # (batch, 32, width, 2n)
        return h + (weights * inputs[..., None]).sum(1)

    def _flat(self, h: Float[Tensor, "batch width n2"]) -> Float[Tensor, "batch size"]:
        return h.unflatten(-1, (2, self.n)).transpose(1, 2).flatten(1)


@final
class Selective(Recurrence):
    """Mamba's recurrence; its state is, for each channel, the last inputs of the convolution and then h."""

    taps: Tensor
    conv_bias: Tensor | None
    D: Tensor

    def __init__(self, stepper: SelectiveStepper, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.scale = stepper.size, None
        self.inner, self.past, self.rows = stepper.inner, stepper.past, stepper.parts
        out_bias = None if stepper.out_bias is None else stepper.gain * stepper.out_bias
        self.into = Product(stepper.into.T, stepper.into_bias, dtype)
        self.select = Product(stepper.select.T, None, dtype)
        self.steps = Product(stepper.steps.T, stepper.step_bias, dtype)
        self.out = Product(stepper.gain * stepper.out.T, out_bias, dtype)
        self._keep(wide(dtype), taps=stepper.taps, conv_bias=stepper.conv_bias, D=stepper.D)
        rates = (stepper.rates.real, stepper.rates.imag) if stepper.complex else (stepper.rates,)
        self.order, self.parts = rates[0].shape[1], len(rates)
        for number, part in enumerate(rates):
            self._keep(wide(dtype), **{f"rate_{number}": part})
        # Of B, then of C: maps of the real parts, then of the imaginary ones. They are never rounded to half precision.
        maps = [] if stepper.maps is None else [rows.T.unflatten(0, (-1, self.parts)) for rows in stepper.maps]
        self.maps = nn.ModuleList(Product(rows[:, p], None, wide(dtype)) for rows in maps for p in range(self.parts))

    def step(self, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        window, *h = pieces(state.unflatten(-1, (self.inner, -1)), [self.past, *[self.order] * self.parts])
        v, z = pieces(self.into(v), [self.inner] * 2)
        inputs = torch.cat([window, v[..., None]], -1)
        decay, driven, C, u = self._selected((inputs * self.taps.mT).sum(-1))
        after = plus(times(decay, tuple(h)), driven)
        return self._read(after, C, u, z), torch.cat([inputs[..., 1:], *after], -1).flatten(1)

    def sequence(self, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        length = v.shape[1]
        v, z = pieces(self.into(v), [self.inner] * 2)
        inputs = pad(v, (0, 0, self.past, 0))
        total = self.taps[0] * inputs[:, :length]
        for k in range(1, self.past + 1):
            total = total + self.taps[k] * inputs[:, k : k + length]
        decay, driven, C, u = self._selected(total)
        h = varying_scan(driven, decay)
        places = lengths[:, None] + torch.arange(self.past)
        window = inputs.gather(1, places[..., None].expand(-1, -1, self.inner)).mT
        state = torch.cat([window, *(at_ends(part, lengths) for part in h)], -1)
        return self._read(h, C, u, z), state.flatten(1)

    def _selected(self, u: Float[Tensor, "*rest inner"]) -> tuple[Parts, Parts, Parts, Tensor]:
        """Decays and inputs of the states, C with the imaginary part negated, and u, from the convolution's sum."""
        u = silu(u if self.conv_bias is None else u + self.conv_bias)
        dt, B, C = pieces(self.select(u), self.rows)
        delta = softplus(self.steps(dt))
        rates = [getattr(self, f"rate_{number}") for number in range(self.parts)]
        size = torch.exp(delta[..., None] * rates[0])
        turn = None if self.parts == 1 else delta[..., None] * rates[1]
        decay = (size,) if turn is None else (size * torch.cos(turn), size * torch.sin(turn))
        both = [B[..., None, :], C[..., None, :]]
        if len(self.maps):
            chosen = [rows(x).unflatten(-1, (self.inner, -1)) for x, rows in self._mapped(B, C)]
            both_parts = chosen[: self.parts], chosen[self.parts :]
        else:
            both_parts = both[:1], both[1:]
        driven = (delta * u)[..., None]
        return decay, tuple(driven * part for part in both_parts[0]), tuple(both_parts[1]), u

    def _mapped(self, B: Tensor, C: Tensor) -> list[tuple[Tensor, nn.Module]]:
        return list(zip([B] * self.parts + [C] * self.parts, self.maps, strict=True))

    def _read(self, h: Parts, C: Parts, u: Tensor, z: Tensor) -> Tensor:
        if len(self.maps):
            y = sum((part * read for part, read in zip(h, C, strict=True)), start=torch.zeros(())).sum(-1)
        else:
            y = torch.matmul(h[0], C[0].mT).squeeze(-1)
        return self.out((y + self.D * u) * silu(z))


@final
class Traced(Recurrence):
    """A layer of any other kind: its own `step` and `forward`, as torch.export traces them."""

    def __init__(self, layer: SSMLayer, stepper: Stepper, gain: float) -> None:
        super().__init__()
        self.layer, self.gain, self.size, self.scale = layer, gain, stepper.size, None
        self.shape = layer.initial_state(1).shape[1:]

    def step(self, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, after = self.layer.step(v, state.unflatten(-1, self.shape))
        return self.gain * y, after.flatten(1)

    def sequence(self, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        y, state = self.layer(v, None, lengths)
        return self.gain * y, state.flatten(1)
