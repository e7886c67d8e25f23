"""The study of small models runs the command line with what each variant says, and tells seeds apart."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import results
from compressm_lab.experiments import rows
from compressm_lab.experiments.engine import Campaign
from compressm_lab.experiments.recipes import Arm, find_recipe
from compressm_lab.experiments.rows import missing
from compressm_lab.runs.directory import RunDirectory, recipe_digest
from compressm_lab.runs.measurement import Measurement
from compressm_lab.training import Plan, train
from results import LINEUPS
from tests.lab.experiments.result_rows import row
from tests.lab.training.tiny import digits, recipe


def trainings(task, out, names, seeds, steps=None):
    return LINEUPS[task].plan(out, list(names), seeds, steps).trainings()


def recipe_of(task, name, steps=None):
    (training,) = trainings(task, Path("folder"), [name], range(1), steps)
    return training.arm.read(training.seed)


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
    assert [order := int(recipe.compression.rho * order) for _ in range(4)] == [238, 148, 92, 57]
    assert len(Plan.of(recipe).cuts) == 4


def test_a_penalty_and_a_teacher_are_tried_once():
    everything = trainings("smnist", Path("folder"), LINEUPS["smnist"].variants, range(3, 5))
    once = [one.seed for one in everything if "Σσ penalty" in str(one) or one.arm.method == "28 states, taught"]
    assert once == [3, 3, 3]
    penalised, taught = recipe_of("smnist", "penalty-28"), recipe_of("smnist", "taught-28")
    assert (penalised.model.order, penalised.truncation.orders, penalised.regulariser.every) == (256, (28,), 20)
    lighter = recipe_of("smnist", "penalty-0.0001")
    assert (penalised.regulariser.beta, lighter.regulariser.beta, lighter.truncation.orders) == (0.1, 1e-4, (28,))
    assert (taught.model.order, taught.training.steps, taught.compression) == (28, 200_000, None)
    (whole,) = trainings("smnist", Path("folder"), ["whole"], range(1))
    assert Path(taught.distillation.teacher) == whole.folder.absolute()
    (waiting,) = [one for one in everything if one.state == "waits"]
    assert waiting.waits_for == "learns from 256 states, seed 3"


def test_what_is_kept_differs_alone_and_ends_at_32():
    timed, without = (recipe_of(name, "to-13") for name in ("smnist-time", "smnist-falling"))
    assert (timed.task, without.task) == ({"name": "smnist", "time": True}, {"name": "smnist"})
    assert (timed.model, timed.training, timed.compression) == (without.model, without.training, without.compression)
    found = [recipe_of("smnist-selection", name) for name in ("largest", "random", "smallest")]
    assert [recipe.compression.select for recipe in found] == ["largest", "random", "smallest"]
    assert all(Plan.of(recipe).cuts == [5_000, 10_000, 15_000, 20_000] for recipe in found)
    order = 256
    assert [order := int(found[0].compression.rho * order) for _ in range(4)] == [153, 91, 54, 32]
    assert Plan.of(recipe_of("smnist-selection", "largest", 400)).cuts == [10, 20, 30, 40]
    assert Plan.of(recipe_of("smnist-selection", "largest", 30)).cuts == [1, 2, 3, 4]


def test_a_rate_that_falls_is_all_that_differs():
    plain, falling = recipe_of("smnist", "to-28"), recipe_of("smnist-falling", "to-28")
    assert (falling.compression, falling.model) == (plain.compression, plain.model)
    assert falling.training.rate(4_000) == pytest.approx(4e-3)
    assert falling.training.rate(200_000) < 1e-6
    both = [trainings(task, Path("f"), ["whole"], range(1))[0].folder for task in ("smnist", "smnist-falling")]
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


@pytest.mark.parametrize("task", LINEUPS)
def test_labels_and_folders_are_one_for_each(task):
    wanted = trainings(task, Path("f"), LINEUPS[task].variants, range(2))
    once = sum(variant.once for variant in LINEUPS[task].variants.values())
    assert len({one.folder for one in wanted}) == len(wanted) == 2 * len(LINEUPS[task].variants) - once
    assert len({(one.arm.method, one.seed) for one in wanted}) == len(wanted)


def test_an_unknown_variant_is_named(capsys):
    with pytest.raises(SystemExit):
        results.main(["smnist", "--only", "to-14"])
    assert "--only to-14: expected one of whole, small-28" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        results.main(["smnist", "smnist-selection", "--only", "small-28"])
    said = " ".join(capsys.readouterr().err.split())
    assert "--only small-28: expected one of largest, random, smallest, small-32, the variants of smnist-select" in said


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


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
    monkeypatch.setattr(rows, "train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(SystemExit) as end:
        results.main(["smnist", "--only", "small-13", *options])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_results_of_another_task_cannot_be_added(monkeypatch, capsys):
    monkeypatch.setattr(rows, "train", lambda *_, **__: pytest.fail("trained"))
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


def in_one_pool(monkeypatch, trained, out):
    """One that is trained of the first task; of the second two that are not, one of them a student."""
    few = {"smnist-selection": ("small-32",), "smnist": ("taught-28", "whole")}
    for task, names in few.items():
        chosen = {name: LINEUPS[task].variants[name] for name in names}
        monkeypatch.setitem(LINEUPS, task, replace(LINEUPS[task], variants=chosen))
    (done,) = trainings("smnist-selection", out, ["small-32"], range(1), 9)
    shutil.copytree(trained, done.folder)
    pools = []
    monkeypatch.setattr(rows, "require_same_recipes", lambda wanted: None)
    monkeypatch.setattr(rows, "train", lambda plan, *_: pools.append({str(one): one.state for one in plan.trainings()}))
    return pools


def test_several_tasks_are_trained_in_one_pool_and_written_each(tmp_path, monkeypatch, capsys, trained):
    pools = in_one_pool(monkeypatch, trained, tmp_path)
    given = ["smnist-selection", "smnist", "smnist", "--out", str(tmp_path), "--steps", "9", "--seeds", "1"]
    said = "2 of 3 trainings are not finished, or not readable: smnist, 28 states, taught, seed 0; smnist, 256 states"
    with pytest.raises(SystemExit, match=said):
        results.main(given)
    assert pools == [
        {
            "smnist-selection, 32 states, seed 0": "done",
            "smnist, 28 states, taught, seed 0": "waits",
            "smnist, 256 states, seed 0": "new",
        }
    ]
    found, gone = tmp_path / "results-smnist-selection.json", tmp_path / "results-smnist.json"
    assert [row["variant"] for row in Measurement.read(found).rows] == ["32 states"]
    assert "no training of smnist was finished: there is nothing to write" in capsys.readouterr().out
    assert not gone.exists()
    found.unlink()
    with pytest.raises(SystemExit, match="2 of 3 trainings are not finished"):
        results.main([*given, "--only-collect"])
    assert len(pools) == 1
    assert found.exists()


def test_rows_that_another_command_wrote_meanwhile_stay(tmp_path, monkeypatch, trained):
    in_one_pool(monkeypatch, trained, tmp_path)
    path = tmp_path / "results-smnist-selection.json"
    other = Measurement(path.stem, "t", 1, [row("largest σ kept", 0)])
    monkeypatch.setattr(rows, "train", lambda *_, **__: other.write(path))
    results.main(["smnist-selection", "--out", str(tmp_path), "--steps", "9", "--seeds", "1"])
    assert [found["variant"] for found in Measurement.read(path).rows] == ["largest σ kept", "32 states"]


def test_results_of_other_days_are_joined_also_where_nothing_was_trained(tmp_path, monkeypatch, trained):
    in_one_pool(monkeypatch, trained, tmp_path)
    added = Measurement("results-smnist", "t", 1, [row("256 states", 1)]).write(tmp_path / "added.json")
    given = ["--out", str(tmp_path / "out"), "--steps", "9", "--seeds", "1", "--add", str(added)]
    with pytest.raises(SystemExit, match="2 of 2 trainings"):
        results.main(["smnist", "--only-collect", *given])
    (found,) = Measurement.read(tmp_path / "out" / "results-smnist.json").rows
    assert (found["variant"], found["seed"]) == ("256 states", 1)


@pytest.mark.parametrize(
    "wrong", [{"best": float("nan")}, {"best": -5.0}, {"last": 101.0}, {"seed": 0.5}, {"order": 0}]
)
def test_a_row_that_cannot_be_is_refused(tmp_path, monkeypatch, capsys, wrong):
    monkeypatch.setattr(rows, "train", lambda *_, **__: pytest.fail("trained"))
    added = Measurement("results-smnist", "t", 1, [row("256 states", 1) | wrong]).write(tmp_path / "added.json")
    with pytest.raises(SystemExit):
        results.main(["smnist", "--out", str(tmp_path / "out"), "--steps", "9", "--add", str(added)])
    assert "--add of a row that cannot be: 256 states with" in " ".join(capsys.readouterr().err.split())


def collected(runs, *names, seeds=1):
    """What is collected of arms whose runs are below a folder, and the trainings."""
    wanted = Campaign(tuple(Arm("", name, "", "smnist", name) for name in names), range(seeds), runs)
    file = LINEUPS["smnist"].file(Path("f"), wanted)
    return file.collect(), file.trainings


def without_tests(folder, after=0):
    """Take the lines of tests after a step away."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["split"] != "test" or json.loads(line)["step"] <= after]
    (folder / "metrics.jsonl").write_text("".join(kept))


