"""What a cut would do: batched as alone, nothing changed, and the errors that come before it."""

import pytest
import torch

from compressm.adapters import write
from compressm.compression import planning
from compressm.compression.compressor import Compressor, compress_
from compressm.compression.inspection import HankelTracker, inspect
from compressm.compression.planning import Options, plan_cuts, read_layers, spectra
from compressm.compression.policies import Budget, EnergyTolerance, ErrorBound, KeepFraction, TargetOrder
from compressm.control import UnstableSystemError, error_bounds, fold, hankel_singular_values
from compressm.control.hankel import gramian_pair
from compressm.errors import CompressionError
from compressm.families import read_layer
from compressm.families.choices import Measured, Random, WhiteNoise
from compressm.families.linear import family as linear
from compressm.layers import LRU, S4, S4D, S5, LinOSS
from compressm.models import Block, Blocks, SequenceClassifier


def make(kind=LRU, depth=3, order=12):
    torch.manual_seed(0)
    return SequenceClassifier(kind, depth=depth, width=4, order=order, inputs=3, classes=5)


def data(model):
    return model(torch.randn(4, 40, 3, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("kind", [LRU, S5, S4, S4D, LinOSS])
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


@pytest.mark.parametrize("kind", [LRU, S5, S4D, LinOSS])
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
        ("0.ssm", 4),
        ("1.ssm", 3),
        ("2.ssm", 4),
        ("3.ssm", 4),
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
    assert Options(EnergyTolerance(0.1), calibrate=data).choices.is_measured
    assert not Options(EnergyTolerance(0.1)).choices.is_measured
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


def test_a_bound_with_data_holds_by_the_exact_gramians():
    """What the refusal of measured ones advises; of a budget the meaning is its number of states, measured or not."""
    model = make()
    options = Options(ErrorBound(0.5), calibrate=data, gramian=WhiteNoise(), gate=1.0)
    layers = read_layers(model, options)
    largest = {name: float(sigma.max()) for name, sigma in spectra(layers, options).items()}
    cuts = plan_cuts(layers, options)
    assert cuts
    assert all(cut.error_bound <= 0.5 * largest[cut.layer.name] and cut.measured_error is not None for cut in cuts)
    shared = Options(Budget(9), calibrate=data, gate=1.0)
    assert sum(cut.system.order for cut in plan_cuts(read_layers(model, shared), shared)) == 9


POLICIES = [TargetOrder(5), KeepFraction(0.5), Budget(9), EnergyTolerance(0.1), ErrorBound(0.1)]
OWN = [pytest.param(lambda spectra: dict.fromkeys(spectra, 2), silent, id=f"own-{silent}") for silent in ("C", "data")]
# Measured Gramians have no bound.
SILENT = [(keep, silent) for silent in ("C", "data") for keep in POLICIES[: -1 if silent == "data" else None]]


@pytest.mark.parametrize(("keep", "silent"), [*SILENT, *OWN], ids=str)
def test_a_layer_whose_values_are_all_zero_is_left_alone_by_every_policy(keep, silent):
    """Fixed orders took it from 12 states to 1, for good; tolerances left it alone."""
    layer = LRU(4, order=12)
    if silent == "C":
        layer.C_re.data.zero_()
        layer.C_im.data.zero_()
    calibrate = (lambda layer: layer(torch.zeros(4, 40, 4))) if silent == "data" else None
    options = Options(keep, calibrate=calibrate, gate=1.0)
    with pytest.warns(UserWarning, match=r"the model \((C is zero|calibrate gave it inputs that are all zeros)"):
        assert plan_cuts(read_layers(layer, options), options) == []


def with_rank(layer, rank):
    layer.C_re.data[:, rank:] = 0
    layer.C_im.data[:, rank:] = 0


@pytest.mark.parametrize("keep", [TargetOrder(8), KeepFraction(0.5), Budget(24)], ids=str)
@pytest.mark.parametrize("round_to", [1, 8])
def test_a_layer_of_smaller_rank_goes_to_that_rank_also_beside_others(keep, round_to):
    """Beside a layer of full rank it was filled up with modes that do nothing and never learn."""
    torch.manual_seed(0)
    model = Blocks([Block(LRU(4, order=16)), Block(LRU(4, order=16))])
    with_rank(model[0].ssm, 2)
    options = Options(keep, round_to=round_to, gate=1.0)
    small, *_ = plan_cuts(read_layers(model, options), options)
    assert small.layer.name == "0.ssm"
    assert small.system.order == 2
    assert small.error_bound < 1e-9
    omega = torch.linspace(0, 3, 20).double()
    old, new = (fold(which).frequency_response(omega) for which in (small.layer.system, small.system))
    assert torch.allclose(old, new, atol=1e-8)


def unstable(value):
    model = make()
    model.blocks[1].ssm.nu_log.data[0] = value
    return model


LOOKS = {
    "inspect": inspect,
    "inspect with data": lambda model: inspect(model, data),
    "tracker": lambda model: HankelTracker(model, every=1).step(1),
    "compress_": lambda model: compress_(model, keep=TargetOrder(5)),
    "compress_ with data": lambda model: compress_(model, keep=TargetOrder(5), calibrate=data),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("value", [-300.0, -800.0])
def test_a_pole_that_rounds_to_the_unit_circle_is_refused_with_the_name_of_its_layer(look, value):
    """inspect gave a value of 2e129, and a cut with data went through."""
    model = unstable(value)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CompressionError, match=r"^blocks\.1\.ssm: .*expected < 1"):
        LOOKS[look](model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("look", ["step", "preview"])
def test_a_layer_that_becomes_unstable_during_training_is_refused_by_name(look):
    model = make()
    compressor = Compressor(model, when=[1], keep=TargetOrder(5))
    model.blocks[1].ssm.nu_log.data[0] = -300.0
    with pytest.raises(CompressionError, match=r"^blocks\.1\.ssm: .*expected < 1"):
        compressor.step(1) if look == "step" else compressor.preview()
    assert [block.ssm.order for block in model.blocks] == [12, 12, 12]


@pytest.mark.parametrize("look", LOOKS)
def test_what_cannot_be_computed_of_several_layers_names_the_one(look, monkeypatch):
    def failing(system, P):
        if bool((system.B == 7).any()):
            raise UnstableSystemError("largest pole modulus is 1")
        return gramian_pair(system, P)

    monkeypatch.setattr(linear, "gramian_pair", failing)
    model = make(S5)

    def marked(name, module, adapter, choices):
        layer = read_layer(name, module, adapter, choices)
        if name == "blocks.2.ssm":
            layer.system.B[0, 0] = layer.balanced.B[0, 0] = 7
        return layer

    monkeypatch.setattr(planning, "read_layer", marked)
    with pytest.raises(CompressionError, match=r"^blocks\.2\.ssm: largest pole") as caught:
        LOOKS[look](model)
    assert isinstance(caught.value.__cause__, UnstableSystemError)


@pytest.mark.parametrize("look", LOOKS)
def test_a_model_without_values_is_refused_by_name(look):
    with pytest.raises(CompressionError, match=r"^blocks\.0\.ssm: nu_log.*meta device"):
        LOOKS[look](make().to("meta"))


def test_a_filter_that_takes_nothing_is_named():
    with pytest.raises(CompressionError, match=r"filter_fn accepts no SSM layer.*'blocks\.0\.ssm'"):
        inspect(make(), filter_fn=lambda module, name: False)
