"""Steps of layers for streams: constants are computed once, and states stay in memory that the stream gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.nn.functional import silu, softplus

from compressm.ops.dispatch import kernels_serve

if TYPE_CHECKING:
    from compressm.layers.base import SSMLayer
    from compressm.layers.mamba import Mamba


class Stepper(ABC):
    """A layer's step: gain · y from scale ⊙ x, with constants computed once and a state that is updated in place.

    Before the steps the stream multiplies the states of all steppers that have `poles` by them, at once: their states
    are complex numbers, and `bind_` gets them as pairs (re, im).
    """

    records = True  # False if a CUDA graph cannot record it
    poles: Complex[Tensor, " modes"] | None = None
    scale: Float[Tensor, " width"] | None = None
    basis: Tensor | None = None  # what a stored state was divided by, if it was
    state: Float[Tensor, "batch size"]

    def __init__(self, size: int) -> None:
        self.size = size  # of the state of one sequence

    def bind_(self, state: Float[Tensor, "batch size"]) -> None:
        """Use this memory for the state."""
        self.state = state

    @abstractmethod
    def step(self, v: Float[Tensor, "batch width"]) -> Float[Tensor, "batch width"]:
        """Make a step, which may overwrite v."""

    @abstractmethod
    def read(self) -> Tensor:
        """The state as the layer's own `step` takes it."""

    @abstractmethod
    def write_(self, state: Tensor) -> None:
        """Take a state that the layer's own `step` or `forward` returned."""


class LTIStepper(Stepper):
    """h ← λ h + B x, y = Re(C h) + D x, without the drive and the readout."""

    def __init__(
        self,
        log_poles: Float[Tensor, "2 *bank n"],
        D: Float[Tensor, " width"],
        dtype: torch.dtype,
        *,
        gain: float,
        scaled: bool,
    ) -> None:
        super().__init__(2 * log_poles[0].numel())
        self.shape, self.dtype = log_poles.shape[1:], dtype
        decay, phase = log_poles.double().flatten(1)
        self.poles = torch.polar(torch.exp(decay), phase).to(_complex(dtype))
        # The skip D ⊙ x is x if the norm before the layer multiplies by D. The input matrix, divided by D, loses no
        # digits by that unless D is 0 or out of the range of float32.
        D = gain * D.double()
        usable = (D.abs() > 1e-15) & (D.abs() < 1e15) if scaled else torch.zeros_like(D, dtype=torch.bool)
        self.scale = torch.where(usable, D, 1.0).to(dtype) if scaled else None
        self.skip = None if bool(usable.all()) else torch.where(usable, 1.0, D).to(dtype)

    def bind_(self, state: Float[Tensor, "batch size"]) -> None:
        super().bind_(state)
        self.modes = torch.view_as_complex(state.unflatten(-1, (*self.shape, 2)))

    def read(self) -> Float[Tensor, "batch 2 *bank n"]:
        return torch.stack([self.modes.real, self.modes.imag], dim=1)

    def write_(self, state: Float[Tensor, "batch 2 *bank n"]) -> None:
        self.modes.copy_(torch.complex(*state.to(self.dtype).unbind(1)))

    def _divided(self, B: Complex[Tensor, "*rest width"]) -> Complex[Tensor, "*rest width"]:
        return B if self.scale is None else B / self.scale.double()

    def _pairs(self, matrix: Complex[Tensor, "*rest n"]) -> Float[Tensor, "*rest twice"]:
        return torch.view_as_real(matrix.resolve_conj()).flatten(-2).to(self.dtype).contiguous()


