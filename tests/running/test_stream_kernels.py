"""The kernels of a Mamba's stream against its definition, on a GPU or in Triton's interpreter."""

import copy

import pytest
import torch

from compressm.layers import Mamba
from compressm.running import Stream
from tests.kernels import DEVICE, MARK, nan_memory, normal, relative

__all__ = ["nan_memory"]

pytestmark = [MARK, pytest.mark.usefixtures("nan_memory")]


@pytest.fixture(autouse=True)
def _kernels_serve_here(monkeypatch):
    monkeypatch.setattr("compressm.ops.dispatch._DEVICES", (DEVICE.type,))


def with_maps(layer):
    inner, n, projected = layer.inner, layer.order, layer.projected
    maps = (normal(inner, n, projected, seed=3), normal(inner, projected, n, seed=4))
    orders = torch.arange(inner, device=DEVICE) % (n + 1)
    layer.keep_maps_(*maps, orders, layer.A_log.detach())
    return layer


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    ("width", "order", "options"),
    [(5, 3, {}), (16, 20, {"conv_width": 1}), (3, 1, {"conv_bias": False, "bias": True, "dt_rank": 3})],
    ids=str,
)
def test_every_step_is_that_of_the_layer(width, order, options, mapped):
    torch.manual_seed(0)
    layer = Mamba(width, order=order, **options).to(DEVICE)
    layer = with_maps(layer) if mapped else layer
    exact = copy.deepcopy(layer).double()
    stream, state, x = Stream(layer, 2), exact.initial_state(2), normal(2, 6, width, seed=1)
    assert stream._program.steppers[0].by_kernel
    with torch.no_grad():
        for t in range(6):
            wanted, state = exact.step(x[:, t].double(), state)
            assert relative(stream(x[:, t]), wanted) < 1e-5
            assert relative(stream.state, state) < 1e-5


def test_rows_that_are_reset_begin_anew_and_others_go_on():
    torch.manual_seed(0)
    layer, x = Mamba(4, order=3).to(DEVICE), normal(2, 5, 4, seed=1)
    stream, other = Stream(layer, 2), Stream(layer, 2)
    for t in range(3):
        stream(x[:, t])
    stream.reset([0])
    first, second = stream(x[:, 3])
    assert relative(first, other(x[:, 3])[0]) < 1e-6
    assert relative(second, layer(x)[0][1, 3].detach()) < 1e-5
