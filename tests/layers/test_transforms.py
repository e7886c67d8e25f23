"""`torch.func` and second derivatives: layers and models run in plain torch there, and elsewhere they refuse."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, vmap

from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba
from compressm.models import LanguageModel, LayerNorm, RMSNorm, SequenceClassifier
from tests.marks import later

LAYERS = (LRU, S5, S4, S4D, LinOSS, Mamba)


class Summed(nn.Module):
    """A number that depends on all outputs, and on the last states."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, *given):
        out = self.inside(*given)
        y, state = out if isinstance(out, tuple) else (out, ())
        states = (state,) if isinstance(state, torch.Tensor) else state
        return sum(part.sin().sum() for part in (y, *states))


def build(kind, layer):
    torch.manual_seed(0)
    x = torch.randn(3, 11, 4, dtype=torch.float64)
    if kind == "layer":
        return Summed(layer(4, order=3).double()), x
    if kind == "classifier":
        model = SequenceClassifier(layer, inputs=4, classes=3, depth=2, width=4, order=3, norm=LayerNorm(), dropout=0.0)
        return Summed(model.double()), x
    model = LanguageModel(layer, vocabulary=5, depth=1, width=4, order=3, norm=RMSNorm())
    return Summed(model.double()), torch.randint(5, (3, 11))


def parameters_of(model):
    return {name: value.detach() for name, value in model.named_parameters()}


def inner(a, b):
    return sum((a[name] * b[name]).sum() for name in a)


CASES = [("layer", layer) for layer in LAYERS]
CASES += [("classifier", LRU), ("classifier", Mamba), ("language model", S4D)]


@pytest.mark.parametrize(("kind", "layer"), CASES)
def test_gradients_of_func_are_those_of_backward(kind, layer):
    """Together, and for each sequence by vmap."""
    model, x = build(kind, layer)
    values = parameters_of(model)
    model(x).backward()
    found = grad(lambda values: functional_call(model, values, (x,)))(values)
    each = vmap(grad(lambda values, x: functional_call(model, values, (x[None],))), in_dims=(None, 0))(values, x)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
        torch.testing.assert_close(each[name].sum(0), parameter.grad)


@pytest.mark.parametrize(("kind", "layer"), CASES)
def test_derivatives_along_a_direction_and_second_ones_agree_with_differences(kind, layer):
    model, x = build(kind, layer)
    values = parameters_of(model)
    along = {name: torch.randn_like(value) for name, value in values.items()}

    def loss(values):
        return functional_call(model, values, (x,))

    def moved(size):
        return {name: value + size * along[name] for name, value in values.items()}

    _, tangent = jvp(loss, (values,), (along,))
    torch.testing.assert_close(tangent, inner(grad(loss)(values), along))
    _, second = jvp(grad(loss), (values,), (along,))
    backwards = grad(lambda values: inner(grad(loss)(values), along))(values)
    plus, minus = grad(loss)(moved(1e-5)), grad(loss)(moved(-1e-5))
    for name in values:
        wanted = (plus[name] - minus[name]) / 2e-5
        torch.testing.assert_close(second[name], wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(backwards[name], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", LAYERS)
def test_padding_and_states_are_transformed_too(layer):
    torch.manual_seed(0)
    module, x = layer(4, order=3).double(), torch.randn(3, 11, 4, dtype=torch.float64)
    state, lengths = torch.randn_like(module.initial_state(3)), torch.tensor([11, 1, 4])

    def both(x, state):
        y, last = module(x, state, lengths)
        return y.sin().sum() + last.sin().sum()

    leaves = [x.requires_grad_(), state.requires_grad_()]
    wanted = torch.autograd.grad(both(*leaves), leaves)
    for found, one in zip(grad(both, argnums=(0, 1))(x.detach(), state.detach()), wanted, strict=True):
        torch.testing.assert_close(found, one)


def test_a_hessian_of_one_parameter():
    model, x = build("layer", LRU)
    values = parameters_of(model)

    def loss(nu_log):
        return functional_call(model, values | {"inside.nu_log": nu_log}, (x,))

    found = hessian(loss)(values["inside.nu_log"])
    torch.testing.assert_close(found, found.mT)
    assert found.abs().max() > 0.1


def test_forward_mode_derivatives_without_func():
    model, x = build("layer", Mamba)
    values = parameters_of(model)
    along = {name: torch.randn_like(value) for name, value in values.items()}
    with forward_ad.dual_level():
        dual = {name: forward_ad.make_dual(value, along[name]) for name, value in values.items()}
        tangent = forward_ad.unpack_dual(functional_call(model, dual, (x,))).tangent
    wanted = grad(lambda values: functional_call(model, values, (x,)))(values)
    torch.testing.assert_close(tangent, inner(wanted, along))


@pytest.mark.parametrize(("kind", "layer"), later(CASES, CASES[0], CASES[3], CASES[4]))
def test_a_gradient_that_is_to_be_differentiated_again_is_refused(kind, layer):
    model, x = build(kind, layer)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*second derivatives by torch\.func"):
        torch.autograd.grad(model(x), list(model.parameters()), create_graph=True)
