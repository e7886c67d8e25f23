"""The study of small models runs the command line with what each variant says, and tells seeds apart."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from compressm_lab.experiments import results
from compressm_lab.experiments.catalogue import find_recipe
from compressm_lab.experiments.jobs import Job, company
from compressm_lab.experiments.jobs import train as train_all
from compressm_lab.experiments.outcomes import missing
from compressm_lab.experiments.results import TASKS, jobs
from compressm_lab.experiments.trainings import Training
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Measurement
from compressm_lab.training import Plan, train
from tests.lab.experiments.result_rows import row
from tests.lab.training.tiny import digits, recipe


def recipe_of(task, name, steps=None):
    (job,) = jobs(task, Path("folder"), [name], range(1), steps)
    training = job.training
    uncut = ("compression=null",) if "--baseline" in training.options else ()
    order = training.options[training.options.index("--order") + 1]
    return find_recipe(training.recipe, (*training.settings, *uncut, f"model.order={order}"))


def test_variants_of_smnist_are_the_recipe_cut_in_their_ways():
    plain = find_recipe("smnist")
    whole, few = recipe_of("smnist", "whole"), recipe_of("smnist", "small-13")
    assert (whole.compression, whole.model, few.model.order) == (None, plain.model, 13)
    ours, paper, gentle = (recipe_of("smnist", name) for name in ("tau-04", "paper-04", "to-13"))
    assert (ours.training.steps, ours.training.evaluate_every, ours.training.precision) == (200_000, 5_000, "tf32")
    assert (ours.compression.tau, ours.compression.gramian, ours.compression.fold) == (0.04, "measured", True)
    assert (paper.compression.gramian, paper.compression.fold, paper.compression.moments) == (
        *("white_noise", False, "slice"),
    )
    assert Plan.of(ours).cuts == list(range(5_000, 150_001, 5_000))
    assert Plan.of(paper).cuts[-1] == 195_000
    assert (gentle.compression.rho, gentle.compression.at_least, gentle.compression.gate) == (0.9, 13, 1.0)
    assert Plan.of(gentle).cuts[:2] == [2_000, 4_000]
    assert Plan.of(recipe_of("smnist", "to-13", 400)).cuts[:2] == [4, 8]


def test_four_cuts_of_scifar_lead_to_57_states():
    recipe, order = recipe_of("scifar", "to-57"), 384
    assert [order := int(recipe.compression.rho * order + 0.5) for _ in range(4)][-1] == 57
    assert len(Plan.of(recipe).cuts) == 4


def test_a_penalty_and_a_teacher_are_tried_once():
    everything = jobs("smnist", Path("folder"), TASKS["smnist"].variants, range(3, 5))
    once = [job for job in everything if "Σσ penalty" in job.variant or job.variant == "28 states, taught"]
    assert [job.seed for job in once] == [3, 3, 3]
    penalised, taught = recipe_of("smnist", "penalty-28"), recipe_of("smnist", "taught-28")
    assert (penalised.model.order, penalised.truncation.orders, penalised.regulariser.every) == (256, (28,), 20)
    lighter = recipe_of("smnist", "penalty-0.0001")
    assert (penalised.regulariser.beta, lighter.regulariser.beta, lighter.truncation.orders) == (0.1, 1e-4, (28,))
    assert (taught.model.order, taught.training.steps, taught.compression) == (28, 200_000, None)
    (whole,) = jobs("smnist", Path("folder"), ["whole"], range(1))
    assert Path(taught.distillation.teacher) == whole.training.folder.absolute()
    alone, after = results.Asked("smnist", Path("f.json"), everything).stages
    assert [job.variant for job in after] == ["28 states, taught"]
    assert len(alone) == len(everything) - 1


def test_what_is_kept_differs_alone_and_ends_at_32():
    found = [recipe_of("smnist-selection", name) for name in ("largest", "random", "smallest")]
    assert [recipe.compression.select for recipe in found] == ["largest", "random", "smallest"]
    assert all(Plan.of(recipe).cuts == [5_000, 10_000, 15_000, 20_000] for recipe in found)
    order = 256
    assert [order := int(found[0].compression.rho * order + 0.5) for _ in range(4)][-1] == 32
    assert Plan.of(recipe_of("smnist-selection", "largest", 400)).cuts == [10, 20, 30, 40]
    assert Plan.of(recipe_of("smnist-selection", "largest", 30)).cuts == [1, 2, 3, 4]


def test_a_rate_that_falls_is_all_that_differs():
    plain, falling = recipe_of("smnist", "to-28"), recipe_of("smnist-falling", "to-28")
    assert (falling.compression, falling.model) == (plain.compression, plain.model)
    assert falling.training.rate(4_000) == pytest.approx(4e-3)
    assert falling.training.rate(200_000) < 1e-6
    both = [jobs(task, Path("f"), ["whole"], range(1))[0].training.folder for task in ("smnist", "smnist-falling")]
    assert both[0] != both[1]


def test_choices_differ_in_what_their_names_say():
    late = recipe_of("smnist-choices", "late-falling-28")
    assert Plan.of(late).cuts[:2] == [50_000, 52_000]
    plain = recipe_of("smnist-falling", "to-28")
    assert late.training == plain.training
    white, paper = (recipe_of("smnist-choices", name) for name in ("white-28", "paper-to-28"))
    assert (white.training, white.compression.gramian, white.compression.fold) == (plain.training, "white_noise", True)
    assert (paper.training, paper.compression.fold, paper.compression.moments) == (plain.training, False, "slice")
    assert Plan.of(paper).cuts == Plan.of(plain).cuts
    circle = recipe_of("smnist-choices", "circle-02")
    assert circle.compression == recipe_of("smnist", "paper-02").compression
    assert circle.model.layer_options["max_phase"] == pytest.approx(6.2832, abs=1e-4)
    undropped, constant = (recipe_of("smnist-choices", name) for name in ("undropped", "constant-28"))
    assert (undropped.model.dropout, undropped.compression, undropped.training) == (0.0, None, plain.training)
    assert (constant.training.schedule, constant.training.learning_rate) == ("constant", 4e-3)
    assert (constant.compression, constant.model.order) == (None, 28)


@pytest.mark.parametrize("task", TASKS)
def test_labels_and_folders_are_one_for_each(task):
    wanted = jobs(task, Path("f"), TASKS[task].variants, range(2))
    once = sum(variant.once for variant in TASKS[task].variants.values())
    assert len({job.training.folder for job in wanted}) == len(wanted) == 2 * len(TASKS[task].variants) - once
    assert len({(job.variant, job.seed) for job in wanted}) == len(wanted)


def test_an_unknown_variant_is_named(capsys):
    with pytest.raises(SystemExit):
        results.main(["smnist", "--only", "to-14"])
    assert "--only to-14: expected one of whole, small-28" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        results.main(["smnist", "smnist-selection", "--only", "small-28"])
    said = " ".join(capsys.readouterr().err.split())
    assert "--only small-28: expected one of largest, random, smallest, small-32, the variants of smnist-select" in said


RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seeds", "0"), "'0' is not an integer of at least 1"),
        (("--processes", "0"), "'0' is not an integer of at least 1"),
        (("--steps", "-5"), "'-5' is not an integer of at least 1"),
        (("--add", "gone.json"), "gone.json: no such file"),
        (("--add", str(RESULTS / "demo.json")), "--add of a result named demo: expected results-smnist"),
    ],
)
def test_bad_options_are_refused_before_anything_is_trained(monkeypatch, capsys, options, said):
    monkeypatch.setattr(results, "train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(SystemExit) as end:
        results.main(["smnist", "--only", "small-13", *options])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_results_of_another_task_cannot_be_added(monkeypatch, capsys):
    monkeypatch.setattr(results, "train", lambda *_, **__: pytest.fail("trained"))
    falling = str(RESULTS / "results-smnist-falling.json")
    with pytest.raises(SystemExit):
        results.main(["smnist", "smnist-choices", "--add", falling])
    said = " ".join(capsys.readouterr().err.split())
    assert "--add of a result named results-smnist-falling: expected results-smnist or results-smnist-choices" in said


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(recipe("task.name=digits", "training.steps=9"), digits(), folder)
    return folder


def in_one_pool(monkeypatch, trained):
    """One that is trained of the first task; of the second two that are not, one of them a pupil."""

    def wanted(task, out, names, seeds, steps):
        if task == "smnist-selection":
            return [Job("32 states", 0, Training("smnist", trained))]
        return [Job(name, 0, Training("smnist", out / name)) for name in ("28 states, taught", "256 states")]

    pools = []
    monkeypatch.setattr(results, "jobs", wanted)
    monkeypatch.setattr(results, "different", lambda wanted: None)
    monkeypatch.setattr(results, "train", lambda pool, **options: pools.append([job.variant for job in pool]))
    return pools


def test_several_tasks_are_trained_in_one_pool_and_written_each(tmp_path, monkeypatch, capsys, trained):
    pools = in_one_pool(monkeypatch, trained)
    given = ["smnist-selection", "smnist", "smnist", "--out", str(tmp_path), "--steps", "9"]
    said = "2 of 3 trainings are not finished, or not readable: smnist: 28 states, taught, seed 0; smnist: 256 states"
    with pytest.raises(SystemExit, match=said):
        results.main(given)
    assert pools == [["32 states", "256 states"], ["28 states, taught"]]
    found, gone = tmp_path / "results-smnist-selection.json", tmp_path / "results-smnist.json"
    assert [row["variant"] for row in Measurement.read(found).rows] == ["32 states"]
    assert "no training of smnist was finished: there is nothing to write" in capsys.readouterr().out
    assert not gone.exists()
    found.unlink()
    with pytest.raises(SystemExit, match="2 of 3 trainings are not finished"):
        results.main([*given, "--only-collect"])
    assert len(pools) == 2
    assert found.exists()


def test_rows_that_another_command_wrote_meanwhile_stay(tmp_path, monkeypatch, trained):
    in_one_pool(monkeypatch, trained)
    path = tmp_path / "results-smnist-selection.json"
    other = Measurement(path.stem, "t", 1, [row("largest σ kept", 0)])
    monkeypatch.setattr(results, "train", lambda *_, **__: other.write(path))
    results.main(["smnist-selection", "--out", str(tmp_path), "--steps", "9"])
    assert [found["variant"] for found in Measurement.read(path).rows] == ["largest σ kept", "32 states"]


def test_results_of_other_days_are_joined_also_where_nothing_was_trained(tmp_path, monkeypatch, trained):
    in_one_pool(monkeypatch, trained)
    added = Measurement("results-smnist", "t", 1, [row("256 states", 1)]).write(tmp_path / "added.json")
    with pytest.raises(SystemExit, match="2 of 2 trainings"):
        results.main(["smnist", "--out", str(tmp_path / "out"), "--steps", "9", "--only-collect", "--add", str(added)])
    (found,) = Measurement.read(tmp_path / "out" / "results-smnist.json").rows
    assert (found["variant"], found["seed"]) == ("256 states", 1)


@pytest.mark.parametrize(
    "wrong", [{"best": float("nan")}, {"best": -5.0}, {"last": 101.0}, {"seed": 0.5}, {"order": 0}]
)
def test_a_row_that_cannot_be_is_refused(tmp_path, monkeypatch, capsys, wrong):
    monkeypatch.setattr(results, "train", lambda *_, **__: pytest.fail("trained"))
    added = Measurement("results-smnist", "t", 1, [row("256 states", 1) | wrong]).write(tmp_path / "added.json")
    with pytest.raises(SystemExit):
        results.main(["smnist", "--out", str(tmp_path / "out"), "--steps", "9", "--add", str(added)])
    assert "--add of a row that cannot be: 256 states with" in " ".join(capsys.readouterr().err.split())


def test_a_run_that_lost_its_evaluations_is_named_and_the_others_are_collected(tmp_path, capsys, trained):
    copied = shutil.copytree(trained, tmp_path / "copied")
    (copied / "metrics.jsonl").write_text("")
    broken = shutil.copytree(trained, tmp_path / "broken")
    (broken / "environment.json").write_text("{")
    wanted = [Job("256 states", k, Training("smnist", folder)) for k, folder in enumerate((copied, trained, broken))]
    found = results.collect("smnist", wanted)
    assert [row["seed"] for row in found.rows] == [1]
    assert [job.seed for job in missing(found, wanted)] == [0, 2]
    said = capsys.readouterr().err
    assert f"left out: 256 states, seed 0: {copied} is finished, but has no accuracy on test: move it away" in said
    assert "left out: 256 states, seed 2:" in said


def test_runs_that_lost_a_part_are_named(tmp_path, capsys, trained):
    def lost(name, change):
        copied = shutil.copytree(trained, tmp_path / name)
        change(copied)
        return Job(name, 0, Training("smnist", copied))

    def shortened(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(lines[:3]))

    def cut_once(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"truncation": {"orders": [2]}}))

    wanted = [
        lost("times", lambda folder: (folder / "timings.jsonl").unlink()),
        lost("end", shortened),
        lost("cuts", cut_once),
    ]
    assert results.collect("smnist", wanted) is None
    said = capsys.readouterr().err
    assert "times has no times" in said
    assert "end is finished, but its last test is at step 4 of 9" in said
    assert "cuts is finished, but has no test of the model that was cut after training" in said


def test_a_folder_of_another_recipe_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, "train", lambda *_, **__: pytest.fail("trained"))
    (job,) = jobs("smnist", tmp_path, ["small-13"], range(1), 9)
    run = RunDirectory(job.training.folder)
    run.begin(recipe_of("smnist", "small-13", 9).as_dict())
    assert not job.training.differs
    config = json.loads((run.path / "config.json").read_text())
    config["training"]["learning_rate"] = 0.5
    (run.path / "config.json").write_text(json.dumps(config))
    given = ["smnist", "--only", "small-13", "--seeds", "1", "--steps", "9", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        results.main(given)
    said = " ".join(capsys.readouterr().err.split())
    assert f"{run.path} holds a run of another recipe than 13 states, seed 0: training.learning_rate was 0.5" in said


def test_a_pupil_that_was_stopped_goes_on_with_the_teacher_it_began_with(tmp_path):
    (job,) = jobs("smnist", tmp_path / "old", ["taught-28"], range(1), 9)
    RunDirectory(job.training.folder).begin(job.training.wanted.as_dict())
    assert not job.training.differs
    (tmp_path / "link").symlink_to(tmp_path / "old")
    (linked,) = jobs("smnist", tmp_path / "link", ["taught-28"], range(1), 9)
    assert not linked.training.differs
    shutil.move(tmp_path / "old", tmp_path / "new")
    (moved,) = jobs("smnist", tmp_path / "new", ["taught-28"], range(1), 9)
    assert f"distillation.teacher was '{tmp_path}/old" in moved.training.differs


def test_a_pupil_without_its_teacher_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        results.main(["smnist", "--only", "taught-28", "--out", str(tmp_path)])
    said = " ".join(capsys.readouterr().err.split())
    assert "--only taught-28: its teacher, whole, is not trained; add --only whole" in said
    with pytest.raises(SystemExit, match="1 of 1 trainings are not finished"):
        results.main(["smnist", "--only", "taught-28", "--out", str(tmp_path), "--only-collect"])


def test_trainings_say_how_many_ran_at_a_time(tmp_path, monkeypatch, trained):
    new, done = (shutil.copytree(trained, tmp_path / name) for name in ("new", "done"))
    (new / "status.json").rename(new / "kept.json")
    (done / "together.json").write_text(json.dumps({"together": 3}))
    code = f"import os; os.rename({str(new / 'kept.json')!r}, {str(new / 'status.json')!r})"
    monkeypatch.setattr(Training, "command", lambda training, data: [sys.executable, "-c", code])
    wanted = [Job("a", 0, Training("smnist", new)), Job("b", 0, Training("smnist", done))]
    train_all(wanted, processes=4, data=None)
    assert company(RunDirectory(new)) == {"together": 1}  # the other was done
    assert company(RunDirectory(done)) == {"together": 3}
    (done / "status.json").unlink()
    train_all(wanted, processes=4, data=None)
    assert company(RunDirectory(done)) == {"together": 3}  # part of it was trained so
    shutil.rmtree(done)
    train_all([wanted[1]], processes=4, data=None)
    assert company(RunDirectory(done)) == {"together": 1}
    assert company(RunDirectory(tmp_path)) == {}


def test_what_says_nothing_of_its_company_had_that_of_an_earlier_result():
    earlier = Measurement("results-smnist", "t", 1, [row("256 states", 0, together=10), row("256 states", 1)])
    rows = [row("256 states", 0), row("256 states", 1), row("256 states", 2, together=3)]
    found = Measurement("results-smnist", "t", 1, rows)
    results._keep_company(found, [earlier])
    assert [one.get("together") for one in found.rows] == [10, None, 3]


def test_a_variant_that_is_asked_for_twice_is_trained_once():
    assert len(jobs("smnist", Path("f"), ["small-13", "whole", "small-13"], range(1))) == 2
