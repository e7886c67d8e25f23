"""The study of small models runs the command line with what each variant says, and tells seeds apart."""

from pathlib import Path

import pytest

from compressm.experiments import results
from compressm.experiments.catalogue import find_recipe
from compressm.experiments.results import TASKS, jobs
from compressm.reports.tables import grids
from compressm.runs.measurement import Measurement
from compressm.training import Plan


def recipe_of(task, name, steps=None):
    (job,) = jobs(task, Path("folder"), [name], range(1), steps)
    training = job.training
    uncut = ("compression=null",) if "--baseline" in training.options else ()
    order = training.options[training.options.index("--order") + 1]
    return find_recipe(training.recipe, (*training.settings, *uncut, f"model.order={order}"))


def test_variants_of_smnist_are_the_recipe_cut_in_their_ways():
    plain = find_recipe("smnist")
    whole, few = recipe_of("smnist", "whole"), recipe_of("smnist", "small-13")
    assert (whole.compression, whole.model, few.model.order) == (None, plain.model, 13)
    ours, paper, gentle = (recipe_of("smnist", name) for name in ("tau-04", "paper-04", "to-13"))
    assert (ours.training.steps, ours.training.evaluate_every, ours.training.precision) == (200_000, 5_000, "tf32")
    assert (ours.compression.tau, ours.compression.gramian, ours.compression.fold) == (0.04, "measured", True)
    assert (paper.compression.gramian, paper.compression.fold, paper.compression.moments) == (
        *("white_noise", False, "slice"),
    )
    assert Plan.of(ours).cuts == list(range(5_000, 150_001, 5_000))
    assert Plan.of(paper).cuts[-1] == 195_000
    assert (gentle.compression.rho, gentle.compression.at_least, gentle.compression.gate) == (0.9, 13, 1.0)
    assert Plan.of(gentle).cuts[:2] == [2_000, 4_000]
    assert Plan.of(recipe_of("smnist", "to-13", 400)).cuts[:2] == [4, 8]


def test_four_cuts_of_scifar_lead_to_57_states():
    recipe, order = recipe_of("scifar", "to-57"), 384
    assert [order := int(recipe.compression.rho * order + 0.5) for _ in range(4)][-1] == 57
    assert len(Plan.of(recipe).cuts) == 4


def test_a_penalty_and_a_teacher_are_tried_once():
    everything = jobs("smnist", Path("folder"), TASKS["smnist"].variants, range(3, 5))
    once = [job for job in everything if job.variant in ("Σσ penalty, then cut to 28", "28 states, taught")]
    assert [job.seed for job in once] == [3, 3]
    penalised, taught = recipe_of("smnist", "penalty-28"), recipe_of("smnist", "taught-28")
    assert (penalised.model.order, penalised.truncation.orders, penalised.regulariser.every) == (256, (28,), 20)
    assert (taught.model.order, taught.training.steps, taught.compression) == (28, 200_000, None)
    (whole,) = jobs("smnist", Path("folder"), ["whole"], range(1))
    assert Path(taught.distillation.teacher) == whole.training.folder.absolute()
    alone, after = results._stages("smnist", everything)
    assert [job.variant for job in after] == ["28 states, taught"]
    assert len(alone) == len(everything) - 1


@pytest.mark.parametrize("task", TASKS)
def test_labels_and_folders_are_one_for_each(task):
    wanted = jobs(task, Path("f"), TASKS[task].variants, range(2))
    once = sum(variant.once for variant in TASKS[task].variants.values())
    assert len({job.training.folder for job in wanted}) == len(wanted) == 2 * len(TASKS[task].variants) - once
    assert len({(job.variant, job.seed) for job in wanted}) == len(wanted)


def test_an_unknown_variant_is_named(capsys):
    with pytest.raises(SystemExit):
        results.main(["smnist", "--only", "to-14"])
    assert "to-14" in capsys.readouterr().err


def row(variant, seed, **values):
    common = {"steps": 9, "initial_order": 256.0, "order": 13.0, "best": 95.0, "last": 94.0}
    times = {"steps_s": 2.0, "seconds": 3.0, "cuts_s": 0.1, "step_s": 0.001, "recording_s": 0.5}
    return {"variant": variant, "seed": seed} | common | times | values


def test_the_table_has_means_and_spreads_beside_the_paper():
    rows = [row("gently to 13", 0), row("gently to 13", 1, best=96.0), row("τ = 0.04", 0, order=11.0)]
    (table,) = grids(Measurement("results-smnist", "t", 1, rows))
    assert table.rows[0][:6] == ("gently to 13", "256 → 13", "2", "95.5 ± 0.7", "94.0", "95.9")
    assert table.rows[1][1] == "256 → 11"


def test_the_caption_says_how_many_trainings_shared_the_device():
    (table,) = grids(Measurement("results-smnist", "t", 1, [row("256 states", 0, together=9)]))
    assert "up to 9 trainings at a time" in table.caption
    (table,) = grids(Measurement("results-smnist", "t", 1, [row("256 states", 0)]))
    assert "one training at a time" in table.caption
