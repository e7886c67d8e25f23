"""Refuse a module or a system before anything is computed from it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from compressm.control import DeviceError, DiagonalSystem, ShapeError, UnstableSystemError
from compressm.control.parts import modulus
from compressm.control.validation import require_finite, require_kind
from compressm.layers import LTILayer


def finite_doubles(module: nn.Module, names: Iterable[str]) -> list[Tensor]:
    """The named parameters in float64; the first that holds NaN or infinity is named."""
    doubles = []
    for name in names:
        value: Tensor = getattr(module, name)  # a plain tensor inside `functional_call`
        require_finite(f"{type(module).__name__}.{name}", value)
        doubles.append(value.double())
    return doubles


def encodable(
    layer: LTILayer, system: DiagonalSystem, *, bank: tuple[int, ...], channels: int
) -> tuple[Tensor, Tensor]:
    """B and C, in complex128, of a system that is finite, stable, of these sizes and where the layer is."""
    kind = type(layer).__name__
    require_kind(f"encoding a {kind}", system, DiagonalSystem, hint="call diagonalise first")
    for name, tensor in (("poles", system.poles), ("B", system.B), ("C", system.C)):
        require_finite(name, tensor)
    unstable = ~(system.decay.detach() > 0)
    if bool(unstable.any()):
        worst = modulus(system.poles.detach()).max().item()
        raise UnstableSystemError(
            f"largest pole modulus is {worst:.9g}, a {kind} stores those < 1 ({int(unstable.sum())} poles are not)"
        )
    given, expected = (tuple(system.bank), system.inputs, system.outputs), (bank, channels, channels)
    if given != expected:
        raise ShapeError(f"the system has (bank, inputs, outputs) {given}, this {kind} {expected}")
    if system.device != layer.D.device:
        raise DeviceError(f"the system is on {system.device}, the {kind} on {layer.D.device}")
    return system.B.to(torch.complex128), system.C.to(torch.complex128)
