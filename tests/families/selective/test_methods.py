"""Cuts of selective layers: exact where they can be, formulas where not, and errors that are measured, not promised."""

import numpy as np
import pytest
import torch
from torch import nn

from compressm.compression import (
    Baked,
    CompressionError,
    EnergyTolerance,
    KeepFraction,
    Measured,
    Random,
    SharedIndex,
    Smallest,
    TargetOrder,
    WhiteNoise,
    compress_,
    inspect,
)
from compressm.compression.planning import Options, plan_cuts, read_layers
from compressm.control import shared_projection
from compressm.layers import Mamba
from tests.families.selective.mixers import Mixer, chosen, data, inputs_of, make, simulate
from tests.unhooked import outcomes

METHODS = [Baked(), Baked(two_sided=True), Baked(refit=True), SharedIndex(), SharedIndex(refit=True)]
GRAMIANS = [WhiteNoise(), Measured(stride=1)]


def runs(layer):
    return layer(data())


def planned(layer, method, order, gramian=None, **options):
    options = Options(TargetOrder(order), calibrate=runs, gramian=gramian, selective=method, gate=1.0, **options)
    (read,) = read_layers(layer, options).values()
    return read, plan_cuts({"": read}, options)


def output(layer, x=None):
    y = layer(data() if x is None else x)
    return y[0] if isinstance(y, tuple) else y


def moments(layer):
    """P and Q of every channel from white moments, in NumPy."""
    rates, _, B, C = chosen(layer, inputs_of(layer, data()))
    sums = -(rates[:, :, None] + rates[:, None])
    return [np.einsum("bti,btj->ij", M, M) / M[..., 0].size / sums for M in (B, C)]


