"""What the page on automatic cuts says follows from its result files."""

from statistics import fmean

import pytest

from compressm_lab.reports.automatic_tables import AUTOMATIC, below_the_front, best_other
from compressm_lab.reports.study_tables import by_variant
from tests.docs.measured import ROOT, result, says, tenths, whole

PAGE = "docs/automatic_results.md"
MEASURED = [name for name in AUTOMATIC if (ROOT / "benchmarks" / "results" / f"{name}.json").exists()]
OWN = "automatic, 1 %"


def mean(task, variant, column="best"):
    return fmean(float(row[column]) for row in by_variant(result(f"automatic-{task}"))[variant])


def groups_of(task):
    return by_variant(result(f"automatic-{task}"))


def test_no_other_small_model_is_better_by_more_than_the_page_says():
    assert len(MEASURED) == 8
    tasks = [name.removeprefix("automatic-") for name in MEASURED]
    worst = max(mean(task, best_other(groups_of(task))) - mean(task, OWN) for task in tasks)
    assert all(says(page, *tenths(worst)) for page in (PAGE, "README.md"))
    below = {task: below_the_front(groups_of(task), OWN) for task in tasks}
    assert says(PAGE, *tenths(max(below.values())))

    def is_alone(task):
        rivals = [name for name in groups_of(task) if not name.startswith("automatic")]
        return all(mean(task, name, "order") > mean(task, OWN, "order") for name in rivals)

    assert sum(map(is_alone, tasks)) == 4
    assert all(map(is_alone, ("forda", "forda-s5", "forda-s4d", "fashion-s4d")))


def test_when_to_cut_differs_between_tasks():
    early, late = "in the warm-up to 8", "late to 8"
    gaps = [mean(task, early) - mean(task, late) for task in ("forda-s5", "forda-s4d")]
    assert says(PAGE, *tenths(*gaps))
    assert gaps[0] > 0 > gaps[1]
    assert says(PAGE, *(str(round(mean(task, OWN, "order"))) for task in ("forda-s4d", "fashion-s5")), "64")


def test_every_arm_has_its_seeds():
    for name in MEASURED:
        groups = by_variant(result(name))
        seeds = 5 if name == "automatic-smnist" else 3
        assert len(groups[OWN]) == len(next(iter(groups.values()))) == seeds


def test_losses_against_the_uncut_model():
    lost = [mean(task, "64 states") - mean(task, OWN) for task in ("fashion", "fashion-s5")]
    assert says(PAGE, *tenths(*lost), "1")


def test_smnist():
    assert says(PAGE, "15", "13", *tenths(mean("smnist", OWN) - mean("smnist", "28 states")), "28")
    assert mean("smnist", OWN, "order") == pytest.approx(15, abs=0.5)
    assert says(PAGE, "15", "13", *tenths(mean("smnist", OWN) - mean("smnist", "gently to 13")))
    assert says(PAGE, *tenths(mean("smnist", "256 states")), "256")


def test_s5_and_s4d():
    gained = [mean(task, "gently to 8") - mean(task, "8 states") for task in ("fashion-s5", "forda-s5")]
    assert says(PAGE, *tenths(*gained), "8")
    groups = by_variant(result("automatic-fashion-s4d"))
    with_8 = [mean("fashion-s4d", name) for name in groups if name.endswith(("to 8", "8 states")) and name[0] != "6"]
    assert max(with_8) - min(with_8) < 0.35
    assert says(PAGE, *tenths(mean("fashion-s4d", "64 states") - mean("fashion-s4d", "8 states")), "64", "8")
    forda = by_variant(result("automatic-forda-s4d"))
    assert max(forda, key=lambda name: mean("forda-s4d", name)) == "gently to 8"


def test_a_penalty_costs_more_than_it_saves():
    few, rival = "automatic, 1 %, penalty 0.001", "τ = 0.02"
    orders = [mean("digits", name, "order") for name in (few, rival)]
    assert says(PAGE, *tenths(*orders, mean("digits", rival) - mean("digits", few)))


def test_options_hardly_matter_on_digits():
    ways = [OWN, *(name for name in by_variant(result("automatic-digits")) if "recover" in name or "share" in name)]
    accuracies = [mean("digits", name) for name in ways]
    assert len(ways) == 6
    assert says(PAGE, "0", "50", *tenths(max(accuracies) - min(accuracies)))


def test_advice_beside_outcome():
    found = [row for name in MEASURED if "fa" in name or "fo" in name for row in result(f"{name}-advice").rows]
    assert len(found) == 18
    assert not any(row["small_from_the_start"] for row in found)
    apart = [row["cut"] - row["small"] for row in found]
    assert says(PAGE, *tenths(min(apart), max(apart)))
    tasks = [name.removeprefix("automatic-") for name in MEASURED if "fa" in name or "fo" in name]
    advised = [fmean(row["order"] for row in result(f"automatic-{task}-advice").rows) for task in tasks]
    kept = [100 * mean(task, OWN, "order") / order for task, order in zip(tasks, advised, strict=True)]
    assert says(PAGE, *whole(min(kept), max(kept)))


def test_cuts_before_training_and_new_moments_differ_by_no_more_than_the_page_says():
    neighbours = {"before training to 8": "8 states", "late, moments anew, to 8": "late to 8"}
    gaps = [abs(mean(task, a) - mean(task, b)) for task in ("fashion-s4d", "forda-s4d") for a, b in neighbours.items()]
    assert all(len(groups_of(task)[way]) == 2 for task in ("fashion-s4d", "forda-s4d") for way in neighbours)
    assert says(PAGE, *tenths(max(gaps)))


def test_the_advice_missed_that_small_models_do_on_fashion_mnist_with_s4d():
    missed = [abs(row["cut"] - row["small"]) for row in result("automatic-fashion-s4d-advice").rows]
    assert says(PAGE, *tenths(max(missed)))
    others = [name for name in MEASURED if ("fa" in name or "fo" in name) and name != "automatic-fashion-s4d"]
    assert all(row["cut"] > row["small"] + 0.5 for name in others for row in result(f"{name}-advice").rows)
