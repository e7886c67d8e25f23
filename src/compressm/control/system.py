"""Discrete linear systems h[k] = A h[k−1] + B u[k], y[k] = C h[k], alone or in banks.

The paper writes h[k+1] = A h[k] + B u[k]. That is the same system with the output one step later: Gramians, Hankel
singular values and both norms are equal. D is left out on purpose: no reduction changes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypeVar

import torch
from jaxtyping import Complex, Float, Inexact, Int
from torch import Tensor

from compressm.control import validation
from compressm.control.linear_algebra import exponential, largest_part, modulus, power_of_two
from compressm.control.poles import decay
from compressm.control.validation import PrecisionError, ShapeError, UnstableSystemError

System = TypeVar("System", bound="LinearSystem")


# The longest impulse response.
_MOST_STEPS = 2**24


class LinearSystem(ABC):
    """The common base of systems with a diagonal and with a dense A; axes before the named ones form a bank."""

    B: Inexact[Tensor, "*bank n p"]
    C: Inexact[Tensor, "*bank q n"]

    @property
    def order(self) -> int:
        return self.B.shape[-2]

    @property
    def inputs(self) -> int:
        return self.B.shape[-1]

    @property
    def outputs(self) -> int:
        return self.C.shape[-2]

    @property
    def bank(self) -> torch.Size:
        return self.B.shape[:-2]

    @property
    def dtype(self) -> torch.dtype:
        return self.B.dtype

    @property
    def is_complex(self) -> bool:
        """True if A, B or C has a complex dtype."""
        return any(tensor is not None and tensor.is_complex() for tensor in vars(self).values())

    @property
    def device(self) -> torch.device:
        return self.B.device

    @property
    def requires_grad(self) -> bool:
        return any(tensor is not None and tensor.requires_grad for tensor in vars(self).values())

    @property
    @abstractmethod
    def A(self) -> Inexact[Tensor, "*bank n n"]:
        """The state matrix as a full n × n matrix."""

    @property
    @abstractmethod
    def stability_margin(self) -> Float[Tensor, "*bank"]:
        """1 − ρ, the distance of the slowest pole from the unit circle."""

    @abstractmethod
    def adjoint(self) -> LinearSystem:
        """The system (Aᴴ, Cᴴ, Bᴴ): its controllability Gramian is this system's observability Gramian."""

    @abstractmethod
    def frequency_response(self, omega: Float[Tensor, "... f"]) -> Complex[Tensor, "*bank f q p"]:
        """G(e^{iω}) = C (I − e^{−iω} A)⁻¹ B; `omega` has shape (f,) or (*bank, f)."""

    @abstractmethod
    def _generator(self) -> Tensor:
        """A, in the form that `_propagate` and `_square` take."""

    @abstractmethod
    def _propagate(self, power: Tensor, columns: Tensor) -> Tensor:
        """Aᵏ times columns of shape (*bank, n, m)."""

    @abstractmethod
    def _square(self, power: Tensor) -> Tensor:
        """A²ᵏ from Aᵏ."""

    def _assign(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            object.__setattr__(self, name, tensor)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a system is immutable: build a new one instead of setting {name}")

    def _map(self: System, function: Callable[[Tensor], Tensor]) -> System:
        """Apply `function` to every tensor of the system, without checking the result."""
        image = object.__new__(type(self))
        image._assign(**{name: None if tensor is None else function(tensor) for name, tensor in vars(self).items()})
        return image

    def __repr__(self) -> str:
        bank = f", bank={tuple(self.bank)}" if self.bank else ""
        return f"{type(self).__name__}(order={self.order}, inputs={self.inputs}, outputs={self.outputs}{bank})"

    def __getitem__(self: System, member: Any) -> System:
        """One or more members of the bank; the index applies to the bank axes only."""
        if not self.bank:
            raise ShapeError("a single system has no bank axes to index")
        axes = len(self.bank)
        if isinstance(member, int) and axes == 1 and -self.bank[0] <= member < self.bank[0]:
            return self._map(lambda tensor: tensor[member].clone())
        chosen = torch.arange(self.bank.numel(), device=self.device).reshape(self.bank)[member]
        if chosen.numel() == 0:
            raise ShapeError(f"index {member!r:.80} selects none of the bank {tuple(self.bank)}, expected at least 1")

        def select(tensor: Tensor) -> Tensor:
            own = tensor.shape[axes:]
            return tensor.reshape(-1, *own).index_select(0, chosen.flatten()).reshape(*chosen.shape, *own)

        return self._map(select)

    @classmethod
    def stack(cls: type[System], systems: Sequence[System]) -> System:
        """A bank of systems of equal shapes, on a new first axis, unchecked."""
        known = [name for name in vars(systems[0]) if all(vars(one).get(name) is not None for one in systems)]
        image = object.__new__(cls)
        image._assign(**{name: None for name in vars(systems[0]) if name != "_decay"})
        image._assign(**{name: torch.stack([getattr(one, name) for one in systems]) for name in known})
        return image

    def to(self: System, device: torch.device | str | int) -> System:
        """Move the system to another device; the precision stays double."""
        if isinstance(device, torch.dtype | Tensor):
            raise PrecisionError(f"to() got {device}, expected only a device: a system always stays {self.dtype}")
        return self._map(lambda tensor: tensor.to(device))

    def detach(self: System) -> System:
        return self._map(torch.Tensor.detach)

    def scales(self, step: int = 1) -> tuple[Float[Tensor, "*bank"], Float[Tensor, "*bank"]]:
        """Powers of two just above the sizes of B and of C; divided by them, both have squares in float64's range."""
        input_scale, output_scale = (power_of_two(largest_part(part.detach()), step) for part in (self.B, self.C))
        return input_scale, output_scale

    def divided(self: System, B: Float[Tensor, "*bank"], C: Float[Tensor, "*bank"]) -> System:
        """The system with B and C divided by these numbers, unchecked."""
        image = self._map(lambda tensor: tensor)
        image._assign(B=self.B / B[..., None, None], C=self.C / C[..., None, None])
        return image

    def states(
        self, inputs: Inexact[Tensor, "... length p"], initial_state: Inexact[Tensor, "... n"] | None = None
    ) -> Inexact[Tensor, "... length n"]:
        """The states h[1..length]; axes of `inputs` before the bank axes are a batch of signals.

        The result is complex if the system, the inputs or the initial state are.
        """
        batch, dtype = self._check_signal(inputs, initial_state)
        columns = (self.B.to(dtype) @ inputs.to(dtype).mT).expand(*batch, -1, -1)
        power = self._generator().to(dtype)
        if initial_state is not None:
            carried = self._propagate(power, initial_state.to(dtype)[..., None])
            columns = torch.cat([columns[..., :1] + carried, columns[..., 1:]], dim=-1)
        step = 1
        while step < columns.shape[-1]:  # after this pass each column holds the last 2·step inputs
            shifted = columns[..., step:] + self._propagate(power, columns[..., :-step])
            columns = torch.cat([columns[..., :step], shifted], dim=-1)
            power, step = self._square(power), 2 * step
        return columns.mT

    def _check_signal(self, inputs: Tensor, initial_state: Tensor | None) -> tuple[torch.Size, torch.dtype]:
        """The axes before those of one signal, and the dtype to compute in."""
        given = {"inputs": validation.require_tensor("inputs", inputs, "length p")}
        if inputs.shape[-1] != self.inputs:
            raise ShapeError(
                f"inputs have {inputs.shape[-1]} channels (shape {tuple(inputs.shape)}), expected {self.inputs}"
            )
        batches = {"bank": self.bank, "inputs": inputs.shape[:-2]}
        if initial_state is not None:
            given["initial_state"] = validation.require_tensor("initial_state", initial_state, "n")
            if initial_state.shape[-1] != self.order:
                raise ShapeError(f"initial_state has shape {tuple(initial_state.shape)}, expected (..., {self.order})")
            batches["initial_state"] = initial_state.shape[:-1]
        validation.require_one_device(system=self.B, **given)
        dtype = self.dtype
        for tensor in given.values():
            dtype = torch.promote_types(dtype, tensor.dtype)
        return validation.require_broadcast(**batches), dtype

    def simulate(
        self, inputs: Inexact[Tensor, "... length p"], initial_state: Inexact[Tensor, "... n"] | None = None
    ) -> Inexact[Tensor, "... length q"]:
        """The outputs y[1..length], complex for a complex system; take `.real` for a layer that reads Re(C h)."""
        states = self.states(inputs, initial_state)
        return states @ self.C.mT.to(states.dtype)

    def impulse_response(self, length: SupportsIndex) -> Inexact[Tensor, "*bank length q p"]:
        """g[k] = C Aᵏ B for k = 0 … length − 1."""
        steps = validation.as_integer(length)
        if steps is None or not 1 <= steps <= _MOST_STEPS:
            raise ShapeError(f"length is {length!r:.100}, expected an integer, at least 1 and at most {_MOST_STEPS}")
        blocks, power = self.B[..., None, :], self._generator()
        while blocks.shape[-2] < steps:
            later = self._propagate(power, blocks.flatten(-2)).reshape(blocks.shape)
            blocks, power = torch.cat([blocks, later], dim=-2), self._square(power)
        return self.C[..., None, :, :] @ blocks[..., :steps, :].transpose(-3, -2)

    def _frequencies(self, omega: Tensor) -> Float[Tensor, "... f"]:
        """Check that `omega` is real and has shape (f,) or (*bank, f); return it in float64."""
        validation.require_real("omega", validation.require_tensor("omega", omega, "f"))
        if omega.shape[:-1] not in ((), self.bank):
            raise ShapeError(f"omega has shape {tuple(omega.shape)}, expected ('f',) or {(*self.bank, 'f')}")
        validation.require_one_device(system=self.B, omega=omega)
        return omega.to(torch.float64)

    def h_infinity_error(self, other: LinearSystem) -> Float[Tensor, "*bank"]:
        """max over ω of ‖G(e^{iω}) − G'(e^{iω})‖₂, approached from below on a grid refined around the peaks."""
        from compressm.control.norms import h_infinity_error  # norms are built on systems

        return h_infinity_error(self, other)

    def h2_error(self, other: LinearSystem) -> Float[Tensor, "*bank"]:
        """√(Σₖ ‖g[k] − g'[k]‖²_F), in closed form."""
        from compressm.control.norms import h2_error

        return h2_error(self, other)


def require_system(function: str, system: object) -> LinearSystem:
    """Require a system; the error names the function that takes it."""
    hint = "expected DiagonalSystem(poles, B, C) or DenseSystem(A, B, C)"
    return validation.require_kind(function, system, LinearSystem, hint)  # type: ignore[type-abstract]


class DiagonalSystem(LinearSystem):
    """A system with A = diag(poles), as in LRU, S4D, S5 and Mamba; float64 if all tensors are real, else complex128."""

    poles: Inexact[Tensor, "*bank n"]
    log_poles: Inexact[Tensor, "*bank n"] | None

    def __init__(
        self, poles: Inexact[Tensor, "*bank n"], B: Inexact[Tensor, "*bank n p"], C: Inexact[Tensor, "*bank q n"]
    ) -> None:
        _check_shapes(poles=(poles, "n"), B=(B, "n p"), C=(C, "q n"))
        _check_values(poles=poles, B=B, C=C)
        poles, B, C = _common_dtype(poles, B, C)
        self._assign(poles=poles, log_poles=None, B=B, C=C)
        self._require_stability()

    @classmethod
    def from_log_poles(
        cls, log_poles: Inexact[Tensor, "*bank n"], B: Inexact[Tensor, "*bank n p"], C: Inexact[Tensor, "*bank q n"]
    ) -> DiagonalSystem:
        """Build a system from log λ, if the layer stores it: 1 − |λ|² keeps all digits however close |λ| is to 1."""
        _check_shapes(log_poles=(log_poles, "n"), B=(B, "n p"), C=(C, "q n"))
        _check_values(log_poles=log_poles, B=B, C=C)
        log_poles, B, C = _common_dtype(log_poles, B, C)
        system = cls._unchecked(exponential(log_poles), log_poles, B, C)
        system._require_stability()
        return system

    def _require_stability(self) -> None:
        if not validation.values_are_read():
            return
        # The decay is kept: it takes about forty operations, and a GPU waits for them.
        self._assign(_decay=decay(self.poles, self.log_poles))
        # Not `decay <= 0`: squares of poles above 1e146 overflow to NaN, and a decay of NaN is not stable either.
        unstable = ~(self.decay.detach() > 0)
        if bool(unstable.any()):
            worst = modulus(self.poles.detach()).max().item()
            raise UnstableSystemError(
                f"largest pole modulus is {worst:.9g}, expected < 1 ({int(unstable.sum())} poles are not)"
            )

    @property
    def A(self) -> Inexact[Tensor, "*bank n n"]:
        return torch.diag_embed(self.poles)

    @property
    def decay(self) -> Float[Tensor, "*bank n"]:
        """1 − |λ|² of every mode."""
        known: Tensor | None = vars(self).get("_decay")
        if known is None:
            known = decay(self.poles, self.log_poles)
            if known.requires_grad == self.poles.requires_grad:  # not so within no_grad
                self._assign(_decay=known)
        return known

    @property
    def stability_margin(self) -> Float[Tensor, "*bank"]:
        return (self.decay / (1 + modulus(self.poles))).amin(-1)

    def adjoint(self) -> DiagonalSystem:
        return self._unchecked(
            self.poles.conj(), None if self.log_poles is None else self.log_poles.conj(), self.C.mH, self.B.mH
        )

    def frequency_response(self, omega: Float[Tensor, "... f"]) -> Complex[Tensor, "*bank f q p"]:
        radius = self.poles.abs()
        phase = torch.angle(self.poles)[..., None, :] - self._frequencies(omega)[..., :, None]
        sine = torch.sin(phase / 2)
        # 1 − λe^{−iω} = (1 − |λ|) + |λ|(1 − e^{iφ}): no cancellation at the resonance of a slow mode.
        gap = (self.decay / (1 + radius))[..., None, :] + 2 * radius[..., None, :] * sine * sine
        resolvent = 1 / torch.complex(gap, -radius[..., None, :] * torch.sin(phase))
        weighted = self.C[..., None, :, :] * resolvent[..., None, :]
        return weighted @ self.B[..., None, :, :].to(weighted.dtype)

    def reordered(self, order: Int[Tensor, "*bank n"]) -> DiagonalSystem:
        """The same system with its modes in another order."""
        log_poles = None if self.log_poles is None else self.log_poles.gather(-1, order)
        B = self.B.gather(-2, order[..., :, None].expand_as(self.B))
        C = self.C.gather(-1, order[..., None, :].expand_as(self.C))
        return self._unchecked(self.poles.gather(-1, order), log_poles, B, C)

    def flat(self) -> DiagonalSystem:
        """The same systems with all bank axes merged into one."""
        axes = len(self.bank)
        return self._map(lambda tensor: tensor.reshape(-1, *tensor.shape[axes:]))

    def _generator(self) -> Tensor:
        return self.poles

    def _propagate(self, power: Tensor, columns: Tensor) -> Tensor:
        return power[..., None] * columns

    def _square(self, power: Tensor) -> Tensor:
        return power * power

    @classmethod
    def _unchecked(cls, poles: Tensor, log_poles: Tensor | None, B: Tensor, C: Tensor) -> DiagonalSystem:
        """Build a system from tensors of a system that has been checked."""
        system = cls.__new__(cls)
        system._assign(poles=poles, log_poles=log_poles, B=B, C=C)
        return system


class DenseSystem(LinearSystem):
    """A system with any matrix A, such as the result of balancing."""

    _A: Inexact[Tensor, "*bank n n"]

    def __init__(
        self, A: Inexact[Tensor, "*bank n n"], B: Inexact[Tensor, "*bank n p"], C: Inexact[Tensor, "*bank q n"]
    ) -> None:
        _check_shapes(A=(A, "n n"), B=(B, "n p"), C=(C, "q n"))
        _check_values(A=A, B=B, C=C)
        A, B, C = _common_dtype(A, B, C)
        self._assign(_A=A, B=B, C=C)
        radius = torch.linalg.eigvals(A.detach()).abs().max().item()
        if not radius < 1:
            raise UnstableSystemError(f"spectral radius of A is {radius:.9g}, expected < 1")

    @property
    def A(self) -> Inexact[Tensor, "*bank n n"]:
        return self._A

    @property
    def stability_margin(self) -> Float[Tensor, "*bank"]:
        # Eigenvalues are exact to ε at best.
        return (1 - modulus(torch.linalg.eigvals(self._A)).amax(-1)).clamp_min(torch.finfo(torch.float64).eps)

    def adjoint(self) -> DenseSystem:
        return self._unchecked(self._A.mH, self.C.mH, self.B.mH)

    def frequency_response(self, omega: Float[Tensor, "... f"]) -> Complex[Tensor, "*bank f q p"]:
        delay = torch.exp(-1j * self._frequencies(omega))[..., None, None]
        identity = torch.eye(self.order, dtype=torch.complex128, device=self.device)
        right = self.B[..., None, :, :].to(torch.complex128)
        return self.C[..., None, :, :].to(torch.complex128) @ torch.linalg.solve(
            identity - delay * self._A[..., None, :, :], right
        )

    def _generator(self) -> Tensor:
        return self._A

    def _propagate(self, power: Tensor, columns: Tensor) -> Tensor:
        return power @ columns

    def _square(self, power: Tensor) -> Tensor:
        return power @ power

    @classmethod
    def _unchecked(cls, A: Tensor, B: Tensor, C: Tensor) -> DenseSystem:
        system = cls.__new__(cls)
        system._assign(_A=A, B=B, C=C)
        return system


def _check_shapes(**given: tuple[Tensor, str]) -> None:
    """Require that named trailing axes, and the bank axes, have the same sizes in all tensors."""
    sizes: dict[str, tuple[int, str]] = {}
    for name, (value, axes) in given.items():
        tensor = validation.require_tensor(name, value, axes)
        for axis, size in zip(axes.split(), tensor.shape[-len(axes.split()) :], strict=True):
            expected, source = sizes.setdefault(axis, (size, name))
            if size != expected:
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)}: axis {axis} is {size}, but {expected} in {source}"
                )
    validation.require_one_bank(
        **{name: value.shape[: value.ndim - len(axes.split())] for name, (value, axes) in given.items()}
    )


def _bounded(log_poles: Tensor) -> Tensor:
    """Replace log poles of −∞, which are poles at 0, by finite numbers for the check of finite values."""
    vanishing = torch.isneginf(log_poles.real if log_poles.is_complex() else log_poles)
    phase = 1j * log_poles.imag if log_poles.is_complex() else torch.zeros_like(log_poles)
    return torch.where(vanishing, phase, log_poles)


def _check_values(**given: Tensor) -> None:
    validation.require_one_precision(**given)
    validation.require_one_device(**given)
    if not any(tensor.is_meta for tensor in given.values()) and validation.are_finite(given.values()):
        return
    if "log_poles" in given:
        given["log_poles"] = _bounded(given["log_poles"])
    validation.require_all_finite(given)


def _common_dtype(*tensors: Tensor) -> list[Tensor]:
    """Copy all tensors to float64, or complex128 if one is complex; later changes of a parameter have no effect."""
    dtype = torch.complex128 if any(tensor.is_complex() for tensor in tensors) else torch.float64
    return [tensor.to(dtype, copy=True) for tensor in tensors]
