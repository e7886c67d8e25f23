"""The study of automatic cuts: one setting for all tasks, arms that end where they say, and a small run of it."""

from dataclasses import replace
from pathlib import Path

import pytest

import automatic
from automatic import LINEUPS, TOLERANCES
from compressm_lab.experiments.engine import conduct
from compressm_lab.experiments.recipes import recipe_names
from compressm_lab.reports.automatic_tables import below_the_front
from compressm_lab.reports.measurements import grids
from compressm_lab.runs.measurement import Measurement
from compressm_lab.training import Plan
from tests.lab.experiments.tiny import Inline

KNOWN = [name for name, lineup in LINEUPS.items() if lineup.recipe in recipe_names()]


def recipes_of(name):
    lineup = LINEUPS[name]
    plan = lineup.plan(Path("folder"), list(lineup.variants), range(1))
    return {key: one.arm.read(0) for key, one in zip(lineup.variants, plan.trainings(), strict=True)}


@pytest.mark.parametrize("name", KNOWN)
def test_automatic_arms_have_one_setting_for_all_tasks(name):
    found = recipes_of(name)
    automatic_ones = [recipe.compression for key, recipe in found.items() if key.startswith("automatic")]
    assert [one.loss_tolerance for one in automatic_ones] == list(TOLERANCES)
    assert all(one.when.automatic and one.gramian == "measured" for one in automatic_ones)
    assert found["whole"].compression is None
    assert all(Plan.of(recipe).steps == LINEUPS[name].steps for recipe in found.values())


@pytest.mark.parametrize("name", KNOWN)
def test_four_cuts_end_at_the_order_that_the_label_says(name):
    for key, recipe in recipes_of(name).items():
        if not key.startswith(("warm-up", "late")):
            continue
        order, small = recipe.model.order, int(key.rpartition("-")[2])
        for _ in Plan.of(recipe).cuts:
            order = max(small, int(recipe.compression.rho * order + 1e-9))
        assert (len(Plan.of(recipe).cuts), order) == (4, small)
        assert recipe.label.endswith(f"to {small}")


def test_a_small_run_writes_rows_and_the_advice(tmp_path, monkeypatch):
    small = replace(LINEUPS["digits"], settings=("model.width=4", "training.batch=10"))
    monkeypatch.setitem(LINEUPS, "digits", small)
    names = ("whole", "automatic-10", "small-4", "warm-up-4")
    # Trained here, not in a process each that loads everything anew.
    assert conduct(small.plan(tmp_path, list(names), range(1), 40), Inline()).failed == {}
    arms = [part for name in names for part in ("--only", name)]
    options = ["--seeds", "1", "--steps", "40", "--out", str(tmp_path), "--advice", *arms]
    result, advice = automatic.main(["digits", *options])
    rows = {row["variant"]: row for row in Measurement.read(result).rows}
    assert set(rows) == {"128 states", "automatic, 10 %", "4 states", "in the warm-up to 4"}
    assert rows["automatic, 10 %"]["initial_order"] == 128
    assert rows["4 states"]["order"] == 4
    (row,) = Measurement.read(advice).rows
    assert row["variant"] == "128 states"
    assert row["advice"].startswith(("Cut to", "Keep all"))
    came = {"whole": "128 states", "small": "4 states", "cut": "in the warm-up to 4"}
    assert {name: row[name] for name in came} == {name: rows[way]["best"] for name, way in came.items()}
    (ways,), (sizes,) = (grids(Measurement.read(path)) for path in (result, advice))
    assert [line[0] for line in ways.rows] == list(rows)
    assert sizes.rows[0][0] == "0"


def test_below_the_front_is_the_distance_to_the_best_with_no_more_states():
    ways = {"a": (8, 90.0), "b": (8, 91.0), "c": (4, 90.5), "d": (64, 92.0), "e": (16, 90.0)}
    rows = {name: [{"order": order, "best": best}] for name, (order, best) in ways.items()}
    assert {way: below_the_front(rows, way) for way in rows} == {"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.0, "e": 1.0}


def test_an_unknown_arm_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        automatic.main(["digits", "--only", "other", "--out", str(tmp_path)])
    assert "--only other: expected one of whole, automatic-0.5" in capsys.readouterr().err
