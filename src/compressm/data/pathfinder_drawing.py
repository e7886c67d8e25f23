"""Scenes of Pathfinder as pictures: white dashes and dots on black, smooth at their edges."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from compressm.data.pathfinder_scenes import NOWHERE, Geometry, Scenes


def drawn(scenes: Scenes, geometry: Geometry) -> UInt8[Tensor, "scenes side side"]:
    """The brightest shape counts where several meet."""
    count, side = len(scenes.dots), geometry.side
    canvas = torch.zeros(count * side * side)
    there = scenes.paths != NOWHERE
    row = torch.arange(count)[:, None].expand(there.shape)[there]
    _paint_(canvas, side, row, scenes.dashes[there], geometry.thickness / 2)
    dots = scenes.dots.flatten(0, 1)[:, None].expand(-1, 2, -1)
    _paint_(canvas, side, torch.arange(count).repeat_interleave(2), dots, geometry.dot)
    return (255 * canvas).round().to(torch.uint8).unflatten(0, (count, side, side))


def _paint_(
    canvas: Float[Tensor, " pixels"],
    side: int,
    row: Int64[Tensor, " shapes"],
    segments: Float[Tensor, "shapes 2 2"],
    radius: float,
) -> None:
    """Each segment, as thick as its radius, on the patch of pixels around it: a fortieth of all pixels."""
    if not len(segments):
        return
    begin, along = segments[:, :1], segments[:, 1:] - segments[:, :1]
    reach = math.ceil(float(along.norm(dim=-1).max()) / 2 + radius + 1)
    window = torch.arange(-reach, reach + 1)
    patch = torch.cartesian_prod(window, window) + segments.mean(1, keepdim=True).floor().long()
    x = patch + 0.5 - begin
    share = ((x * along).sum(-1) / along.square().sum(-1).clamp(min=1e-9)).clamp(0, 1)
    distance = (x - share[..., None] * along).norm(dim=-1)
    ink = (radius + 0.5 - distance).clamp(0, 1)
    inside = ((patch >= 0) & (patch < side)).all(dim=-1)
    index = (row[:, None] * side + patch[..., 1]) * side + patch[..., 0]
    canvas.scatter_reduce_(0, index[inside], ink[inside], "amax")