def test_a_run_that_lost_its_evaluations_is_named_and_the_others_are_collected(tmp_path, capsys, trained):
    copied, _, broken = (shutil.copytree(trained, tmp_path / "256 states" / f"seed-{seed}") for seed in range(3))
    without_tests(copied)
    (broken / "environment.json").write_text("{")
    found, wanted = collected(tmp_path, "256 states", seeds=3)
    assert [row["seed"] for row in found.rows] == [1]
    assert [one.seed for one in missing(found, wanted)] == [0, 2]
    said = capsys.readouterr().err
    assert f"left out: 256 states, seed 0: {copied}/metrics.jsonl lacks test of step" in said
    assert "left out: 256 states, seed 2:" in said


def test_runs_that_lost_a_part_are_named(tmp_path, capsys, trained):
    def lost(name, change):
        change(shutil.copytree(trained, tmp_path / name / "seed-0"))

    def cut_once(folder):
        config, run = json.loads((folder / "config.json").read_text()), RunDirectory(folder)
        (folder / "config.json").write_text(json.dumps(config | {"truncation": {"orders": [2]}}))
        run.write_status(replace(run.status(), recipe=recipe_digest(run.config())))

    def no_times(folder):
        (folder / "timings.jsonl").unlink()
        run = RunDirectory(folder)
        run.write_status(replace(run.status(), records={}))  # as of an earlier version, which wrote no digests

    lost("times", no_times)
    lost("end", partial(without_tests, after=4))
    lost("cuts", cut_once)
    assert collected(tmp_path, "times", "end", "cuts")[0] is None
    said = capsys.readouterr().err
    assert "times/seed-0 has no times" in said
    assert "end/seed-0/metrics.jsonl lacks test of step" in said
    assert "cuts/seed-0 is finished, but has no test of the model that was cut after training" in said


