"""Runs whose cuts find their steps and orders: the recipe, its records, the report, and resuming bit for bit."""

import pytest
import torch

from compressm_lab.experiments.recipes import AUTOMATIC, find_recipe
from compressm_lab.reports.run_report import decision_grid
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import CutRecord, DecisionRecord, RunError
from compressm_lab.runs.run import read_run
from compressm_lab.training import ConfigError, Interrupted, Plan, train
from compressm_lab.training.building import held_out
from compressm_lab.training.config import AutomaticConfig
from tests.lab.training.tiny import Sending, check_same_run, digits, recipe
from tests.marks import later

SETTINGS = (
    "name=tiny-digits",
    "task={name: digits}",
    "model={depth: 2, width: 4, order: 8, dropout: 0.0}",
    "training.steps=120",
    "compression={when: automatic, loss_tolerance: 0.0005, gramian: measured}",
)


def automatic(*settings):
    return recipe(*SETTINGS, *settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("automatic") / "whole"
    train(automatic(), digits(), folder)
    return folder


def test_the_word_automatic_is_a_schedule_without_listed_steps():
    plan = Plan.of(automatic())
    assert list(plan.cuts) == []
    assert str(plan).splitlines()[1].startswith("cuts tried: at most 28 tries, from step 9")
    assert automatic().compression.when.automatic is True
    assert automatic("compression.when={automatic: true}") == automatic()
    changed = automatic("compression.when={automatic: {recover: 0.5, every: 10}}")
    assert str(Plan.of(changed)).splitlines()[1].startswith("cuts tried: at most 4 tries")
    assert changed.compression.when.automatic == AutomaticConfig(recover=0.5, every=10)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("compression.when={automatic: false}",), "automatic is false"),
        (("compression.when={automatic: true, every: 3}",), "when has every and automatic"),
        (("compression.when={automatic: {recover: 1.5}}",), "recover is 1.5, expected a number at least 0 and below 1"),
        (("compression.when={automatic: {recovery: 0.5}}",), "recovery"),
        (("compression.tau=0.1",), "tau and loss_tolerance"),
        (("compression.loss_tolerance=-1",), "loss_tolerance is -1"),
        (("compression.loss_tolerance=null", "compression.tau=0.1", "compression.loss_batches=2"), "loss_batches is 2"),
        (("compression.rollback={settle: 40}",), "judges a cut 40 steps later"),
    ],
)
def test_bad_keys_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        Plan.of(automatic(*settings))


def test_the_records_say_what_was_decided_and_why(whole):
    run = read_run(RunDirectory(whole))
    assert run.decisions
    assert {one.action for one in run.decisions} <= {"wait", "cut", "keep", "stop"}
    assert {cut.step for cut in run.cut_records} == {one.step for one in run.decisions if one.action == "cut"}
    assert all(one.reason for one in run.decisions)
    assert all(cut.loss_after <= cut.loss_before * 1.0005 + 1e-9 for cut in run.cut_records)
    grid = decision_grid(run)
    assert len(grid.rows) == len(run.decisions)
    assert grid.heads[1:3] == ("decision", "reason")


@pytest.mark.parametrize("at", later([2, 20, 24, 40], 20, 40))
def test_a_run_that_was_stopped_goes_on_bit_for_bit(at, whole, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(automatic(), digits(), folder, objective=Sending(digits().kind, at))
    train(automatic(), digits(), folder, resume=True)
    check_same_run(folder, whole, "metrics", "cuts", "decisions")


def test_a_run_that_lost_its_decisions_does_not_go_on(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(automatic(), digits(), folder, objective=Sending(digits().kind, 30))
    (folder / "decisions.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"decisions.jsonl lacks \d+ of \d+ decisions"):
        train(automatic(), digits(), folder, resume=True)


def test_trials_are_judged_on_the_same_validation_examples_for_every_seed():
    splits = [held_out(automatic(*more), digits()) for more in (("seed=1",), ("seed=2",))]
    assert torch.equal(splits[0].inputs, splits[1].inputs)
    few = held_out(automatic("training.evaluation_batch=7", "compression.loss_batches=2"), digits())
    assert len(few) == 14
    rows = {tuple(row.flatten().tolist()) for row in digits().validation.inputs}
    assert all(tuple(row.flatten().tolist()) in rows for row in few.inputs)


def test_automatic_settings_replace_any_policy_of_a_recipe():
    for name in ("digits", "smnist", "scifar", "digits-mamba"):
        found = find_recipe(name, AUTOMATIC)
        assert (found.compression.loss_tolerance, found.compression.when.automatic) == (0.01, True)
        assert found.label == "automatic"


def test_records_of_earlier_versions_have_no_losses():
    stored = {"step": 1, "module": "a", "order": 3, "rank": 2, "error_bound": None, "measured_error": None}
    cut = CutRecord.from_dict(stored | {"energy_lost": 0.1, "seconds": 0.1})
    assert cut.loss_after is None
    assert "loss_after" not in cut.as_dict()
    decision = DecisionRecord(3, "wait", "because", 5)
    assert DecisionRecord.from_dict(decision.as_dict()) == decision


@pytest.mark.parametrize(
    ("change", "said"),
    [({"action": "fly"}, "action is 'fly', expected one of wait"), ({"again": 3}, "again is 3, expected a step after")],
)
def test_edited_decisions_are_refused(change, said):
    stored = DecisionRecord(3, "wait", "because", 5).as_dict()
    with pytest.raises(RunError, match=said):
        DecisionRecord.from_dict(stored | change)
