import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from torch import nn

from compressm.baselines import Teacher, distillation_loss


def random_logits(count=6, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    given, wanted = torch.randn(2, count, classes, generator=generator, dtype=torch.float32)
    return given, wanted, torch.randint(classes, (count,), generator=generator)


@pytest.mark.parametrize(("temperature", "alpha"), [(2.0, 0.5), (1.0, 1.0), (4.0, 0.0)])
def test_the_loss_is_the_papers_formula(temperature, alpha):
    given, wanted, targets = random_logits()
    z, t = given.numpy().astype(float), wanted.numpy().astype(float)
    truth = -log_softmax(z, axis=1)[np.arange(len(z)), targets.numpy()].mean()
    p, q = softmax(t / temperature, axis=1), softmax(z / temperature, axis=1)
    divergence = (p * np.log(p / q)).sum(1).mean()
    expected = (1 - alpha) * truth + alpha * temperature**2 * divergence
    found = distillation_loss(given, wanted, targets, temperature=temperature, alpha=alpha)
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_a_student_that_answers_as_its_teacher_has_no_divergence_left():
    given, _, targets = random_logits()
    given.requires_grad_()
    loss = distillation_loss(given, given.detach(), targets, alpha=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert given.grad.abs().max() < 1e-6


def test_what_is_not_asked_counts_for_neither_part():
    given, wanted, targets = random_logits()
    targets[2:] = -100
    whole = distillation_loss(given, wanted, targets)
    assert whole.item() == pytest.approx(distillation_loss(given[:2], wanted[:2], targets[:2]).item(), rel=1e-6)


def test_a_teacher_has_neither_gradients_nor_dropout_and_remembers_by_number():
    torch.manual_seed(0)
    teacher = Teacher(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    inputs = torch.randn(10, 3)
    asked = teacher(inputs)
    assert not asked.requires_grad
    assert torch.equal(asked, teacher(inputs))
    assert not teacher.keeps
    teacher.keep((part,) for part in inputs.split(4))
    assert teacher.keeps
    torch.testing.assert_close(teacher.recall(torch.tensor([7, 0, 7])), asked[[7, 0, 7]])