def test_a_folder_of_another_recipe_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rows, "train", lambda *_, **__: pytest.fail("trained"))
    (training,) = trainings("smnist", tmp_path, ["small-13"], range(1), 9)
    run = training.run
    run.begin(recipe_of("smnist", "small-13", 9).as_dict())
    assert not training.differs
    config = json.loads((run.path / "config.json").read_text())
    config["training"]["learning_rate"] = 0.5
    (run.path / "config.json").write_text(json.dumps(config))
    given = ["smnist", "--only", "small-13", "--seeds", "1", "--steps", "9", "--out", str(tmp_path)]
    with pytest.raises(SystemExit):
        results.main(given)
    said = " ".join(capsys.readouterr().err.split())
    assert f"{run.path} holds a run of another recipe than 13 states, seed 0: training.learning_rate was 0.5" in said


def test_a_student_that_was_stopped_goes_on_with_the_teacher_it_began_with(tmp_path):
    def taught(out):
        (training,) = trainings("smnist", out, ["taught-28"], range(1), 9)
        return training

    begun = taught(tmp_path / "old")
    begun.run.begin(begun.arm.read(seed=0).as_dict())
    assert not begun.differs
    (tmp_path / "link").symlink_to(tmp_path / "old")
    assert not taught(tmp_path / "link").differs
    shutil.move(tmp_path / "old", tmp_path / "new")
    assert f"distillation.teacher was '{tmp_path}/old" in taught(tmp_path / "new").differs


def test_a_student_without_its_teacher_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        results.main(["smnist", "--only", "taught-28", "--out", str(tmp_path)])
    said = " ".join(capsys.readouterr().err.split())
    assert "--only taught-28: its teacher, whole, is not trained; add --only whole" in said
    with pytest.raises(SystemExit, match="1 of 1 trainings are not finished"):
        results.main(["smnist", "--only", "taught-28", "--out", str(tmp_path), "--only-collect"])


def test_a_variant_that_is_asked_for_twice_is_trained_once():
    assert len(trainings("smnist", Path("f"), ["small-13", "whole", "small-13"], range(1))) == 2
