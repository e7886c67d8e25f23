"""Cuts of layers whose B, C or inputs are far from 1: the same cut as at ordinary sizes, and a stable one."""

import copy

import pytest
import torch

import compressm as cs
from compressm.adapters import adapter_for
from compressm.layers import LRU, S4D, S5, LinOSS, Mamba

SIZES = [1e-300, 1e-170, 1e150]
PARTS = ("B", "C", "inputs")
# B of an S4D layer is fixed.
CASES = [(kind, part) for kind in (LRU, S5, S4D, LinOSS) for part in PARTS if (kind, part) != (S4D, "B")]


def made(kind):
    torch.manual_seed(3)
    return kind(4, order=12).double()


def names_of(layer, part):
    return [name for name, _ in layer.named_parameters() if name.startswith(f"{part}_")]


def inputs(size=1.0):
    return size * torch.randn(6, 40, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sized(layer, names, size):
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        for name in names:
            layer.get_parameter(name).mul_(size)
    return layer


def cut(layer, size=1.0, **options):
    """The layer after a cut by measured Gramians, and its record."""
    options = {"keep": cs.TargetOrder(5), "calibrate": lambda model: model(inputs(size)), **options}
    (record,) = cs.compress_(layer, **options)
    return layer, record


def sorted_poles(layer):
    poles = adapter_for(layer).read(layer).detach().poles
    return poles.gather(-1, (poles.abs() + 1e-3 * poles.imag).argsort(-1))


@pytest.mark.parametrize(("kind", "part"), CASES)
@pytest.mark.parametrize("size", SIZES)
def test_the_size_of_a_layer_does_not_change_its_cut(kind, size, part):
    plain, ordinary = cut(made(kind))
    names = names_of(plain, part)
    small, record = cut(sized(made(kind), names, size), size if part == "inputs" else 1.0)
    assert (record.rank, record.error_bound) == (ordinary.rank, None) == (5, None)
    torch.testing.assert_close(sorted_poles(small), sorted_poles(plain), rtol=1e-6, atol=1e-8)
    assert float(sorted_poles(small).abs().max()) < 1
    assert record.measured_error == pytest.approx(ordinary.measured_error, rel=1e-4)
    assert record.energy_lost == pytest.approx(ordinary.energy_lost, rel=1e-4)
    for name in names:
        torch.testing.assert_close(small.get_parameter(name) / size, plain.get_parameter(name), rtol=1e-5, atol=1e-8)


@pytest.mark.filterwarnings("ignore:without effect. gramian")
@pytest.mark.parametrize("method", [cs.Baked(), cs.SharedIndex(), cs.PerChannel(), cs.PerChannel("measured")], ids=str)
@pytest.mark.parametrize("gramian", [cs.WhiteNoise(), cs.Measured()], ids=str)
@pytest.mark.parametrize("size", [1e-170, 1e150])
@pytest.mark.parametrize("part", ["B", "C"])
def test_the_size_of_a_selective_layer_does_not_change_its_cut(method, gramian, size, part):
    def resized(by):
        layer = made(Mamba)
        rank, n = layer.dt_rank, layer.order
        rows = slice(rank, rank + n) if part == "B" else slice(rank + n, None)
        with torch.no_grad():
            layer.x_proj.weight[rows] *= by
        return cut(layer, selective=method, gramian=gramian)

    (plain, ordinary), (small, record) = resized(1.0), resized(size)
    assert record.rank == ordinary.rank < 12
    assert record.measured_error == pytest.approx(ordinary.measured_error, rel=1e-4)
    assert record.energy_lost == pytest.approx(ordinary.energy_lost, rel=1e-4)
    torch.testing.assert_close(small.A_log.sort().values, plain.A_log.sort().values, rtol=1e-5, atol=1e-7)
