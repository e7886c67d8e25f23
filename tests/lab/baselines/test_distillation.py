import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr, softmax
from torch import nn

from compressm_lab.baselines import DistillationError, Teacher, distillation_loss
from tests import unhooked


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


def test_a_class_that_the_teacher_rules_out_has_no_part_in_the_divergence():
    given, wanted, targets = random_logits()
    wanted[:, 2] = -torch.inf
    given.requires_grad_()
    found = distillation_loss(given, wanted, targets, alpha=1.0)
    found.backward()
    p, q = (softmax(z.detach().double().numpy() / 2, axis=1) for z in (wanted, given))
    expected = 4 * rel_entr(p, q).sum(1).mean()
    assert found.item() == pytest.approx(expected, rel=1e-5)
    assert given.grad.numpy() == pytest.approx(2 * (q - p) / len(p), abs=1e-6)


def test_a_teacher_is_asked_in_evaluation_mode_whatever_became_of_it():
    model = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5))
    teacher = Teacher(model)
    model.train()
    inputs = torch.ones(2, 3)
    assert torch.equal(teacher(inputs), teacher(inputs))


def test_a_teacher_that_answers_with_more_than_logits_is_refused():
    class Talkative(nn.Module):
        def forward(self, inputs):
            return inputs, None

    with pytest.raises(DistillationError, match="answers with a tuple, expected logits alone"):
        Teacher(Talkative())(torch.ones(2, 3))


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.0}, "temperature is 0.0, expected a number above 0"),
        ({"temperature": -2.0}, "temperature is -2.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"alpha": 1.5}, "alpha is 1.5, expected a number at least 0 and at most 1"),
        ({"alpha": -0.1}, "alpha is -0.1"),
    ],
)
def test_weights_that_make_no_mean_of_two_losses_are_refused(options, said):
    with pytest.raises(DistillationError, match=said):
        distillation_loss(*random_logits(), **options)


GIVEN = """
import torch
from compressm_lab.baselines import distillation_loss

z, y = torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)
"""


def test_answers_of_another_shape_are_refused_and_not_spread_over_all():
    cases = ("z, z[:1], y", "z, z[:, :1], y", "z, z, y[:1]", "z[None], z[None], y[None]")
    found = unhooked.outcomes(GIVEN, {case: f"distillation_loss({case})" for case in cases})
    for kinds, message in found.values():
        assert "DistillationError" in kinds
        assert "expected (m, classes), (m, classes) and (m,)" in message


def test_a_teacher_that_kept_nothing_has_nothing_to_recall():
    with pytest.raises(DistillationError, match="call keep before recall"):
        Teacher(nn.Linear(3, 2)).recall(torch.tensor([0]))
