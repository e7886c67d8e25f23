"""What a cut would do: batched as alone, nothing changed, and the errors that come before it."""

import pytest
import torch

from compressm.adapters import write
from compressm.compression.errors import CompressionError
from compressm.compression.gramian import Measured, WhiteNoise
from compressm.compression.planning import Options, plan_cuts, read_layers, spectra
from compressm.compression.policies import EnergyTolerance, KeepFraction, TargetOrder
from compressm.compression.selection import Random
from compressm.control import error_bounds, fold, hankel_singular_values
from compressm.layers import LRU, S4D, S5
from compressm.models import Block, Blocks, SequenceClassifier


def make(kind=LRU, depth=3, order=12):
    torch.manual_seed(0)
    return SequenceClassifier(kind, depth=depth, width=4, order=order, inputs=3, classes=5)


def data(model):
    return model(torch.randn(4, 40, 3, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("kind", [LRU, S5, S4D])
@pytest.mark.parametrize("calibrate", [None, data], ids=["white noise", "measured"])
def test_layers_side_by_side_are_cut_as_each_alone(kind, calibrate):
    model = make(kind)
    options = Options(TargetOrder(5), calibrate=calibrate)
    together = plan_cuts(read_layers(model, options), options)
    assert [cut.layer.name for cut in together] == ["blocks.0.ssm", "blocks.1.ssm", "blocks.2.ssm"]
    for cut in together:
        alone = Options(TargetOrder(5), calibrate=calibrate, filter_fn=lambda _, name, cut=cut: name == cut.layer.name)
        (single,) = plan_cuts(read_layers(model, alone), alone)
        assert torch.allclose(single.system.poles, cut.system.poles, atol=1e-9)
        assert single.energy_lost == pytest.approx(cut.energy_lost)
        assert (cut.error_bound is None) == (calibrate is not None)
        assert (cut.measured_error is None) == (calibrate is None)


def test_bounds_and_energy_are_those_of_the_spectrum():
    model, options = make(), Options(TargetOrder(5))
    for cut in plan_cuts(read_layers(model, options), options):
        sigma = hankel_singular_values(fold(cut.layer.system))
        assert cut.error_bound == pytest.approx(float(error_bounds(sigma)[5]), rel=1e-9)
        assert cut.energy_lost == pytest.approx(float(sigma[5:].sum() / sigma.sum()), rel=1e-9)


@pytest.mark.parametrize("kind", [LRU, S5, S4D])
def test_planning_changes_nothing_and_what_is_planned_is_what_the_module_becomes(kind):
    model, options = make(kind, depth=1), Options(TargetOrder(5), calibrate=data)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (cut,) = plan_cuts(read_layers(model, options), options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    write(cut.layer.module, cut.layer.adapter.encode(cut.layer.module, cut.system))
    assert cut.layer.module.order == 5
    layers = read_layers(model, options)
    assert torch.allclose(
        torch.view_as_real(fold(layers["blocks.0.ssm"].system).poles),
        torch.view_as_real(fold(cut.system).poles),
        atol=1e-6,
    )


def test_layers_of_several_kinds_and_orders_stand_in_one_model():
    torch.manual_seed(0)
    blocks = Blocks([Block(LRU(4, order=9)), Block(S5(4, order=6)), Block(S4D(4, order=8)), Block(LRU(4, order=9))])
    options = Options(KeepFraction(0.5))
    found = spectra(read_layers(blocks, options), options)
    assert {name: tuple(sigma.shape) for name, sigma in found.items()} == {
        "0.ssm": (9,),
        "1.ssm": (6,),
        "2.ssm": (4, 8),
        "3.ssm": (9,),
    }
    cuts = plan_cuts(read_layers(blocks, options), options)
    assert [(cut.layer.name, cut.system.order) for cut in cuts] == [
        ("0.ssm", 5),
        ("1.ssm", 3),
        ("2.ssm", 4),
        ("3.ssm", 5),
    ]


def test_the_gate_holds_back_what_is_hardly_a_cut():
    model = make(order=40)
    assert plan_cuts(read_layers(model, Options(TargetOrder(39))), Options(TargetOrder(39))) == []
    assert len(plan_cuts(read_layers(model, Options(TargetOrder(39))), Options(TargetOrder(39), gate=1.0))) == 3


def test_random_states_differ_between_layers_and_cuts_and_are_repeatable():
    model, options = make(), Options(TargetOrder(5), select=Random(3))
    poles = [
        [cut.system.poles for cut in plan_cuts(read_layers(model, options), options, salt=salt)] for salt in (1, 1, 2)
    ]
    assert all(torch.equal(one, other) for one, other in zip(poles[0], poles[1], strict=True))
    assert not any(torch.allclose(one, other) for one, other in zip(poles[0], poles[2], strict=True))


def test_without_data_nothing_can_be_measured():
    with pytest.raises(CompressionError, match="without calibrate"):
        Options(EnergyTolerance(0.1), gramian=Measured())


def test_data_is_used_for_the_gramian_unless_white_noise_is_asked_for():
    assert Options(EnergyTolerance(0.1), calibrate=data).measure
    assert not Options(EnergyTolerance(0.1)).measure
    options = Options(TargetOrder(5), calibrate=data, gramian=WhiteNoise())
    (first, *_) = plan_cuts(read_layers(make(), options), options)
    assert first.error_bound is not None
    assert first.measured_error is not None


def test_a_model_without_ssm_layers_is_refused():
    with pytest.raises(CompressionError, match="no SSM layer"):
        read_layers(torch.nn.Linear(2, 2), Options(EnergyTolerance(0.1)))


def test_a_layer_that_is_not_finite_is_refused_by_name():
    model = make()
    model.blocks[1].ssm.B_re.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="B_re"):
        read_layers(model, Options(EnergyTolerance(0.1)))