@pytest.mark.parametrize("kind", [Mamba, Mixer])
@pytest.mark.parametrize("gramian", GRAMIANS, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_basis_of_all_states_is_the_same_layer(method, gramian, kind):
    """With equal rates in all channels every change of basis is exact, whatever was measured."""
    layer = make(kind=kind)
    layer.A_log.data = layer.A_log.data[:1].repeat(len(layer.A_log), 1)
    before = output(layer)
    read, _ = planned(layer, method, 5, gramian)
    cut = read.cut([torch.arange(6)], 0.0)
    assert cut.measured_error < 1e-10
    for name, value in cut.change().values.items():
        layer.get_parameter(name).data = value
    torch.testing.assert_close(output(layer), before, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_states_that_are_never_driven_and_never_read_go_without_a_trace(method):
    layer = make()
    rows = layer.x_proj.weight.data[1:].view(2, 6, -1)
    rows[:, [1, 4, 5]] = 0
    before = output(layer)
    (cut,) = compress_(layer, keep=TargetOrder(3), calibrate=runs, selective=method)
    assert layer.order == cut.rank == 3
    assert cut.measured_error < 1e-8
    torch.testing.assert_close(output(layer), before, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("two_sided", [False, True])
def test_where_rates_are_equal_a_subspace_of_b_and_c_is_all_that_is_kept(two_sided):
    """The symmetric projection needs B and C to be alike: it scales states so that both Gramians weigh the same."""
    layer = make()
    layer.A_log.data = torch.randn(8, 1).double().repeat(1, 6)
    subspace = torch.linalg.qr(torch.randn(6, 2).double()).Q
    rows = layer.x_proj.weight.data[1:].view(2, 6, -1)
    rows[:] = subspace @ torch.randn(2 if two_sided else 1, 2, 8).double()
    before = output(layer)
    method = Baked(two_sided=two_sided)
    (cut,) = compress_(layer, keep=EnergyTolerance(1e-6), calibrate=runs, selective=method)
    assert cut.rank == 2
    assert cut.error_bound is None
    torch.testing.assert_close(output(layer), before, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("two_sided", [False, True])
def test_baked_parameters_are_those_of_the_shared_projection(two_sided):
    layer = make()
    weight, rates = layer.x_proj.weight.detach().clone(), -torch.exp(layer.A_log.detach())
    P, Q = (torch.from_numpy(gramian) for gramian in moments(layer))
    expected = shared_projection(rates, P, Q, 3, two_sided=two_sided)
    compress_(layer, keep=TargetOrder(3), calibrate=runs, selective=Baked(two_sided=two_sided), gramian=WhiteNoise())
    step, B, C = layer.x_proj.weight.detach().split([1, 3, 3])
    assert torch.equal(step, weight[:1])
    signs = torch.sign((B * (expected.E_B @ weight[1:7])).sum(1))[:, None]  # of eigenvectors
    torch.testing.assert_close(signs * B, expected.E_B @ weight[1:7], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(signs * C, expected.E_C.mT @ weight[7:], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(-torch.exp(layer.A_log.detach()), expected.rates, rtol=1e-8, atol=0)


@pytest.mark.parametrize("gramian", GRAMIANS, ids=str)
def test_baked_spectra_are_hankel_values_of_means_at_equal_trace(gramian):
    layer = make()
    P, Q = moments(layer)
    if isinstance(gramian, Measured):
        h = simulate(layer, inputs_of(layer, data()))[0]
        P = np.einsum("btci,btcj->cij", h, h)
    P, Q = ((M / np.trace(M, axis1=1, axis2=2)[:, None, None]).mean(0) for M in (P, Q))
    expected = np.sort(np.sqrt(np.linalg.eigvals(P @ Q).real.clip(0)))[::-1]
    found = inspect(layer, runs, gramian=gramian)
    np.testing.assert_allclose(found.spectra[""].numpy(), expected, rtol=1e-6, atol=1e-9)
    assert set(found.bounds[0.05].values()) == {None}


@pytest.mark.parametrize("seed", range(8))
def test_baked_rates_stay_real_and_negative_for_any_data(seed):
    layer = make(order=12, seed=seed)
    layer.A_log.data += 2 * torch.randn(layer.A_log.shape).double()
    old = layer.A_log.detach().clone()
    compress_(layer, keep=TargetOrder(5), calibrate=lambda layer: layer(1e3 * data(seed=seed)), gramian=Measured())
    assert (layer.A_log >= old.min(1, keepdim=True).values - 1e-9).all()
    assert (layer.A_log <= old.max(1, keepdim=True).values + 1e-9).all()


def scores(layer):
    P, Q = moments(layer)
    return np.sqrt(np.einsum("cii->ci", P) * np.einsum("cii->ci", Q)).sum(0)


def test_shared_index_keeps_the_states_of_the_largest_scores_as_they_are():
    layer = make()
    weight, A_log, expected = layer.x_proj.weight.detach().clone(), layer.A_log.detach().clone(), scores(layer)
    found = inspect(layer, runs, selective=SharedIndex()).spectra[""]
    np.testing.assert_allclose(found.numpy(), np.sort(expected)[::-1], rtol=1e-9)
    kept = torch.from_numpy(np.sort(np.argsort(-expected)[:3]))
    (cut,) = compress_(layer, keep=TargetOrder(3), calibrate=runs, selective=SharedIndex())
    torch.testing.assert_close(layer.A_log.detach(), A_log[:, kept], rtol=1e-14, atol=1e-14)
    assert torch.equal(layer.x_proj.weight.detach(), weight[torch.cat([torch.tensor([0]), 1 + kept, 7 + kept])])
    assert cut.energy_lost == pytest.approx(1 - np.sort(expected)[3:].sum() / expected.sum())


def test_a_refitted_readout_is_the_least_squares_one():
    """Over all channels and steps, of h from the states kept; C cancels where it does not depend on them."""
    layer, gramian = make(), Measured(stride=1)
    weight, h = layer.x_proj.weight.detach().numpy(), simulate(layer, inputs_of(layer, data()))[0]
    sizes = np.sqrt((h**2).mean((0, 1)) * np.einsum("cii->ci", moments(layer)[1])).sum(0)
    kept, h = np.sort(np.argsort(-sizes)[:3]), h.reshape(-1, 6)
    compress_(layer, keep=TargetOrder(3), calibrate=runs, selective=SharedIndex(refit=True), gramian=gramian)
    fit = np.linalg.lstsq(h[:, kept], h, rcond=None)[0]
    np.testing.assert_allclose(layer.x_proj.weight.detach().numpy()[4:], fit @ weight[7:], rtol=1e-6, atol=1e-8)


def test_the_refit_of_a_projection_is_the_least_squares_one():
    layer = make()
    u = inputs_of(layer, data())
    old, W_C = simulate(layer, u)[0].reshape(-1, 6), layer.x_proj.weight.detach().numpy()[7:]
    compress_(layer, keep=TargetOrder(3), calibrate=runs, selective=Baked(refit=True))
    new = simulate(layer, u)[0].reshape(-1, 3)
    fit = np.linalg.lstsq(new, old, rcond=None)[0]
    np.testing.assert_allclose(layer.x_proj.weight.detach().numpy()[4:], fit @ W_C, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [Mamba, Mixer])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_measured_error_is_the_change_of_what_the_scan_puts_out(method, kind):
    layer = make(kind=kind)
    u = inputs_of(layer, data())
    before = simulate(layer, u)[1]
    (cut,) = compress_(layer, keep=TargetOrder(3), calibrate=runs, selective=method)
    after = simulate(layer, u)[1]
    assert cut.measured_error == pytest.approx(np.linalg.norm(after - before) / np.linalg.norm(before), rel=1e-6)
    assert cut.error_bound is None
    assert 0 < cut.energy_lost < 1


def errors(method, gramian=None, **options):
    found = []
    for seed in range(3):
        _, (cut,) = planned(make(order=16, seed=seed), method, 5, gramian, **options)
        found.append(cut.measured_error)
    return float(np.mean(found))


def test_projections_beat_indices_and_indices_beat_chance():
    baked, index = errors(Baked()), errors(SharedIndex())
    assert errors(Baked(refit=True)) < baked < 0.7 * index
    assert errors(SharedIndex(refit=True)) < index < errors(SharedIndex(), select=Random(0))
    assert baked < 0.5 * min(errors(Baked(), select=Random(0)), errors(Baked(), select=Smallest()))
    assert errors(Baked(), Measured(stride=1)) < 1.05 * baked


def test_random_indices_are_repeatable_and_differ_between_cuts():
    layer = make(order=16)
    options = Options(TargetOrder(5), calibrate=runs, selective=SharedIndex(), select=Random(1))
    read = read_layers(layer, options)
    one, again, other = (plan_cuts(read, options, salt=salt)[0].reduction.E_B for salt in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_a_layer_that_was_cut_can_be_cut_again():
    layer = make(order=16)
    u = inputs_of(layer, data())
    before = simulate(layer, u)[1]
    _, (once,) = planned(layer, Baked(), 4)
    for order in (12, 8, 4):
        compress_(layer, keep=TargetOrder(order), calibrate=runs)
    assert layer.order == 4
    after = simulate(layer, u)[1]
    assert np.linalg.norm(after - before) / np.linalg.norm(before) < 1.3 * once.measured_error


def test_complex_rates_of_two_sided_balancing_are_refused_with_the_name_of_the_layer():
    found = []
    for seed in range(40):
        model = nn.Sequential(make(order=12, seed=seed, kind=Mixer))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            compress_(
                model, keep=TargetOrder(8), calibrate=lambda model: model(data()), selective=Baked(two_sided=True)
            )
        except CompressionError as error:
            found.append(str(error))
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            break
    assert found[0].startswith("0: two-sided balancing gives rates")
    assert "use two_sided=False" in found[0]


def test_a_silent_layer_is_left_alone():
    layer = make()
    layer.x_proj.weight.data[7:] = 0
    for method in METHODS:
        with pytest.warns(UserWarning, match=r"the model \(C is zero\)"):
            assert compress_(layer, keep=KeepFraction(0.5), calibrate=runs, selective=method) == []


CASES = {
    "two_sided": ("Baked(two_sided=1)", "Baked: two_sided is 1", "expected True or False"),
    "refit": ("Baked(refit=None)", "Baked: refit is None", "expected True or False"),
    "refitted indices": ("SharedIndex(refit='no')", "SharedIndex: refit is 'no'", "expected True or False"),
    "a surrogate": ("PerChannel('average')", "surrogate is 'average'", "expected 'mean', 'second_moment', 'measured'"),
    "no surrogate": ("PerChannel(None)", "surrogate is None", "expected 'mean'"),
    "sides": ("PerChannel(two_sided=2)", "PerChannel: two_sided is 2", "expected True or False"),
    "a class": ("cut(selective=Baked)", "selective is <class", "expected Baked(), PerChannel(...) or SharedIndex()"),
    "a word": ("cut(selective='baked')", "selective is 'baked'", "expected Baked()"),
    "nothing": ("inspect(Mamba(4), selective=None)", "selective is None", "expected Baked()"),
}
PREAMBLE = """
from compressm.compression import Baked, PerChannel, SharedIndex, TargetOrder, compress_, inspect
from compressm.layers import Mamba

def cut(**options):
    compress_(Mamba(4), keep=TargetOrder(3), calibrate=lambda layer: None, **options)
"""


@pytest.fixture(scope="module")
def refusals():
    return outcomes(PREAMBLE, {case: expression for case, (expression, *_) in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_choices_that_mean_nothing_are_refused(case, refusals):
    kinds, said = refusals[case]
    assert "CompressionError" in kinds, said
    assert all(part in said for part in CASES[case][1:]), said
