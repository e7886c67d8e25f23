"""Cuts of S4: matrices before, modes after."""

import copy

import pytest
import torch

import compressm as cs
from compressm.adapters import AdapterError, adapter_for, write
from compressm.compression import CompressionError
from compressm.control import DenseSystem, h_infinity_error, hankel_singular_values
from compressm.control.folding import conjugate_pairs
from tests.layers.test_s4 import make


class Reader(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.ssm = layer

    def forward(self, x):
        return self.ssm(x)[0]


def data(length=300):
    return torch.randn(8, length, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).cumsum(1) / 10


@pytest.mark.parametrize("measured", [False, True])
def test_a_cut_layer_is_an_s4d_of_the_bound_or_the_measured_error(measured):
    layer, x = make(order=16), data()
    before, system = layer(x)[0].detach() - layer.D.detach() * x, adapter_for(layer).read(layer).detach()
    options = {"calibrate": lambda model: model(x)} if measured else {}
    (event,) = cs.compress_(Reader(layer), keep=cs.TargetOrder(6), **options)
    assert (layer.order, layer.is_diagonal()) == (6, True)
    after = layer(x)[0].detach() - layer.D.detach() * x
    if measured:
        assert event.error_bound is None
        assert (after - before).norm() / before.norm() == pytest.approx(event.measured_error, rel=1e-6)
        assert event.measured_error < 0.1
    else:
        modes = conjugate_pairs(adapter_for(layer).modes(layer).detach())
        assert max(h_infinity_error(system[k], modes[k]) for k in range(3)) <= event.error_bound


def test_data_make_cuts_of_what_it_holds_better():
    errors = []
    for options in ({}, {"calibrate": lambda model: model(data())}):
        layer = make(order=16)
        before = layer(data())[0].detach()
        cs.compress_(Reader(layer), keep=cs.TargetOrder(4), **options)
        errors.append(float((layer(data())[0].detach() - before).norm()))
    assert errors[1] < errors[0] / 2


def test_the_spectrum_sums_the_values_of_pairs():
    layer = make(order=8)
    sigma = cs.inspect(layer).spectra[""]
    wanted = hankel_singular_values(adapter_for(layer).read(layer).detach())
    torch.testing.assert_close(sigma, wanted.unflatten(-1, (8, 2)).sum(-1))


def test_a_layer_that_was_cut_can_be_cut_again():
    layer = make(order=16)
    compressor = cs.Compressor(layer, when=[1, 2], keep=cs.KeepFraction(0.5))
    for step in (1, 2):
        compressor.step(step)
    assert layer.order == 4


def test_states_of_a_running_stream_are_carried_over():
    """A cut that loses nothing changes nothing in the stream."""
    layer, x = without_effect(), data()
    whole = layer(x)[0].detach()
    stream = cs.Stream(layer, 8)
    for now in x[:, :200].unbind(1):
        stream(now)
    cs.compress_(layer, keep=cs.TargetOrder(5))
    for t in range(200, 220):
        torch.testing.assert_close(stream(x[:, t]).double(), whole[:, t], rtol=1e-5, atol=1e-5)


def test_an_average_is_cut_by_the_same_projection():
    layer = make(order=12)
    average = torch.optim.swa_utils.AveragedModel(layer)
    cs.Compressor(layer, when=[1], keep=cs.TargetOrder(5), follow=[average]).step(1)
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(average.module.state_dict()[name], value, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gramian": cs.Modal()}, r"Modal\(\), which drops modes of a diagonal A.*expected WhiteNoise\(\) or Measured"),
        ({"select": cs.Random(seed=0)}, r"select is Random\(seed=0\).*expected Largest\(\)"),
    ],
)
def test_choices_that_matrices_cannot_follow_are_refused(options, said):
    layer = make(order=8)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(CompressionError, match=said):
        cs.compress_(layer, keep=cs.TargetOrder(4), **options)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_matrices_of_another_structure_cannot_be_stored():
    layer = make(order=4)
    system = adapter_for(layer).read(layer).detach()
    A = system.A.clone()
    A[0, 0, 3] += 1e-3
    with pytest.raises(AdapterError, match=r"another than the one that this S4 computes.*expected modes"):
        adapter_for(layer).encode(layer, DenseSystem(A, system.B, system.C))
    with pytest.raises(AdapterError, match="is not the system of this S4"):
        adapter_for(layer).encode(layer, adapter_for(make(order=5)).read(make(order=5)).detach())


def without_effect(order=8, idle=3):
    """A layer with some states that have neither input nor output: a cut loses nothing.

    HiPPO itself has real poles, each of which takes a mode; with a tenth of its p all poles are pairs.
    """
    layer = make(order=order - idle)
    for name in ("p_re", "p_im"):
        layer.get_parameter(name).data *= 0.1
    values = {
        name: growth.resized(layer.get_parameter(name).detach(), order)
        for name, growth in adapter_for(layer).growth(layer).items()
    }
    write(layer, values)
    return layer


def loss_of(layer):
    return (layer(data(60))[0] - data(60).roll(1, 1)).square().mean()


def test_means_of_gradients_of_b_and_c_become_those_of_the_reduced_layer():
    """A cut that loses nothing: autograd on the reduced layer is the oracle."""
    layer = without_effect()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9)
    loss_of(layer).backward()
    optimizer.step()
    before = loss_of(layer).item()
    cs.compress_(layer, keep=cs.TargetOrder(5), optimizer=optimizer)
    optimizer.zero_grad()
    loss = loss_of(layer)
    assert loss.item() == pytest.approx(before, rel=1e-9)
    loss.backward()
    for name in ("B_re", "B_im", "C_re", "C_im", "log_step"):
        parameter = layer.get_parameter(name)
        momentum = optimizer.state[parameter]["momentum_buffer"]
        cosine = torch.nn.functional.cosine_similarity(momentum.flatten(), parameter.grad.flatten(), dim=0)
        assert cosine > 0.9999, (name, float(cosine))


def test_squares_of_gradients_stay_in_their_sizes():
    layer = make(order=12)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(layer).backward()
        optimizer.step()
    cs.compress_(layer, keep=cs.TargetOrder(5), optimizer=optimizer)
    optimizer.zero_grad()
    loss_of(layer).backward()
    for name in ("log_A_real", "A_imag", "B_re", "C_re"):
        parameter = layer.get_parameter(name)
        squares = optimizer.state[parameter]["exp_avg_sq"] / (1 - 0.999**3)
        assert squares.shape == parameter.shape
        ratio = float(squares.mean() / parameter.grad.square().mean())
        assert 1e-2 < ratio < 1e2, (name, ratio)
    for name in ("p_re", "p_im"):
        assert not optimizer.state[layer.get_parameter(name)]["exp_avg"].any()
    optimizer.step()
    assert layer.is_diagonal()
