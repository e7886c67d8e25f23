"""The errors of `compressm.control`, and checks that refuse bad tensors before any work is done."""

from __future__ import annotations

import cmath
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from compressm.control.linear_algebra import modulus


class ControlError(ValueError):
    """The base class of all errors of `compressm.control`."""


class ShapeError(ControlError):
    """Axes are missing or empty, or their sizes disagree."""


class PrecisionError(ControlError):
    """A dtype is not floating point, or one system mixes several precisions."""


class DeviceError(ControlError):
    """Tensors of one system are on different devices."""


class NonFiniteError(ControlError):
    """A tensor holds NaN or infinity."""


class UnstableSystemError(ControlError):
    """A pole lies on or outside the unit circle: Gramians do not exist."""


class OrderError(ControlError):
    """An order or a state index is out of range."""


class IndefiniteGramianError(ControlError):
    """A Gramian is not Hermitian positive semi-definite."""


class DefectiveSystemError(ControlError):
    """The eigenvectors form no usable basis: the system cannot be written with a diagonal A."""


class OrderChangedError(ControlError):
    """Two snapshots have different orders: δH is undefined across a cut."""


_SINGLE = (torch.float32, torch.complex64)
_DOUBLE = (torch.float64, torch.complex128)

Kind = TypeVar("Kind")

_UNREAD: ContextVar[bool] = ContextVar("_UNREAD", default=False)


@contextmanager
def values_unread() -> Iterator[None]:
    """Check shapes and dtypes but no values inside this context: reading a value waits for the GPU.

    A CUDA graph cannot record code that reads values. NaN and infinity then show up in the result.
    """
    token = _UNREAD.set(True)
    try:
        yield
    finally:
        _UNREAD.reset(token)


def values_are_read() -> bool:
    """True outside of `values_unread`."""
    return not _UNREAD.get()


def require_kind(what: str, value: object, kind: type[Kind], hint: str = "") -> Kind:
    """Require an instance of `kind`; the error adds `hint`, which says how to get one."""
    if not isinstance(value, kind):
        raise ShapeError(f"{what} takes a {kind.__name__}, got a {type(value).__name__}{hint and '; '}{hint}")
    return value


def require_tensor(name: str, tensor: object, axes: str) -> Tensor:
    """Require a tensor with the trailing `axes`, such as "n p", none empty; bank axes may come before them."""
    expected = f"({', '.join(['*bank', *axes.split()])})"
    if not isinstance(tensor, Tensor):
        raise ShapeError(f"{name} is a {type(tensor).__name__}, expected a tensor {expected}")
    if tensor.ndim < len(axes.split()):
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")
    if 0 in tensor.shape:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)} with an empty axis, expected all sizes >= 1")
    _require_dense(name, tensor)
    return tensor


