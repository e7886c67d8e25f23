import json
import re
import time
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from compressm.compression import load_model
from compressm.layers import LRU
from compressm.models import OneMask, SequenceClassifier
from compressm_lab.data import Order
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import CutRecord, Evaluation, RestoredRecord, RunError, Spectrum, Timing
from compressm_lab.training import ConfigError, Silent, train
from compressm_lab.training.clock import Clock
from compressm_lab.training.steps import task_objective
from tests.lab.training.tiny import (
    CUTS,
    SPECTRA,
    check_same_run,
    copies,
    digits,
    lines,
    pairs,
    recipe,
    teacher,
    tokens,
    weights,
)

STEPS = "model.pooling=steps"
FAST = ("training.steps=30", "training.evaluate_every=15", "training.learning_rate=0.05", "training.schedule=constant")


@pytest.mark.parametrize(
    ("task", "settings"),
    [(copies, [STEPS]), (teacher, [STEPS]), (digits, ["training.batch=25"]), (tokens, []), (pairs, [])],
    ids=["copies", "teacher", "digits", "tokens", "pairs"],
)
def test_every_kind_of_task_is_learnt(task, settings, tmp_path):
    found = recipe(*FAST, *settings, "compression={rho: 0.7, gate: 1.0, when: {steps: [10]}}")
    run = train(found, task(), tmp_path / "run")
    evaluations = run.records(Evaluation)
    first, last = (
        {e.split: e for e in evaluations if e.step == step} for step in (evaluations[0].step, evaluations[-1].step)
    )
    assert last["train"].loss < 0.97 * first["train"].loss
    assert [e.split for e in evaluations] == ["train", "validation", "test"] * 2
    assert all((e.accuracy is None) is (task is teacher) for e in evaluations)
    assert run.status().state == "finished"


def test_a_recipe_of_mamba_layers_is_learnt(tmp_path):
    options = ("model.layer=Mamba", "model.norm=rms", "model.layer_options={conv_width: 2}")
    run = train(recipe(*FAST, *options), pairs(), tmp_path / "run")
    losses = [e.loss for e in run.records(Evaluation) if e.split == "train"]
    assert losses[-1] < 0.97 * losses[0]
    assert load_model(run.path / "model").blocks[0].ssm.conv_width == 2


