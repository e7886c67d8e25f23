"""Cuts on a GPU, with optimizers that keep their step counts there."""

import math

import pytest
import torch

from compressm.compression.optimizer import Restart, Slice, Transport
from compressm.compression.surgery import apply_cuts, prepare_cut
from tests.compression.trained import LAYERS, change_of, gradients_of, make_layer

pytestmark = pytest.mark.gpu

OPTIMIZERS = {
    "Adam, capturable": lambda p: torch.optim.Adam(p, lr=1e-3, capturable=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True, amsgrad=True),
    "NAdam, capturable": lambda p: torch.optim.NAdam(p, lr=1e-3, capturable=True),
    # Small steps: three plain ones of 1e-3 on the sum of squares throw some of these layers off.
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=1e-5, momentum=0.9, foreach=True),
}


def train(layer, optimizer):
    u = torch.ones(2, 20, layer.width, device="cuda")
    for _ in range(3):
        layer.zero_grad()
        loss = layer(u)[0].square().sum()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("moments", [Transport(), Restart(), Slice()], ids=repr)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_after_a_cut(name, kind, moments):
    layer = make_layer(kind, torch.float32).cuda()
    optimizer = OPTIMIZERS[name](layer.parameters())
    train(layer, optimizer)
    apply_cuts([prepare_cut("layer", change_of(layer, 4), optimizer, moments)], optimizer)
    for parameter in layer.parameters():
        assert parameter.is_cuda
        assert all(value.is_cuda for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))
    assert math.isfinite(train(layer, optimizer))


@pytest.mark.parametrize("kind", LAYERS)
def test_moments_are_carried_as_on_the_cpu(kind):
    """With all states kept, where the order of the modes and which of a conjugate pair stands are the choices left."""
    results = []
    for device in ("cpu", "cuda"):
        layer = make_layer(kind)
        moments = {name: value.to(device) for name, value in gradients_of(layer).items()}
        layer = layer.to(device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9)
        for name, parameter in layer.named_parameters():
            optimizer.state[parameter]["momentum_buffer"] = moments[name]
        cut = prepare_cut("layer", change_of(layer, 8), optimizer, Transport())
        carried = {name: state["momentum_buffer"].cpu() for name, state in cut.states.items()}
        results.append({name: value.abs().flatten().sort().values for name, value in carried.items()})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-8, atol=1e-8)
