"""The study of Mamba on IMDB trains what was asked for, and reads sizes off the models."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import imdb_mamba
from compressm.compression import Baked, PerChannel, SharedIndex, load_model
from compressm_lab.experiments import rows
from compressm_lab.experiments.engine import Campaign
from compressm_lab.experiments.recipes import Arm, find_recipe
from compressm_lab.reports.measurements import grids
from compressm_lab.runs.directory import Status
from compressm_lab.runs.measurement import Measurement
from compressm_lab.training import Plan, train
from compressm_lab.training.building import build_method
from imdb_mamba import VARIANTS, Scale, file, plan
from tests.lab.experiments.tiny import answering
from tests.lab.training.tiny import tokens


def recipe_of(variant, **scale):
    (arm,) = plan(Path("folder"), [variant], 1, Scale(**scale)).arms
    return arm.read(seed=0)


def test_every_variant_is_the_recipe_cut_in_its_way():
    plain, whole, few = find_recipe("imdb-mamba"), recipe_of("whole"), recipe_of("small")
    paper, baked, once, chance = map(recipe_of, ("paper", "baked", "once", "random"))
    assert (whole.compression, few.compression, whole.model) == (None, None, plain.model)
    assert few.model == replace(plain.model, order=16)
    assert [found.label for found in (whole, few, paper, baked, once, chance)] == [
        *("128 states", "16 states", "paper: means, τ = 0.001", "baked to 16"),
        *("baked to 16 at once", "random states to 16"),
    ]
    assert build_method(paper.compression.selective) == PerChannel(surrogate="mean")
    assert (paper.compression.tau, baked.compression.tau, chance.compression.tau) == (1e-3, None, None)
    assert build_method(baked.compression.selective) == Baked()
    assert build_method(chance.compression.selective) == SharedIndex()
    assert (baked.compression.select, chance.compression.select) == ("largest", "random")
    assert all(Plan.of(found).cuts == [150, 300, 450, 600] for found in (paper, baked, chance))
    assert (once.compression.order, Plan.of(once).cuts) == (16, [50])
    assert Plan.of(whole).evaluations == [500, 1000, 1500, 2000, 2500, 3000]
    assert Plan.of(recipe_of("baked", steps=20)).cuts == [1, 2, 3, 4]
    assert recipe_of("small", size=8).label == "8 states"
    folders = [arm.folder for arm in plan(Path("f"), VARIANTS, 1, Scale(20, 1, 8)).arms]
    assert folders == ["whole-20", "small-8-20", "paper-20", "baked-8-20", "once-8-20", "random-8-20"]


@pytest.mark.parametrize("size", [3, 4, 5, 6, 8, 12, 16, 24])
def test_four_cuts_lead_to_the_size(size):
    cuts, order = recipe_of("baked", size=size).compression, 128
    found = [order := max(cuts.at_least, int(cuts.rho * order)) for _ in range(4)]
    assert found[-1] == size
    assert size != 16 or found == [76, 45, 26, 16]


def small(variant):
    """Settings for the same cuts of a model that is trained in a moment."""
    size = ("model.width=4", "model.depth=1", "training.batch=8", "training.precision=float32")
    settings = map(Scale(size=1).filled, VARIANTS[variant][1])
    steps = ("training.steps=20", "model.order=6", "training.evaluate_every=3")
    return (*size, *settings, *steps, f"label={variant}")


def small_plan(folder, *variants, seeds=1):
    arms = (Arm("", variant, "", "imdb-mamba", variant, small(variant)) for variant in variants)
    return Campaign(tuple(arms), range(seeds), folder, by_seed=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of two variants one seed each, and one that was stopped."""
    parent = tmp_path_factory.mktemp("trained")
    everything = small_plan(parent, "paper", "baked", seeds=2).trainings()
    for training in (everything[0], everything[1], everything[3]):
        train(training.arm.read(training.seed), tokens(), training.folder)
    everything[3].run.write_status(Status("interrupted", 6, 20))
    return parent


