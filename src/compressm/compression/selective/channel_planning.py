"""Cuts in which every channel of a selective layer gets an order of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressm.compression.options import Options
from compressm.compression.orders import choose_channel_orders, restricted
from compressm.compression.selection import Selection
from compressm.compression.selective.layer import SelectiveCut, SelectiveLayer
from compressm.control import numerical_rank


def plan_channels(
    layers: Iterable[SelectiveLayer], values: Mapping[str, Tensor], options: Options, salt: int
) -> dict[str, SelectiveCut]:
    """The layers of which some channels are to have fewer states."""
    named = {layer.name: layer for layer in layers}
    orders = choose_channel_orders(
        {name: values[name] for name in named},
        options.keep,
        overrides=restricted(options.overrides, named),
        gate=options.gate,
        round_to=options.round_to,
        at_least=options.at_least,
    )
    planned = {}
    for name, layer in named.items():
        sigma = values[name].cpu()
        wanted = _within_rank(torch.tensor(orders[name]), sigma)
        wanted = torch.where(wanted < _present(layer), wanted, layer.order)
        if bool((wanted < layer.order).any()):
            kept = [
                _chosen(one, int(order), options.select, f"{name}[{channel}]@{salt}")
                for channel, (one, order) in enumerate(zip(sigma, wanted, strict=True))
            ]
            planned[name] = layer.cut(kept, _lost(sigma, kept))
    return planned


def _chosen(sigma: Float[Tensor, " n"], order: int, select: Selection, salt: str) -> Int[Tensor, " _"]:
    """Of the states that are there: those whose σ is rounding have no direction, and a mode made of one no rate."""
    there = max(int(numerical_rank(sigma)), order)
    return select(sigma[:there], order, salt=salt)


def _present(layer: SelectiveLayer) -> Int[Tensor, " channels"]:
    """States that each channel has."""
    maps = layer.system.maps
    return torch.full((layer.system.channels,), layer.order) if maps is None else maps.orders.cpu()


def _within_rank(orders: Tensor, sigma: Float[Tensor, "channels n"]) -> Int[Tensor, " channels"]:
    """No channel that is cut keeps more than its numerical rank; those without a trace are left alone."""
    rank = numerical_rank(sigma)
    cut = (orders < sigma.shape[-1]) & (rank > 0)
    return torch.where(cut, torch.minimum(orders, rank), orders)


def _lost(sigma: Float[Tensor, "channels n"], kept: list[Int[Tensor, " _"]]) -> float:
    """The share of Σσ over all channels that goes."""
    stays = torch.stack([one[states].sum() for one, states in zip(sigma, kept, strict=True)]).sum()
    whole = float(sigma.sum())
    return max(0.0, 1 - float(stays) / whole) if whole > 0 else 0.0
