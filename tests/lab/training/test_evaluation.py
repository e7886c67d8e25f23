import pytest
import torch
from torch.nn import functional

from compressm_lab.data import Order
from compressm_lab.training.building import build_model, build_optimizer
from compressm_lab.training.evaluation import Score, evaluate, score
from compressm_lab.training.steps import Learner, task_objective
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
