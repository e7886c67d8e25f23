"""Tasks that need no files, and the catalogue of all."""

import pytest
import torch

from compressm_lab.data import (
    CATALOGUE,
    IGNORED,
    DataError,
    DataSet,
    DelayedCopy,
    Digits,
    LTITeacher,
    Store,
    TaskKind,
    make,
)
from compressm_lab.data.synthetic import impulse_response
from digits import load_digits
from tests import unhooked


@pytest.mark.parametrize("side", [8, 12])
def test_digits_are_those_of_the_studies(tmp_path, side):
    task, studied = Digits(side=side).load(Store(tmp_path)), load_digits(side)
    assert torch.equal(task.test.inputs, studied.test_x)
    assert torch.equal(task.test.targets, studied.test_y)
    assert (len(task.train), len(task.validation)) == (1293, 144)
    together = torch.cat([task.train.inputs, task.validation.inputs]).flatten(1)
    assert torch.equal(together.sum(0).round(), studied.train_x.flatten(1).sum(0).round())


def test_a_delayed_copy_asks_for_what_was_said(tmp_path):
    made = DelayedCopy(symbols=4, copied=5, delay=7, examples=30, held_out=10)
    task = made.load(Store(tmp_path))
    assert (task.kind, task.length, task.vocabulary, task.classes) == (TaskKind.LABEL_STEPS, 17, 6, 4)
    batch = task.batch(task.train, torch.arange(30))
    assert torch.equal(batch.targets[:, -5:], batch.inputs[:, :5] - 2)
    assert (batch.targets[:, :-5] == IGNORED).all()
    assert (batch.inputs[:, 5:12] == 0).all()
    assert (batch.inputs[:, 12:] == 1).all()
    said = torch.cat([split.inputs for split in (task.train, task.validation, task.test)])
    assert len(said.unique(dim=0)) == 50


def test_a_teacher_is_simulated_step_by_step(tmp_path):
    made = LTITeacher(order=3, inputs=2, outputs=2, length=40, examples=6, held_out=2)
    task, teacher = made.load(Store(tmp_path)), made.teacher()
    assert (task.kind, task.channels, task.classes) == (TaskKind.REGRESS, 2, 2)
    state, outputs = torch.zeros(6, 3, dtype=torch.complex128), []
    for u in task.train.inputs.to(torch.complex128).unbind(1):
        state = teacher.poles * state + u @ teacher.B.T
        outputs.append((state @ teacher.C.T).real)
    torch.testing.assert_close(task.train.targets, torch.stack(outputs, dim=1).float(), rtol=1e-5, atol=1e-6)


def test_more_symbols_than_two_bytes_hold_are_told_apart(tmp_path):
    task = DelayedCopy(symbols=100_000, copied=2, delay=0, examples=8, held_out=2).load(Store(tmp_path))
    assert task.train.inputs.min() >= 0
    assert torch.equal(task.train.targets[:, 2:], task.train.inputs[:, :2] - 2)


def test_a_teacher_without_memory_answers_at_once(tmp_path):
    task = LTITeacher(smallest_radius=0.0, largest_radius=0.0, length=6, examples=4, held_out=2).load(Store(tmp_path))
    assert task.train.targets.isfinite().all()
    torch.testing.assert_close(task.train.targets.abs(), task.train.inputs.abs())


def test_a_teachers_outputs_have_variance_one_and_the_asked_noise():
    teacher = LTITeacher(order=4, outputs=3).teacher()
    power = impulse_response(teacher, 5000).square().sum(dim=(0, 2))
    torch.testing.assert_close(power, torch.ones(3, dtype=torch.float64))
    assert teacher.poles.abs().max() < 0.99


def test_noise_is_added_to_the_outputs_alone(tmp_path):
    clean, noisy = (LTITeacher(examples=40, held_out=2, noise=n).load(Store(tmp_path)).train for n in (0.0, 0.5))
    assert torch.equal(clean.inputs, noisy.inputs)
    assert (noisy.targets - clean.targets).std() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    ("make_it", "said"),
    [
        (lambda: DelayedCopy(symbols=2, copied=3), "there are 8, expected at most half"),
        (lambda: DelayedCopy(delay=-1), "delay is -1, expected an integer of at least 0"),
        (lambda: LTITeacher(largest_radius=1.0), "radii 0.8 to 1.0"),
        (lambda: LTITeacher(noise=-0.1), "noise is -0.1"),
        (lambda: Digits(side=0), "side is 0, expected an integer of at least 1"),
        (lambda: make("mnist"), "no data set is called 'mnist', expected one of smnist, scifar"),
        (lambda: make("imdb", size=3), "imdb has no option 'size'; its options: length=4096"),
        (lambda: make("smnist", size=3), "its options: time=False"),
        (lambda: make("imdb", length="long"), "length of imdb is 'long', expected int"),
        (lambda: make("imdb", length=True), "length of imdb is True, expected int"),
        (lambda: make("scifar", grey=1), "grey of scifar is 1, expected bool"),
    ],
)
def test_bad_options_are_refused_with_what_is_allowed(make_it, said):
    with pytest.raises(DataError, match=said):
        make_it()


def test_the_catalogue_has_every_data_set_under_its_name():
    assert list(CATALOGUE) == [
        "smnist",
        "scifar",
        "fashion",
        "listops",
        "imdb",
        "aan",
        "pathfinder",
        "digits",
        "delayed_copy",
        "lti_teacher",
    ]
    for name, kind in CATALOGUE.items():
        dataset = make(name)
        assert isinstance(dataset, DataSet)
        assert dataset == kind()
        assert dataset.form.length > 1
    assert make("lti_teacher", noise=1).noise == 1
    assert make("pathfinder", generated=True, distractors=None).wanted == ()


def test_what_only_some_tasks_need_is_imported_by_them():
    script = "import sys, compressm_lab.data; print(*({'pooch', 'sklearn', 'PIL', 'requests'} & set(sys.modules)))"
    assert unhooked.run(script, loaded=False).split() == []
