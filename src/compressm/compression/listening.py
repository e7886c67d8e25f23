"""Running the model on data, once, while layers are listened to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from compressm.errors import CompressionError

Calibrate = Callable[[nn.Module], object]


class Listener(ABC):
    """What is hung on a layer while the model runs."""

    module: nn.Module

    @property
    @abstractmethod
    def name(self) -> str:
        """That of the layer."""

    @property
    @abstractmethod
    def passes(self) -> int:
        """How often the layer was heard."""

    @abstractmethod
    def attach(self) -> Sequence[RemovableHandle]:
        """Begin to listen."""


def run_listening(model: nn.Module, calibrate: Calibrate, listeners: Sequence[Listener]) -> None:
    """Run `calibrate(model)` once, in evaluation mode and without gradients; every listener must hear something."""
    for listener in listeners:
        _require_finite(listener.name, listener.module)
    before = [_sums(listener) for listener in listeners]
    # What is compiled is not asked again for hooks that came later.
    with _attached(listeners), _evaluating(model), torch.compiler.set_stance("force_eager"):
        calibrate(model)
    for listener, then in zip(listeners, before, strict=True):
        if changed := [name for name, now in _sums(listener).items() if then.get(name) != now]:
            raise CompressionError(
                f"calibrate changed {listener.name or 'the model'}: {', '.join(changed)}; expected it to run the model"
                " and nothing else"
            )
    missed = [repr(listener.name) if listener.name else "the model" for listener in listeners if listener.passes == 0]
    if missed:
        raise CompressionError(
            f"calibrate did not run {', '.join(missed)}: it must call the model that it is given"
            " so that the `forward` of these layers runs (`step` is not listened to)"
        )


def _sums(listener: Listener) -> dict[str, tuple[object, ...]]:
    """Of every parameter what other values would hardly have too; those that were put back count as the same."""
    found: dict[str, tuple[object, ...]] = {}
    with torch.no_grad():
        for name, parameter in listener.module.named_parameters():
            values = parameter.detach().to(torch.complex128 if parameter.is_complex() else torch.float64)
            found[name] = (tuple(parameter.shape), values.sum().item(), values.abs().sum().item())
    return found


def _require_finite(name: str, layer: nn.Module) -> None:
    """Before the model stumbles over them, and does not say in which layer."""
    for weight, parameter in layer.named_parameters(prefix=name):
        if unusable := int((~parameter.isfinite()).sum()):
            raise CompressionError(f"{weight} holds {unusable} entries that are not finite")


@contextmanager
def _attached(listeners: Sequence[Listener]) -> Iterator[None]:
    handles: list[RemovableHandle] = []
    try:
        for listener in listeners:
            handles += listener.attach()
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """As an evaluation: no dropout, no new statistics, no gradients, and random numbers as if it had not been."""
    modes: Mapping[nn.Module, bool] = {module: module.training for module in model.modules()}
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
