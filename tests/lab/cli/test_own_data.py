"""Own data from the command line: files without code, and code that a recipe names."""

import errno
import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from compressm.cli.app import app
from compressm.compression import load_model
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import CutRecord
from tests.lab.data.tables import steps, write_ford, write_long, write_turbofan

PAGE = Path("page/report.html")
SHORT = ("--set", "model={depth: 1, width: 4, order: 8, norm: layer, pooling: %s}", "--set", "spectra={every: 4}")
STEPS = ("training={steps: 12, batch: 8, learning_rate: 0.01, evaluate_every: 6}", "compression.when={steps: [4, 8]}")


@pytest.fixture
def run_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPRESSM_COMMIT", "tests")
    monkeypatch.setenv("COMPRESSM_DATA", str(tmp_path / "data"))
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*arguments, code=0):
        done = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "250"})
        assert done.exit_code == code, done.output
        return " ".join(done.output.replace("│", " ").split())

    yield run
    for name in ("mine", "broken"):
        sys.modules.pop(name, None)


def short(pooling):
    return (SHORT[0], SHORT[1] % pooling, *SHORT[2:], *(part for one in STEPS for part in ("--set", one)))


def used(run_in, run, what):
    """A run is reported, inspected and cut with its data."""
    assert [(cut.step, cut.order, cut.rank) for cut in RunDirectory(run).records(CutRecord)] == [(4, 8, 4), (8, 4, 2)]
    run_in("report", run, "--out", "page", "--formats", "svg")
    assert what in (page := PAGE.read_text())
    assert "blocks.0.ssm" in page
    assert "blocks.0.ssm" in run_in("inspect", run, "--measured")
    said = run_in("compress", run, "--measured", "--order", 1, "--out", "small")
    assert "2 -> 1 state, measured" in said
    assert load_model("small").blocks[0].ssm.order == 1
    return said


def test_forda_is_trained_cut_and_reported_from_files_only(run_in, tmp_path):
    write_ford(tmp_path / "data" / "forda")
    said = run_in("train", "forda", *short("mean"), "--out", "run", "--device", "cpu")
    assert "imports" not in said
    assert "test accuracy" in used(run_in, "run", "accuracy")
    notes = RunDirectory("run").task()
    assert (notes["labels"], notes["kind"]) == (["-1", "1"], "classify")
    assert notes["about"]["files"]["train"]["path"].endswith("data/forda/FordA_TRAIN.tsv")


def test_turbofan_is_regressed_step_by_step_from_files_only(run_in, tmp_path):
    write_turbofan(tmp_path / "data" / "turbofan")
    said = run_in("train", "turbofan", *short("steps"), "--out", "run", "--device", "cpu")
    assert "MAE" in said
    assert "test MSE" in used(run_in, "run", "MAE")


