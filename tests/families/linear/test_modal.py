"""Modes that are dropped as they are: what stays is untouched, and the bound holds."""

import numpy as np
import pytest
import torch

import compressm as cs
from compressm.adapters import adapter_for
from compressm.families.linear.reduction import drop_modes, mode_sizes
from compressm.layers import Mamba
from tests.compression.trained import LAYERS, loss_of, make_layer
from tests.oracles import as_arrays, difference, gain_on_a_grid
from tests.systems import lru_at_initialisation


def read(layer):
    return adapter_for(layer).read(layer).detach()


def trained(name):
    layer = make_layer(name)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for seed in range(3):
        optimizer.zero_grad()
        loss_of(layer, seed).backward()
        optimizer.step()
    return layer, optimizer


def test_the_size_of_a_mode_is_half_its_largest_gain_on_a_grid():
    system = lru_at_initialisation(6, 3, seed=1)
    for k, size in enumerate(mode_sizes(system).tolist()):
        _, B, C = as_arrays(system)
        alone = np.diag([complex(system.poles[k])]), B[k : k + 1], C[:, k : k + 1]
        assert gain_on_a_grid(*alone, 100) == pytest.approx(2 * size, rel=1e-9)


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_the_error_of_dropping_modes_is_within_the_bound(rank):
    system = lru_at_initialisation(8, 3, seed=2)
    found = drop_modes(system, rank)
    error = gain_on_a_grid(*difference(as_arrays(system), as_arrays(found.system)), 2000)
    assert 0 < error <= float(found.error_bound)


@pytest.mark.parametrize("name", LAYERS)
def test_the_largest_modes_stay_as_they_were_and_their_moments_with_them(name):
    layer, optimizer = trained(name)
    before = read(layer)
    adapter = adapter_for(layer)
    (cut,) = cs.compress_(layer, keep=cs.TargetOrder(3), gramian=cs.Modal(), optimizer=optimizer)
    after, sizes = read(layer), mode_sizes(before)
    kept = sizes.argsort(dim=-1, descending=True)[..., :3].sort(dim=-1).values
    torch.testing.assert_close(after.poles, before.poles.gather(-1, kept), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(mode_sizes(after), sizes.gather(-1, kept), rtol=1e-9, atol=0)
    assert (cut.order, cut.rank) == (8, 3)
    lost = sizes.scatter(-1, kept, 0).sum(-1)
    assert cut.error_bound == pytest.approx(float(2 * lost.max()))
    assert cut.energy_lost == pytest.approx(float(lost.sum() / sizes.sum()))
    optimizer.zero_grad()
    loss_of(layer).backward()
    optimizer.step()
    assert adapter.order(layer) == 3


def test_rows_of_an_lru_and_of_its_moments_are_copied():
    layer, optimizer = trained("LRU")
    kept = mode_sizes(read(layer)).argsort(descending=True)[:4].sort().values
    old = {name: value.detach().clone() for name, value in layer.named_parameters()}
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in layer.named_parameters()}
    cs.compress_(layer, keep=cs.TargetOrder(4), gramian=cs.Modal(), optimizer=optimizer)
    for name, parameter in layer.named_parameters():
        axis = {"C_re": 1, "C_im": 1}.get(name, 0)
        chosen = (lambda t: t) if name == "D" else (lambda t, axis=axis: t.index_select(axis, kept))
        torch.testing.assert_close(parameter.data, chosen(old[name]), rtol=1e-12, atol=1e-14)
        if name != "gamma_log":  # γ is a factor of B: its moments follow from those of B
            torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], chosen(moments[name]))


def test_layers_of_equal_shape_are_cut_together_and_by_their_own_modes():
    torch.manual_seed(0)
    model = cs.models.SequenceClassifier(cs.layers.LRU, depth=3, width=4, order=6, inputs=1, classes=2)
    systems = [read(block.ssm) for block in model.blocks]
    cuts = cs.compress_(model, keep=cs.KeepFraction(0.5), gramian=cs.Modal(), select=cs.Smallest())
    for block, system, cut in zip(model.blocks, systems, cuts, strict=True):
        smallest = mode_sizes(system).sort().values[:3]
        torch.testing.assert_close(mode_sizes(read(block.ssm)).sort().values, smallest, rtol=1e-5, atol=0)
        assert cut.rank == 3


def test_a_bound_can_be_asked_for():
    layer = make_layer("LRU")
    sizes = mode_sizes(read(layer)).sort(descending=True).values
    wanted = float(2 * sizes[5:].sum()) * 1.01
    (cut,) = cs.compress_(layer, keep=cs.ErrorBound(wanted, relative=False), gramian=cs.Modal())
    assert cut.rank == 5
    assert cut.error_bound <= wanted


def test_selective_layers_have_no_modes_to_drop():
    layer = Mamba(4, 3)
    with pytest.raises(
        cs.compression.CompressionError, match=r"Modal\(\) needs fixed poles, which selective layers do not have"
    ):
        cs.compress_(layer, keep=cs.TargetOrder(1), gramian=cs.Modal(), calibrate=lambda m: m(torch.randn(1, 5, 4)))