def _require_dense(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise ShapeError(f"{name} has the layout {tensor.layout}, expected a dense tensor: call to_dense()")


def require_values(name: str, tensor: Tensor) -> None:
    """Require a dense tensor that holds values."""
    _require_dense(name, tensor)
    if tensor.is_meta:
        raise DeviceError(f"{name} is on the meta device, expected a tensor that holds values")


def require_one_precision(**tensors: Tensor) -> None:
    """Require one precision, single or double; real and complex tensors may mix."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _SINGLE + _DOUBLE:
            raise PrecisionError(f"{name} has dtype {tensor.dtype}, expected float32, float64, complex64 or complex128")
    if len({tensor.dtype in _SINGLE for tensor in tensors.values()}) > 1:
        raise PrecisionError(f"mixed precisions: {_listing(tensors, 'dtype')}; convert them to one first")


def require_real(name: str, tensor: Tensor) -> Tensor:
    """Refuse a complex tensor, because its imaginary part would be lost."""
    if tensor.is_complex():
        raise PrecisionError(f"{name} has dtype {tensor.dtype}, expected a real dtype such as float64")
    return tensor


def require_one_device(**tensors: Tensor) -> None:
    """Require that all tensors are on one device."""
    if len({tensor.device for tensor in tensors.values()}) > 1:
        raise DeviceError(f"mixed devices: {_listing(tensors, 'device')}; move them to one first")


def require_one_bank(**banks: torch.Size) -> None:
    """Require that all bank shapes are equal."""
    if len(set(banks.values())) > 1:
        raise ShapeError("bank axes disagree: " + ", ".join(f"{name} {tuple(bank)}" for name, bank in banks.items()))


def is_finite(tensor: Tensor) -> bool:
    """True if no entry is NaN or infinite; always True within `values_unread`."""
    if not values_are_read():
        return True
    # A finite sum proves finite terms in a tenth of the time; a sum of huge numbers can overflow, so terms come next.
    return cmath.isfinite(tensor.detach().sum().item()) or bool(torch.isfinite(tensor).all())


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """True if all entries of all tensors are finite; the host waits for a GPU once, not once for each tensor."""
    if not values_are_read():
        return True
    sums: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in (given := list(tensors)):
        sums.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach().sum())
    totals = [total for group in sums.values() for total in torch.stack(group).tolist()]
    return all(map(cmath.isfinite, totals)) or all(map(is_finite, given))


def require_all_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse NaN and infinity in all of these tensors; the error names the first such entry."""
    if values_are_read():
        for name, tensor in tensors.items():
            require_values(name, tensor)
    if not are_finite(tensors.values()):
        for name, tensor in tensors.items():
            require_finite(name, tensor)


def require_finite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and infinity; the error names the first such entry."""
    if values_are_read():
        require_values(name, tensor)
    if not is_finite(tensor):
        finite = torch.isfinite(tensor)
        where = tuple(int(i) for i in torch.nonzero(~finite)[0])
        raise NonFiniteError(
            f"{name}{list(where)} is {tensor.detach()[where].item()}: {int((~finite).sum())} entries are not finite"
        )


def require_broadcast(**shapes: torch.Size) -> torch.Size:
    """The common shape that all shapes broadcast to."""
    try:
        return torch.broadcast_shapes(*shapes.values())  # type: ignore[no-untyped-call]
    except RuntimeError:
        listing = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ShapeError(f"axes before the last do not broadcast: {listing}; sizes must agree or be 1") from None


def require_order(order: object, n: int) -> int:
    """Require an integer from 1 to n."""
    number = as_integer(order)
    if number is None:
        raise OrderError(f"order is {order!r}, expected an integer from 1 to {n}")
    if not 1 <= number <= n:
        raise OrderError(f"order {number} is outside 1..{n}")
    return number


def as_integer(value: Any) -> int | None:
    """Convert a Python, NumPy or tensor integer to int; None for anything else, including bool."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and (value.ndim > 0 or value.dtype == torch.bool)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def is_number(value: object) -> bool:
    """True for a real number of Python or NumPy; False for bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def require_gramian(name: str, gramian: object, bank: torch.Size, n: int, device: torch.device) -> Tensor:
    """Require a finite Hermitian (*bank, n, n) tensor; return it in double precision. Its factors test definiteness."""
    gramian = require_tensor(name, gramian, "n n")
    if gramian.shape != (*bank, n, n):
        raise ShapeError(f"{name} has shape {tuple(gramian.shape)}, expected {(*bank, n, n)}")
    require_one_precision(**{name: gramian})
    if gramian.device != device:
        raise DeviceError(f"{name} is on {gramian.device}, expected {device}, the device of the system")
    require_finite(name, gramian)
    gramian = to_double(gramian)
    _require_hermitian(name, gramian.detach())
    return (gramian + gramian.mH) / 2


def _require_hermitian(name: str, matrix: Tensor) -> None:
    """Require Hermitian matrices, each member of a bank relative to its own largest entry."""
    scale, skew = (modulus(part).amax((-2, -1)) for part in (matrix, matrix - matrix.mH))
    if bool((skew > 1e-6 * scale).any()):
        share = (skew / torch.where(scale > 0, scale, 1)).amax().item()
        raise IndefiniteGramianError(
            f"{name} is not Hermitian: it differs from its adjoint by {share:.1e} of its largest entry, expected 0"
        )


def to_double(tensor: Tensor) -> Tensor:
    """Convert to float64 or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _listing(tensors: dict[str, Tensor], attribute: str) -> str:
    return ", ".join(f"{name} {getattr(tensor, attribute)}" for name, tensor in tensors.items())
