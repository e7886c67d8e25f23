"""Runs that wait for a teacher, and one training that stands in several cells."""

from dataclasses import replace

import pytest

from compressm_lab.experiments import paper
from compressm_lab.experiments.engine import Campaign, conduct, require_same_recipes
from compressm_lab.experiments.paper import Setting
from compressm_lab.reports import run_report
from compressm_lab.reports.reproduction import write_reproduction
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.groups import group_runs
from tests.lab.experiments.tiny import SMALL, STEPS, Inline, arms, plan, shown

SETTING = Setting("sMNIST", "digits", 8, STEPS, (0.04,), "{steps: [6]}", SMALL, interval=4, finals=(3,))


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("COMPRESSM_COMMIT", "tests")
    monkeypatch.setenv("COMPRESSM_DATA", str(tmp_path / "data"))


def chosen():
    """A τ, the model that is never cut, a student beside the first, and a penalty."""
    compressed, _, whole = arms(SETTING)
    (student,) = paper.distillation(SETTING)
    return compressed, whole, replace(student, beside=compressed), *paper.nuclear_norm(SETTING)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESSM_COMMIT", "tests")
        wanted, executor = plan(tmp_path_factory.mktemp("compared"), chosen=chosen()), Inline()
        return wanted, conduct(wanted, executor), executor


def test_a_student_waits_for_an_order_and_for_the_teacher_of_its_seed(tmp_path):
    wanted = plan(tmp_path, chosen=chosen())
    jobs = {(job.arm.method, job.seed): job for job in wanted.trainings()}
    assert len(wanted.trainings()) == 8
    assert jobs["distillation", 1].waits_for == (
        "takes the mean final order of sMNIST, CompreSSM, τ = 0.04, and learns from sMNIST, baseline, τ = 0, seed 1"
    )
    assert jobs["Hankel nuclear norm", 0].state == "new"


def test_all_is_trained_in_the_order_of_what_waits_for_what(done):
    wanted, outcome, executor = done
    assert (outcome.done, outcome.failed, len(executor.commands)) == (8, {}, 8)
    folders = [command[command.index("--out") + 1] for command in executor.commands]
    students = [folder for folder in folders if "/student-" in folder]
    assert folders[-2:] == students
    configs = [RunDirectory(folder).config() for folder in students]
    teachers = [str(wanted.folder(SETTING.whole(), seed)) for seed in (0, 1)]
    assert [config["distillation"]["teacher"] for config in configs] == teachers
    assert conduct(wanted, again := Inline()).before == 8
    assert again.commands == []


def test_students_of_several_seeds_are_one_group_and_a_moved_folder_is_the_same_plan(done, tmp_path):
    wanted = done[0]
    groups = group_runs(shown(wanted).runs)
    assert sorted(len(group.runs) for group in groups) == [2, 2, 2, 2]
    moved = tmp_path / "moved"
    moved.symlink_to(wanted.runs)
    jobs = Campaign(wanted.arms, range(2), moved).trainings()
    require_same_recipes(jobs)
    assert {job.state for job in jobs} == {"done"}


def test_cells_show_the_cut_model_and_the_time_of_the_teacher(done, tmp_path, monkeypatch):
    # Pictures have tests of their own.
    monkeypatch.setattr(run_report, "write_files", lambda *_: [])
    monkeypatch.setattr(run_report, "inline_svg", lambda *_, **__: "")
    found = shown(done[0])
    cells = {(cell.method, cell.column): cell for cell in found.cells}
    cut, uncut = cells["Hankel nuclear norm", "τ = 0.04"], cells["Hankel nuclear norm", "τ = 0"]
    assert (found.ours(cut, "order").centre, found.ours(uncut, "order").centre) == (3, 8)
    records = [r for run in cut.runs for r in run.truncations if r.split == "test"]
    expected = 100 * sum(record.accuracy for record in records) / 2
    assert found.ours(cut, "accuracy").centre == pytest.approx(expected)
    student, teacher = cells["distillation", "τ = 0.04"], cells["baseline", "τ = 0"]
    assert student.seconds.centre == pytest.approx(student.group.seconds.centre + teacher.seconds.centre)
    whole = teacher.group.time("CPU time").centre
    ratio = whole / (student.group.time("CPU time").centre + whole)
    assert found.ours(student, "speed-up").centre == pytest.approx(ratio)
    text = write_reproduction(found, tmp_path / "out").read_text()
    assert "| Hankel nuclear norm: time |" in text


def test_a_student_whose_teacher_failed_is_left(tmp_path):
    wanted = plan(tmp_path, chosen=chosen()[:3], seeds=1)
    outcome = conduct(wanted, Inline(breaks=["n-8/seed-0"]))
    assert outcome.failed.keys() == {("digits/n-8", 0)}
    assert [job.state for job in wanted.trainings(outcome.failed)] == ["done", "new", "waits"]
