"""A Mamba layer by one function of kernels computes and learns what the plain one does."""

import copy

import pytest
import torch
from torch import nn

from compressm.layers import Mamba
from tests.kernels import DEVICE, MARK, normal, relative

pytestmark = MARK


@pytest.fixture(autouse=True)
def _kernels_serve_here(monkeypatch):
    monkeypatch.setattr("compressm.ops.dispatch._DEVICES", (DEVICE.type,))


def make(**options):
    torch.manual_seed(0)
    layer = Mamba(5, 3, expand=2, dt_rank=2, **options).to(DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.05 * normal(*parameter.shape, seed=parameter.numel()).to(parameter))
    return layer


def trained(layer, x, *, keep_state, through_state=False):
    """Outputs, and the gradients of a sum over them, and over the state."""
    x = x.clone().requires_grad_()
    out, state = layer(x, keep_state=keep_state)
    loss = (out * normal(*out.shape, seed=2).to(x)).sum()
    if through_state:
        loss = loss + (state * normal(*state.shape, seed=3).to(x)).sum()
    loss.backward()
    found = {"out": out.detach(), "x": x.grad} | ({} if state is None else {"state": state.detach()})
    return found | {name: parameter.grad for name, parameter in layer.named_parameters()}


@pytest.fixture
def counted(monkeypatch):
    from compressm.ops.selective.mixer_triton import MambaMixer

    calls, forward = [], MambaMixer.forward
    monkeypatch.setattr(MambaMixer, "forward", staticmethod(lambda *args: calls.append(1) or forward(*args)))
    return calls


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"conv_bias": False}], ids=str)
@pytest.mark.parametrize(("keep_state", "through_state"), [(False, False), (True, False), (True, True)])
def test_it_learns_what_the_plain_layer_does(options, keep_state, through_state, counted):
    layer, x = make(**options), normal(2, 9, 5, seed=1).float()
    plain = copy.deepcopy(layer).double()
    kinds = {"keep_state": keep_state, "through_state": through_state}
    got, wanted = trained(layer, x, **kinds), trained(plain, x.double(), **kinds)
    assert counted == [1]
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == torch.float32
        assert relative(got[name], value) < 2e-4, name


@pytest.mark.parametrize("why", ["hook", "another class", "a state", "lengths", "short"])
def test_other_cases_take_the_parts_one_by_one(why, counted):
    layer, x = make(), normal(2, 9, 5, seed=1).float()
    options = {}
    if why == "hook":
        layer.in_proj.register_forward_hook(lambda module, args, output: 2 * output)
    elif why == "another class":
        layer.out_proj = nn.Sequential(layer.out_proj)
    elif why == "a state":
        options["state"] = layer.initial_state(2)
    elif why == "lengths":
        options["lengths"] = torch.tensor([9, 4], device=DEVICE)
    else:
        x = x[:, :2]
    assert layer(x, **options)[0].shape == x.shape
    assert not counted


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_are_cast_together(dtype, monkeypatch):
    from compressm.ops.selective import mixer_triton

    monkeypatch.setattr(mixer_triton, "_BLOCK", 16)
    weights = [normal(*shape, seed=k) for k, shape in enumerate([(7, 5), (3, 11), (16, 1), (2, 2)])]
    weights[1] = weights[1].mT
    cast, A = mixer_triton.cast_weights(tuple(weights), normal(9, 2, seed=9), dtype)
    for one, other in zip(cast, weights, strict=True):
        assert torch.equal(one, other.to(dtype))
    torch.testing.assert_close(A, -torch.exp(normal(9, 2, seed=9)))
