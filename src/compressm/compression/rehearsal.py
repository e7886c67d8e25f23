"""A cut that nobody sees, where the first one would take long."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from compressm.adapters import SelectiveAdapter, SSMAdapter, find
from compressm.compression.layer import Layer
from compressm.compression.linear import LinearLayer
from compressm.compression.options import Options
from compressm.compression.planning import plan_cuts, read_any
from compressm.compression.policies import KeepFraction
from compressm.compression.selective.calibrated import Calibrated
from compressm.compression.selective.layer import SelectiveLayer
from compressm.compression.selective.seen import Averages, SelectiveSeen
from compressm.control import DiagonalSystem, fold
from compressm.control.selective import SelectiveSystem

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
