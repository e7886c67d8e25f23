"""Layers whose values are all zero cannot be cut: a warning names them, and says why."""

import warnings

import pytest
import torch
from torch import nn

import compressm as cs
from compressm.compression import planning
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba

ALL_ZERO = "not cut, because all values of their states are zero: "
ZERO_INPUTS = "calibrate gave it inputs that are all zeros: run the model on real data"


def made(*kinds, order=8):
    torch.manual_seed(0)
    return nn.ModuleList([kind(4, order=order).double() for kind in kinds])


def runs(x):
    def calibrate(model):
        for layer in model:
            layer(x)

    return calibrate


def zeroed(layer, part):
    with torch.no_grad():
        if isinstance(layer, Mamba):
            first = layer.dt_rank + (0 if part == "B" else layer.order)
            layer.x_proj.weight[first : first + layer.order] = 0
        else:
            for name in (f"{part}_re", f"{part}_im"):
                layer.get_parameter(name).zero_()


def noise(size=1.0):
    return size * torch.randn(4, 30, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def said(model, **options):
    """The one warning of a call that cuts what it can, and the orders afterwards."""
    options = {"keep": cs.TargetOrder(3), "calibrate": runs(noise()), **options}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        cs.compress_(model, **options)
    assert len(found) == 1
    assert found[0].category is UserWarning
    return str(found[0].message), [layer.order for layer in model]


@pytest.mark.parametrize("kind", [LRU, S5, S4, S4D, LinOSS, Mamba])
def test_inputs_of_zeros_are_said(kind):
    model = made(kind)
    if kind is Mamba:  # its bias would turn zeros into other inputs of the scan
        nn.init.zeros_(model[0].conv1d.bias)
    message, orders = said(model, calibrate=runs(noise(0.0)))
    assert message == f"{ALL_ZERO}0 ({ZERO_INPUTS})"
    assert orders == [8]


@pytest.mark.parametrize("part", ["B", "C"])
@pytest.mark.parametrize("kind", [LRU, S5, Mamba])
def test_a_zero_matrix_is_named_and_other_layers_are_cut(kind, part):
    model = made(kind, LRU, kind)
    zeroed(model[0], part)
    zeroed(model[2], part)
    message, orders = said(model)
    assert message == f"{ALL_ZERO}0 ({part} is zero), 2 ({part} is zero)"
    assert orders == [8, 3, 8]


@pytest.mark.parametrize(
    "options", [{"calibrate": None}, {"gramian": cs.WhiteNoise()}, {"gramian": cs.Modal()}], ids=str
)
def test_exact_gramians_and_modes_say_it_too(options):
    model = made(S4D)
    zeroed(model[0], "C")
    assert said(model, **options) == (f"{ALL_ZERO}0 (C is zero)", [8])


@pytest.mark.parametrize("method", [cs.Baked(), cs.SharedIndex(), cs.PerChannel(), cs.PerChannel("measured")], ids=str)
def test_every_selective_method_says_it(method):
    model = made(Mamba)
    zeroed(model[0], "C")
    assert said(model, selective=method) == (f"{ALL_ZERO}0 (C is zero)", [8])


def test_states_without_input_or_output_are_said():
    model = made(LRU)
    with torch.no_grad():
        for part in ("re", "im"):
            model[0].get_parameter(f"B_{part}")[:4] = 0
            model[0].get_parameter(f"C_{part}")[:, 4:] = 0
    message, _ = said(model, calibrate=None)
    # What balancing leaves of such a system is zero.
    assert message == f"{ALL_ZERO}0 (no state connects an input with an output)"


def test_one_channel_of_zeros_is_not_worth_a_warning():
    model = made(S4D)
    with torch.no_grad():
        model[0].C_re[0] = model[0].C_im[0] = 0
    x = noise()
    x[..., 1] = 0
    (cut,) = cs.compress_(model, keep=cs.TargetOrder(3), calibrate=runs(x))
    assert cut.rank == 3


def test_a_compressor_says_it_at_its_step_and_in_a_preview():
    model = made(LRU)
    compressor = cs.Compressor(model, when=[1], keep=cs.TargetOrder(3), calibrate=runs(noise(0.0)))
    with pytest.warns(UserWarning, match=r"0 \(calibrate gave it inputs that are all zeros"):
        assert compressor.preview() == []
    with pytest.warns(UserWarning, match="zeros"):
        assert compressor.step(1) == []


def test_a_layer_that_may_not_be_cut_anyway_needs_no_warning():
    model = made(LRU)
    assert cs.compress_(model, keep=cs.TargetOrder(3), calibrate=runs(noise(0.0)), at_least=8) == []


def test_a_rehearsal_says_nothing(monkeypatch):
    monkeypatch.setattr(planning, "_SLOW_TO_LOAD", ("cpu",))
    model = made(LRU)
    zeroed(model[0], "C")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        cs.Compressor(model, when=[1], keep=cs.TargetOrder(3))
    assert found == []
