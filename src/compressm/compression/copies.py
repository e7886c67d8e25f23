"""Cut copies of a model on which a loss is tried: they share every tensor with it but those of the cut layers."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from compressm.adapters import find
from compressm.compression.several import kept_groups
from compressm.compression.surgery import PreparedCut, write_cuts_
from compressm.compression.trying import Loss
from compressm.errors import CompressionError
from compressm.families.base import Change
from compressm.families.observing import untouched
from compressm.layers.parameters import unrecorded
from compressm.ops.dispatch import only_reads, trained_kernels


def copied(model: nn.Module, own: Sequence[str] = ()) -> nn.Module:
    """A copy with its own modules; of the tensors, only those inside the modules named `own` are copied."""
    modules = dict(model.named_modules(remove_duplicate=False))
    apart = {inner for name in own for inner in modules[name].modules()}
    memo: dict[int, Any] = {}
    for module in modules.values():
        tables = [vars(module), *([] if module in apart else [module._parameters, module._buffers])]
        # Tensors that a module keeps as plain attributes may have a graph, which cannot be copied.
        memo |= {id(value): value for table in tables for value in table.values() if isinstance(value, Tensor)}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever the model's parts raise when they are copied
        raise CompressionError(
            f"{type(model).__name__} cannot be copied for a trial cut ({type(error).__name__}: {error}); expected a"
            " model that copy.deepcopy copies, or a policy that tries nothing, such as EnergyTolerance(0.05)"
        ) from error


def cut_copy(model: nn.Module, changes: Mapping[str, Change], filled: Any, grown: Collection[str] = ()) -> nn.Module:
    """A copy with these changes written to its layers, and zero states in those named `grown`; by layer name.

    `filled` is a function of the prepared cuts and of the layers of the copy; it gives all that is written.
    """
    twin = copied(model, [*{**changes, **dict.fromkeys(grown)}])
    found = find(twin)
    cuts = {name: _prepared(name, change, found[name][0]) for name, change in changes.items()}
    with unrecorded(), ExitStack() as undo:
        write_cuts_(filled(cuts, found), None, undo, models=(twin,))
        undo.pop_all()  # a copy that could not be written is thrown away
    return twin


def _prepared(name: str, change: Change, module: nn.Module) -> PreparedCut:
    return PreparedCut(name, module, change.values, writing=change.writing)


def loss_of(twin: nn.Module, loss: Loss, cut: Sequence[str], optimizer: Any | None = None) -> float:
    """The loss of a copy, which must have run; NaN, −∞ and what is no number are refused, ∞ is a bad cut.

    What else the function does to the optimizer, or to tensors that the copy shares with the model, is put back.
    """
    ran: list[str] = []
    _note_runs_(twin, cut, ran)

    def run() -> float:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), trained_kernels():
            twin.eval()
            return _number(loss(twin))

    found = untouched(twin, "loss", run, kept_groups(optimizer))
    if not ran:
        raise CompressionError(
            "loss did not run the model that it was given, so every cut would look harmless: expected a function of"
            " that model, such as lambda model: cross_entropy(model(inputs), targets)"
        )
    return found


def _note_runs_(twin: nn.Module, cut: Sequence[str], ran: list[str]) -> None:
    """Note every call of a module of the copy that holds one of these layers."""

    @only_reads
    def note(module: nn.Module, inputs: object) -> None:
        ran.append(type(module).__name__)

    for name, module in twin.named_modules():
        if any(layer == name or not name or layer.startswith(f"{name}.") for layer in cut):
            module.register_forward_pre_hook(note)


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise CompressionError(f"loss returned {value!r:.100}, expected a number") from None
    if math.isnan(number) or number == -math.inf:
        raise CompressionError(f"loss returned {number}, expected a finite number")
    return number
