"""Steps that are replayed from a CUDA graph are the steps of a plain loop."""

import pytest
import torch

from compressm.compression import Compressor, TargetOrder
from compressm_lab.baselines import HankelNuclearNorm
from compressm_lab.data import Order
from compressm_lab.experiments.comparisons import comparison
from compressm_lab.runs.records import CutRecord, Evaluation, PenaltyRecord, Timing
from compressm_lab.training import (
    CompressionConfig,
    DistillationConfig,
    Interrupted,
    ModelConfig,
    Recipe,
    RegulariserConfig,
    SelectiveConfig,
    SpectraConfig,
    TrainingConfig,
    WhenConfig,
    train,
)
from compressm_lab.training.building import build_model, build_optimizer
from compressm_lab.training.clock import Clock
from compressm_lab.training.steps import GraphSteps, Learner, Steps, task_objective
from tests.lab.training.tiny import Sending, lines, tokens

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
_PARTS = ("compression", "spectra", "regulariser", "distillation")


def recipe(steps=40, dropout=0.0, learning_rate=0.01, **others):
    """Without pydantic, which a machine with a GPU may not have."""
    parts = {name: others.pop(name) for name in _PARTS if name in others}
    model = others.pop("model", {})
    training = {"batch": 8, "schedule": "cosine", "evaluate_every": 4, "checkpoint_every": 6, **others}
    return Recipe(
        name="tiny",
        task={"name": "tokens"},
        model=ModelConfig(depth=1, width=4, order=6, dropout=dropout, **model),
        training=TrainingConfig(steps=steps, learning_rate=learning_rate, **training),
        **parts,
    )


def steps_of(kind, **options):
    found, task = recipe(**options), tokens().to(DEVICE)
    torch.manual_seed(0)
    model = build_model(found.model, task).to(DEVICE)
    optimizer = build_optimizer(model, found.training, DEVICE)
    learner = Learner(model, optimizer, task_objective(task.kind), task, Order(64, 8, 0), found.training)
    return kind(learner, Clock(DEVICE))


def losses(steps, first, last):
    """One by one."""
    found = []
    for step in range(first, last + 1):
        steps.clear()
        assert steps.run(step, step, lambda: False) == step
        found.append(steps.totals().loss)
    return found


def test_a_graph_learns_what_a_plain_loop_learns_before_and_after_a_cut():
    """With a rate that rises and falls inside the graph."""
    found = []
    for kind in (Steps, GraphSteps):
        steps = steps_of(kind, clip=1.0, ssm_factor=0.5, weight_decay=0.05)
        before = losses(steps, 1, 12)
        learner = steps.learner
        assert Compressor(learner.model, learner.optimizer, when=[12], keep=TargetOrder(3)).step(12)
        steps.renew()
        found.append(before + losses(steps, 13, 24))
        rates = [float(group["lr"]) for group in learner.optimizer.param_groups]
        assert rates == pytest.approx([0.5 * learner.config.rate(24), learner.config.rate(24)], rel=1e-5)
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert found[0][-1] < found[0][0]


def test_many_replays_together_count_every_step():
    together, single = steps_of(GraphSteps), steps_of(Steps)
    assert together.run(1, 40, lambda: False) == single.run(1, 40, lambda: False) == 40
    mine, its = together.totals(), single.totals()
    assert (mine.steps, mine.asked) == (its.steps, its.asked) == (40, 320)
    assert mine.loss == pytest.approx(its.loss, rel=1e-3)


def test_dropout_differs_from_replay_to_replay():
    steps = steps_of(GraphSteps, learning_rate=0.0, lowest_rate=0.0, dropout=0.5)
    steps.learner.order = Order(8, 8, 0)  # the same examples at every step
    found = losses(steps, 1, 12)
    assert len({round(loss, 6) for loss in found[4:]}) > 4


