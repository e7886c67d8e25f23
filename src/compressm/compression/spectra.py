"""Spectra of all layers, checked once, and the two curves that a policy reads off each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from compressm.control import ControlError, error_bounds, validation
from compressm.errors import CompressionError

Spectra = Mapping[str, Tensor]


def checked_spectra(spectra: Spectra) -> dict[str, Tensor]:
    """The same in float64 on the CPU, each with at least one value, all finite, >= 0 and falling on the last axis."""
    if not isinstance(spectra, Mapping) or not spectra:
        raise CompressionError(
            f"spectra are {spectra!r:.100}, expected {{module name: tensor (*channels, n)}}, not empty"
        )
    return {name: _checked(name, sigma) for name, sigma in spectra.items()}


def _checked(name: object, sigma: Tensor) -> Tensor:
    if not isinstance(name, str):
        raise CompressionError(f"a spectrum is named {name!r}, expected the name of a module")
    try:
        validation.require_one_precision(sigma=validation.require_tensor("sigma", sigma, "n"))
        validation.require_real("sigma", sigma)
        validation.require_finite("sigma", sigma)
        values = sigma.detach().to("cpu", torch.float64)
        total = summed_tails(values)[0].item()
    except ControlError as error:
        raise CompressionError(f"the spectrum of {name!r}: {error}") from error
    if not math.isfinite(2 * total):
        largest = values.amax().item()
        raise CompressionError(f"the spectrum of {name!r}: values up to {largest:.3g}, whose sum is not finite")
    return values


def summed_tails(sigma: Float[Tensor, "*channels n"]) -> Float[Tensor, "n+1"]:
    """tails[r] = the energy that all channels together lose by keeping r states each, Σ_channels Σ_{i>r} σᵢ."""
    return _by_channel(error_bounds(sigma)).sum(0) / 2


def largest_bounds(sigma: Float[Tensor, "*channels n"]) -> Float[Tensor, "n+1"]:
    """bounds[r] = the largest over the channels of 2 Σ_{i>r} σᵢ."""
    return _by_channel(error_bounds(sigma)).amax(0)


def _by_channel(bounds: Tensor) -> Tensor:
    return bounds.reshape(-1, bounds.shape[-1])
