import pytest
import torch
from torch import nn
from torch.nn import functional

from compressm_lab.data import Batch, TaskKind
from compressm_lab.training.steps import task_objective


class Fixed(nn.Module):
    """A model that answers with what it was given."""

    def __init__(self, answers):
        super().__init__()
        self.answers = nn.Parameter(answers)

    def forward(self, inputs, lengths):
        return self.answers


INPUTS = torch.zeros(3, 4, 1)


def test_classes_cost_their_cross_entropy():
    logits, targets = torch.randn(3, 5), torch.tensor([0, 4, 2])
    found = task_objective(TaskKind.CLASSIFY)(Fixed(logits), Batch(INPUTS, targets, None))
    expected = -sum(logits[k].log_softmax(-1)[targets[k]] for k in range(3)) / 3
    torch.testing.assert_close(found.loss.detach(), expected)
    assert found.hits == sum(int(logits[k].argmax()) == int(targets[k]) for k in range(3))
    assert found.asked == 3


def test_a_floor_is_added_to_probabilities_before_their_logarithm():
    logits, targets = torch.tensor([[0.0, 40.0], [3.0, 1.0]], dtype=torch.float32), torch.tensor([0, 1])
    found = task_objective(TaskKind.CLASSIFY, floor=1e-8)(Fixed(logits), Batch(INPUTS[:2], targets, None))
    shares = logits.double().softmax(-1)
    expected = -((shares[0, 0] + 1e-8).log() + (shares[1, 1] + 1e-8).log()) / 2
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert expected < 12  # without a floor the first alone costs 40


def test_steps_at_which_nothing_is_asked_cost_nothing():
    logits = torch.randn(3, 4, 5)
    targets = torch.full((3, 4), -100)
    asked = [(0, 1, 2), (0, 3, 4), (2, 0, int(logits[2, 0].argmax()))]
    for row, step, target in asked:
        targets[row, step] = target
    model = Fixed(logits)
    found = task_objective(TaskKind.LABEL_STEPS)(model, Batch(INPUTS, targets, None))
    expected = -sum(logits[row, step].log_softmax(-1)[target] for row, step, target in asked) / 3
    torch.testing.assert_close(found.loss.detach(), expected)
    assert found.hits == sum(int(logits[row, step].argmax()) == target for row, step, target in asked)
    assert found.asked == 3
    found.loss.backward()
    assert (model.answers.grad[targets == -100] == 0).all()


def test_signals_cost_their_mean_squared_error_and_have_no_hits():
    answers, targets = torch.randn(3, 4, 2), torch.randn(3, 4, 2)
    found = task_objective(TaskKind.REGRESS)(Fixed(answers), Batch(INPUTS, targets, None))
    torch.testing.assert_close(found.loss.detach(), sum((answers - targets).flatten() ** 2) / 24)
    assert (found.hits, found.asked) == (0, 3)


@pytest.mark.parametrize("kind", [TaskKind.CLASSIFY, TaskKind.LABEL_STEPS])
def test_losses_of_half_precision_are_summed_in_float32(kind):
    logits, targets = torch.randn(3, 5).bfloat16(), torch.tensor([0, 4, 2])
    if kind is TaskKind.LABEL_STEPS:
        logits, targets = logits[:, None], targets[:, None]
    loss = task_objective(kind)(Fixed(logits), Batch(INPUTS, targets, None)).loss
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss.detach(), functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
    )
