"""Named errors, and checks that refuse bad tensors before any work is done."""

from __future__ import annotations

import cmath
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor


class ControlError(ValueError):
    """Anything `compressm.control` refuses."""


class ShapeError(ControlError):
    """Axes are missing, empty or disagree."""


class PrecisionError(ControlError):
    """A dtype that is not floating point, or several precisions in one system."""


class DeviceError(ControlError):
    """Tensors of one system live on different devices."""


class NonFiniteError(ControlError):
    """NaN or infinity among the entries."""


class UnstableSystemError(ControlError):
    """A pole on or outside the unit circle: Gramians do not exist."""


class OrderError(ControlError):
    """An order, or an index of a state, outside the system."""


class IndefiniteGramianError(ControlError):
    """A Gramian that is not Hermitian positive semi-definite."""


class DefectiveSystemError(ControlError):
    """No usable basis of eigenvectors: the system cannot be written with a diagonal A."""


class OrderChangedError(ControlError):
    """Two snapshots of different order: δH is undefined across a cut."""


_SINGLE = (torch.float32, torch.complex64)
_DOUBLE = (torch.float64, torch.complex128)

Kind = TypeVar("Kind")

_UNREAD: ContextVar[bool] = ContextVar("_UNREAD", default=False)


@contextmanager
def values_unread() -> Iterator[None]:
    """Within it shapes and dtypes are checked and values are not: whoever looks at one waits for the GPU.

    A CUDA graph cannot be recorded of work that looks. What is not finite then shows in the result.
    """
    token = _UNREAD.set(True)
    try:
        yield
    finally:
        _UNREAD.reset(token)


def values_are_read() -> bool:
    """Not within `values_unread`."""
    return not _UNREAD.get()


def require_kind(what: str, value: object, kind: type[Kind], hint: str = "") -> Kind:
    """An instance of `kind`; `hint` says how to get one."""
    if not isinstance(value, kind):
        raise ShapeError(f"{what} takes a {kind.__name__}, got a {type(value).__name__}{hint and '; '}{hint}")
    return value


def require_tensor(name: str, tensor: object, axes: str) -> Tensor:
    """`axes` names the trailing axes, as in "n p"; any bank axes stand before them."""
    expected = f"({', '.join(['*bank', *axes.split()])})"
    if not isinstance(tensor, Tensor):
        raise ShapeError(f"{name} is a {type(tensor).__name__}, expected a tensor {expected}")
    if tensor.ndim < len(axes.split()):
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
    if 0 in tensor.shape:
        raise ShapeError(
            f"{name} has shape {tuple(tensor.shape)}: an empty bank, order or channel axis; sizes must be >= 1"
        )
    return tensor


def require_one_precision(**tensors: Tensor) -> None:
    """Real and complex may mix, single and double precision may not."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _SINGLE + _DOUBLE:
            raise PrecisionError(f"{name} has dtype {tensor.dtype}, expected float32, float64, complex64 or complex128")
    if len({tensor.dtype in _SINGLE for tensor in tensors.values()}) > 1:
        raise PrecisionError(f"mixed precisions: {_listing(tensors, 'dtype')}; convert them to one first")


def require_real(name: str, tensor: Tensor) -> Tensor:
    """Not complex: an imaginary part would be dropped."""
    if tensor.is_complex():
        raise PrecisionError(f"{name} has dtype {tensor.dtype}, expected a real one, float32 or float64")
    return tensor


def require_one_device(**tensors: Tensor) -> None:
    """All on one device."""
    if len({tensor.device for tensor in tensors.values()}) > 1:
        raise DeviceError(f"mixed devices: {_listing(tensors, 'device')}; move them to one first")


def require_one_bank(**banks: torch.Size) -> None:
    """All of one shape."""
    if len(set(banks.values())) > 1:
        raise ShapeError("bank axes disagree: " + ", ".join(f"{name} {tuple(bank)}" for name, bank in banks.items()))


def is_finite(tensor: Tensor) -> bool:
    """Neither NaN nor infinite, any of it; taken for granted within `values_unread`."""
    if not values_are_read():
        return True
    # A sum is finite only if its terms are, at a tenth of the time; that of huge numbers may overflow all the same.
    return cmath.isfinite(tensor.detach().sum().item()) or bool(torch.isfinite(tensor).all())


def require_finite(name: str, tensor: Tensor) -> None:
    """Neither NaN nor infinite; the first offender is named."""
    if not is_finite(tensor):
        finite = torch.isfinite(tensor)
        where = tuple(int(i) for i in torch.nonzero(~finite)[0])
        raise NonFiniteError(
            f"{name}{list(where)} is {tensor.detach()[where].item()}: {int((~finite).sum())} entries are not finite"
        )


def require_broadcast(**shapes: torch.Size) -> torch.Size:
    """The shape that all of them broadcast to."""
    try:
        return torch.broadcast_shapes(*shapes.values())  # type: ignore[no-untyped-call]
    except RuntimeError:
        listing = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ShapeError(f"axes before the last do not broadcast: {listing}; sizes must agree or be 1") from None


def require_order(order: object, n: int) -> int:
    """An integer from 1 to n."""
    number = as_integer(order)
    if number is None:
        raise OrderError(f"order is {order!r}, expected an integer from 1 to {n}")
    if not 1 <= number <= n:
        raise OrderError(f"order {number} is outside 1..{n}")
    return number


def as_integer(value: Any) -> int | None:
    """A Python, NumPy or tensor integer; None for anything else, a truth value too."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and (value.ndim > 0 or value.dtype == torch.bool)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def require_gramian(name: str, gramian: object, bank: torch.Size, n: int, device: torch.device) -> Tensor:
    """A finite Hermitian (*bank, n, n) tensor in double precision; definiteness shows when it is factored."""
    gramian = require_tensor(name, gramian, "n n")
    if gramian.shape != (*bank, n, n):
        raise ShapeError(f"{name} has shape {tuple(gramian.shape)}, expected {(*bank, n, n)}")
    require_one_precision(**{name: gramian})
    if gramian.device != device:
        raise DeviceError(f"{name} is on {gramian.device}, the system on {device}")
    require_finite(name, gramian)
    gramian = to_double(gramian)
    _require_hermitian(name, gramian.detach())
    return (gramian + gramian.mH) / 2


def _require_hermitian(name: str, matrix: Tensor) -> None:
    """Each member of a bank by its own scale."""
    scale, skew = (part.abs().amax((-2, -1)) for part in (matrix, matrix - matrix.mH))
    if bool((skew > 1e-6 * scale).any()):
        share = (skew / torch.where(scale > 0, scale, 1)).amax().item()
        raise IndefiniteGramianError(
            f"{name} is not Hermitian: it differs from its adjoint by {share:.1e} of its largest entry, expected 0"
        )


def to_double(tensor: Tensor) -> Tensor:
    """As float64 or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _listing(tensors: dict[str, Tensor], attribute: str) -> str:
    return ", ".join(f"{name} {getattr(tensor, attribute)}" for name, tensor in tensors.items())
