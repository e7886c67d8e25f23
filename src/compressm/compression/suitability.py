"""Whether the layers of a model can be cut, asked before training begins rather than at the first cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from compressm.adapters import Adapter
from compressm.compression.optimizer_state import require_supported
from compressm.compression.planning import Found, read_any
from compressm.compression.surgery import require_plain_parameters
from compressm.errors import CompressionError


def require_suitable(model: nn.Module, found: Found, optimizer: Any | None) -> None:
    """Refuse by name layers whose parameters are elsewhere, computed from others, or those of another module too."""
    owners = _owners(model)
    for name, (module, adapter) in found.items():
        require_plain_parameters(name, module)
        for entry in _cut_parameters(name, module, adapter):
            others = owners[id(module.get_parameter(entry))] - {f"{name}.{entry}" if name else entry}
            if others:
                raise CompressionError(
                    f"{name}.{entry} is also {', '.join(sorted(others))}: a parameter that two modules share cannot be"
                    " cut for one of them; use the same layer twice, or give each its own"
                )
        if optimizer is not None:
            require_supported(optimizer, {f"{name}.{key}": p for key, p in module.named_parameters()})


def _cut_parameters(name: str, module: nn.Module, adapter: Adapter[Any, Any]) -> Iterator[str]:
    with torch.no_grad():
        values = adapter.encode(module, read_any(name, module, adapter))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for entry in values:
        if entry not in parameters:
            raise CompressionError(
                f"{name}.{entry} is no parameter but computed from {', '.join(parameters)}: a parametrised, normalised"
                " or pruned weight cannot be cut; remove that first (torch.nn.utils.parametrize, .prune)"
            )
        yield entry


def _owners(model: nn.Module) -> dict[int, set[str]]:
    """Every parameter's names, one a module that has it."""
    owners: dict[int, set[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(f"{path}.{name}" if path else name)
    return owners
