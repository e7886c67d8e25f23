"""The study of settings runs the command line, keeps what is done, and its table is of the last two evaluations."""

from dataclasses import replace
from pathlib import Path

import pytest

from compressm_lab.experiments.recipes import find_recipe
from compressm_lab.reports.measurements import grids
from compressm_lab.runs.directory import RunDirectory, Status
from compressm_lab.runs.measurement import Measurement
from compressm_lab.runs.records import Evaluation
from smnist_settings import ASKED, VARIANTS, file, plan


@pytest.mark.parametrize("variant", [*VARIANTS, *ASKED])
def test_every_variant_is_a_recipe_of_its_own(variant):
    recipe = plan(Path("folder"), [variant], 1, 80).arms[-1].read(seed=0)
    assert (recipe.compression, recipe.model.order) == (None, (VARIANTS | ASKED)[variant][1][-1])
    assert (recipe.label, recipe.training.steps, recipe.training.evaluate_every) == (variant, 80, 10)
    plain = find_recipe("smnist")
    alike = replace(recipe.model, order=256) == plain.model and recipe.training.precision == plain.training.precision
    assert alike == (variant == "recipe")


def write(training, accuracies, state="finished"):
    run = RunDirectory(training.folder)
    run.begin({})
    run.model.mkdir()
    (run.model / "model.safetensors").touch()
    for step, accuracy in accuracies:
        run.append(Evaluation(step, "test", 0.5, accuracy, 1e-3, step / 10, step / 20))
    run.write_status(Status(state, 8, 8))


def test_the_table_is_the_mean_of_the_last_two_over_seeds_that_are_done(tmp_path):
    both = plan(tmp_path, ["recipe"], 3, 8)
    small = replace(both, arms=both.arms[1:])
    wanted = small.trainings()
    write(wanted[0], [(6, 0.1), (7, 0.80), (8, 0.82)])
    write(wanted[1], [(7, 0.84), (8, 0.90)])
    write(wanted[2], [(7, 0.99)], state="interrupted")
    found = file(tmp_path, small).collect()
    assert [(row["seed"], row["before"], row["last"]) for row in found.rows] == [(0, 80, 82), (1, 84, 90)]
    assert grids(found)[0].rows == (("recipe", "28", "81.0, 87.0", "84.0", "89.5"),)
    assert [training.finished for training in wanted] == [True, True, False]


def test_a_variant_at_two_orders_has_two_rows(tmp_path):
    wanted = plan(tmp_path, ["recipe"], 1, 8)
    for training in wanted.trainings():
        write(training, [(7, 0.80), (8, 0.82)])
    assert file(tmp_path, wanted).write([]) == []
    path = tmp_path / "smnist_settings.json"
    assert [row["order"] for row in Measurement.read(path).rows] == [256, 28]