@pytest.mark.parametrize("gramian", ["white_noise", "measured"])
def test_mamba_layers_shrink_by_training_data_and_their_spectra_are_recorded(gramian, tmp_path):
    cuts = f"compression={{rho: 0.5, gate: 1.0, gramian: {gramian}, when: {{steps: [10]}}}}"
    found = recipe(*FAST, SPECTRA, cuts, "model.layer=Mamba", "model.norm=rms")
    run = train(found, tokens(), tmp_path / "run")
    (cut,) = run.records(CutRecord)
    assert (cut.order, cut.rank, cut.error_bound) == (6, 3, None)
    assert 0 < cut.measured_error < 1
    assert load_model(run.path / "model").blocks[0].ssm.order == 3
    assert {len(spectrum.sigma) for spectrum in run.records(Spectrum)} == {6, 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with two cuts and everything recorded."""
    return train(recipe(CUTS, SPECTRA), tokens(), tmp_path_factory.mktemp("runs") / "whole")


def test_the_run_directory_holds_everything(whole):
    names = {path.name for path in whole.path.iterdir()}
    assert names == {
        *("config.json", "environment.json", "status.json", "task.json", "checkpoints", "model"),
        *("metrics.jsonl", "cuts.jsonl", "spectra.jsonl", "timings.jsonl"),
    }
    assert whole.config() == json.loads(json.dumps(recipe(CUTS, SPECTRA).as_dict()))
    assert whole.environment().torch == torch.__version__
    assert (whole.status().state, whole.status().step, whole.status().steps) == ("finished", 16, 16)
    assert sorted(path.name for path in whole.checkpoints.iterdir()) == ["step-00000012.pt", "step-00000016.pt"]


def test_evaluations_are_at_their_steps_with_the_rate_of_the_step(whole):
    evaluations = whole.records(Evaluation)
    expected = [(step, split) for step in (4, 8, 12, 16) for split in ("train", "validation", "test")]
    assert [(e.step, e.split) for e in evaluations] == expected
    assert all(e.learning_rate == recipe().training.rate(e.step) for e in evaluations)
    assert [e.seconds for e in evaluations] == sorted(e.seconds for e in evaluations)


def test_a_cut_changes_the_orders_from_its_step_on(whole):
    cuts = whole.records(CutRecord)
    assert [(c.step, c.module, c.order, c.rank) for c in cuts] == [
        (5, "blocks.0.ssm", 6, 4),
        (11, "blocks.0.ssm", 4, 3),
    ]
    assert all(c.error_bound > 0 and 0 < c.energy_lost < 1 for c in cuts)
    sizes = {s.step: len(s.sigma) for s in whole.records(Spectrum)}
    # A spectrum of the step of a cut would be that before it.
    assert sizes == {0: 6, 3: 6, 6: 4, 9: 4, 12: 3, 15: 3, 16: 3}
    assert load_model(whole.model).blocks[0].ssm.order == 3


def test_no_singular_value_moves_further_than_the_bound(whole):
    spectra = whole.records(Spectrum)
    assert [s.weyl_bound is None for s in spectra] == [True, False, True, False, True, False, False]
    for before, now in pairwise(spectra):
        if now.weyl_bound is not None:
            moved = max(abs(a - b) for a, b in zip(before.sigma, now.sigma, strict=True))
            assert 0 < moved <= now.weyl_bound * (1 + 1e-6)


def test_times_add_up_and_steps_are_counted_at_the_orders_they_ran_at(whole):
    timings, last = whole.records(Timing), whole.records(Evaluation)[-1]
    assert sum(t.steps for t in timings) == 16
    spent = [(t.step, t.steps, t.orders["blocks.0.ssm"]) for t in timings]
    assert spent == [(4, 4, 6), (5, 1, 6), (8, 3, 4), (11, 3, 4), (12, 1, 3), (16, 4, 3), (16, 0, 3)]
    phases = {}
    for timing in timings:
        for name, seconds in timing.seconds.items():
            phases[name] = phases.get(name, 0.0) + seconds
    assert set(phases) == {"steps", "evaluation", "spectrum", "cut", "optimizer", "checkpoint"}
    assert all(seconds > 0 for seconds in phases.values())
    # All but the last checkpoint was there when the last record was made.
    assert last.seconds == pytest.approx(sum(phases.values()) - timings[-1].seconds["checkpoint"])
    assert last.step_seconds == pytest.approx(phases["steps"])
    for timing in timings:
        assert set(timing.cpu) == set(timing.seconds)
        assert timing.load is not None
        assert timing.gpu is None
    assert sum(timing.cpu["steps"] for timing in timings if "steps" in timing.cpu) > 0


def test_waiting_is_time_on_the_wall_and_not_of_the_processor():
    clock = Clock(torch.device("cpu"))
    with clock.phase("cut"):
        time.sleep(0.05)
        with clock.phase("spectrum"):
            torch.linalg.eigvalsh(torch.eye(40, dtype=torch.float64))
    wall, cpu, gpu = clock.take()
    assert wall["cut"] >= 0.05 > cpu["cut"]
    assert wall["spectrum"] > 0 < cpu["spectrum"]
    assert gpu is None
    assert clock.peek().wall == {}


@pytest.mark.parametrize("known", [{"wall": {"steps": 2.0}}, {"wall": {"steps": 2.0}, "cpu": {"steps": 1.0}}])
def test_a_clock_goes_on_with_what_a_checkpoint_knows(known):
    clock = Clock(torch.device("cpu"))
    clock.restore(3.0, 2.0, known)
    assert clock.peek() == ({"steps": 2.0}, known.get("cpu", {}), None)


def plain_training(found, task):
    """As one writes it by hand: no plan, no evaluation, no checkpoint."""
    model_config, training = found.model, found.training
    torch.manual_seed(found.seed)
    model = SequenceClassifier(
        LRU, depth=1, width=4, order=6, classes=2, vocabulary=3, dropout=OneMask(model_config.dropout)
    )
    slow = [p for n, p in model.named_parameters() if ".ssm." in n and n.rsplit(".", 1)[1][0] not in "CD"]
    rest = [p for p in model.parameters() if all(p is not other for other in slow)]
    groups = [{"params": slow, "weight_decay": 0.0}, {"params": rest, "weight_decay": training.weight_decay}]
    optimizer = torch.optim.AdamW(groups, fused=True)
    losses = []
    for step, rows in enumerate(Order(len(task.train), training.batch, found.seed).rows(1, training.steps), start=1):
        for group, factor in zip(optimizer.param_groups, (training.ssm_factor, 1.0), strict=True):
            group["lr"] = factor * training.rate(step)
        logits = model(task.train.inputs[rows].long(), task.train.lengths[rows])
        loss = functional.cross_entropy(logits, task.train.targets[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def test_training_is_a_plain_loop_bit_for_bit(tmp_path):
    found = recipe(SPECTRA, "training.ssm_factor=0.25", "training.weight_decay=0.05", "training.clip=0.5", "seed=3")
    run = train(found, tokens(), tmp_path / "run")
    model, losses = plain_training(found, tokens())
    mine = weights(run.path)
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in mine.items()
    }
    recorded = [e.loss for e in run.records(Evaluation) if e.split == "train"]
    assert recorded == pytest.approx([sum(losses[k : k + 4]) / 4 for k in range(0, 16, 4)], rel=1e-12)


def test_the_same_seed_gives_the_same_run_and_another_one_another(whole, tmp_path):
    torch.rand(5)  # what came before does not matter
    check_same_run(train(recipe(CUTS, SPECTRA), tokens(), tmp_path / "again").path, whole.path)
    other = train(recipe(CUTS, SPECTRA, "seed=1"), tokens(), tmp_path / "other")
    assert lines(other.path, "metrics") != lines(whole.path, "metrics")


def test_evaluations_and_spectra_do_not_change_what_is_learnt(whole, tmp_path):
    often = recipe(CUTS, "training.evaluate_every=3", "training.checkpoint_every=100")
    assert {k: v.tolist() for k, v in weights(train(often, tokens(), tmp_path / "run").path).items()} == {
        k: v.tolist() for k, v in weights(whole.path).items()
    }


GUARDED = "compression={order: 1, gate: 1.0, when: {steps: [5]}, rollback: {drop: 0.0, settle: 3}}"


def test_a_cut_that_did_harm_is_undone_and_recorded(tmp_path):
    class Worse(Silent):
        """Breaks the model after the cut: what is judged is worse than before."""

        def happened(self, event):
            events.append(event)

    def objective(model, batch):
        outcome = task_objective(task.kind)(model, batch)
        return outcome if not events else outcome._replace(loss=-10 * outcome.loss)

    events, task = [], tokens()
    run = train(recipe(GUARDED), task, tmp_path / "run", logger=Worse(), objective=objective)
    (restored,) = run.records(RestoredRecord)
    assert (restored.step, restored.orders) == (8, {"blocks.0.ssm": 6})
    assert re.fullmatch(
        r"validation accuracy fell by \S+ %, from \S+ to \S+ after the cut; 0 % is allowed", restored.reason
    )
    assert [(c.step, c.rank) for c in run.records(CutRecord)] == [(5, 1)]
    assert [type(event).__name__ for event in events] == ["Cut", "Restored"]
    timed = [(t.step, t.steps, t.orders["blocks.0.ssm"]) for t in run.records(Timing)]
    assert timed[:4] == [(4, 4, 6), (5, 1, 6), (8, 3, 1), (8, 0, 6)]
    assert load_model(run.model).blocks[0].ssm.order == 6
    # The guard's own evaluations, before the cut and when it judged, are no part of the cut.
    assert "evaluation" in run.records(Timing)[1].seconds


def test_a_listener_hears_all_of_it(tmp_path):
    class Ear(Silent):
        def begins(self, recipe, plan, step):
            heard.append(("begins", recipe.name, plan.steps, step))

        def reached(self, step, loss):
            heard.append(("reached", step, loss > 0))

        def evaluated(self, evaluation):
            heard.append((evaluation.split, evaluation.step))

    heard = []
    train(recipe("training.steps=4", "training.evaluate_every=2"), tokens(), tmp_path / "run", logger=Ear())
    each = [[("reached", s, True), ("train", s), ("validation", s), ("test", s)] for s in (2, 4)]
    assert heard == [("begins", "tiny", 4, 0), *each[0], *each[1]]


def test_half_precision_trains(tmp_path):
    run = train(recipe(CUTS, "training.precision=bfloat16", "training.steps=12"), tokens(), tmp_path / "run")
    assert run.records(CutRecord)[-1].rank == 3
    assert {value.dtype for value in weights(run.path).values()} == {torch.float32, torch.int64}


def test_a_run_is_not_written_over(whole):
    before = {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="already holds a run"):
        train(recipe(), tokens(), whole.path)
    assert {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["training.batch=65"], "64 examples are fewer than a batch of 65"),
        (["model.layer_options={colour: red}"], "model.layer_options: LRU has no option 'colour'"),
        (["model.norm_options={momentum: 3.0}"], "momentum is 3.0"),
        (["compression={rho: 0.5, when: {every: 30}}"], "would never fire"),
    ],
)
def test_what_cannot_be_built_leaves_no_run_behind(settings, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        train(recipe(*settings), tokens(), tmp_path / "run")
    assert not RunDirectory(tmp_path / "run").exists


def test_a_task_that_the_model_cannot_answer_is_refused(tmp_path):
    said = r"model\.pooling is steps, and the task asks for one class a sequence: expected mean or last"
    with pytest.raises(ConfigError, match=said):
        train(recipe(STEPS), pairs(), tmp_path / "run")


def test_a_cut_that_is_held_back_is_told(tmp_path):
    """Otherwise a gate cannot be told from a schedule that never fires."""
    told = []

    class Kept(Silent):
        def kept(self, step):
            told.append(step)

    held = "compression={tau: 0.0, when: {steps: [5, 11]}}"
    run = train(recipe(held), tokens(), tmp_path / "run", logger=Kept())
    assert told == [5, 11]
    assert run.records(CutRecord) == []
