"""Layers with gradients, and cuts of them, for the tests of what a cut does to an optimizer."""

import math

import torch
from torch import nn

from compressm.adapters import SSMAdapter, adapter_for, adapts
from compressm.control import DiagonalSystem
from compressm.families import Writing
from compressm.families.linear.reduction import reduce_system
from compressm.families.linear.transport import ModuleChange
from compressm.layers import LRU, S4D, S5, Bilinear, DampedIMEX, LinOSS

LAYERS = {
    "LRU": lambda width=3, order=8: LRU(width, order),
    "S5": lambda width=3, order=8: S5(width, order),
    "S5 bilinear": lambda width=3, order=8: S5(width, order, discretisation=Bilinear()),
    "S4D": lambda width=3, order=8: S4D(width, order),
    "S4D above the sampling rate": lambda width=3, order=8: S4D(width, order, step_min=0.3, step_max=1.0),
    "LinOSS": lambda width=3, order=8: LinOSS(width, order),
    "LinOSS damped": lambda width=3, order=8: LinOSS(width, order, scheme=DampedIMEX()),
    "somebody's": lambda width=3, order=8: Spirals(width, order),
}


class Spirals(nn.Module):
    """A layer of somebody else's: real and imaginary parts on an axis of one parameter."""

    def __init__(self, width, order):
        super().__init__()
        self.width = width
        self.shrink = nn.Parameter(2 + torch.rand(order))
        self.angle = nn.Parameter(math.pi * torch.rand(order))
        self.B = nn.Parameter(torch.randn(order, 2, width) / math.sqrt(width))
        self.C = nn.Parameter(torch.randn(width, order, 2) / math.sqrt(order))
        self.D = nn.Parameter(torch.randn(width))

    def forward(self, u):
        system = SpiralsAdapter().read(self)
        return system.simulate(u.double()).real.to(u.dtype) + self.D * u, None


@adapts(Spirals)
class SpiralsAdapter(SSMAdapter):
    def read(self, module):
        shrink, angle, B, C = (p.double() for p in (module.shrink, module.angle, module.B, module.C))
        poles = torch.polar(torch.sigmoid(shrink), angle)
        return DiagonalSystem(poles, torch.complex(B[:, 0], B[:, 1]), torch.complex(C[..., 0], -C[..., 1]))

    def encode(self, module, system):
        return {
            "shrink": torch.logit(system.poles.abs()),
            "angle": torch.angle(system.poles),
            "B": torch.stack([system.B.real, system.B.imag], dim=1),
            "C": torch.stack([system.C.real, -system.C.imag], dim=-1),
        }


def make_layer(name, dtype=torch.float64, **sizes):
    """The layer, with an LRU's γ as if it had been learned."""
    torch.manual_seed(0)
    layer = LAYERS[name](**sizes).to(dtype)
    if isinstance(layer, LRU):
        layer.gamma_log.data += torch.randn(layer.order).to(dtype)
    return layer


def loss_of(layer, seed=1):
    generator = torch.Generator().manual_seed(seed)
    dtype = layer.D.dtype
    u, wanted = torch.randn(2, 2, 20, layer.width, generator=generator, dtype=torch.float64).to(dtype)
    return (layer(u)[0] - wanted).square().sum()


def gradients_of(layer):
    layer.zero_grad()
    loss_of(layer).backward()
    return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}


def change_of(layer, order, **options):
    """What a cut to this order would be."""
    adapter = adapter_for(layer)
    old = adapter.read(layer).detach()
    reduction = reduce_system(old, order, **options)
    new = adapter.nearest(layer, reduction.system)
    return ModuleChange(layer, adapter, old, new, reduction.change, Writing.of(layer, adapter, new, new.order))
