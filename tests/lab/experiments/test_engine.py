"""What is trained, in which order, and what is left alone."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from compressm_lab.experiments.engine import conduct, require_same_recipes
from compressm_lab.reports import reproduction, run_report
from compressm_lab.reports.reproduction import write_reproduction
from compressm_lab.runs.directory import RunDirectory, Status
from compressm_lab.runs.records import RunError
from tests.lab.experiments.tiny import STEPS, Inline, arms, plan, shown


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("COMPRESSM_COMMIT", "tests")
    monkeypatch.setenv("COMPRESSM_DATA", str(tmp_path / "data"))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Two seeds of a τ, of the baseline beside it and of the model that is never cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESSM_COMMIT", "tests")
        folder = tmp_path_factory.mktemp("reproduced")
        wanted, executor, said = plan(folder), Inline(), []
        outcome = conduct(wanted, executor, said.append)
    return wanted, outcome, executor, said


def test_before_anything_is_trained_baselines_wait_for_the_order_beside_them(tmp_path):
    wanted = plan(tmp_path)
    assert [job.state for job in wanted.trainings()] == ["new", "new", "waits", "waits", "new", "new"]
    assert len({job.key for job in wanted.trainings()}) == 6


def test_a_baseline_has_the_rounded_mean_of_the_final_orders(done):
    wanted, outcome, executor, said = done
    assert (outcome.before, outcome.done, outcome.failed) == (0, 6, {})
    compressed, baseline, _ = arms()
    finals = [wanted.finished_run(compressed, seed).mean_order for seed in (0, 1)]
    order = round(sum(finals) / 2)
    resolved = dict(wanted.resolved())[baseline]
    assert resolved.folder == f"digits/n-{order}"
    runs = [wanted.finished_run(resolved, seed) for seed in (0, 1)]
    assert [run.mean_order for run in runs] == [order, order]
    assert order < 8
    assert [run.config["compression"] for run in runs] == [None, None]
    assert len(executor.commands) == len(said) == 6


def test_the_report_has_both_numbers_seeds_steps_time_and_commit(done, tmp_path):
    path = write_reproduction(shown(done[0], quick=True), tmp_path / "out")
    text = path.read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| digits for sMNIST")]
    methods = [["CompreSSM", "τ = 0.04"], ["baseline, our mean order", "τ = 0.04"], ["baseline", "τ = 0"]]
    assert [row[1:3] for row in rows] == methods
    # What stands at an order of our own has no number of the paper beside it.
    assert (rows[0][4], rows[0][6], rows[1][6], rows[2][6]) == ("12.7 ± 3.0", "95.9 ± 0.2", "–", "97.3 ± 0.1")
    assert [row[9:11] for row in rows] == [["2", str(STEPS)]] * 3
    # The paper gives no speed-up here: no column of dashes.
    assert "| order | paper | top three by test, % | paper | mean of all, % | speed-up | seeds |" in text
    assert all("tests" in row[-1] and "s" in row[-2] for row in rows)
    assert "Quick: scikit-learn's 8 × 8 digits" in text
    assert "tab:results" in text
    page = (tmp_path / "out" / "report.html").read_text()
    assert "12.7 ± 3.0" in page
    assert {file.suffix for file in (tmp_path / "out" / "figures").iterdir()} == {".png", ".svg"}
    assert "figures/accuracy.png" in text


def test_a_picture_stands_once_in_a_report(tmp_path):
    for name in ("time", "timer-digits", "accuracy"):
        (tmp_path / f"{name}.png").touch()
    timed = SimpleNamespace(picture="timer")
    assert [path.stem for path in reproduction._figures(timed, tmp_path, None)] == ["timer-digits", "time"]


@pytest.mark.slow
@pytest.mark.parametrize("picture", ["curves", "spectra", "seeds", "hankel", "timer"])
def test_every_picture_can_be_drawn_of_real_runs(done, tmp_path, picture, monkeypatch):
    # Not all that a report draws beside it, 5 s each time: the test above has that.
    names, write = reproduction._FIGURES.get(picture, (picture,)), run_report.write_files
    monkeypatch.setattr(run_report, "write_files", lambda c, *to: c.name.startswith(names) and write(c, *to))
    monkeypatch.setattr(run_report, "inline_svg", lambda *_, **__: "")
    monkeypatch.setattr(reproduction, "FORMATS", ("png",))
    path = write_reproduction(shown(done[0], picture=picture), tmp_path)
    assert "](figures/" in path.read_text()


def test_a_page_calls_runs_by_their_arm_and_not_by_the_label_that_arms_share(done, tmp_path, monkeypatch):
    monkeypatch.setattr(run_report, "inline_svg", lambda panel, **_: panel.words)
    monkeypatch.setattr(reproduction, "FORMATS", ())
    compressed, *others = arms()
    wanted = plan(done[0].runs.parent, chosen=(replace(compressed, column="largest kept"), *others))
    write_reproduction(shown(wanted), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "largest kept: " in page
    assert '<th scope="row">largest kept</th>' in page
    assert '<th scope="row">τ = 0.04</th>' not in page


def test_nothing_is_trained_twice(done):
    wanted, executor = done[0], Inline()
    outcome = conduct(wanted, executor)
    assert (outcome.before, outcome.done, executor.commands) == (6, 6, [])


def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(done, tmp_path):
    shutil.copytree(done[0].runs, tmp_path / "runs")
    wanted = plan(tmp_path)
    folder = wanted.folder(arms()[0], 1)
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints" / f"{STEPS:09d}", ignore_errors=True)
    RunDirectory(folder).write_status(Status("interrupted", 8, STEPS))
    states = {(job.arm.method, job.arm.column, job.seed): job.state for job in wanted.trainings()}
    assert states["CompreSSM", "τ = 0.04", 1] == "begun"
    assert states["baseline, our mean order", "τ = 0.04", 0] == "waits"
    executor = Inline()
    outcome = conduct(wanted, executor)
    assert (outcome.before, outcome.done) == (3, 6)
    assert [command[3:] for command in executor.commands] == [["train", str(folder), "--resume"]]


def test_after_an_interruption_the_same_plan_trains_what_is_left(tmp_path):
    chosen = arms()[2:]
    stopped = Inline(until=1)
    outcome = conduct(plan(tmp_path, chosen=chosen), stopped)
    assert outcome.interrupted
    assert stopped.stopped
    assert outcome.done == 1
    again = Inline()
    outcome = conduct(plan(tmp_path, chosen=chosen), again)
    assert (outcome.before, outcome.done, len(again.commands)) == (1, 2, 1)
    assert not outcome.interrupted


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path):
    said = []
    wanted = plan(tmp_path)
    outcome = conduct(wanted, Inline(breaks=["tau-0.04/seed-1"]), said.append)
    assert outcome.failed == {("digits/tau-0.04", 1): "exit 1: the loss is not finite"}
    assert "sMNIST, CompreSSM, τ = 0.04, seed 1: failed: exit 1: the loss is not finite" in said
    # The baseline takes the order of the seed that is there.
    assert outcome.done == 5


def test_a_folder_with_another_recipe_is_refused(done, tmp_path):
    shutil.copytree(done[0].runs, tmp_path / "runs")
    wanted = plan(tmp_path)
    require_same_recipes(wanted.trainings())
    file = wanted.folder(arms()[2], 0) / "config.json"
    stored = json.loads(file.read_text())
    stored["training"]["learning_rate"] *= 2
    file.write_text(json.dumps(stored))
    with pytest.raises(RunError, match="holds a run of another recipe than sMNIST, baseline, τ = 0, seed 0"):
        require_same_recipes(wanted.trainings())