def test_a_recipe_finds_files_beside_itself_and_the_run_finds_them_from_elsewhere(run_in, tmp_path, monkeypatch):
    write_ford(tmp_path / "here")
    recipe = {"name": "own", "task": {"name": "table", "train": "FordA_TRAIN.tsv", "test": "FordA_TEST.tsv"}}
    recipe |= {"model": {"depth": 1, "width": 4, "order": 8}, "compression": {"rho": 0.5, "when": {"steps": [4, 8]}}}
    recipe["training"] = {"steps": 12, "batch": 8, "learning_rate": 0.01}
    (tmp_path / "here" / "own.yaml").write_text(yaml.safe_dump(recipe))
    run_in("train", "here/own.yaml", "--out", "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert "test accuracy" in run_in("compress", "../run", "--measured", "--order", 1, "--out", "small")
    assert "is finished" in run_in("train", "../run", "--resume")
    # Files that were moved are found in the folder of data sets.
    (tmp_path / "here").rename(tmp_path / "moved")
    missing = run_in("compress", "../run", "--measured", "--order", 1, "--out", "other", code=2)
    assert "FordA_TRAIN.tsv is not there and not in the folder of data sets" in missing
    moved = run_in("compress", "../run", "--measured", "--order", 1, "--out", "other", "--data", tmp_path / "moved")
    assert "test accuracy" in moved


def test_a_run_does_not_go_on_with_another_file(run_in, tmp_path):
    write_ford(tmp_path / "data" / "forda")
    run_in("train", "forda", *short("mean"), "--out", "run")
    path = tmp_path / "run" / "status.json"
    path.write_text(path.read_text().replace("finished", "interrupted"))
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("*"):
        checkpoint.unlink()
    file = tmp_path / "data" / "forda" / "FordA_TRAIN.tsv"
    file.write_text(file.read_text() + file.read_text().splitlines()[0] + "\n")
    assert "run began with another train than" in run_in("train", "run", "--resume", code=2)
    for about, said in (
        ("lost", "about is 'lost', expected an object"),
        ({"files": [1]}, "about.files is [1], expected an object"),
        ({"files": {"train": 3}}, "about.files.train is 3, expected an object"),
        ({"files": {"train": {}}}, "about.files.train has no sha256"),
    ):
        (tmp_path / "run" / "task.json").write_text(json.dumps({"about": about}))
        assert f"task.json: {said}" in run_in("train", "run", "--resume", code=2)


CODE = """
import torch
from compressm_lab.data import Split, Task, TaskKind
from compressm.layers import LRU
from torch import nn

def signs(length: int = 6, kind: str = "classify"):
    x = torch.randn(40, length, 2, generator=torch.Generator().manual_seed(0))
    y = (x.mean(dim=(1, 2)) > 0).long() if kind == "classify" else x.mean(dim=1)
    split = Split(x, y)
    return Task(name="signs", kind=TaskKind(kind), train=split, validation=split, test=split, channels=2, classes=2)

def wrong():
    return [1, 2]

def bad():
    split = Split(torch.zeros(4, 3, 2), torch.tensor([0, 1, 2, 0]))
    return Task(name="b", kind=TaskKind.CLASSIFY, train=split, validation=split, test=split, channels=2, classes=2)

class Tower(nn.Module):
    def __init__(self, inputs, classes, width, order, scale=1.0):
        super().__init__()
        self.encoder, self.ssm, self.head = nn.Linear(inputs, width), LRU(width, order), nn.Linear(width, classes)
        self.scale = scale

    def forward(self, inputs, lengths=None):
        features, _ = self.ssm(self.encoder(inputs), lengths=lengths)
        return self.scale * self.head(features.mean(dim=1))

def tower(inputs, classes, width, order, depth):
    return Tower(inputs, classes, width, order)

def flat(inputs, classes, order):
    return nn.Linear(inputs, classes)

def number(order):
    return 5

def unordered(inputs):
    return nn.Linear(inputs, 2)
"""
RECIPE = """
name: mine
task: mine:signs
model: {depth: 1, width: 4, order: 8}
training: {steps: 12, batch: 8, learning_rate: 0.01, evaluate_every: 6}
compression: {rho: 0.5, gramian: measured, gate: 1.0, when: {steps: [4, 8]}}
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "mine.yaml").write_text(RECIPE)


def test_a_function_gives_the_task_and_train_says_that_it_imports(run_in, mine):
    said = run_in("train", "mine.yaml", "--set", "task.length=9", "--out", "run")
    assert said.startswith("imports mine, which the recipe names mine, compressed, seed 0")
    assert RunDirectory("run").config()["task"] == {"name": "mine:signs", "length": 9}
    assert "test accuracy" in used(run_in, "run", "accuracy")
    assert "float32 (9, 2)" in run_in("data", "mine:signs", "--set", "length=9")


def test_a_regression_in_code_has_its_errors(run_in, mine):
    run_in("train", "mine.yaml", "--set", "task.kind=predict", "--out", "run")
    assert "test MSE" in used(run_in, "run", "MAE")


@pytest.mark.parametrize("factory", ["mine:Tower", "mine:tower"])
def test_a_model_of_a_factory_is_trained_cut_and_opened(run_in, mine, tmp_path, factory):
    """The class is part of saved models, without a decorator."""
    scale = ("--set", "model.options={scale: 2.0}") if factory == "mine:Tower" else ()
    if factory == "mine:tower":
        code = CODE.replace("class Tower", "import compressm as cs\n\n@cs.compression.savable\nclass Tower")
        (tmp_path / "mine.py").write_text(code)
    said = run_in("train", "mine.yaml", "--set", f"model.factory={factory}", *scale, "--out", "run")
    assert said.count("imports mine, which the recipe names") == 1
    assert "step 4: ssm: 8 -> 4 states" in said
    run_in("report", "run", "--out", "page", "--formats", "svg")
    assert f"1 × {factory}" in PAGE.read_text()
    assert "2 -> 1 state" in run_in("compress", "run", "--measured", "--order", 1, "--out", "small")
    assert "ssm" in run_in("inspect", "run")


def test_a_run_of_a_factory_that_was_stopped_is_opened_and_goes_on(run_in, mine, tmp_path):
    run_in("train", "mine.yaml", "--set", "model.factory=mine:Tower", "--out", "run")
    (tmp_path / "run" / "model" / "model.safetensors").unlink()
    assert "has not finished" in run_in("inspect", "run")
    run_in("train", "run", "--resume")
    assert RunDirectory("run").finished


BAD_CODE = [
    (("task=mine:wrong",), "mine:wrong returns [1, 2], expected a compressm_lab.data.Task"),
    (("task=mine:bad",), "mine:bad: train: target 2 in example 2, expected 0 to 1"),
    (("task=mine:sings",), "mine has no 'sings', which 'mine:sings' names; did you mean 'signs'?"),
    (("task.lenght=3",), "cannot be called with its options: got an unexpected keyword argument 'lenght'"),
    (("task.lenght=3",), "did you mean 'length'?"),
    (("task=mine:nn",), "mine:nn is <module 'torch.nn'"),
    (("model.factory=mine:nothing",), "model.factory is 'mine:nothing': mine has no 'nothing'"),
    (("model.factory=mine:unordered",), "unordered(inputs) does not take order, the states of each layer"),
    (("model.factory=mine:number",), "model.factory: mine:number returns 5, expected an nn.Module"),
    (("model.factory=mine:flat",), "is called as model(inputs, lengths)"),
    (("model.factory=mine:tower",), "makes a model that cannot be saved"),
    (("model.factory=mine:Tower", "model.dropout=0.3"), "dropout is 0.3 with factory, which does not take it"),
    (("model.factory=mine:Tower", "model.options={order: 3}"), "model.options has order, which the factory takes from"),
    (("model.factory=mine:Tower", "model.options={scales: 3}"), "cannot be called with inputs, width, order, classes"),
    (("model.options={scale: 3}",), "options are for factory, which is not set"),
]


@pytest.mark.parametrize(("settings", "said"), BAD_CODE, ids=[said[:45] for _, said in BAD_CODE])
def test_code_that_cannot_be_used_is_refused_before_training(run_in, mine, tmp_path, settings, said):
    output = run_in(
        "train", "mine.yaml", *(part for one in settings for part in ("--set", one)), "--out", "run", code=2
    )
    assert said in output
    assert not (tmp_path / "run" / "config.json").exists()


def test_reading_a_run_for_a_report_never_imports_its_code(run_in, mine, tmp_path):
    run_in("train", "mine.yaml", "--out", "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    for part, key in (("task", "name"), ("model", "factory")):
        config[part][key] = "broken:thing"
    (tmp_path / "broken.py").write_text("raise SystemExit('imported')")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    (tmp_path / "run" / "status.json").write_text(json.dumps(status | {"recipe": ""}))
    run_in("report", "run", "--out", "page", "--formats", "svg")
    assert "broken:thing" in PAGE.read_text()
    assert "broken" not in sys.modules


def test_a_finished_run_is_inspected_without_the_code_of_its_task(run_in, mine, tmp_path):
    run_in("train", "mine.yaml", "--out", "run")
    sys.modules.pop("mine")
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    assert "blocks.0.ssm" in run_in("inspect", "run")


def test_inspect_shows_what_would_be_read_and_a_recipe_that_trains(run_in, tmp_path):
    write_ford(tmp_path)
    said = run_in("data", "inspect", "FordA_TRAIN.tsv")
    assert "48 rows, 41 columns" in said
    assert "train 43 sequences, validation 5 sequences, a tenth of FordA_TRAIN.tsv, test 16 sequences" in said
    assert "classes of train: -1 (24), 1 (24)" in said
    assert "missing values: none" in said
    done = CliRunner().invoke(app, ["data", "inspect", "FordA_TRAIN.tsv"]).output
    text = done.partition("a recipe, to be changed:")[2]
    (tmp_path / "own.yaml").write_text(text)
    short = (
        "training.steps=4",
        "training.class_weights=balanced",
        "compression.when={steps: [2]}",
        "training.evaluate_every=4",
    )
    assert "test" in run_in("train", "own.yaml", *(part for one in short for part in ("--set", one)))


def test_inspect_says_what_is_to_be_decided(run_in, tmp_path):
    rows = [(*row[:2], "" if row[1] == 1 else row[2], *row[3:]) for row in steps(series=10)]
    write_long(tmp_path / "a.csv", rows)
    said = run_in("data", "inspect", "a.csv")
    assert "label: texts, such as 'no', 2 different" in said
    assert "to decide: target is missing, the column of answers: a.csv has series, step, a, b, label" in said
    assert "task: {name: table, train: a.csv, target: '?'}" in said
    options = ("sequence=series", "step=step", "target=label", "leave_out=[b]")
    said = run_in("data", "inspect", "a.csv", *(part for one in options for part in ("--set", one)))
    assert "3 to 5 steps, mean 4, 1 channel" in said
    assert "classes of train: no (5), yes (5)" in said
    assert "missing values: train 8" in said
    assert "training refuses missing values: set missing: last (the value before), or missing: mean" in said
    assert "leave_out: [b], missing: last}" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("inspect",), "inspect without a file, expected `compressm data inspect FILE`"),
        (("imdb", "a.csv"), "imdb a.csv, expected `compressm data inspect FILE`"),
        (("inspect", "gone.csv"), "gone.csv does not exist"),
        (("inspect", "a.csv", "--set", "train=b.csv"), "train is the file itself: leave it out"),
        (("inspect", "a.csv", "--set", "sequenc=s"), "table has no option 'sequenc'"),
    ],
)
def test_a_wrong_call_of_inspect_says_what_is_expected(run_in, tmp_path, arguments, said):
    write_long(tmp_path / "a.csv", steps())
    assert said in run_in("data", *arguments, code=2)


def test_a_new_folder_trains_at_once_from_files_and_from_code(run_in, tmp_path, monkeypatch):
    said = run_in("init", "new")
    assert "cd new compressm train recipe.yaml compressm report out/runs/waves" in said
    monkeypatch.chdir(tmp_path / "new")
    monkeypatch.syspath_prepend(str(tmp_path / "new"))
    fewer = ("--set", "training.schedule=constant", "--device", "cpu")
    run_in("train", "recipe.yaml", *fewer, "--set", "training.steps=100")
    run = RunDirectory("out/runs/waves/compressed-n32/seed-0")
    assert [cut.rank for cut in run.records(CutRecord)] == [16, 16, 8, 8, 4, 4]
    last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["split"] == "test"
    assert last["accuracy"] > 0.8
    mine = ("task={name: mytask:waves, noise: 0.1}", "training.steps=20", "compression.when={steps: [10]}")
    changed = (part for setting in mine for part in ("--set", setting))
    said = run_in("train", "recipe.yaml", *fewer, *changed, "--out", "code")
    assert "imports mytask" in said
    sys.modules.pop("mytask")
    run_in("report", "out/runs/waves", "code", "--out", "page", "--formats", "svg")
    recipe = yaml.safe_load((tmp_path / "new" / "recipe.yaml").read_text())
    assert set(recipe) == {"name", "task", "model", "training", "compression", "spectra"}


def test_init_writes_over_nothing(run_in, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mytask.py").write_text("mine")
    assert "new has mytask.py already; expected a new folder" in run_in("init", "new", code=2)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mytask.py"]
    assert "expected a folder to write to" in run_in("init", "new/mytask.py", code=2)


def test_init_leaves_nothing_where_there_is_no_room_so_that_it_can_be_called_again(run_in, tmp_path, monkeypatch):
    write = Path.write_text

    def until_full(path, text, **options):
        if path.name == "mytask.py":
            path.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, text, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", until_full)
        assert "new: No space left on device; expected a folder to write to" in run_in("init", "new", code=2)
    assert list((tmp_path / "new").iterdir()) == []
    run_in("init", "new")
