"""What modules keep beside their tensors and goes with their order, found by its path."""

from __future__ import annotations

from typing import Any

from torch import nn

from compressm.adapters import SelectiveAdapter, adapter_for, find
from compressm.errors import CompressionError


def place_of(name: str, module: nn.Module, path: str) -> tuple[Any, str]:
    """The object that has the attribute, and its name there, as the module's adapter says."""
    adapter = adapter_for(module)
    assert isinstance(adapter, SelectiveAdapter)
    try:
        owner, leaf = adapter.place(module, path)
        getattr(owner, leaf)
    except AttributeError as error:
        raise CompressionError(f"{name or 'the model'}: {path} should go with the order: {error}") from None
    return owner, leaf


def take_orders_(model: nn.Module) -> None:
    """Let all that goes with orders say those that the parameters have by now."""
    for name, (module, adapter) in find(model).items():
        if isinstance(adapter, SelectiveAdapter):
            for path, value in adapter.attributes(module, adapter.order(module)).items():
                setattr(*place_of(name, module, path), value)


def attributes_of(model: nn.Module) -> dict[str, tuple[Any, str]]:
    """All of a model that a cut may change, by module and path."""
    return {
        f"{name}/{path}": place_of(name, module, path)
        for name, (module, adapter) in find(model).items()
        if isinstance(adapter, SelectiveAdapter)
        for path in adapter.attributes(module, adapter.order(module))
    }


def optional_in(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Parameters and buffers that layers have since a cut, and had not before, by module and name."""
    return [
        (module, leaf)
        for module, adapter in find(model).values()
        if isinstance(adapter, SelectiveAdapter)
        for leaf in sorted(adapter.KNOWN)
        if getattr(module, leaf, None) is not None
    ]
