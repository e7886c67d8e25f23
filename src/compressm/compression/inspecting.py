"""Look at a model's layers without touching them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from compressm.compression.gramian import Gramian
from compressm.compression.inspection import Inspection
from compressm.compression.linear import LinearLayer
from compressm.compression.listening import Calibrate
from compressm.compression.options import Options
from compressm.compression.planning import read_layers, spectra
from compressm.compression.policies import KeepFraction
from compressm.compression.selective.methods import Baked, SelectiveMethod


def inspect(
    model: nn.Module,
    calibrate: Calibrate | None = None,
    *,
    gramian: Gramian | None = None,
    fold: bool = True,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    selective: SelectiveMethod = Baked(),
) -> Inspection:
    """Spectra, recommended orders and bounds of every SSM layer; a table when printed.

    With `calibrate`, a function that runs the model on some data, states count by what they do there, and there is no
    a-priori bound. Selective layers need it, and never have a bound.
    """
    options = Options(KeepFraction(1.0), calibrate, gramian, fold, filter_fn=filter_fn, selective=selective)
    with torch.no_grad():
        layers = read_layers(model, options)
        found = {name: sigma.cpu() for name, sigma in spectra(layers, options).items()}
    bounded = {name for name, layer in layers.items() if isinstance(layer, LinearLayer) and not options.measure}
    return Inspection.of(found, without_bound=tuple(found.keys() - bounded))
