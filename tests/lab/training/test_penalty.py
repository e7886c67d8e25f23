"""A penalty beside the loss: what it adds at which step, and that a run that was stopped goes on with the same bits."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from compressm.compression.distributed import Processes
from compressm_lab.experiments.comparisons import penalty as penalty_of
from compressm_lab.runs.records import Evaluation, PenaltyRecord, Timing
from compressm_lab.training import ConfigError, Diverged, Interrupted, RegulariserConfig, train
from compressm_lab.training.clock import Clock
from compressm_lab.training.penalty import HeldPenalty
from tests.lab.training.tiny import CUTS, Sending, check_same_run, lines, recipe, tokens

HNN = "regulariser={kind: hankel-nuclear-norm, beta: 0.05, every: 3}"


def held(every=1, hold=True, beta=0.5, alpha=1.0):
    """Of a weight w of 2 and the penalty w²: its gradient is 2w."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    config = RegulariserConfig(kind="modal-l1", beta=beta, alpha=alpha, every=every, hold=hold)
    penalty = HeldPenalty(
        model, lambda model: model.weight.double().square().sum(), config, Clock(torch.device("cpu")), Processes()
    )
    return model, penalty


def added(model, penalty, steps):
    """What every step adds, the weight growing by 1 at each."""
    found = []
    for step in steps:
        penalty.ready(step)
        model.weight.grad = torch.zeros_like(model.weight)
        penalty.add_()
        found.append(model.weight.grad.item())
        model.weight.data += 1
    return found


def test_a_gradient_that_is_held_is_added_at_every_step_until_it_is_found_again():
    assert added(*held(), range(1, 5)) == [2, 3, 4, 5]
    assert added(*held(every=3), range(1, 8)) == [2, 2, 2, 5, 5, 5, 8]


def test_one_that_is_not_held_comes_once_with_all_its_weight():
    assert added(*held(every=3, hold=False), range(1, 8)) == [6, 0, 0, 15, 0, 0, 24]


@pytest.mark.parametrize(("hold", "last"), [(True, [3, 3, 3, 6, 6]), (False, [1, 3, 3, 4, 6])])
def test_the_last_step_that_adds_the_same_is_known_ahead(hold, last):
    _, penalty = held(every=3, hold=hold)
    assert [penalty.ready(step) for step in range(1, 6)] == last


@pytest.mark.parametrize("hold", [True, False])
def test_a_step_that_is_asked_for_twice_finds_its_gradient_once(hold):
    """As after the recording of a CUDA graph, which runs nothing."""
    model, penalty = held(every=3, hold=hold)
    assert added(model, penalty, [1, 1, 4, 4]) == ([2, 2, 4, 4] if hold else [6, 6, 12, 12])
    assert penalty.evaluations == 2


@pytest.mark.parametrize("hold", [True, False])
def test_after_a_cut_a_gradient_of_the_new_sizes_is_there(hold):
    model, penalty = held(every=4, hold=hold)
    penalty.ready(1)
    model.weight.data = torch.full((1, 3), 5.0)
    penalty.renew()
    penalty.ready(2)
    model.weight.grad = torch.zeros_like(model.weight)
    penalty.add_()
    assert model.weight.grad.tolist() == [[5.0] * 3 if hold else [0.0] * 3]


def test_what_is_held_stays_in_its_tensor_and_a_weight_without_gradient_gets_it():
    """A CUDA graph has recorded where it lies."""
    model, penalty = held()
    penalty.ready(1)
    place = penalty._held["weight"].data_ptr()
    penalty.ready(2)
    assert penalty._held["weight"].data_ptr() == place
    model.weight.grad = None
    penalty.add_()
    assert model.weight.grad.item() == 2
    assert model.weight.grad.data_ptr() != place


def test_the_task_has_the_weight_alpha():
    _, penalty = held(alpha=0.25)
    assert penalty.weigh(torch.tensor(2.0)).item() == 0.5


def run(found, folder, objective=None, **options):
    return train(found, tokens(), folder, objective=objective, penalty=penalty_of(found.regulariser), **options)


@pytest.mark.parametrize("kind", ["hankel-nuclear-norm", "hankel-majoriser", "modal-l1"])
def test_a_penalty_falls_and_is_recorded_with_its_time(kind, tmp_path):
    found = recipe(
        f"regulariser={{kind: {kind}, beta: 5.0, every: 2}}", "training.steps=40", "training.schedule=constant"
    )
    directory = run(found, tmp_path / "run")
    records = directory.records(PenaltyRecord)
    assert [record.step for record in records] == list(range(4, 41, 4))
    assert records[-1].value < records[0].value
    assert [(record.found_at, record.evaluations) for record in records[:2]] == [(3, 2), (7, 4)]
    assert all(one.seconds < other.seconds for one, other in pairwise(records))
    assert {record.kind for record in records} == {kind}
    spent = sum(timing.seconds.get("regulariser", 0.0) for timing in directory.records(Timing))
    # The record's clock runs around that of the phase: on a busy machine the process may have to wait between the two.
    assert 0 < spent <= records[-1].seconds
    # Of the time of gradient steps it is a part.
    steps = sum(timing.seconds.get("steps", 0.0) for timing in directory.records(Timing))
    assert directory.records(Evaluation)[-1].step_seconds == pytest.approx(steps + spent, rel=1e-6)


