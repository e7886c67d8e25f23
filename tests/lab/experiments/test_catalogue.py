"""Every table and figure of the paper is there, and what it trains is what the paper trained."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compressm.compression import KeepFraction
from compressm_lab.experiments import paper
from compressm_lab.experiments.catalogue import experiment_names, find_experiment
from compressm_lab.experiments.paper import QUICK, SMNIST
from compressm_lab.experiments.recipes import FinalOrder, find_recipe
from compressm_lab.runs.paper import paper_labels, read_paper
from compressm_lab.training.config import ConfigError
from compressm_lab.training.plan import Plan

OURS = {"fold", "gramian", "moments", "policy"}


def test_every_label_of_the_paper_can_be_reproduced():
    assert set(experiment_names()) == {*paper_labels(), *OURS}


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", sorted({*paper_labels(), *OURS} - {"results-max", "red-perf-all"}))
def test_every_arm_is_a_recipe_with_a_plan(name, quick):
    wanted = find_experiment(name, quick=quick)
    folders = {}
    for arm in wanted.arms:
        resolved = arm.filled(FinalOrder(20.4, 6))
        recipe = resolved.read(0)
        assert Plan.of(recipe).evaluations
        # Whoever asks for a folder asks for the same training.
        assert folders.setdefault(resolved.folder, recipe) == recipe
    assert wanted.measures or folders


@pytest.mark.slow
def test_folders_are_shared_by_whole_trainings_only():
    found = {}
    for name in experiment_names():
        for arm in find_experiment(name).arms:
            if arm.known:
                recipe = arm.read(0)
                assert found.setdefault(arm.folder, recipe) == recipe, (name, arm.folder)


@pytest.mark.parametrize(("setting", "last"), [(SMNIST, 32), (QUICK, 8)])
def test_every_number_of_cuts_ends_at_an_eighth(setting, last):
    for arm in paper.numbers(setting):
        recipe = arm.read(0)
        order, keep = recipe.model.order, KeepFraction(recipe.compression.rho)
        steps = Plan.of(recipe).cuts
        for _ in steps:
            order = max(recipe.compression.at_least, keep.order(torch.ones(order)))
        assert order == last
        assert arm.column in (f"{len(steps)} cuts", "1 cut")


def test_cuts_come_when_the_paper_makes_them():
    cuts = [list(Plan.of(arm.read(0)).cuts) for arm in paper.windows(SMNIST)]
    assert cuts[0] == [5_000, 10_000, 15_000, 20_000]
    assert [window[-1] for window in cuts] == [20_000, 45_000, 70_000, 120_000, 170_000]
    (timer,) = find_experiment("timer").arms
    steps = Plan.of(timer.read(0)).cuts
    assert (len(steps), steps[0], steps[-1]) == (31, 5_000, 155_000)
    assert 256 - 8 * len(steps) == 8
    imdb = next(arm for arm in find_experiment("results").arms if arm.task == "IMDB")
    assert list(Plan.of(imdb.read(0)).cuts) == [2_000, 3_000]


def test_one_budget_has_as_many_states_as_the_layers_of_the_arm_beside_it():
    tolerance, budget, _ = find_experiment("policy").arms
    assert budget.beside is tolerance
    assert budget.filled(FinalOrder(20.5, 6)).read(0).compression.total_states == 123


def test_the_nuclear_norm_is_one_training_that_is_cut_to_the_papers_orders():
    arms = [arm for arm in find_experiment("hnn_vs_compressm").arms if arm.method == "Hankel nuclear norm"]
    assert [(arm.column, arm.truncated) for arm in arms] == [
        ("τ = 0.04", 13),
        ("τ = 0.02", 28),
        ("τ = 0.01", 47),
        ("τ = 0.005", 76),
        ("τ = 0.002", 148),
        ("τ = 0.001", 191),
        ("τ = 0", None),
    ]
    (folder,) = {arm.folder for arm in arms}
    mine, named = arms[0].read(0), find_recipe("smnist-hnn-paper")
    assert folder == "smnist-paper/nuclear"
    assert (mine.regulariser.beta, mine.regulariser.over) == (0.1, "mean")
    assert (mine.regulariser, mine.truncation, mine.model) == (named.regulariser, named.truncation, named.model)
    assert mine.training == named.training


def test_students_learn_as_in_the_papers_recipe_from_the_model_that_is_never_cut():
    wanted = find_experiment("knowledge-distillation")
    student = next(arm for arm in wanted.arms if arm.method == "distillation")
    assert student.teacher.folder in {arm.folder for arm in wanted.arms}
    resolved = student.taught_by(Path("runs/scifar-paper/n-384/seed-3"))
    assert resolved.folder == "scifar-paper/student-57"
    mine, named = resolved.read(3), find_recipe("scifar-distillation")
    assert mine.distillation.teacher == "runs/scifar-paper/n-384/seed-3"
    assert replace(mine.distillation, teacher=named.distillation.teacher) == named.distillation
    alone = find_recipe("scifar-paper", ("model.order=57",))
    assert (mine.model, mine.training) == (alone.model, alone.training)
    assert student.teacher.read(3).model.order == 384


def test_random_states_are_drawn_for_every_channel_as_many_as_the_paper_keeps():
    mean, drawn = (arm.read(0).compression for arm in find_experiment("mamba-imdb").arms[:2])
    assert (mean.select, drawn.select) == ("largest", "random")
    assert replace(drawn, select="largest") == mean
    assert (drawn.selective.kind, drawn.selective.surrogate) == ("per-channel", "mean")


def test_seeds_are_as_many_as_in_the_paper_and_two_where_it_is_quick():
    assert [find_experiment(name).seeds for name in ("sanity", "hnn_vs_compressm", "speedup", "timer")] == [
        10,
        10,
        5,
        1,
    ]
    table = find_experiment("results")
    seeds = {arm.task: len(table.plan(Path("out")).seeds_of(arm)) for arm in table.arms}
    assert seeds == {**dict.fromkeys(TABLE, 5), "sMNIST": 10}
    few = table.plan(Path("out"), seeds=2)
    assert {len(few.seeds_of(arm)) for arm in table.arms} == {2}
    # Every arm waits for as many seeds as the arm beside it has.
    beside = [arm for arm in table.arms if arm.beside]
    assert all(few.seeds_of(arm) == few.seeds_of(arm.beside) for arm in beside)
    assert find_experiment("sanity", quick=True).seeds == 2


TABLE = ("CIFAR10", "ListOps", "AAN", "IMDB", "Pathfinder", "sMNIST")


@pytest.mark.parametrize("task", TABLE)
def test_arms_beside_a_cell_of_the_paper_have_its_setting_and_its_order(task):
    arms = [arm for arm in find_experiment("results").arms if arm.task == task]
    results, ours = read_paper("results"), {"our way", "baseline, our mean order"}
    for arm in (arm for arm in arms if arm.method not in ours):
        recipe = arm.read(0)
        assert arm.recipe.endswith("-paper")
        assert (recipe.model.norm, recipe.model.norm_options["through"]) == ("running", True)
        assert (recipe.model.gelu, recipe.training.floor) == ("tanh", 1e-8)
        if arm.method == "CompreSSM":
            assert f"τ = {recipe.compression.tau:g}" == arm.column
            assert (recipe.compression.fold, recipe.compression.moments) == (False, "slice")
        else:
            order = results.value(task, "CompreSSM", arm.column, "order") or results.value(
                task, "baseline", arm.column, "order"
            )
            assert order is None or recipe.model.order == round(order.centre)
    assert {arm.column for arm in arms} >= {column for t, _, column, _ in results.values if t == task}


def test_our_own_arms_are_marked_and_end_at_the_papers_orders():
    arms = find_experiment("results").arms
    ours = [arm for arm in arms if arm.method == "our way" and arm.task == "sMNIST"]
    assert [arm.read(0).compression.at_least for arm in ours] == [13, 28, 47, 76, 148, 191]
    for arm in ours:
        recipe, order = arm.read(0), 256
        for _ in Plan.of(recipe).cuts:
            order = max(recipe.compression.at_least, KeepFraction(recipe.compression.rho).order(torch.ones(order)))
        assert (order, recipe.task) == (recipe.compression.at_least, {"name": "smnist", "time": True})
    beside = [arm for arm in arms if arm.beside is not None]
    assert {arm.method for arm in beside} == {"baseline, our mean order"}


def test_an_unknown_name_says_what_may_have_been_meant():
    with pytest.raises(ConfigError, match="did you mean 'sanity'"):
        find_experiment("santiy")
