"""What a cut requires of a model beside its layers: parameters of their own, and an optimizer that can follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from compressm.adapters.base import encode_present, plain_name, require_differentiable
from compressm.compression.optimizer import Moments, require_followable, require_held, require_supported
from compressm.errors import AdapterError, CompressionError
from compressm.families import Layer


def require_suitable(model: nn.Module, layers: Mapping[str, Layer], optimizer: Any | None, moments: Moments) -> None:
    """Refuse by name parameters that other modules share, that are computed, or that the optimizer does not support."""
    _require_no_average_beside(model, layers)
    owners = _owners(model)
    cut: dict[str, nn.Parameter] = {}
    for name, layer in layers.items():
        for entry in _cut_parameters(layer, carried=optimizer is not None and moments.needs_roles):
            cut[f"{name}.{entry}" if name else entry] = layer.module.get_parameter(entry)
            others = owners[id(layer.module.get_parameter(entry))] - {f"{name}.{entry}" if name else entry}
            if others:
                raise CompressionError(
                    f"{name}.{entry} is also {', '.join(sorted(others))}: a parameter that two modules share cannot be"
                    " cut for one of them; use the same layer twice, or give each layer its own parameter"
                )
    if optimizer is not None:
        inside = {id(p) for layer in layers.values() for p in layer.module.parameters()}
        require_held(optimizer, dict(model.named_parameters()), trained=inside)
        require_supported(optimizer, cut)
        require_followable(optimizer, cut, moments)


def _cut_parameters(layer: Layer, *, carried: bool) -> Iterator[str]:
    """The parameters that a cut of the layer changes; moments that are `carried` need gradients of its adapter."""
    parameters = dict(layer.module.named_parameters(remove_duplicate=False))
    try:
        with torch.no_grad():
            values = encode_present(layer.adapter, layer.module, layer.system)
        if carried and values.keys() <= parameters.keys():
            require_differentiable(
                layer.adapter, layer.module, [key for key in values if parameters[key].requires_grad]
            )
    except AdapterError as error:
        raise CompressionError(f"{layer.said}: {error}") from error
    for entry in values:
        if entry not in parameters:
            raise CompressionError(
                f"{layer.name}.{entry} is not a parameter but computed from {', '.join(parameters)}: a parametrised,"
                " normalised or pruned weight cannot be cut; first remove that (torch.nn.utils.parametrize, .prune)"
            )
        yield entry


def _require_no_average_beside(model: nn.Module, layers: Mapping[str, Layer]) -> None:
    """Refuse an average that the model holds beside the averaged layers: each would get coordinates of its own."""
    modules = dict(model.named_modules())
    cut = {layer.module for layer in layers.values()}
    for path, module in modules.items():
        inside = cut.intersection(module.modules()) if isinstance(module, AveragedModel) else cut
        if inside and inside != cut:
            name = plain_name(path, modules)
            raise CompressionError(
                f"{name} is an {type(module).__name__} inside the model, and was to be cut apart from the layers beside"
                " it: the average of the cut model would make no sense; pass the trained part as the model and"
                f" follow=[model.{name}]"
            )


def _owners(model: nn.Module) -> dict[int, set[str]]:
    """The names of every parameter without those of wrappers, one for each module that has it."""
    owners: dict[int, set[str]] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                named = plain_name(f"{path}.{name}" if path else name, modules)
                owners.setdefault(id(parameter), set()).add(named)
    return owners