def test_a_penalty_without_weight_changes_nothing(tmp_path):
    plain = train(recipe(), tokens(), tmp_path / "plain").path
    without = run(recipe("regulariser={kind: hankel-nuclear-norm, beta: 0.0}"), tmp_path / "run").path
    check_same_run(plain, without, "metrics")


@pytest.mark.parametrize("hold", ["true", "false"])
def test_a_run_stopped_after_every_step_goes_on_bit_for_bit(hold, tmp_path):
    """In the middle of intervals, and around cuts, after which gradients have other shapes."""
    found = recipe(CUTS, HNN, f"regulariser.hold={hold}")
    whole = run(found, tmp_path / "whole").path
    for step in range(1, 17):
        with pytest.raises(Interrupted):
            run(found, tmp_path / "run", Sending(tokens().kind, 1), resume=step > 1)
    run(found, tmp_path / "run", resume=True)
    check_same_run(tmp_path / "run", whole, "metrics", "cuts", "penalties")
    assert lines(whole, "cuts")


def test_weights_that_are_not_finite_are_a_run_that_diverged(tmp_path):
    found = recipe(HNN, "training.learning_rate=1e12", "training.schedule=constant")
    with pytest.raises(Diverged, match="not finite"):
        run(found, tmp_path / "run")


def test_a_recipe_and_what_is_given_must_agree(tmp_path):
    with pytest.raises(ConfigError, match="with no penalty, expected one"):
        train(recipe(HNN), tokens(), tmp_path / "run")
    with pytest.raises(ConfigError, match="regulariser is None with a penalty"):
        train(recipe(), tokens(), tmp_path / "run", penalty=lambda model: model)
    with pytest.raises(ConfigError, match="without an objective"):
        train(recipe("distillation={teacher: there}"), tokens(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("regulariser={kind: hnn, beta: 1}",), "regulariser.kind is 'hnn', expected 'hankel-nuclear-norm'"),
        (("regulariser={kind: modal-l1}",), "regulariser.beta is missing"),
        (("regulariser={kind: modal-l1, beta: -1}",), "beta is -1.0, expected at least 0"),
        (("regulariser={kind: modal-l1, beta: 1, every: 0}",), "every is 0, expected at least 1"),
        (("regulariser={kind: modal-l1, beta: 1, floor: 0}",), "floor is 0.0, expected at least 1e-06"),
        (
            ("regulariser={kind: modal-l1, beta: 1, floor: 0.01}",),
            "floor is 0.01 with modal-l1, expected of hankel-nuc",
        ),
        (("regulariser={kind: hankel-majoriser, beta: 1, fold: false}",), "fold is False with hankel-majoriser"),
        (("regulariser={kind: modal-l1, beta: 1, over: mean}",), "over is mean with modal-l1, expected of hankel-nuc"),
        (("regulariser={kind: hankel-nuclear-norm, beta: 1, over: n}",), "regulariser.over is 'n'"),
        (("regulariser={kind: modal-l1, beta: 1, colour: red}",), "regulariser.colour is not a key of a recipe"),
        (
            ("regulariser={kind: modal-l1, beta: 1}", "model.layer=Mamba"),
            "regulariser: modal-l1 is for layers with fixed poles, and layer is Mamba",
        ),
        (
            ("regulariser={kind: modal-l1, beta: 1}", "model.layer=S4"),
            "regulariser: modal-l1 is for layers with fixed poles, and layer is S4: expected LRU, S5, S4D or LinOSS",
        ),
        (("distillation={}",), "distillation.teacher is missing"),
        (("distillation={teacher: there, alpha: 2}",), "alpha is 2.0, expected a number at least 0 and at most 1"),
        (("distillation={teacher: there, temperature: 0}",), "temperature is 0.0, expected a number above 0"),
        (("truncation={orders: []}",), "orders is [], expected integers of at least 1"),
        (("truncation={orders: [2, 2]}",), "orders is [2, 2], expected integers of at least 1, each once"),
        (("truncation={orders: [3, 6]}",), "truncation: orders has 6, expected less than order, 6"),
        (("truncation={orders: [3], gramian: modal}", "model.layer=Mamba"), "truncation: gramian is modal with layer"),
        ((CUTS, "compression.gramian=modal", "model.layer=Mamba"), "compression: gramian is modal with layer Mamba"),
    ],
)
def test_a_bad_value_is_refused_by_name(settings, said):
    with pytest.raises(ConfigError) as error:
        recipe(*settings)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ((), "baseline"),
        ((HNN,), "regularised"),
        (("distillation={teacher: there}",), "distilled"),
        ((CUTS, HNN), "compressed and regularised"),
    ],
)
def test_a_label_says_what_was_done(settings, label):
    assert recipe(*settings).label == label
