import pytest

from compressm_lab.data import Digits
from compressm_lab.experiments.recipes import find_recipe
from compressm_lab.training import ConfigError, Plan
from compressm_lab.training.building import build_model
from tests.lab.training.tiny import CUTS, SPECTRA, recipe


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("scifar", [4500, 9000, 13500, 18000]),
        ("listops", [2000, 4000, 6000, 8000]),
        ("aan", [2500, 5000, 7500, 10000]),
        ("pathfinder", [12500, 25000, 37500, 50000]),
        ("imdb", [2000, 3000]),
        ("smnist", list(range(5000, 200_001, 5000))),
        # A cut at the last step could not be judged any more.
        ("pragmatic-smnist", list(range(5000, 195_001, 5000))),
    ],
)
def test_cuts_are_those_of_the_paper(name, cuts):
    assert list(Plan.of(find_recipe(name)).cuts) == cuts


def test_schedules_know_nothing_of_each_other():
    full = recipe(CUTS, SPECTRA)
    plan = Plan.of(full)
    assert list(plan.cuts) == [5, 11]
    assert list(plan.evaluations) == [4, 8, 12, 16]
    assert list(plan.spectra) == [0, 3, 6, 9, 12, 15, 16]
    assert list(plan.checkpoints) == [6, 12, 16]
    schedules = {
        "compression=null": "cuts",
        "training.evaluate_every=7": "evaluations",
        "spectra=null": "spectra",
        "training.checkpoint_every=5": "checkpoints",
    }
    for change, other in schedules.items():
        changed = Plan.of(recipe(CUTS, SPECTRA, change))
        assert getattr(changed, other) != getattr(plan, other)
        for schedule in set(schedules.values()) - {other}:
            assert getattr(changed, schedule) == getattr(plan, schedule)


def test_the_last_step_is_evaluated_and_saved_whatever_the_schedules_say():
    plan = Plan.of(recipe("training.evaluate_every=100", "training.checkpoint_every=100"))
    assert (list(plan.evaluations), list(plan.checkpoints)) == ([16], [16])
    default = Plan.of(recipe("training.steps=60", "training.evaluate_every=null", "training.checkpoint_every=null"))
    assert (len(default.evaluations), len(default.checkpoints)) == (20, 10)


def test_no_milestone_is_left_out():
    plan = Plan.of(recipe(CUTS, SPECTRA, "compression.rollback={settle: 2}"))
    assert list(plan.judgements) == [7, 13]
    reached, step = [], 0
    while step < plan.steps:
        step = plan.next_after(step)
        reached.append(step)
    schedules = (plan.cuts, plan.judgements, plan.evaluations, plan.spectra, plan.checkpoints)
    assert reached == sorted({step for schedule in schedules for step in schedule} - {0})


def test_the_loss_is_looked_at_between_milestones_that_are_far_apart():
    plan = Plan.of(find_recipe("pathfinder"))
    assert plan.next_after(0) == 500
    assert plan.next_after(12_300) == 12_500
    assert plan.next_after(plan.steps - 1) == plan.steps


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("{steps: [5, 17]}", "compression.when cuts at step 17, after the last step, 16"),
        ("{every: 17}", "the first cut is at step 17, after the last step of a cut, 16: it would never fire"),
        ("{every: 2, first: 9, last: 8}", "the first cut is at step 9, after last, 8: it would never fire"),
        ("{every: 5, last: 30}", "cuts at step 20, after the last step, 16"),
        ("{warmup_cuts: 4}", "cuts is 4, but a warm-up of 0.1 of 16 steps has 1: too few"),
    ],
)
def test_what_would_never_fire_is_an_error(when, said):
    with pytest.raises(ConfigError) as error:
        Plan.of(recipe(f"compression={{rho: 0.5, when: {when}}}"))
    assert said in str(error.value)


def test_a_cut_that_could_not_be_judged_is_an_error_or_left_out():
    with pytest.raises(ConfigError, match="judges at step 17 a cut of step 11, after the last step, 16"):
        Plan.of(recipe(CUTS, "compression.rollback={settle: 6}"))
    every = recipe("compression={rho: 0.5, when: {every: 4}, rollback: {settle: 3}}")
    assert (list(Plan.of(every).cuts), list(Plan.of(every).judgements)) == ([4, 8, 12], [7, 11, 15])


def test_by_default_a_cut_is_judged_after_one_percent_of_all_steps():
    plan = Plan.of(recipe(CUTS, "compression.rollback={}", "training.steps=300"))
    assert list(plan.judgements) == [8, 14]


def test_the_plan_can_be_read():
    said = str(Plan.of(recipe(CUTS, SPECTRA)))
    assert "16 steps" in said
    assert "cuts tried: 2, at 5, 11" in said
    assert "Hankel spectra: 7, at 0, 3, 6, …, 16" in said
    assert "judged" not in said


@pytest.mark.parametrize("setting", ["training.evaluate_every=1", "spectra={every: 1}", "compression.when={every: 1}"])
def test_a_plan_of_too_many_events_is_refused_before_it_fills_the_memory(setting):
    with pytest.raises(ConfigError, match="expected at most 10,000,000"):
        Plan.of(recipe(CUTS, "training.steps=1000000000", setting))


def test_a_model_that_no_memory_holds_is_refused_before_it_is_built():
    with pytest.raises(ConfigError, match=r"order 10000000 need at least \d.* bytes, and this machine has"):
        build_model(recipe("model.order=10000000", "model.width=1000000").model, Digits().form)
