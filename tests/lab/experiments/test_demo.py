"""The demo trains every model with every seed and says what came out, whichever way it falls."""

import json
import multiprocessing
import os
import queue
from concurrent.futures import Future
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from compressm.cli.app import app
from compressm_lab.cli.bench import as_table
from compressm_lab.experiments import demo
from compressm_lab.reports import run_report
from compressm_lab.reports.study_tables import demo_grids, demo_says
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Measurement
from compressm_lab.runs.records import RunError

QUICK = ("training.steps=6", "training.evaluate_every=3", "model.width=4", "model.order=16", "spectra=null")


def made(**accuracies):
    """A result with three seeds a model."""
    rows = [
        {
            "model": model.replace("_", " "),
            "seed": seed,
            "initial_order": 4 if model == "small" else 128,
            "order": 128 if model == "large" else 4,
            "accuracy": value,
            "seconds": 20.0 if model == "large" else 10.0,
            "bounds": {"compressed": "none, none", "white_noise": "3, 4"}.get(model, ""),
        }
        for model, values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    return Measurement("demo", "made up", 1, rows)


class Here:
    """In the place of processes, which take 5 s to load everything: what is submitted is done at once."""

    def __init__(self, processes, *, mp_context, initializer, initargs):
        initializer(*initargs)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, argument):
        done = Future()
        done.set_result(function(argument))
        return done


@pytest.fixture
def in_one_process(monkeypatch):
    monkeypatch.setattr(demo, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(demo, "multiprocessing", SimpleNamespace(get_context=lambda _: queue))
    # Pictures have tests of their own.
    monkeypatch.setattr(run_report, "write_files", lambda *_: [])
    monkeypatch.setattr(run_report, "inline_svg", lambda *_, **__: "")


@pytest.fixture(params=["in_one_process", pytest.param("in_processes", marks=pytest.mark.slow)])
def placed(request):
    if request.param == "in_one_process":
        request.getfixturevalue(request.param)


@pytest.mark.usefixtures("placed")
def test_the_demo_trains_all_and_ends_with_table_meaning_and_report(tmp_path):
    settings = [*QUICK, "compression.when={steps: [1, 2]}", "compression.rho=0.5"]
    options = [part for setting in settings for part in ("--set", setting)]
    ended = CliRunner().invoke(
        app, ["demo", "--out", str(tmp_path / "demo"), "--seeds", "2", "--processes", "1", *options]
    )
    assert ended.exit_code == 0, ended.output
    rows = json.loads((tmp_path / "demo" / "demo.json").read_text())["rows"]
    assert [(row["model"], row["seed"]) for row in rows] == [(label, seed) for label in demo.MODELS for seed in (0, 1)]
    assert {row["model"]: (row["initial_order"], row["order"]) for row in rows} == {
        "large": (16, 16),
        "small": (4, 4),
        "compressed": (16, 4),
        "white noise": (16, 4),
    }
    assert "points on the mean" in ended.output
    page = Path(ended.output.rsplit("Report: ", 1)[1].strip())
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("settings", "said"),
    [(["--set", "model.ordre=3"], "model.ordre is not a key"), (["--seeds", "0"], "0 is too small")],
)
def test_bad_settings_are_refused_before_anything_goes(settings, said, tmp_path):
    kept = tmp_path / "demo" / "runs" / "kept"
    kept.mkdir(parents=True)
    ended = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo"), *settings])
    assert ended.exit_code == 2
    assert said in " ".join(ended.output.replace("│", " ").split())
    assert kept.is_dir()


@pytest.mark.parametrize("place", [".", "runs/large/seed-0"])
def test_a_demo_that_goes_on_in_the_folder_is_not_disturbed(place, tmp_path):
    trained = tmp_path / "runs" / "large" / "seed-0"
    trained.mkdir(parents=True)
    with RunDirectory(tmp_path / place).locked():
        ended = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--seeds", "1"])
    assert ended.exit_code == 2
    assert f"is being trained by process {os.getpid()}" in " ".join(ended.output.replace("│", " ").split())
    assert trained.is_dir()


@pytest.mark.slow
def test_a_killed_process_is_named_in_plain_words(tmp_path):
    wanted = demo.plan(tmp_path, 1, (*QUICK, "training.steps=100000", "compression.when={steps: [1, 2]}"))

    def kill(label, seed, step):
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(RunError, match=r"a process of the demo was killed.*; not finished: large, seed 0\. Run the"):
        demo.run(wanted, processes=1, progress=kill)


@pytest.mark.usefixtures("in_one_process")
def test_a_training_that_fails_says_why_and_exits_1(tmp_path):
    settings = [*QUICK, "compression.when={steps: [1, 2]}", "training.learning_rate=1e30"]
    options = [part for setting in settings for part in ("--set", setting)]
    ended = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "demo"), "--seeds", "1", *options])
    assert ended.exit_code == 1
    assert isinstance(ended.exception, SystemExit)
    assert "A smaller learning rate may help" in ended.output


def test_the_table_has_a_row_a_model_with_spread_and_speed_up():
    found = demo_grids(made(large=[98, 98, 98], small=[94, 95, 96], compressed=[97, 98, 96], white_noise=[90, 91, 92]))
    lines = {row[0]: row[1:] for row in found[0].rows}
    assert lines["large"] == ("128", "98.0 ± 0.0", "20.0 ± 0.0", "1.00", "")
    assert lines["compressed"] == ("128 → 4", "97.0 ± 1.0", "10.0 ± 0.0", "2.00", "none: P is measured")
    assert lines["white noise"][-1] == "3, 4"


def test_it_says_when_the_method_did_not_help():
    better = demo_says(made(large=[98, 98], small=[94, 95], compressed=[97, 96]))[0]
    assert "better than" in better
    assert "+2.0 points on the mean, ahead in 2 of 2 seeds" in better
    worse = demo_says(made(large=[98, 98], small=[94, 95], compressed=[90, 96]))[0]
    assert "no better than" in worse
    assert "-1.5 points on the mean, ahead in 1 of 2 seeds" in worse


def test_it_says_what_is_missing():
    assert demo_says(made(large=[98], small=[94])) == ["Not trained to the end: compressed."]


def test_the_table_is_whole_on_a_terminal_of_80_columns():
    rows = made(large=[98.5, 98.3], small=[94.9, 93.1], compressed=[98.0, 97.1], white_noise=[91.9, 88.1])
    rows.rows[-2]["bounds"] = rows.rows[-1]["bounds"] = "181, 224, 291, 418, 287"
    narrow = Console(width=80, record=True, file=StringIO())
    narrow.print(as_table(demo_grids(rows)[0]))
    assert "…" not in narrow.export_text()
