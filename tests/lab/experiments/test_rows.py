"""Trainings become rows: begun, gone on with or left alone, stopped so that they save, and joined with other days'."""

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace

import pytest

from compressm_lab.experiments import rows
from compressm_lab.experiments.engine import Campaign
from compressm_lab.experiments.recipes import Arm
from compressm_lab.experiments.rows import concurrency, joined, train
from compressm_lab.runs.directory import RunDirectory, Status
from compressm_lab.runs.measurement import Measurement
from compressm_lab.training import train as train_one
from tests.lab.experiments.result_rows import row
from tests.lab.experiments.tiny import answering
from tests.lab.training.tiny import digits, recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    train_one(recipe("task.name=digits", "training.steps=9"), digits(), folder)
    return folder


def arm(name, recipe="digits", *settings):
    return Arm("", name, "", recipe, name, settings)


def test_a_training_begins_goes_on_and_is_left_alone(tmp_path, monkeypatch, capsys):
    wanted = Campaign((arm("new", "digits", "label='a b'"), arm("stopped"), arm("done")), range(1, 2), tmp_path)
    new, stopped, done = wanted.trainings()
    for training, state in ((stopped, "interrupted"), (done, "finished")):
        run = training.run
        run.begin({})
        run.model.mkdir()
        (run.model / "model.safetensors").touch()
        run.write_status(Status(state, 1, 1))
    ran = answering(monkeypatch, "print('well')")
    train(wanted, processes=1, data=tmp_path)
    assert capsys.readouterr().out == "done, seed 1: was done\nnew, seed 1: failed: it ended without a model\n" + (
        "stopped, seed 1: failed: it ended without a model\n"
    )
    place = ["--data", str(tmp_path), "--offline"]
    assert ran[0] == ["digits", "--seed", "1", "--out", str(new.folder), *place, "--set", "label='a b'"]
    assert ran[1] == [str(stopped.folder), "--resume", *place]
    answering(monkeypatch, r"print('╭─ Error ───╮\n│ Invalid value: of four │\n│ lines │\n╰───╯'); raise SystemExit(2)")
    train(replace(wanted, arms=wanted.arms[:1]), processes=1, data=None)
    assert capsys.readouterr().out == "new, seed 1: failed: exit 2: Error Invalid value: of four lines\n"


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_study_that_is_stopped_lets_its_trainings_save_and_says_how_to_go_on(tmp_path, monkeypatch, capsys, which):
    saving = f"""
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path({str(tmp_path / "saved")!r}).touch()
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
pathlib.Path({str(tmp_path / "begun")!r}).touch()
time.sleep(60)
"""
    asked = answering(monkeypatch, saving)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it

    def stop():
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), which)

    threading.Thread(target=stop).start()
    try:
        with pytest.raises(SystemExit) as end:
            train(Campaign((arm("a"), arm("b")), range(1), tmp_path), processes=1, data=None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (end.value.code, len(asked)) == (130, 1)
    assert (tmp_path / "saved").exists()
    assert "the same command goes on" in capsys.readouterr().err


def test_trainings_say_how_many_ran_at_a_time(tmp_path, monkeypatch, trained):
    wanted = Campaign((arm("a"), arm("b")), range(1), tmp_path)
    new, done = (shutil.copytree(trained, training.folder) for training in wanted.trainings())
    (new / "status.json").rename(new / "kept.json")
    (done / "together.json").write_text(json.dumps({"together": 3}))
    code = f"import os; os.rename({str(new / 'kept.json')!r}, {str(new / 'status.json')!r})"
    answering(monkeypatch, code)
    train(wanted, processes=4, data=None)
    assert concurrency(RunDirectory(new)) == {"together": 1}  # the other was done
    assert concurrency(RunDirectory(done)) == {"together": 3}
    (done / "status.json").unlink()
    train(wanted, processes=4, data=None)
    assert concurrency(RunDirectory(done)) == {"together": 3}  # part of it was trained so
    shutil.rmtree(done)
    train(replace(wanted, arms=wanted.arms[1:]), processes=4, data=None)
    assert concurrency(RunDirectory(done)) == {"together": 1}
    assert concurrency(RunDirectory(tmp_path)) == {}


def test_a_row_without_its_concurrency_takes_that_of_an_earlier_result():
    earlier = Measurement("results-smnist", "t", 1, [row("256 states", 0, together=10), row("256 states", 1)])
    new = [row("256 states", 0), row("256 states", 1), row("256 states", 2, together=3)]
    found = Measurement("results-smnist", "t", 1, new)
    rows._keep_concurrency(found, [earlier])
    assert [one.get("together") for one in found.rows] == [10, None, 3]


def test_results_of_several_days_are_joined_variant_by_variant():
    def result(*rows):
        return Measurement("imdb_mamba", "t", 1, list(rows))

    first = result(row("128 states", 1), row("baked to 16", 0, best=1.0))
    found = joined([first, result(row("baked to 16", 0), row("16 states", 0), row("128 states", 0))])
    assert [(one["variant"], one["seed"]) for one in found.rows] == [
        *(("128 states", 0), ("128 states", 1), ("baked to 16", 0), ("16 states", 0))
    ]
    assert found.rows[2]["best"] == 95.0  # of what was trained last