@final
class SystemStepper(LTIStepper):
    """One system for all channels: B is n × width, C is width × n."""

    def __init__(
        self,
        log_poles: Float[Tensor, "2 n"],
        B: Float[Tensor, "2 n width"],
        C: Float[Tensor, "2 width n"],
        D: Float[Tensor, " width"],
        dtype: torch.dtype,
        *,
        gain: float = 1.0,
        scaled: bool = False,
    ) -> None:
        super().__init__(log_poles, D, dtype, gain=gain, scaled=scaled)
        # At n = 256 one core takes a third longer for B as a transposed view, and 15 % for C without one.
        self.drive = self._pairs(self._divided(torch.complex(*B.double())).mT)
        self.readout = self._pairs(gain * torch.complex(*C.double()).conj()).mT

    def step(self, v: Float[Tensor, "batch width"]) -> Float[Tensor, "batch width"]:
        h = self.state.addmm_(v, self.drive)
        return (v if self.skip is None else v * self.skip).addmm_(h, self.readout)


@final
class BankStepper(LTIStepper):
    """One system for each channel: B and C are width × n. States are stored divided by B: an input adds to all."""

    basis: Tensor

    def __init__(
        self,
        log_poles: Float[Tensor, "2 width n"],
        B: Float[Tensor, "2 width n"],
        C: Float[Tensor, "2 width n"],
        D: Float[Tensor, " width"],
        dtype: torch.dtype,
        *,
        gain: float = 1.0,
        scaled: bool = False,
    ) -> None:
        super().__init__(log_poles, D, dtype, gain=gain, scaled=scaled)
        B, C = self._divided(torch.complex(*B.double()).mT).mT, gain * torch.complex(*C.double())
        self.basis, self.C = B.to(_complex(dtype)), C.to(_complex(dtype))
        self.readout = self._pairs((B * C).conj())

    def bind_(self, state: Float[Tensor, "batch size"]) -> None:
        super().bind_(state)
        self.numbers = state.unflatten(-1, self.readout.shape)

    def step(self, v: Float[Tensor, "batch width"]) -> Float[Tensor, "batch width"]:
        self.modes.add_(v[..., None])
        y = (self.numbers * self.readout).sum(-1)
        return y.add_(v) if self.skip is None else y.addcmul_(v, self.skip)

    def read(self) -> Float[Tensor, "batch 2 width n"]:
        h = self.modes * self.basis
        return torch.stack([h.real, h.imag], dim=1)

    def write_(self, state: Float[Tensor, "batch 2 width n"]) -> None:
        self.modes.copy_(torch.complex(*state.to(self.dtype).unbind(1)) / self.basis)


@final
class LowRankStepper(Stepper):
    """An S4 layer: h ← decay h + drive x − left (Re(rightᴴ h) + own x), y = Re(C h) + D x."""

    def __init__(
        self,
        moves: tuple[
            Complex[Tensor, "width n"],
            Complex[Tensor, "width n"],
            Complex[Tensor, "width n"],
            Complex[Tensor, "width n"],
        ],
        own: Float[Tensor, " width"],
        C: Complex[Tensor, "width n"],
        D: Float[Tensor, " width"],
        dtype: torch.dtype,
        *,
        gain: float = 1.0,
    ) -> None:
        self.shape = C.shape
        super().__init__(2 * C.numel())
        self.dtype, kind = dtype, _complex(dtype)
        self.decay, self.left, right, self.drive = (part.to(kind) for part in moves)
        self.right = right.conj().resolve_conj()
        self.own, self.C, self.D = own.to(dtype), (gain * C).to(kind), (gain * D.double()).to(dtype)

    def bind_(self, state: Float[Tensor, "batch size"]) -> None:
        super().bind_(state)
        self.modes = torch.view_as_complex(state.unflatten(-1, (*self.shape, 2)))

    def step(self, v: Float[Tensor, "batch width"]) -> Float[Tensor, "batch width"]:
        read = (self.right * self.modes).real.sum(-1) + self.own * v
        self.modes.mul_(self.decay).add_(self.drive * v[..., None]).sub_(self.left * read[..., None])
        return (self.C * self.modes).real.sum(-1) + self.D * v

    def read(self) -> Float[Tensor, "batch 2 width n"]:
        return torch.stack([self.modes.real, self.modes.imag], dim=1)

    def write_(self, state: Float[Tensor, "batch 2 width n"]) -> None:
        self.modes.copy_(torch.complex(*state.to(self.dtype).unbind(1)))


