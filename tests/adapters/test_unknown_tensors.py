"""Tensors of a layer that its adapter does not know: refused where they have one entry a state, else left alone."""

import pytest
import torch
from torch import nn

from compressm.adapters import adapter_for, writing
from compressm.adapters.base import encode_with, read_with
from compressm.compression import CompressionError, Compressor, TargetOrder, compress_
from compressm.layers import LRU, S4D
from tests.adapters.other_packages import LAYERS
from tests.adapters.test_conformance import MODULES


class Gained(LRU):
    """A factor for every state."""

    def __init__(self, width, order):
        super().__init__(width, order)
        self.gain = nn.Parameter(torch.ones(order))

    def forward(self, x, *args, **kwargs):
        y, state = super().forward(x, *args, **kwargs)
        return y * (self.gain * self.nu_log.exp()).mean(), state


class Scaled(LRU):
    """A factor for every channel, and a number."""

    def __init__(self, width, order):
        super().__init__(width, order)
        self.scale, self.out = nn.Parameter(torch.ones(width)), nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *args, **kwargs):
        y, state = super().forward(x, *args, **kwargs)
        return self.out(y * self.scale), state


class Louder(LRU):
    def forward(self, x, *args, **kwargs):
        y, state = super().forward(x, *args, **kwargs)
        return 2 * y, state


def attached(kind, **made):
    """A layer with something attached to it."""
    layer = kind(3, 8)
    for name, thing in made.items():
        if type(thing) is torch.Tensor:
            layer.register_buffer(name, thing)
        else:
            setattr(layer, name, thing)
    return layer


REFUSED = {
    "a parameter of a subclass": (lambda: Gained(3, 8), "gain"),
    "an attached parameter": (lambda: attached(LRU, gate=nn.Parameter(torch.ones(8, 1))), "gate"),
    "an attached buffer of pairs": (lambda: attached(S4D, mask=torch.ones(16)), "mask"),
    "an attached module": (lambda: attached(LRU, mix=nn.Linear(8, 8)), r"mix\.weight"),
}
KEPT = {
    "of every channel": lambda: Scaled(3, 8),
    "as many channels as states": lambda: Scaled(8, 8),
    "no tensor, another forward": lambda: Louder(3, 8),
    "of no size of the layer": lambda: attached(LRU, mix=nn.Linear(3, 5), table=torch.ones(7)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tensor_with_an_entry_for_every_state_that_the_adapter_does_not_know_is_refused(case):
    build, name = REFUSED[case]
    model = nn.Sequential(build())
    for call in (compress_, lambda model, **options: Compressor(model, when=[1], **options)):
        with pytest.raises(CompressionError, match=rf"0\.{name} has the shape .* 8 states.*@adapts\(.*filter_fn"):
            call(model, keep=TargetOrder(4))
    assert model[0].order == 8


@pytest.mark.parametrize("case", KEPT)
def test_a_tensor_that_has_nothing_to_do_with_the_order_goes_through_a_cut(case):
    layer = KEPT[case]()
    compress_(layer, keep=TargetOrder(4))
    assert layer.order == 4
    layer(torch.randn(2, 10, layer.width))


@pytest.mark.parametrize("name", {**MODULES, **LAYERS})
def test_all_tensors_of_known_layers_are_known(name):
    module = {**MODULES, **LAYERS}[name]()
    written = encode_with(adapter_for(module), module, {}, read_with(adapter_for(module), module))
    known = writing._made_by(type(module)) | {path.split(".")[0] for path in written}
    unknown = [path for path, _ in writing._tensors(module) if not writing._is_known(path.split(".")[0], known)]
    assert unknown == []
