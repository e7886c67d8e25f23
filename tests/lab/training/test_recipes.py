import json
from dataclasses import replace

import pytest

from compressm_lab.data import Store
from compressm_lab.data.catalogue import CATALOGUE, make
from compressm_lab.experiments.recipes import find_recipe, recipe_names
from compressm_lab.training import ConfigError, Plan
from compressm_lab.training.building import build_model
from tests.lab.data.tables import write_ford, write_turbofan

# tab:hyperparameters: depth, width h, order n, steps, batch B, learning-rate factor, weight decay, dropout.
TABLE = {
    "smnist": (1, 8, 256, 200_000, 50, 1.0, 0.0, 0.1),
    "scifar": (6, 512, 384, 180_000, 50, 0.25, 0.05, 0.1),
    "listops": (6, 128, 256, 80_000, 32, 0.5, 0.05, 0.0),
    "imdb": (1, 256, 192, 50_000, 32, 0.1, 0.05, 0.1),
    "aan": (6, 128, 256, 100_000, 64, 0.5, 0.05, 0.1),
    "pathfinder": (6, 192, 256, 500_000, 64, 0.25, 0.05, 0.0),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_recipe_has_the_numbers_of_the_paper(name):
    found = find_recipe(name)
    model, training = found.model, found.training
    numbers = (model.depth, model.width, model.order, training.steps, training.batch, training.ssm_factor)
    assert (*numbers, training.weight_decay, model.dropout) == TABLE[name]
    assert (model.layer, found.task["name"]) == ("LRU", name)


@pytest.mark.parametrize("name", TABLE)
def test_learning_rates_are_those_of_the_paper(name):
    training = find_recipe(name).training
    if name == "smnist":
        assert {training.rate(1), training.rate(training.steps)} == {4e-4}
    else:
        assert training.rate(training.steps // 10) == pytest.approx(1e-3)
        assert training.rate(training.steps) == pytest.approx(1e-7)
        assert training.warmup == 0.1


@pytest.mark.parametrize("name", TABLE)
def test_a_paper_variant_differs_in_what_the_papers_code_does_and_its_paper_does_not_say(name):
    found, plain = find_recipe(f"{name}-paper"), find_recipe(name)
    images = name in ("smnist", "scifar")
    assert found.task == plain.task | ({"time": True} if images else {})
    model, training, cuts = found.model, found.training, found.compression
    assert (model.norm, model.norm_options) == ("running", {"affine": False, "momentum": 0.01, "through": True})
    assert (model.dropout_form, model.gelu, model.layer_options) == ("batch", "tanh", {"max_phase": 6.28})
    assert (training.floor, cuts.fold, cuts.moments, cuts.gramian) == (1e-8, False, "slice", "white_noise")
    numbers = ("depth", "width", "order", "dropout", "layer")
    assert [getattr(model, key) for key in numbers] == [getattr(plain.model, key) for key in numbers]
    rates = ("steps", "batch", "learning_rate", "ssm_factor", "weight_decay", "schedule", "warmup", "lowest_rate")
    assert [getattr(training, key) for key in rates] == [getattr(plain.training, key) for key in rates]
    # A cut after the last step would never train.
    assert Plan.of(found).cuts == [step for step in Plan.of(plain).cuts if step < training.steps]


def test_the_nuclear_norm_of_the_papers_code_is_on_the_mean():
    found, alone = find_recipe("smnist-hnn-paper"), find_recipe("smnist-paper")
    assert (found.regulariser.beta, found.regulariser.over, found.regulariser.fold) == (0.1, "mean", False)
    assert (found.model, found.training, found.task) == (alone.model, alone.training, alone.task)


def test_the_pragmatic_variant_is_that_of_the_paper():
    found = find_recipe("pragmatic-smnist")
    assert (found.compression.rho, found.compression.rollback.drop, found.compression.rollback.settle) == (
        0.9,
        0.01,
        found.training.steps // 100,
    )


def test_what_compression_is_compared_with_has_the_numbers_of_the_paper():
    """app:hnn_det and tab:hnn_vs_compressm; app:kd."""
    hnn, smnist = find_recipe("smnist-hnn"), find_recipe("smnist")
    assert (hnn.regulariser.alpha, hnn.regulariser.beta) == (1.0, 0.1)
    assert hnn.truncation.orders == (191, 148, 76, 47, 28, 13)
    assert (hnn.model, hnn.training, hnn.name) == (smnist.model, smnist.training, smnist.name)
    for name in ("smnist-distillation", "scifar-distillation", "digits-distillation"):
        student, alone = find_recipe(name), find_recipe(name.removesuffix("-distillation"))
        assert (student.distillation.temperature, student.distillation.alpha) == (2.0, 0.5)
        assert student.training == alone.training
        assert replace(student.model, order=alone.model.order) == alone.model
        teacher = f"out/runs/{alone.name}/baseline-n{alone.model.order}/seed-0"
        assert student.distillation.teacher == teacher


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_of_the_catalogue_can_be_planned_and_built(name, tmp_path):
    found = find_recipe(name)
    plan = Plan.of(found)
    assert plan.cuts or found.regulariser or found.distillation
    assert found.description
    task = make(**found.task)
    if found.task["name"] not in CATALOGUE:  # files of one's own
        task = task.load(Store({"forda": write_ford, "turbofan": write_turbofan}[name](tmp_path / name).parent))
    # The smallest model of its kind: its sizes have been looked at above.
    small = find_recipe(name, ("model.depth=1", "model.width=2", "model.order=2", "truncation=null"))
    assert build_model(small.model, getattr(task, "form", task)).blocks[0].ssm.order == 2


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_has_a_baseline(name):
    baseline = find_recipe(name, ("compression=null", "regulariser=null", "distillation=null", "label=''"))
    assert baseline.label == "baseline"
    assert Plan.of(baseline).cuts == []


def test_a_recipe_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"'mnist' is not a recipe; expected one of .*smnist.*, or a \.yaml file"):
        find_recipe("mnist")


def test_what_a_run_wrote_down_is_a_recipe(tmp_path):
    wanted = find_recipe("digits", ("seed=3", "model.layer=S5"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(wanted.as_dict()))
    assert find_recipe(str(path)) == wanted