@pytest.fixture
def trained(folders, tmp_path):
    """Copies, for a test to change."""
    return shutil.copytree(folders, tmp_path / "trained")


def collect(wanted):
    return file(Path("f"), wanted, 20).collect()


def test_rows_are_of_the_trainings_that_are_done_with_sizes_of_their_models(trained):
    found = collect(small_plan(trained, "paper", "baked", seeds=2))
    assert [row["variant"] for row in found.rows] == ["paper", "baked"]
    paper, baked = found.rows
    layer = load_model(trained / "paper" / "seed-0" / "model").blocks[0].ssm
    assert paper["channel_order"] == pytest.approx(float(layer.orders.double().mean()))
    assert paper["channel_order"] <= paper["order"] < paper["initial_order"] == 6
    assert (baked["order"], baked["channel_order"], baked["complex_layers"]) == (1, 1, 0)
    assert paper["numbers"] > baked["numbers"]
    for row in found.rows:
        assert 0 <= row["last"] <= 100
        assert 0 <= row["best"] <= 100
        assert 0 < row["step_s"] < row["steps_s"] < row["seconds"]
        assert row["steps"] == 20


def test_what_is_not_trained_cannot_be_collected(tmp_path, capsys):
    wanted = plan(tmp_path, VARIANTS, 1, Scale())
    found = file(tmp_path, wanted, 3000)
    assert found.collect() is None
    assert found.write([]) == wanted.trainings()
    assert "nothing to write" in capsys.readouterr().out
    assert not found.path.exists()


def test_the_command_trains_what_was_asked_for_and_writes_the_result(tmp_path, monkeypatch, capsys, trained):
    asked, both = [], small_plan(trained, "paper", "baked")
    monkeypatch.setattr(imdb_mamba, "plan", lambda *given: asked.append(given[1:]) or both)
    options = ["--seeds", "1", "--steps", "9", "--evaluations", "3", "--only", "baked", "--size", "4"]
    path = imdb_mamba.main(["--out", str(tmp_path / "out"), *options])
    assert asked == [(["baked"], 1, Scale(9, 3, 4))]
    assert len(Measurement.read(path).rows) == 2
    assert "baked, seed 0: was done" in capsys.readouterr().out
    Measurement("imdb_mamba", "t", 1, [row("whole", 0, steps=20)]).write(tmp_path / "earlier.json")
    again = imdb_mamba.main(["--out", str(tmp_path / "out"), "--steps", "20", "--add", str(tmp_path / "earlier.json")])
    assert [found["variant"] for found in Measurement.read(again).rows] == ["paper", "baked", "whole"]


