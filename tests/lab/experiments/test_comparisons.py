"""Recipes with a teacher, a penalty or a cut after training, as `compressm train` runs them."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch

from compressm.compression import load_model, save_model
from compressm.layers import LRU
from compressm.models import MeanPooling, SequenceClassifier
from compressm_lab.experiments.comparisons import comparison, penalty
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.groups import group_runs, reference
from compressm_lab.runs.records import Evaluation, Timing, TruncationRecord
from compressm_lab.runs.run import read_run
from compressm_lab.training import ConfigError, Interrupted, loop, train
from compressm_lab.training.evaluation import score, truncations
from tests.cli.test_commands import plain, run
from tests.lab.training.tiny import Sending, check_same_run, copies, digits, lines, recipe, teacher, tokens, weights


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """The folder of a finished run on tokens."""
    found = recipe("training.steps=30", "model.order=8", "training.learning_rate=0.02")
    return train(found, tokens(), tmp_path_factory.mktemp("runs") / "teacher").path


def student(folder, *settings):
    return recipe(f"distillation={{teacher: {folder}}}", "model.order=2", *settings)


def learn(found, folder, task=None, **options):
    task = task or tokens()
    return train(found, task, folder, **comparison(found, task)._asdict(), **options)


def test_answers_that_are_kept_are_those_that_are_asked_for(taught, tmp_path):
    """Batch norm in evaluation mode looks at no other example: rounding is all that differs."""
    kept = learn(student(taught, "model.dropout=0"), tmp_path / "kept")
    asked = learn(student(taught, "model.dropout=0", "distillation.cache=false"), tmp_path / "asked")
    torch.testing.assert_close(weights(kept.path), weights(asked.path), rtol=1e-2, atol=1e-3)
    plain = train(recipe("model.order=2", "model.dropout=0"), tokens(), tmp_path / "plain")
    mine, its = (run.records(Evaluation)[0].loss for run in (kept, plain))
    assert mine != pytest.approx(its, rel=1e-3)
    assert any("teacher" in timing.seconds for timing in kept.records(Timing))


@pytest.mark.parametrize("cache", ["true", "false"])
def test_a_student_that_was_stopped_goes_on_bit_for_bit(cache, taught, tmp_path):
    found = student(taught, f"distillation.cache={cache}")
    whole = learn(found, tmp_path / "whole").path

    class Stopping(Sending):
        def __init__(self, inner, at):
            super().__init__(tokens().kind, at)
            self.inner = inner
            self.prepare = inner.prepare

    objective = Stopping(comparison(found, tokens()).objective, 7)
    with pytest.raises(Interrupted):
        train(found, tokens(), tmp_path / "run", objective=objective)
    learn(found, tmp_path / "run", resume=True)
    check_same_run(tmp_path / "run", whole, "metrics")


def test_a_teacher_is_left_as_it_was(taught, tmp_path):
    before = weights(taught)
    learn(student(taught), tmp_path / "run")
    assert all(torch.equal(value, before[name]) for name, value in weights(taught).items())


def test_a_saved_model_is_a_teacher_and_steps_can_be_taught(tmp_path):
    found = recipe("model.pooling=steps", "training.steps=6")
    run = train(found, copies(), tmp_path / "teacher")
    small = recipe(f"distillation={{teacher: {run.model}}}", "model.pooling=steps", "model.order=2", "training.steps=6")
    assert learn(small, tmp_path / "run", copies()).status().state == "finished"


def test_a_teacher_that_is_none_is_refused_by_name(taught, tmp_path):
    def refused(path, task=None):
        with pytest.raises(ConfigError) as error:
            comparison(recipe(f"distillation={{teacher: {path}}}"), task or tokens())
        return str(error.value)

    assert f"distillation: {tmp_path / 'no'} is no teacher, expected the folder of a finished run" in refused(
        tmp_path / "no"
    )
    assert "is a regression, expected a task with classes" in refused(taught, teacher())
    assert "cannot read digits" in refused(taught, digits())
    other = SequenceClassifier(LRU, depth=1, width=2, order=2, vocabulary=3, classes=5, pooling=MeanPooling())
    save_model(other, tmp_path / "other")
    assert "answers tokens with (5,) numbers, expected (2,)" in refused(tmp_path / "other")
    with pytest.raises(Interrupted):
        train(recipe(), tokens(), tmp_path / "half", objective=Sending(tokens().kind, 3))
    assert "is a run that has not finished" in refused(tmp_path / "half")


def test_a_teacher_that_learned_on_another_task_is_refused(taught, tmp_path):
    copied = shutil.copytree(taught, tmp_path / "copied")
    config = json.loads((copied / "config.json").read_text())
    config["task"]["seed"] = 5
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"copied learned on {.*'seed': 5.*}, expected {.*}, as its student"):
        comparison(student(copied), tokens())


def test_a_signal_is_heard_between_copies_that_are_cut(tmp_path, monkeypatch):
    found = recipe("truncation={orders: [5, 3, 2]}")
    whole = learn(found, tmp_path / "whole").records(TruncationRecord)
    cut = []

    def slowly(*given):
        for record in truncations(*given):
            cut.append(record)
            if len(cut) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield record

    monkeypatch.setattr(loop, "truncations", slowly)
    with pytest.raises(Interrupted, match="SIGTERM at step 16"):
        learn(found, tmp_path / "run")
    directory = RunDirectory(tmp_path / "run")
    assert (len(cut), directory.records(TruncationRecord), directory.status().state) == (2, [], "interrupted")
    learn(found, tmp_path / "run", resume=True)
    assert directory.records(TruncationRecord) == whole
    assert directory.finished


@pytest.mark.parametrize("gramian", ["white_noise", "measured", "modal"])
def test_a_model_is_cut_once_after_training_to_every_order_and_stays_whole(gramian, tmp_path):
    found = recipe(f"truncation={{orders: [5, 2], gramian: {gramian}}}")
    directory = learn(found, tmp_path / "run")
    records = directory.records(TruncationRecord)
    assert [(r.order, r.mean_order, r.split) for r in records] == [
        (order, order, split) for order in (5, 2) for split in ("validation", "test")
    ]
    assert all((r.error_bound is None) == (gramian == "measured") for r in records)
    assert all(r.gramian == gramian and r.step == 16 for r in records)
    whole = load_model(directory.model)
    assert whole.blocks[0].ssm.order == 6
    assert score(whole, tokens(), tokens().test).loss == directory.records(Evaluation)[-1].loss
    # Once is enough, also where a killed run had everything but its model.
    (directory.path / "status.json").write_text(
        json.dumps({"state": "running", "step": 16, "steps": 16, "message": ""})
    )
    learn(found, tmp_path / "run", resume=True)
    assert directory.records(TruncationRecord) == records


def test_a_selective_model_is_cut_by_averages_over_data(tmp_path):
    records = learn(recipe("truncation={orders: [2]}", "model.layer=Mamba"), tmp_path / "run").records(TruncationRecord)
    assert {(r.gramian, r.mean_order, r.error_bound) for r in records} == {("selective", 2, None)}


def test_penalties_have_the_options_of_the_recipe():
    found = recipe("regulariser={kind: hankel-nuclear-norm, beta: 1, floor: 0.01, fold: false}").regulariser
    assert str(penalty(found)) == "HankelNuclearNorm(floor=0.01, fold=False, mean=False)"
    assert penalty(replace(found, over="mean")).mean
    assert not penalty(replace(found, over="sum")).mean


def test_a_regularised_group_is_not_what_speeds_are_measured_by(tmp_path):
    plain = train(recipe(), tokens(), tmp_path / "plain")
    mine = learn(recipe("regulariser={kind: modal-l1, beta: 0.1}"), tmp_path / "mine")
    groups = group_runs([read_run(mine), read_run(plain)])
    assert {reference(group, groups).label for group in groups} == {"baseline"}


def test_the_command_trains_a_teacher_a_student_and_with_a_penalty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = ["--offline", "--set", "training.steps=4", "--set", "training.batch=8", "--set", "model.width=4"]
    lonely = run("train", "digits-distillation", *quick)
    assert lonely.exit_code == 2
    assert "out/runs/digits/baseline-n128/seed-0 is no teacher" in plain(lonely)
    assert not (tmp_path / "out" / "runs" / "digits" / "distilled-n4").exists()
    assert run("train", "digits-hnn", "--baseline", *quick).exit_code == 0
    assert RunDirectory("out/runs/digits/baseline-n128/seed-0").config()["regulariser"] is None
    assert run("train", "digits-distillation", *quick).exit_code == 0
    assert (tmp_path / "out/runs/digits/distilled-n4/seed-0/model").is_dir()
    stored = RunDirectory("out/runs/digits/distilled-n4/seed-0").config()["distillation"]["teacher"]
    assert stored == str(tmp_path / "out/runs/digits/baseline-n128/seed-0")  # from wherever it is resumed
    said = run("train", "digits-hnn", "--set", "model.order=6", "--set", "truncation.orders=[3, 1]", *quick)
    assert said.exit_code == 0, said.output
    assert "hankel-nuclear-norm" in said.output
    assert "cut once to 3 states by white noise: test" in said.output
    assert "cut once to 1 state by white noise: test" in said.output
    folder = tmp_path / "out/runs/digits/regularised-n6/seed-0"
    assert [line["order"] for line in lines(folder, "truncations")] == [3, 3, 1, 1]
    assert lines(folder, "penalties")
