"""A layer and a task of somebody else's, for recipes that name them by their place."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from compressm.adapters import SSMAdapter, adapts
from compressm.control import DiagonalSystem
from compressm.layers import LRU, SSMLayer
from compressm_lab.data import DataSet, Form, Split
from compressm_lab.data.task import in_three


class Spirals(SSMLayer):
    """Damped rotations (x, y) ← ρ R(φ) (x, y) + B u; the output is C (x, y)."""

    def __init__(self, width, order, *, turns=0.5):
        super().__init__(width, order)
        self.shrink = nn.Parameter(2 + torch.rand(order))  # ρ = sigmoid(shrink)
        self.angle = nn.Parameter(2 * math.pi * turns * torch.rand(order))
        self.B = nn.Parameter(torch.randn(order, 2, width) / math.sqrt(width))
        self.C = nn.Parameter(torch.randn(width, order, 2) / math.sqrt(order))

    @property
    def order(self):
        return self.shrink.shape[0]

    def shape_at(self, name, order):
        return {"B": (order, 2, self.width), "C": (self.width, order, 2)}.get(name, (order,))

    def dynamics(self):
        yield from (self.shrink, self.angle)

    def initial_state(self, batch):
        return self.B.new_zeros(batch, 2, self.order)

    def step(self, x, state):
        cos, sin = (torch.sigmoid(self.shrink) * part for part in (self.angle.cos(), self.angle.sin()))
        first, second = state.unbind(1)
        state = torch.stack([cos * first - sin * second, sin * first + cos * second], dim=1)
        state = state + torch.einsum("bc,nic->bin", x, self.B)
        return torch.einsum("bin,cni->bc", state, self.C), state

    def forward(self, x, state=None, lengths=None, *, keep_state=True):
        assert lengths is None
        state, outputs = self.initial_state(len(x)) if state is None else state, []
        for u in x.unbind(1):
            y, state = self.step(u, state)
            outputs.append(y)
        return torch.stack(outputs, dim=1), state if keep_state else None


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


class Unfinished(SSMLayer):
    """Has none of the methods."""


class Square(LRU):
    """Is built otherwise than recipes build layers."""

    def __init__(self, order):
        super().__init__(order, order)


def make_layer(width, order):
    return LRU(width, order)


@dataclass(frozen=True)
class Signs(DataSet):
    """Is the mean of a short signal above 0?"""

    name = "signs"
    length: int = 8

    @property
    def form(self):
        return Form(length=self.length, classes=2, channels=1)

    def parse(self, paths, progress):
        inputs = torch.randn(100, self.length, 1, generator=torch.Generator().manual_seed(0))
        return in_three(Split(inputs, (inputs.mean(dim=(1, 2)) > 0).long()))


class Nameless(Signs):
    """Has no name that a file could have."""

    name = None


class Taken(Signs):
    """Would read the cached files of another data set."""

    name = "digits"


class Formless(DataSet):
    """Cannot say its sizes."""

    name = "formless"

    def parse(self, paths, progress):
        raise NotImplementedError
