"""Observations of linear layers: states against simulation, padding, modes, random numbers, layers that do not run."""

import pytest
import torch

from compressm.adapters import adapter_for
from compressm.compression import TargetOrder, compress_
from compressm.control import NonFiniteError, balanced_truncation, controllability_gramian, fold
from compressm.errors import CompressionError
from compressm.families.choices import Measured
from compressm.families.linear.observer import LinearObserver, scaled_gramian, squared_change
from compressm.families.linear.simulation import outputs
from compressm.families.observing import Observations, observe, ratio_of, sampled_steps
from compressm.layers import LRU, S4D, S5, LinOSS
from compressm.models import OneMask, SequenceClassifier


def gramian(observations):
    """E[h hᴴ] of ordinary states, whose scale is 1."""
    P, scale = scaled_gramian(observations)
    assert bool((scale == 1).all())
    return P


def system_of(layer):
    return adapter_for(layer).read(layer).detach()


def make(kind=LRU, depth=2, **options):
    torch.manual_seed(0)
    return SequenceClassifier(
        kind, depth=depth, width=4, order=6, inputs=3, classes=5, dropout=OneMask(0.2), layer_options=options
    )


def observed(model, calibrate, layers, choice):
    """Observations by name; each comes with the system whose states are wanted."""
    observers = {name: LinearObserver(Observations(name), *layer, choice) for name, layer in layers.items()}
    observe(model, calibrate, list(observers.values()))
    return {name: observer.observations for name, observer in observers.items()}


def relative_change(old, new, observations):
    return ratio_of(squared_change(old, new, observations))


def layers_of(model, *, folded=True):
    found = {f"blocks.{k}.ssm": block.ssm for k, block in enumerate(model.blocks)}
    return {name: (layer, fold(system_of(layer)) if folded else system_of(layer)) for name, layer in found.items()}


@pytest.mark.parametrize("kind", [LRU, S5, S4D, LinOSS])
def test_outputs_are_those_of_the_layer(kind):
    torch.manual_seed(1)
    layer, u = kind(4, order=5).double(), torch.randn(3, 40, 4, dtype=torch.float64)
    system = system_of(layer)
    y, _ = layer(u, skip=False)
    assert torch.allclose(outputs(system, u), y, atol=1e-10)
    assert torch.allclose(outputs(fold(system), u), y, atol=1e-10)


@pytest.mark.parametrize("kind", [LRU, S4D])
def test_the_measured_gramian_of_white_noise_is_the_exact_one(kind):
    torch.manual_seed(2)
    options = {"r_min": 0.2, "r_max": 0.7} if kind is LRU else {}
    layer = kind(2, order=3, **options).double()
    system = system_of(layer)
    if kind is S4D:
        layer.log_step.data += 2  # short memories, so that few steps tell
        system = system_of(layer)
    model = torch.nn.Sequential(layer)
    noise = torch.randn(64, 2000, 2, dtype=torch.float64)
    seen = observed(model, lambda model: model(noise), {"0": (layer, system)}, Measured(batches=1, stride=1))
    exact = controllability_gramian(system)
    assert ((gramian(seen["0"]) - exact).norm() / exact.norm()) < 0.05


def test_padding_never_counts():
    model, lengths = make(), torch.tensor([7, 20])
    x = torch.randn(2, 20, 3)
    garbage = x.clone()
    garbage[0, 7:] = 1e3
    choice = Measured(stride=3)
    one, other = (
        observed(model, lambda model, data=data: model(data, lengths), layers_of(model), choice)
        for data in (x, garbage)
    )
    for name in one:
        assert torch.allclose(gramian(one[name]), gramian(other[name]), rtol=1e-9)


