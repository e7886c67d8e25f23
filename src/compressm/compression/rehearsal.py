"""A cut that nobody sees, where the first one would take long."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from compressm.compression.planning import Options, plan_cuts, read_layers
from compressm.compression.policies import KeepFraction

# Their libraries and kernels are loaded when they are first used: on an H200 the first cut took 1 s, the next 0.35 s.
_SLOW_TO_LOAD = ("cuda",)


def rehearse(model: nn.Module, options: Options) -> None:
    """On a GPU, plan half of every layer away and forget it, so that the first cut finds everything loaded."""
    if not any(parameter.device.type in _SLOW_TO_LOAD for parameter in model.parameters()):
        return
    blind = replace(options, keep=KeepFraction(0.5), overrides=None, calibrate=None, gramian=None, gate=1.0, round_to=1)
    with torch.no_grad():
        plan_cuts(read_layers(model, blind), blind, salt=0)