def test_a_result_that_is_there_keeps_its_rows(tmp_path, monkeypatch, capsys, trained):
    out = ("--out", str(tmp_path / "out"))
    monkeypatch.setattr(imdb_mamba, "plan", lambda *given: small_plan(trained, "paper", "baked"))
    path = imdb_mamba.main([*out, "--steps", "20"])
    monkeypatch.setattr(imdb_mamba, "plan", lambda *given: small_plan(trained, "baked"))
    imdb_mamba.main([*out, "--steps", "20"])
    assert [found["variant"] for found in Measurement.read(path).rows] == ["paper", "baked"]
    assert "1 row of trainings that were not asked for here stay" in capsys.readouterr().out
    monkeypatch.setattr(rows, "train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(SystemExit):
        imdb_mamba.main([*out, "--steps", "30"])
    said = " ".join(capsys.readouterr().err.split())
    assert f"{path} is there, of trainings with 20 steps: expected 30" in said
    assert "it would be lost: choose another --out" in said
    path.write_text("{")
    with pytest.raises(SystemExit):
        imdb_mamba.main([*out, "--steps", "20"])
    assert f"{path} is not a result of" in " ".join(capsys.readouterr().err.split())
    assert path.read_text() == "{"


@pytest.mark.parametrize(
    ("spoil", "said"), [({"best": "x"}, "has 'x' as best, expected a number"), ({"variant": None}, "lacks variant")]
)
def test_rows_to_be_added_are_looked_at_before_anything_is_trained(tmp_path, monkeypatch, capsys, spoil, said):
    monkeypatch.setattr(rows, "train", lambda *_, **__: pytest.fail("trained"))
    bad = {key: value for key, value in (row("128 states", 0) | spoil).items() if value is not None}
    Measurement("imdb_mamba", "t", 1, [bad]).write(tmp_path / "bad.json")
    with pytest.raises(SystemExit):
        imdb_mamba.main(["--out", str(tmp_path / "out"), "--add", str(tmp_path / "bad.json")])
    assert said in " ".join(capsys.readouterr().err.split())


def test_trainings_that_failed_are_named_after_the_result_is_written(tmp_path, monkeypatch, trained):
    wanted = small_plan(trained, "paper", "baked")
    lost = Arm("", "lost", "", "digits", "lost")
    monkeypatch.setattr(imdb_mamba, "plan", lambda *given: replace(wanted, arms=(*wanted.arms, lost)))
    answering(monkeypatch, "raise SystemExit(1)")
    with pytest.raises(SystemExit, match="1 of 3 trainings are not finished, or not readable: lost, seed 0"):
        imdb_mamba.main(["--out", str(tmp_path / "out")])
    assert len(Measurement.read(tmp_path / "out" / "imdb_mamba.json").rows) == 2


def test_results_of_other_lengths_are_not_joined(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rows, "train", lambda *_, **__: pytest.fail("trained"))
    long = Measurement("imdb_mamba", "t", 1, [row("128 states", 0, steps=24_000)]).write(tmp_path / "long.json")
    with pytest.raises(SystemExit):
        imdb_mamba.main(["--add", str(long)])
    assert "--add of trainings with 24000 steps: expected 3000" in capsys.readouterr().err


def test_rows_say_when_and_at_which_commit_they_were_trained(trained):
    wanted = small_plan(trained, "paper", "baked")
    found = collect(wanted).rows
    assert [(row["date"], row["commit"]) for row in found] == [
        (here.date, here.commit) for here in (training.run.environment() for training in wanted.trainings())
    ]


def row(variant, seed, **other):
    sizes = {"initial_order": 128.0, "order": 20.0, "channel_order": 12.25, "complex_layers": 1, "numbers": 250_000}
    times = {"steps_s": 50.0, "seconds": 80.0, "cuts_s": 2.5, "step_s": 0.016, "recording_s": 1.5}
    return {"variant": variant, "seed": seed, "steps": 3000, "best": 80.0, "last": 79.0, **sizes, **times, **other}


def test_the_table_compares_times_with_those_of_all_states():
    whole = row("128 states", 0, steps_s=100.0, order=128.0, channel_order=128.0, complex_layers=0)
    found = Measurement("imdb_mamba", "t", 1, [whole, row("paper", 0), row("paper", 1, best=81.0, steps_s=30.0)])
    (grid,) = grids(found)
    assert grid.rows[0][1:3] == ("128 → 128", "128")
    assert grid.rows[1] == (
        *("paper", "128 → 20", "12.2, complex", "250 k", "80.0, 81.0", "79.0, 79.0"),
        *("16 ms", "40 s", "2.50×", "2.5 s", "1.5 s", "44 s", "2.36×", "80 s"),
    )
    (alone,) = grids(Measurement("imdb_mamba", "t", 1, [row("paper", 0)]))
    assert alone.rows[0][8] == ""


def test_a_result_from_before_recordings_were_counted_shows_none():
    old = row("paper", 0)
    del old["recording_s"]
    (grid,) = grids(Measurement("imdb_mamba", "t", 1, [old]))
    assert grid.rows[0][-5:] == ("2.5 s", "", "", "", "80 s")