def test_a_run_on_a_gpu_is_cut_stopped_and_goes_on_with_its_rates(tmp_path):
    found = recipe(
        steps=24,
        compression=CompressionConfig(rho=0.7, gate=1.0, when=WhenConfig(steps=(5, 11))),
        spectra=SpectraConfig(every=3, changes=True),
    )
    whole = train(found, tokens(), tmp_path / "whole", device="cuda")
    assert [cut.rank for cut in whole.records(CutRecord)] == [4, 2]
    assert any("capture" in timing.seconds for timing in whole.records(Timing))
    with pytest.raises(Interrupted):
        # Called in steps 1, 2 and 3, once for the recording, and after the cut of step 5 in 6, 7 and 8.
        train(found, tokens(), tmp_path / "run", device="cuda", objective=Sending(tokens().kind, 6))
    train(found, tokens(), tmp_path / "run", device="cuda", resume=True)
    assert [c["rank"] for c in lines(tmp_path / "run", "cuts")] == [4, 2]
    mine, its = ([line["loss"] for line in lines(folder, "metrics")] for folder in (whole.path, tmp_path / "run"))
    assert mine == pytest.approx(its, rel=2e-3)
    assert whole.records(Evaluation)[-1].learning_rate == pytest.approx(1e-7)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["baked", "shared-index", "per-channel"])
def test_graphs_of_mamba_layers_are_recorded_anew_after_a_cut(kind, precision, tmp_path):
    """The rows of x_proj, and with states of their own whole maps, have other shapes then."""
    method = SelectiveConfig(kind=kind, surrogate="mean" if kind == "per-channel" else None)
    found = recipe(
        steps=24,
        model={"layer": "Mamba", "norm": "rms"},
        precision=precision,
        compression=CompressionConfig(rho=0.7, gate=1.0, when=WhenConfig(steps=(5, 11)), selective=method),
        spectra=SpectraConfig(every=6),
    )
    runs = [train(found, tokens(), tmp_path / device, device=device) for device in ("cuda", "cpu")]
    timings = runs[0].records(Timing)
    for begin in (0, 5, 11):  # at the start and after each cut
        assert "capture" in next(timing for timing in timings if timing.step > begin).seconds
    assert "capture" not in timings[-1].seconds
    assert runs[0].records(CutRecord)[-1].rank <= 3
    mine, its = ([e.loss for e in run.records(Evaluation)] for run in runs)
    assert mine == pytest.approx(its, rel=2e-2 if precision == "float32" else 0.1)


@pytest.mark.parametrize("hold", [True, False])
def test_a_graph_adds_a_penalty_as_a_plain_loop_does_before_and_after_a_cut(hold, tmp_path):
    """Its gradient is found outside the graph, at other steps than those that warm it up."""
    found = recipe(
        steps=40,
        compression=CompressionConfig(rho=0.7, gate=1.0, when=WhenConfig(steps=(20,))),
        regulariser=RegulariserConfig(kind="hankel-nuclear-norm", beta=0.05, every=5, hold=hold),
    )
    penalty = HankelNuclearNorm()
    runs = [train(found, tokens(), tmp_path / device, device=device, penalty=penalty) for device in ("cuda", "cpu")]
    mine, its = ([record.value for record in run.records(PenaltyRecord)] for run in runs)
    assert mine == pytest.approx(its, rel=2e-2)
    assert mine[-1] < mine[0]
    mine, its = ([e.loss for e in run.records(Evaluation)] for run in runs)
    assert mine == pytest.approx(its, rel=2e-2)


@pytest.mark.parametrize("cache", [True, False])
def test_a_graph_learns_from_a_teacher(cache, tmp_path):
    teacher = train(recipe(steps=8), tokens(), tmp_path / "teacher", device="cpu")
    config = DistillationConfig(teacher=str(teacher.path), cache=cache)
    found = recipe(steps=24, distillation=config)
    runs = []
    for device in ("cuda", "cpu"):
        objective = comparison(found, tokens()).objective
        runs.append(train(found, tokens(), tmp_path / device, device=device, objective=objective))
    mine, its = ([e.loss for e in run.records(Evaluation)] for run in runs)
    assert mine == pytest.approx(its, rel=2e-2)
