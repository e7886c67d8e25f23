import pytest
import torch

from compressm.compression import load_checkpoint
from compressm_lab.baselines import ModalL1
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.training import CutError, Diverged, train
from compressm_lab.training.building import build_model
from compressm_lab.training.steps import task_objective
from tests.lab.training.tiny import CUTS, SPECTRA, recipe, tokens


class Failing:
    """At one gradient step the loss, or only its gradient, is not finite."""

    def __init__(self, at, value=torch.nan, *, only_gradient=False):
        self.at, self.value, self.only_gradient, self.steps = at, value, only_gradient, 0

    def __call__(self, model, batch):
        self.steps += 1
        outcome = task_objective(tokens().kind)(model, batch)
        if self.steps != self.at:
            return outcome
        weight = next(model.parameters()).sum()
        # √|x − x| is 0, with a gradient of 0 · ∞.
        extra = (weight - weight).abs().sqrt() if self.only_gradient else self.value
        return outcome._replace(loss=outcome.loss + extra)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_ends_the_run_with_the_last_good_checkpoint(value, tmp_path):
    found = recipe("training.keep_checkpoints=1")
    with pytest.raises(Diverged) as error:
        train(found, tokens(), tmp_path / "run", objective=Failing(7, value))
    newest = tmp_path / "run" / "checkpoints" / "step-00000006.pt"
    said = f"the loss is not finite at step 8; the last good checkpoint is {newest}. A smaller learning rate may help"
    assert str(error.value) == said
    status = RunDirectory(tmp_path / "run").status()
    assert (status.state, status.step, status.message) == ("failed", 8, said)
    model = build_model(found.model, tokens())
    assert load_checkpoint(newest, model=model).step == 6
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("step", [6, 12])
def test_weights_that_are_not_finite_are_never_saved(step, tmp_path):
    """The loss of the last step before a checkpoint was finite, its gradient was not."""
    found = recipe("training.keep_checkpoints=1")
    with pytest.raises(Diverged, match=f"the weights are not finite at step {step}; ") as error:
        train(found, tokens(), tmp_path / "run", objective=Failing(step, only_gradient=True))
    saved = [path.name for path in (tmp_path / "run").glob("checkpoints/*")]
    assert saved == ([] if step == 6 else ["step-00000006.pt"])
    assert (saved[0] if saved else "there is no checkpoint yet") in str(error.value)


def test_a_run_that_diverged_goes_on_from_its_last_good_checkpoint(tmp_path):
    found = recipe()
    whole = train(found, tokens(), tmp_path / "whole")
    with pytest.raises(Diverged):
        train(found, tokens(), tmp_path / "run", objective=Failing(9))
    train(found, tokens(), tmp_path / "run", resume=True)
    assert RunDirectory(tmp_path / "run").status() == whole.status()


def test_weights_that_explode_at_once_are_a_divergence_too(tmp_path):
    """The run ends with one sentence, not with a traceback."""
    with pytest.raises(Diverged, match=r"the loss is not finite at step \d+; there is no checkpoint yet"):
        train(recipe("training.learning_rate=1e30", "training.schedule=constant"), tokens(), tmp_path / "run")
    assert RunDirectory(tmp_path / "run").status().state == "failed"


def test_a_penalty_that_outweighs_the_loss_is_named_beside_the_learning_rate(tmp_path):
    found = recipe("regulariser={kind: modal-l1, beta: 1.0e+300}", "compression=null")
    with pytest.raises(Diverged, match="A smaller learning rate, or beta of the penalty, may help"):
        train(found, tokens(), tmp_path / "run", penalty=ModalL1())


def test_layers_that_training_made_uncuttable_end_the_run_with_one_sentence(tmp_path):
    """A traceback, or the exit code of a command that was mistyped, would say nothing of the training."""
    found = recipe("training.learning_rate=30", "training.schedule=constant", SPECTRA)
    with pytest.raises(
        CutError, match=r"no spectrum can be made at step \d+: blocks\.0\.ssm: .* smaller learning rate"
    ):
        train(found, tokens(), tmp_path / "run")
    status = RunDirectory(tmp_path / "run").status()
    assert (status.state, status.message[:9]) == ("failed", "no spectr")


def test_moments_that_are_not_finite_end_the_run_at_the_cut(tmp_path):
    class Heavy:
        """A gradient whose square is not finite in float32."""

        def __call__(self, model, batch):
            outcome = task_objective(tokens().kind)(model, batch)
            return outcome._replace(loss=1e25 * outcome.loss)

    with pytest.raises(CutError, match=r"no cut can be made at step 5: .* not finite; there is no checkpoint yet"):
        train(recipe(CUTS), tokens(), tmp_path / "run", objective=Heavy())