def test_nothing_of_the_training_is_disturbed():
    model = make()
    model.train()
    model.blocks[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    observed(model, lambda model: model(torch.randn(2, 10, 3)), layers_of(model), Measured())
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert model.blocks[0].training
    assert not model.blocks[1].training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(block.ssm._forward_pre_hooks for block in model.blocks)


def test_an_error_in_calibrate_leaves_no_hook_behind():
    model = make()

    def broken(model):
        model(torch.randn(2, 10, 3))
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        observed(model, broken, layers_of(model), Measured())
    assert not any(block.ssm._forward_pre_hooks for block in model.blocks)
    assert model.training


def test_only_the_first_batches_count():
    model = make()
    batches = [torch.randn(2, 10, 3) for _ in range(3)]

    def run(count):
        def calibrate(model):
            for batch in batches[:count]:
                model(batch)

        return observed(model, calibrate, layers_of(model), Measured(batches=2))

    for name, what in run(3).items():
        assert what.passes == 2
        assert torch.equal(gramian(what), gramian(run(2)[name]))


def test_a_layer_that_was_not_run_is_named():
    model = make()
    with pytest.raises(CompressionError, match=r"blocks\.0\.ssm.*blocks\.1\.ssm"):
        observed(model, lambda model: None, layers_of(model), Measured())


def test_with_little_data_every_step_counts():
    """At every eighth of 40 steps there would be 5 samples for 6 states: one state would seem dead."""
    model, x = make(), torch.randn(2, 20, 3)
    few, all_steps = (
        observed(model, lambda model: model(x), layers_of(model), Measured(stride=stride)) for stride in (8, 1)
    )
    for name, what in few.items():
        assert torch.equal(gramian(what), gramian(all_steps[name]))
        assert int(torch.linalg.matrix_rank(gramian(what))) == 6


def test_fewer_steps_than_states_are_refused():
    model = make()
    seen = observed(model, lambda model: model(torch.randn(1, 5, 3)), layers_of(model), Measured())
    with pytest.raises(CompressionError, match=r"5 steps through a layer of 6 states.*more data"):
        gramian(seen["blocks.0.ssm"])


@pytest.mark.parametrize("period", [2, 7, 8, 9, 16, 64])
def test_sampled_steps_see_every_phase_of_data_that_repeats(period):
    """Images are read row by row: every eighth step of rows of 8 pixels would see their last column only."""
    for batch, length in ((1, 64 * period), (32, 64)):
        phases = torch.bincount(sampled_steps(batch, length, 8).flatten() % period, minlength=period)
        assert float(phases.max()) < 2.2 * float(phases.double().mean())
        assert int(phases.min()) > 0


def test_sampled_steps_are_all_of_them_at_stride_1_and_never_beyond_the_end():
    assert torch.equal(sampled_steps(2, 9, 1), torch.arange(9).expand(2, 9))
    for length, stride in ((1, 8), (7, 8), (15, 8), (100, 3)):
        steps = sampled_steps(5, length, stride)
        assert steps.shape == (5, max(1, length // stride))
        assert 0 <= int(steps.min()) <= int(steps.max()) < length
        assert bool((steps.diff(dim=1) > 0).all())


def test_rows_of_an_image_as_long_as_the_stride_leave_no_channel_out():
    """A pulse at the first pixel of every row has left a fast state again when the row ends."""
    model = torch.nn.Sequential(LRU(1, order=2, r_min=0.1, r_max=0.2).double())
    x = torch.zeros(32, 64, 1, dtype=torch.float64)
    x[:, ::8] = 1
    layers = {"0": (model[0], system_of(model[0]))}
    strided, whole = (
        gramian(observed(model, lambda model: model(x), layers, Measured(stride=stride))["0"]) for stride in (8, 1)
    )
    assert float((strided - whole).norm() / whole.norm()) < 0.1


@pytest.mark.parametrize("options", [{"batches": 0}, {"stride": 0}, {"batches": True}])
def test_measured_refuses_numbers_that_mean_nothing(options):
    with pytest.raises(CompressionError, match="expected an integer of at least 1"):
        Measured(**options)


def test_the_measured_error_is_the_relative_change_of_the_output():
    model = make()
    model.eval()
    x = torch.randn(4, 30, 3)
    seen = observed(model, lambda model: model(x), layers_of(model), Measured())["blocks.0.ssm"]
    system = system_of(model.blocks[0].ssm)
    cut = balanced_truncation(fold(system), 3).diagonalise().system
    u = model.blocks[0].norm(model.encoder(x)).detach().double()
    before, after = system.simulate(u + 0j).real, cut.simulate(u + 0j).real
    expected = float((after - before).norm() / before.norm())
    assert relative_change(system, cut, seen) == pytest.approx(expected, rel=1e-6)
    assert relative_change(system, system, seen) == 0


def cut_of(layer, order=3):
    return balanced_truncation(fold(system_of(layer)), order).diagonalise().system


def true_change(layer, new, batches):
    """Over all of the data, by simulation."""
    system = system_of(layer)
    before, after = (torch.cat([which.simulate(u + 0j).real for u in batches]) for which in (system, new))
    return float((after - before).norm() / before.norm())


def inputs_of(layer, batches, *, lengths=None):
    def calibrate(model):
        for batch in batches:
            layer(batch, None, lengths)

    return observed(layer, calibrate, {"": (layer, fold(system_of(layer)))}, Measured())[""]


@pytest.mark.parametrize("sizes", [(32,), (8, 8, 8, 8), (256, 256), (1, 200)], ids=str)
def test_the_measured_error_of_sorted_data_is_that_of_all_of_it(sizes):
    """The first 8 sequences of the first batch, all of them constant, gave 0.12 where the truth was 0.65."""
    torch.manual_seed(4)
    layer, x = LRU(4, order=6).double(), torch.randn(sum(sizes), 50, 4, dtype=torch.float64)
    x[: len(x) // 4] = 1
    batches, new = x.split(sizes), cut_of(layer)
    assert relative_change(system_of(layer), new, inputs_of(layer, batches)) == pytest.approx(
        true_change(layer, new, [x]), rel=0.05
    )


def test_what_is_kept_to_measure_on_is_bounded_and_the_same_every_time():
    torch.manual_seed(5)
    layer = LRU(2, order=3)
    batches = [torch.randn(n, length, 2) for n, length in ((300, 20), (40, 900), (300, 20))]
    first, again = (inputs_of(layer, batches).sample for _ in range(2))
    assert sum(map(len, first.sequences.values())) <= 8 * 1024
    assert len(first.sequences) == 9  # 8192 steps of sequences as long as the longest
    assert (first.count, first.steps) == (640, 600 * 20 + 40 * 900)
    assert list(first.sequences) == list(again.sequences)
    assert len({number // 80 for number in first.sequences}) >= 6  # of eight stretches of the data


def test_padding_is_no_part_of_the_measured_error_whatever_it_holds():
    torch.manual_seed(6)
    layer, x, lengths = LRU(4, order=6).double(), torch.randn(5, 30, 4).double(), torch.tensor([30, 9, 17, 30, 22])
    for k, length in enumerate(lengths):
        x[k, length:] = torch.nan
    new = cut_of(layer)
    pieces = [x[k : k + 1, :length] for k, length in enumerate(lengths)]
    changes, wholes = zip(
        *(
            (
                (new.simulate(u + 0j).real - system_of(layer).simulate(u + 0j).real).square().sum(),
                system_of(layer).simulate(u + 0j).real.square().sum(),
            )
            for u in pieces
        ),
        strict=True,
    )
    expected = float((sum(changes) / sum(wholes)) ** 0.5)
    seen = inputs_of(layer, [x], lengths=lengths)
    assert relative_change(system_of(layer), new, seen) == pytest.approx(expected, rel=1e-6)


def test_a_process_that_saw_more_counts_for_more():
    torch.manual_seed(7)
    layer, u = LRU(2, order=4).double(), torch.randn(600, 100, 2).double()
    u[:] = u[:1]
    new, system = cut_of(layer, 2), system_of(layer)
    little, much = (squared_change(system, new, inputs_of(layer, [u[:count]])) for count in (6, 600))
    assert torch.allclose(much, 100 * little)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_data_that_is_not_finite_is_refused_with_the_name_of_the_layer(value):
    """The last step: no state that is sampled may have seen it."""
    model, x = make(), torch.randn(2, 20, 3)
    x[1, 19, 2] = value
    with pytest.raises(CompressionError, match=r"calibrate gave 'blocks\.0\.ssm'.*finite") as caught:
        observed(model, lambda model: model(x), layers_of(model), Measured())
    assert isinstance(caught.value.__cause__, NonFiniteError)


def test_steps_of_the_layers_alone_are_said_not_to_be_enough():
    model = make()

    def streamed(model):
        model.step(torch.randn(2, 3), model.initial_state(2))

    with pytest.raises(CompressionError, match=r"'blocks\.0\.ssm'.*`forward` of these layers"):
        observed(model, streamed, layers_of(model), Measured())


@pytest.mark.parametrize("change", [lambda layer: layer.nu_log.data.mul_(2), lambda layer: layer.nu_log.mul_(2)])
def test_a_calibration_that_changes_a_layer_is_refused(change):
    model, x = make(), torch.randn(2, 20, 3)

    def calibrate(model):
        model(x)
        change(model.blocks[1].ssm)

    with pytest.raises(
        CompressionError, match=r"calibrate changed blocks\.1\.ssm\.nu_log; expected a function that only runs"
    ):
        compress_(model, keep=TargetOrder(3), calibrate=calibrate)
    assert [block.ssm.order for block in model.blocks] == [6, 6]


def test_weights_may_be_others_while_a_model_is_calibrated():
    model, x = make(), torch.randn(2, 20, 3)
    other = {name: 1.01 * value for name, value in model.state_dict().items()}

    def averaged(model):
        mine = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(other)
        model(x)
        model.load_state_dict(mine)

    assert len(compress_(model, keep=TargetOrder(3), calibrate=averaged)) == 2


def test_models_that_were_made_to_infer_can_be_calibrated():
    with torch.inference_mode():
        model, x = make(), torch.randn(2, 20, 3)
        assert len(compress_(model, keep=TargetOrder(3), calibrate=lambda model: model(x))) == 2
