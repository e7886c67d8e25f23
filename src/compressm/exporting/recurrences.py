"""Recurrences of layers as exported graphs compute them: real arithmetic, states in and out, one path for any length.

A sequence of any length is cut into chunks of 32 steps, the last ones of repeated rows that nobody reads. Inside the
chunks, and then over them, h[t] takes up λˢ h[t − s] for s = 1, 2, 4, …: no size depends on the length but the number
of chunks, and no branch at all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias, final

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu, softplus

from compressm.layers import SSMLayer
from compressm.layers.streaming import BankStepper, SelectiveStepper, Stepper, SystemStepper

# One tensor of real numbers, or the real and the imaginary parts of complex ones.
Parts: TypeAlias = tuple[Tensor, ...]

CHUNK = 32
_INSIDE = 5  # doublings inside a chunk
_ACROSS = 15  # doublings over chunks: what is 2²⁰ steps ago is forgotten
LONGEST = CHUNK * 2**_ACROSS


def times(a: Parts, h: Parts) -> Parts:
    """The product a h."""
    if len(h) == 1:
        return (a[0] * h[0],)
    return a[0] * h[0] - a[1] * h[1], a[0] * h[1] + a[1] * h[0]


def plus(g: Parts, h: Parts) -> Parts:
    """The sum g + h."""
    return tuple(left + right for left, right in zip(g, h, strict=True))


def constant_scan(x: Parts, powers: Parts) -> Parts:
    """Every h[t] = λ h[t−1] + x[t] on axis 1, from λ, λ², λ⁴, … on the first axis of `powers`."""
    length = x[0].shape[1]
    steps = [tuple(part[j] for part in powers) for j in range(_INSIDE + _ACROSS)]
    h, near = _in_chunks(x), tuple(part[None] for part in steps[0])
    for j in range(_INSIDE):
        s = 2**j
        later = plus(_from(h, s), times(steps[j], _until(h, s)))
        h = _joined([_first(h, s), later], 2)
        near = _joined([near, times(steps[j], near)], 0)
    ends = _last(h)
    for j in range(_ACROSS):
        ends = plus(ends, times(steps[_INSIDE + j], _delayed(ends, 2**j)))
    before = tuple(part[:, :, None] for part in _delayed(ends, 1))
    return _in_one(plus(h, times(near, before)), length)


def varying_scan(x: Parts, decay: Parts) -> Parts:
    """Every h[t] = a[t] h[t−1] + x[t] on axis 1."""
    length = x[0].shape[1]
    h, a = _in_chunks(x), _in_chunks(decay)
    for j in range(_INSIDE):
        s = 2**j
        h = _joined([_first(h, s), plus(_from(h, s), times(_from(a, s), _until(h, s)))], 2)
        a = _joined([_first(a, s), times(_from(a, s), _until(a, s))], 2)
    ends, left = _last(h), _last(a)
    for j in range(_ACROSS):
        ends, left = plus(ends, times(left, _delayed(ends, 2**j))), times(left, _delayed(left, 2**j))
    before = tuple(part[:, :, None] for part in _delayed(ends, 1))
    return _in_one(plus(h, times(a, before)), length)


def _in_chunks(x: Parts) -> Parts:
    """(batch, length, …) as (batch, chunks, 32, …); two chunks at least, so that no size is 1."""
    length = x[0].shape[1]
    chunks = length // CHUNK + 2
    places = torch.arange(chunks * CHUNK).clamp_max(length - 1)
    return tuple(part.index_select(1, places).unflatten(1, (chunks, CHUNK)) for part in x)


def _in_one(h: Parts, length: int) -> Parts:
    return tuple(part.flatten(1, 2).index_select(1, torch.arange(length)) for part in h)


def _delayed(h: Parts, chunks: int) -> Parts:
    """h of some chunks ago, and zeros before the first."""
    place = torch.arange(h[0].shape[1])
    known = (place >= chunks).to(h[0].dtype).reshape(-1, *[1] * (h[0].ndim - 2))
    return tuple(part.index_select(1, (place - chunks).clamp_min(0)) * known for part in h)


def _first(h: Parts, s: int) -> Parts:
    return tuple(part[:, :, :s] for part in h)


def _from(h: Parts, s: int) -> Parts:
    return tuple(part[:, :, s:] for part in h)


def _until(h: Parts, s: int) -> Parts:
    return tuple(part[:, :, :-s] for part in h)


def _last(h: Parts) -> Parts:
    return tuple(part[:, :, -1] for part in h)


def _joined(pieces: Sequence[Parts], axis: int) -> Parts:
    return tuple(torch.cat(list(parts), axis) for parts in zip(*pieces, strict=True))


def at_ends(x: Float[Tensor, "batch length *rest"], lengths: Int[Tensor, " batch"]) -> Float[Tensor, "batch *rest"]:
    """The last step of each sequence."""
    place = (lengths - 1).reshape(-1, *[1] * (x.ndim - 1)).expand(-1, 1, *x.shape[2:])
    return x.gather(1, place).squeeze(1)


@final
class Product(nn.Module):
    """x Wᵀ + b, in the dtype of W; the result is as wide as the bias and all else."""

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


def recurrence_of(layer: SSMLayer, dtype: torch.dtype, *, gain: float = 1.0, scaled: bool = False) -> Recurrence:
    """The recurrence of a layer, with matrices in `dtype`; a layer of another package is traced as it is."""
    stepper = layer.stepper(torch.float64, gain=gain, scaled=scaled)
    if isinstance(stepper, SystemStepper):
        return System(stepper, dtype)
    if isinstance(stepper, BankStepper):
        return Bank(stepper, dtype)
    if isinstance(stepper, SelectiveStepper):
        return Selective(stepper, dtype)
    return Traced(layer, stepper, gain)


class FixedPoles(Recurrence):
    """A recurrence with constant poles."""

    def __init__(self, stepper: SystemStepper | BankStepper, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.scale, exact = stepper.size, stepper.scale, torch.float64
        assert stepper.poles is not None
        poles: Complex[Tensor, "..."] = stepper.poles.reshape(stepper.shape)
        self._keep(wide(dtype), a=poles.real, b=poles.imag, skip=stepper.skip)
        # A float32 power of 2²⁰ would be off by 2²⁰ roundings.
        self._keep(exact, decay=poles.abs().clamp_min(torch.finfo(exact).tiny).log(), phase=poles.angle())

    def _powers(self) -> Parts:
        """λ, λ², λ⁴, …"""
        exponents = [2.0**j for j in range(_INSIDE + _ACROSS)]
        steps = torch.tensor(exponents, dtype=torch.float64).reshape(-1, *[1] * self.decay.ndim)
        size, angle = torch.exp(steps * self.decay), steps * self.phase
        # onnxruntime knows sines of float64, but no cosines.
        return tuple((size * torch.sin(turn)).to(self.a.dtype) for turn in (angle + math.pi / 2, angle))

    def _skipped(self, v: Tensor) -> Tensor:
        return v if self.skip is None else v * self.skip


@final
class System(FixedPoles):
    """One system for all channels; its state is (re, im) of all modes."""

    def __init__(self, stepper: SystemStepper, dtype: torch.dtype) -> None:
        super().__init__(stepper, dtype)
        # The stepper has re and im of each mode side by side.
        apart = torch.arange(self.size).reshape(-1, 2).T.flatten()
        self.drive = Product(stepper.drive.T[apart], None, dtype)
        self.readout = Product(stepper.readout.T[:, apart], None, dtype)
        self._keep(wide(dtype), same=torch.cat([self.a, self.a]), crossed=torch.cat([-self.b, self.b]))

    def step(self, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        re, im = state.chunk(2, -1)
        h = self.same * state + self.crossed * torch.cat([im, re], -1) + self.drive(v)
        return self.readout(h) + self._skipped(v), h

    def sequence(self, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.cat(constant_scan(self.drive(v).chunk(2, -1), self._powers()), -1)
        return self.readout(h) + self._skipped(v), at_ends(h, lengths)


@final
class Bank(FixedPoles):
    """One system for each channel; its state is (re, im) of width × n modes."""

    def __init__(self, stepper: BankStepper, dtype: torch.dtype) -> None:
        super().__init__(stepper, dtype)
        B, C = stepper.basis, stepper.C
        self._keep(wide(dtype), B_re=B.real, B_im=B.imag, C_re=C.real, C_minus_im=-C.imag)

    def step(self, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        h = state.unflatten(-1, (2, *self.a.shape)).unbind(1)
        h = plus(times((self.a, self.b), h), self._driven(v))
        return self._read(h, v), torch.stack(h, 1).flatten(1)

    def sequence(self, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        h = constant_scan(self._driven(v), self._powers())
        return self._read(h, v), torch.stack([at_ends(part, lengths) for part in h], 1).flatten(1)

    def _driven(self, v: Tensor) -> Parts:
        return self.B_re * v[..., None], self.B_im * v[..., None]

    def _read(self, h: Parts, v: Tensor) -> Tensor:
        return (self.C_re * h[0] + self.C_minus_im * h[1]).sum(-1) + self._skipped(v)


@final
class Selective(Recurrence):
    """Mamba's recurrence; its state is, for each channel, the last inputs of the convolution and then h."""

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
        window, h = state.unflatten(-1, (self.inner, -1)).split([self.past, self.parts * self.order], -1)
        v, z = self.into(v).chunk(2, -1)
        inputs = torch.cat([window, v[..., None]], -1)
        decay, driven, C, u = self._selected((inputs * self.taps.mT).sum(-1))
        h = plus(times(decay, h.split(self.order, -1)), driven)
        return self._read(h, C, u, z), torch.cat([inputs[..., 1:], *h], -1).flatten(1)

    def sequence(self, v: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        length = v.shape[1]
        v, z = self.into(v).chunk(2, -1)
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
        dt, B, C = self.select(u).split(self.rows, -1)
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
