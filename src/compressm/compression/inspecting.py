"""Look at a model's layers without touching them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from compressm.compression.calibration import Calibrate
from compressm.compression.gramian import Gramian
from compressm.compression.inspection import Inspection
from compressm.compression.planning import Options, read_layers, spectra
from compressm.compression.policies import KeepFraction


def inspect(
    model: nn.Module,
    calibrate: Calibrate | None = None,
    *,
    gramian: Gramian | None = None,
    fold: bool = True,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> Inspection:
    """Spectra, recommended orders and bounds of every SSM layer; a table when printed.

    With `calibrate`, a function that runs the model on some data, states count by what they do there, and there is no
    a-priori bound.
    """
    options = Options(KeepFraction(1.0), calibrate, gramian, fold, filter_fn=filter_fn)
    with torch.no_grad():
        layers = read_layers(model, options)
        found = {name: sigma.cpu() for name, sigma in spectra(layers, options).items()}
    return Inspection.of(found, without_bound=tuple(found) if options.measure else ())
