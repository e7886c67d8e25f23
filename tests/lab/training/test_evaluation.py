import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from compressm_lab.data import Order, Split, Task, TaskKind
from compressm_lab.training import ConfigError
from compressm_lab.training.building import build_model, build_optimizer
from compressm_lab.training.evaluation import Score, evaluate, score
from compressm_lab.training.steps import Learner, task_objective, training_objective
from tests.lab.training.tiny import copies, pairs, recipe, teacher, tokens


def model_for(task, *settings):
    torch.manual_seed(0)
    every_step = ["model.pooling=steps"] if task.kind.value != "classify" else []
    return build_model(recipe(*every_step, *settings).model, task)


@pytest.mark.parametrize("size", [7, 500])
@pytest.mark.parametrize("task", [tokens, pairs])
def test_classes_are_scored_one_by_one_whatever_the_batch(task, size):
    task = task()
    model, split = model_for(task), task.test
    model.eval()
    losses, hits = [], 0
    for inputs, target, length in zip(split.inputs, split.targets, split.lengths, strict=True):
        logits = model(inputs[None].long(), length[None])
        losses.append(functional.cross_entropy(logits, target[None]).item())
        hits += int(logits.argmax() == target)
    found = score(model, task, split, size=size)
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found.accuracy == hits / len(losses)


def test_every_step_that_is_asked_counts_the_same():
    task = copies()
    model = model_for(task).eval()
    logits = model(task.test.inputs.long())
    asked = task.test.targets != -100
    found = score(model, task, task.test, size=5)
    expected = -logits.log_softmax(-1)[asked].gather(-1, task.test.targets[asked][:, None]).mean()
    assert found.loss == pytest.approx(expected.item(), rel=1e-5)
    assert found.accuracy == (logits.argmax(-1) == task.test.targets)[asked].double().mean().item()


def test_a_regression_has_a_loss_and_no_accuracy():
    task = teacher()
    model = model_for(task).eval()
    found = score(model, task, task.test, size=5)
    error = (model(task.test.inputs) - task.test.targets).square().mean().item()
    assert found.loss == pytest.approx(error, rel=1e-5)
    assert found.accuracy is None


def shifted(task):
    return replace(task, target_shift=(3.0,), target_scale=(0.5,))


def test_errors_of_a_regression_are_in_the_units_of_its_targets():
    task = shifted(teacher())
    model = model_for(task).eval()
    found = score(model, task, task.test, size=5)
    errors = 2 * model(task.test.inputs) + 3 - task.test.targets
    assert found.mse == pytest.approx(errors.square().mean().item(), rel=1e-5)
    assert found.mae == pytest.approx(errors.abs().mean().item(), rel=1e-5)
    assert found.loss == pytest.approx(found.mse / 4, rel=1e-5)


def test_steps_that_are_not_asked_and_padding_count_for_nothing():
    task = teacher()
    targets, lengths = task.test.targets.clone(), torch.full((16,), 12)
    targets[:, ::3], lengths[:8] = math.nan, 7
    targets[:8, 7:] = math.nan
    test = Split(task.test.inputs, targets, lengths)
    model = model_for(task).eval()
    asked = targets.isfinite()
    errors = (model(test.inputs, lengths) - targets)[asked]
    found = score(model, task, test, size=5)
    assert found.mse == found.loss == pytest.approx(errors.square().mean().item(), rel=1e-5)
    outcome = task_objective(task.kind)(model, task.batch(test, torch.arange(16)))
    assert outcome.loss.item() == pytest.approx(found.loss, rel=1e-5)
    assert outcome.asked == asked.sum()
    outcome.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_real_number_a_sequence_is_learned_and_scored():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 9, 2, generator=generator)
    split = Split(inputs, inputs.mean(1))
    task = Task(
        name="means", kind=TaskKind.PREDICT, classes=2, channels=2, train=split, validation=split, test=split,
        target_scale=(3.0, 2.0), target_shift=(0.0, 0.1),
    )  # fmt: skip
    torch.manual_seed(0)
    model = build_model(recipe("model.width=8").model, task)
    before = score(model, task, task.test).mae
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        task_objective(task.kind)(model, task.batch(split, torch.arange(64))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = score(model.eval(), task, task.test)
    assert after.mae < before / 2
    model.eval()
    errors = (model(inputs) / torch.tensor([3.0, 2.0]) + torch.tensor([0.0, 0.1]) - inputs.mean(1)).abs().mean()
    assert after.mae == pytest.approx(errors.item(), rel=1e-4)


@pytest.mark.parametrize(("given", "weights"), [("balanced", [64 / 2 / 22, 64 / 2 / 42]), ([0.25, 4.0], [0.25, 4.0])])
def test_class_weights_are_those_of_the_cross_entropy(given, weights):
    task = tokens()
    targets = torch.arange(64) >= 22
    task = replace(task, train=replace(task.train, targets=targets.long()))
    config = recipe(f"training.class_weights={given}").training
    model, batch = model_for(task).eval(), task.batch(task.train, torch.arange(64))
    expected = functional.cross_entropy(model(batch.inputs, batch.lengths), targets.long(), torch.tensor(weights))
    found = training_objective(task, config, torch.device("cpu"))(model, batch)
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_recipe_may_give_the_loss_a_floor_which_a_regression_cannot_have():
    task, found = tokens(), recipe("training.floor=0.25").training
    model, batch = model_for(task).eval(), task.batch(task.train, torch.arange(64))
    shares = model(batch.inputs, batch.lengths).softmax(-1).gather(1, batch.targets[:, None])
    loss = training_objective(task, found, torch.device("cpu"))(model, batch).loss
    assert loss.item() == pytest.approx(-(shares + 0.25).log().mean().item(), rel=1e-5)
    with pytest.raises(ConfigError, match=r"training.floor is 0.25, and lti_teacher has no classes: leave it out"):
        training_objective(teacher(), found, torch.device("cpu"))


@pytest.mark.parametrize(
    ("task", "given", "said"),
    [
        (tokens, [1.0, 2.0, 3.0], "class_weights has 3 numbers, expected one for each of the 2 classes"),
        (teacher, "balanced", "class_weights is balanced, and lti_teacher has no classes: leave it out"),
    ],
)
def test_class_weights_that_do_not_fit_are_refused(task, given, said):
    with pytest.raises(ConfigError, match=said):
        training_objective(task(), recipe(f"training.class_weights={given}").training, torch.device("cpu"))
    with pytest.raises(ConfigError, match="class_weights"):
        recipe("training.class_weights=[1.0, 0.0]")


def test_a_score_is_its_accuracy_or_else_its_loss():
    assert Score(0.5, 0.9).value == 0.9
    assert Score(0.5, None).value == 0.5


@pytest.mark.parametrize("training", [True, False])
def test_a_score_changes_nothing_and_draws_nothing(training):
    task = tokens()
    model = model_for(task, "model.dropout=0.5").train(training)
    before, numbers = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    assert score(model, task, task.test) == score(model, task, task.test)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(module.training is training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_recipe_in_half_precision_is_evaluated_in_it():
    task, found = tokens(), recipe("training.precision=bfloat16")
    model = model_for(task)
    optimizer = build_optimizer(model, found.training, torch.device("cpu"))
    learner = Learner(model, optimizer, task_objective(task.kind), task, Order(64, 8, 0), found.training)
    half, full = evaluate(learner, task.test), score(model, task, task.test)
    assert half.loss != full.loss
    assert half.loss == pytest.approx(full.loss, rel=0.05)