@final
class SelectiveStepper(Stepper):
    """A Mamba layer: its state is the last inputs of the convolution, time first, and then h."""

    def __init__(self, layer: Mamba, dtype: torch.dtype, *, gain: float = 1.0) -> None:
        self.inner, self.past, n = layer.inner, layer.conv_width - 1, layer.order
        self.complex = layer.A_imag is not None
        super().__init__(self.inner * (self.past + n * (2 if self.complex else 1)))
        self.parts = [layer.dt_rank, layer.projected, layer.projected]
        # The layer's own memory, where dtypes agree.
        self.into, self.select, self.steps, self.out = (
            linear.weight.detach().to(dtype).mT
            for linear in (layer.in_proj, layer.x_proj, layer.dt_proj, layer.out_proj)
        )
        self.into_bias, self.conv_bias, self.out_bias = (
            None if part.bias is None else part.bias.detach().to(dtype)
            for part in (layer.in_proj, layer.conv1d, layer.out_proj)
        )
        self.step_bias, self.D = (part.detach().to(dtype) for part in (layer.dt_proj.bias, layer.D))
        self.gain = gain
        self.taps = layer.conv1d.weight[:, 0].mT.to(dtype).contiguous()
        rates = layer.rates().to(dtype)
        self.rates = torch.complex(*rates) if self.complex else rates
        self.maps = None if layer.B_map is None or layer.C_map is None else self._maps(layer, dtype)

    def _maps(self, layer: Mamba, dtype: torch.dtype) -> list[Tensor]:
        """The maps of B and C as (projected, inner · n) matrices, pairs last, and 0 for states that are not there."""
        assert layer.B_map is not None
        assert layer.C_map is not None
        assert layer.orders is not None
        there = torch.arange(layer.order, device=layer.orders.device) < layer.orders[:, None]
        found = []
        for rows, sign in ((layer.B_map, 1.0), (layer.C_map.mT, -1.0)):
            rows = rows.movedim(1, 2) if self.complex else rows[:, :, None]  # (inner, n, pair, projected)
            signs = torch.tensor([1.0, sign], device=rows.device)[: rows.shape[2], None]
            rows = torch.where(there[..., None, None], rows.to(dtype) * signs.to(dtype), 0)
            found.append(rows.flatten(0, 2).mT)
        return found

    def bind_(self, state: Float[Tensor, "batch size"]) -> None:
        super().bind_(state)
        inputs, h = state.split([self.past * self.inner, self.size - self.past * self.inner], dim=-1)
        self.window, self.h = inputs.unflatten(-1, (self.past, self.inner)), h.unflatten(-1, (self.inner, -1))
        self.modes = torch.view_as_complex(self.h.unflatten(-1, (-1, 2))) if self.complex else self.h
        # Results of products, with views of their parts: to make a view takes as long as to add two vectors.
        self.vz, self.chosen = (state.new_empty(len(state), rows.shape[1]) for rows in (self.into, self.select))
        v, self.z = self.vz.chunk(2, dim=1)
        self.inputs = state.new_empty(len(state), self.past + 1, self.inner)
        self.joined, self.newest = [self.window, v[:, None]], self.inputs[:, 1:]
        self.dt, self.B, self.C = self.chosen.split(self.parts, dim=1)
        self.by_kernel = kernels_serve(state) and state.dtype is torch.float32 and not self.complex
        if self.by_kernel:
            from compressm.ops.selective.step_triton import plan_advance, plan_convolution

            self.u, self.y = (state.new_empty(len(state), self.inner) for _ in range(2))
            self.weight, self.rates = self.steps.mT.contiguous(), self.rates.contiguous()
            self.convolve = plan_convolution(self.vz, self.window, self.taps)
            B_row = self.chosen.stride(0) if self.maps is None else self.h[0].numel()
            self.advance = plan_advance(self.z, self.dt, B_row, self.h, own=self.maps is not None)

    def step(self, v: Float[Tensor, "batch width"]) -> Float[Tensor, "batch width"]:
        if self.into_bias is None:
            torch.mm(v, self.into, out=self.vz)
        else:
            torch.addmm(self.into_bias, v, self.into, out=self.vz)
        y = self._by_kernels() if self.by_kernel else self._by_definition()
        y = torch.mm(y, self.out) if self.out_bias is None else torch.addmm(self.out_bias, y, self.out)
        return y if self.gain == 1 else y.mul_(self.gain)

    def _by_definition(self) -> Float[Tensor, "batch inner"]:
        inputs = torch.cat(self.joined, 1, out=self.inputs)
        self.window.copy_(self.newest)
        u = inputs.mul_(self.taps).sum(1)
        u = silu(u if self.conv_bias is None else u.add_(self.conv_bias), inplace=True)
        torch.mm(u, self.select, out=self.chosen)
        B, C = (self.B[:, None], self.C[:, None]) if self.maps is None else self._mapped()
        delta = softplus(torch.addmm(self.step_bias, self.dt, self.steps))
        self.modes.mul_((delta[..., None] * self.rates).exp_())
        self.h.addcmul_((delta * u)[..., None], B)
        y = torch.bmm(self.h, C.mT)[..., 0] if self.maps is None else (self.h * C).sum(-1)
        return y.addcmul_(u, self.D).mul_(silu(self.z))

    def _mapped(self) -> Iterator[Tensor]:
        """B and C of every channel, in the shape of the states."""
        assert self.maps is not None
        return (torch.mm(x, rows).view(self.h.shape) for x, rows in zip((self.B, self.C), self.maps, strict=True))

    def _by_kernels(self) -> Float[Tensor, "batch inner"]:
        """Do the same by two kernels around the product with `select`; the result is overwritten by the next step."""
        self.convolve(self.vz, self.window, self.taps, self.conv_bias, self.u)
        torch.mm(self.u, self.select, out=self.chosen)
        B, C = (self.B, self.C) if self.maps is None else self._mapped()
        given = (self.weight, self.step_bias, self.rates, self.D, self.h, self.y)
        self.advance(self.u, self.z, self.dt, B, C, *given)
        return self.y

    def read(self) -> Float[Tensor, "batch inner kept"]:
        h = self.h.unflatten(-1, (-1, 2)).mT.flatten(-2) if self.complex else self.h
        return torch.cat([self.window.mT, h], dim=-1)

    def write_(self, state: Float[Tensor, "batch inner kept"]) -> None:
        inputs, h = state.split([self.past, state.shape[-1] - self.past], dim=-1)
        self.window.copy_(inputs.mT)
        self.h.copy_(h.unflatten(-1, (2, -1)).mT.flatten(-2) if self.complex else h)


@final
class EagerStepper(Stepper):
    """A layer of any other kind, by its own `step`, with nothing computed in advance."""

    records = False

    def __init__(self, layer: SSMLayer, *, gain: float = 1.0) -> None:
        self.layer, self.gain, self.like = layer, gain, layer.initial_state(1)
        super().__init__(self.like.numel())

    def step(self, v: Float[Tensor, "batch width"]) -> Float[Tensor, "batch width"]:
        with torch.no_grad():
            y, after = self.layer.step(v.to(next(self.layer.parameters()).dtype), self.read())
        self.write_(after)
        return self.gain * y.to(self.state.dtype)

    def read(self) -> Tensor:
        return self.state.unflatten(-1, self.like.shape[1:]).to(self.like.dtype, copy=True)

    def write_(self, state: Tensor) -> None:
        self.state.copy_(state.flatten(1))


def _complex(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.complex64)
