"""The stages of a cut, by name, for whoever wants to time them; unwatched they cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters import Adapter, SelectiveAdapter, SSMAdapter, find
from compressm.adapters.transformers import refused_in
from compressm.compression.distributed import unwrapped
from compressm.compression.optimizer import require_supported
from compressm.compression.options import Options
from compressm.compression.orders import choose_orders, require_choices, restricted
from compressm.compression.policies import Budget, ErrorBound, KeepFraction
from compressm.compression.surgery import require_plain_parameters
from compressm.control import DiagonalSystem, fold, numerical_rank
from compressm.control.linear_algebra import each
from compressm.control.selective import SelectiveSystem
from compressm.errors import CompressionError
from compressm.families.base import Layer, PlannedCut
from compressm.families.choices import Largest
from compressm.families.linear.family import LinearLayer, energy_lost, linear_spectra, plan_linear, read_system
from compressm.families.linear.observer import InputListener, Seen
from compressm.families.observing import Listener, run_listening
from compressm.families.selective.family import SelectiveLayer, plan_channels, read_selective
from compressm.families.selective.methods import Calibrated
from compressm.families.selective.observer import Averages, SelectiveListener, SelectiveSeen

STAGES = ("calibrate", "read", "spectra", "reduce", "encode", "optimizer", "write")

Watch: TypeAlias = Callable[[str], AbstractContextManager[object]]

_watch: ContextVar[Watch] = ContextVar("watch", default=lambda name: nullcontext())


def stage(name: str) -> AbstractContextManager[object]:
    """Around the work of one of `STAGES`; those do not nest."""
    return _watch.get()(name)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Within it every stage of a cut runs inside `watch(name)`."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


Found = Mapping[str, tuple[nn.Module, Adapter[Any, Any]]]


def find_layers(model: nn.Module, options: Options) -> dict[str, tuple[nn.Module, Adapter[Any, Any]]]:
    """The layers to look at, with their adapters; there is at least one, and each can be looked at as is asked."""
    found = find(model, options.filter_fn)
    kind = type(model).__name__
    if not found and options.filter_fn is not None and (all_of_them := find(model)):
        raise CompressionError(
            f"filter_fn takes no SSM layer of {kind}; expected at least one of {', '.join(map(repr, all_of_them))}"
        )
    if not found:
        raise CompressionError(
            f"{kind} has no SSM layer that an adapter reads{refused_in(model)}; see compressm.adapters"
        )
    selective = {name: both for name, both in found.items() if isinstance(both[1], SelectiveAdapter)}
    if selective and options.calibrate is None:
        raise CompressionError(
            f"{', '.join(name or 'the model' for name in selective)}: selective layers are cut by what their inputs"
            " choose; pass calibrate, a function that runs the model on data: calibrate=lambda model: model(inputs)"
        )
    if selective and options.modal:
        raise CompressionError(
            f"{', '.join(name or 'the model' for name in selective)}: {options.gramian} is for layers whose poles are"
            " fixed, and selective ones have none; expected WhiteNoise() or Measured(...)"
        )
    _require_policies(found, selective, options)
    for name, (module, adapter) in selective.items():
        assert isinstance(adapter, SelectiveAdapter)
        require_plain_parameters(name, module)
        read_any(name, module, adapter)
        options.selective.require(name or "the model", module, adapter)
    return found


def _require_policies(found: Found, selective: Found, options: Options) -> None:
    """Refuse those that have no meaning for a selective layer."""
    shares = require_choices(found, options.keep, options.overrides, options.gate, options.round_to, options.at_least)
    for policy, names in shares:
        touched = ", ".join(name or "the model" for name in names if name in selective)
        if touched and isinstance(policy, ErrorBound):
            raise CompressionError(
                f"{touched}: {policy} for selective layers, which have no error bound; expected another policy, such as"
                " EnergyTolerance(0.05), for them in keep or overrides"
            )
        if touched and isinstance(policy, Budget) and options.selective.by_channel:
            raise CompressionError(
                f"{touched}: {policy} shares states out among layers, while {options.selective} gives every channel an"
                " order of its own; expected another policy, such as EnergyTolerance(0.05)"
            )


def read_layers(model: nn.Module, options: Options) -> dict[str, Layer]:
    """Every SSM layer of the model as a system; with `calibrate`, after it ran."""
    if not isinstance(model, nn.Module):
        raise CompressionError(f"model is a {type(model).__name__}, expected an nn.Module")
    # Inside DistributedDataParallel a forward pass waits for the other processes, which may not be looking.
    model = unwrapped(model)
    found = find_layers(model, options)
    for name, (module, _) in found.items():
        require_plain_parameters(name, module)
    with stage("read"), torch.no_grad():
        systems = {name: read_any(name, *both) for name, both in found.items()}
        listeners = {name: _listener(name, *found[name], system, options) for name, system in systems.items()}
    if options.calibrate is not None:
        with stage("calibrate"):
            run_listening(model, options.calibrate, list(listeners.values()))
    return {name: _layer(name, *found[name], systems[name], listeners[name], options) for name in found}


def read_any(name: str, module: nn.Module, adapter: Adapter[Any, Any]) -> DiagonalSystem | SelectiveSystem:
    """A layer as it is now, of whatever kind; what is wrong with it is said with its name."""
    absent = [entry for entry, parameter in module.named_parameters() if parameter.is_meta]
    if absent:
        raise CompressionError(
            f"{name or 'the model'}: {', '.join(absent)} are on the meta device, expected values: use to_empty and load"
            " them first"
        )
    if isinstance(adapter, SelectiveAdapter):
        return read_selective(name, module, adapter)
    assert isinstance(adapter, SSMAdapter)
    return read_system(name, module, adapter)


def _listener(
    name: str, module: nn.Module, adapter: Adapter[Any, Any], system: DiagonalSystem | SelectiveSystem, options: Options
) -> Listener:
    if isinstance(system, DiagonalSystem):
        balanced = fold(system) if options.fold else system
        return InputListener(Seen(name), module, balanced, options.measured)
    assert isinstance(adapter, SelectiveAdapter)
    covariance = options.selective.measures(options.gramian)
    return SelectiveListener(name, module, adapter, system, options.measured, covariance=covariance)


def _layer(
    name: str,
    module: nn.Module,
    adapter: Adapter[Any, Any],
    system: DiagonalSystem | SelectiveSystem,
    heard: Listener,
    options: Options,
) -> Layer:
    if isinstance(heard, SelectiveListener):
        assert isinstance(system, SelectiveSystem)
        return SelectiveLayer(name, module, heard.adapter, Calibrated(system, heard.seen), options.selective)
    assert isinstance(heard, InputListener)
    assert isinstance(system, DiagonalSystem)
    assert isinstance(adapter, SSMAdapter)
    seen = None if options.calibrate is None else heard.seen
    return LinearLayer(name, module, adapter, system, heard.system, seen)


def spectra(layers: Mapping[str, Layer], options: Options) -> dict[str, Float[Tensor, "*bank n"]]:
    """The Hankel singular values of every layer; of selective ones what `options.selective` has in their place."""
    found = linear_spectra([layer for layer in layers.values() if isinstance(layer, LinearLayer)], options)
    selective = [layer for layer in layers.values() if isinstance(layer, SelectiveLayer)]
    found |= dict(each(lambda layer: (layer.name, layer.spectrum()), selective))
    return {name: found[name] for name in layers}


def plan_cuts(layers: Mapping[str, Layer], options: Options, *, salt: int = 0) -> list[PlannedCut]:
    """The cuts that the policy wants, in the order of the layers; those the gate holds back are left out."""
    with stage("spectra"):
        values = spectra(layers, options)
    apart = [layer for layer in layers.values() if isinstance(layer, SelectiveLayer) and layer.method.by_channel]
    together = {name: values[name] for name in layers if name not in {layer.name for layer in apart}}
    wanted = _wanted(together, options) if together else {}
    chosen = [layers[name] for name in wanted]
    with stage("reduce"):
        linear = [layer for layer in chosen if isinstance(layer, LinearLayer)]
        planned: dict[str, PlannedCut] = dict(plan_linear(linear, wanted, values, options, salt))
        for layer in chosen:
            if isinstance(layer, SelectiveLayer):
                sigma = values[layer.name]
                kept = options.select(sigma, wanted[layer.name], salt=f"{layer.name}@{salt}")
                planned[layer.name] = layer.cut([kept], energy_lost(sigma, kept))
        planned |= plan_channels(apart, values, options, salt) if apart else {}
    return [planned[name] for name in layers if name in planned]


def _wanted(values: Mapping[str, Tensor], options: Options) -> dict[str, int]:
    """The orders of layers that are to have fewer states."""
    overrides = restricted(options.overrides, values)
    orders = choose_orders(
        values,
        options.keep,
        overrides=overrides,
        gate=options.gate,
        round_to=options.round_to,
        at_least=options.at_least,
    )
    wanted = {name: rank for name, rank in orders.items() if rank < values[name].shape[-1]}
    if isinstance(options.select, Largest):
        # Each layer by its own rank: in a group those of lower rank would be filled up with modes that do nothing.
        wanted = {name: min(rank, int(numerical_rank(values[name]).amax())) for name, rank in wanted.items()}
    return wanted


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


# Their libraries and kernels are loaded when they are first used: on an H200 the first cut took 1 s, the next 0.35 s.
_SLOW_TO_LOAD = ("cuda",)


def rehearse(model: nn.Module, options: Options) -> None:
    """On a GPU, plan half of every layer away and forget it, so that the first cut finds everything loaded."""
    if not any(parameter.device.type in _SLOW_TO_LOAD for parameter in model.parameters()):
        return
    blind = replace(
        options, keep=KeepFraction(0.5), overrides=None, calibrate=None, gramian=None, gate=1.0, round_to=1, at_least=1
    )
    with torch.no_grad():
        plan_cuts(made_up_layers(model, blind), blind, salt=0)


def made_up_layers(model: nn.Module, options: Options) -> dict[str, Layer]:
    """The layers as if selective ones had seen white noise, which takes no data."""
    layers: dict[str, Layer] = {}
    for name, (module, adapter) in find(model, options.filter_fn).items():
        system = read_any(name, module, adapter)
        if isinstance(system, SelectiveSystem) and isinstance(adapter, SelectiveAdapter):
            seen = SelectiveSeen(name, Averages.made_up(system), None)
            layers[name] = SelectiveLayer(name, module, adapter, Calibrated(system, seen), options.selective)
        elif isinstance(system, DiagonalSystem) and isinstance(adapter, SSMAdapter):
            balanced = fold(system) if options.fold else system
            layers[name] = LinearLayer(name, module, adapter, system, balanced, None)
    return layers
