"""The paper's formula by hand, and a small recipe measured and checked."""

import pytest
import torch

from compressm_lab.bench.speedup import Costs, Leg, NotChecked, measure_speedup, predict, stretches_of
from compressm_lab.data import Store, make
from compressm_lab.experiments.recipes import find_recipe
from compressm_lab.reports.measurements import draw, grids
from compressm_lab.training import Diverged, Interrupted

PAPER = Costs(
    orders=(96, 136, 176, 216, 256),
    train=(1.4e-3, 1.6e-3, 1.9e-3, 2.4e-3, 3.4e-3),
    evaluate=(3.1e-3, 3.2e-3, 3.3e-3, 3.4e-3, 3.6e-3),
    cut=(0.55, 0.60, 0.64, 0.68, 0.80),
    recapture=5.0,
)


def test_the_example_of_the_paper_is_predicted_as_it_computes_it():
    """app:time: s = 5000, E = 1, 1, 1, 1, 36, n = 256, 216, 176, 136, 96."""
    epochs = zip((256, 216, 176, 136, 96), (1, 1, 1, 1, 36), strict=True)
    found = predict(PAPER, [Leg(order, 5_000 * count, count) for order, count in epochs])
    assert found.whole == pytest.approx(680.144)
    assert found.training == pytest.approx(5 * (3.4 + 2.4 + 1.9 + 1.6 + 36 * 1.4))
    assert found.training + found.evaluation == pytest.approx(298.6251)
    assert found.cuts + found.recapture == pytest.approx(22.72)
    assert found.reduced == pytest.approx(321.3451)
    assert found.speed_up == pytest.approx(2.1165, abs=1e-4)


def test_without_a_cut_there_is_no_speed_up():
    found = predict(PAPER, [Leg(256, 1_000, 2)])
    assert found.speed_up == 1
    assert (found.cuts, found.recapture) == (0, 0)


def test_between_two_orders_costs_lie_on_a_line_and_outside_at_the_end():
    assert PAPER.at(PAPER.cut, 116) == pytest.approx(0.575)
    assert (PAPER.at(PAPER.cut, 8), PAPER.at(PAPER.cut, 999)) == (0.55, 0.80)
    with pytest.raises(ValueError, match="expected rising orders"):
        Costs((8, 4), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))


def test_a_cut_comes_before_the_evaluation_of_its_step():
    found = stretches_of([(0, 8.0), (10, 4.0)], 30, [10, 20, 30])
    assert found == [Leg(8.0, 10, 0), Leg(4.0, 20, 3)]


def small(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPRESSM_COMMIT", "tests")
    monkeypatch.setattr("compressm_lab.bench.speedup._SAMPLE_S", 1e-3)
    settings = ("training.steps=12", "training.evaluate_every=6", "model.order=8", "model.width=4")
    recipe = find_recipe("digits", (*settings, "compression={rho: 0.5, gate: 1.0, when: {steps: [3, 6]}}"))
    return recipe, make("digits").load(Store(tmp_path, offline=True))


@pytest.mark.parametrize(
    ("error", "said", "stopped"),
    [
        (Interrupted("SIGTERM", 3, "a folder that is gone"), "stopped before the check was done", True),
        (Diverged("the loss is nan"), "the check failed: the loss is nan", False),
    ],
)
def test_what_was_measured_outlasts_a_check_that_does_not_end(tmp_path, monkeypatch, error, said, stopped):
    def ends(*_, **__):
        raise error

    monkeypatch.setattr("compressm_lab.bench.speedup.train", ends)
    with pytest.raises(NotChecked) as found:
        measure_speedup(*small(tmp_path, monkeypatch), orders=[4, 8], path=[(0, 8), (6, 4)], repeats=1)
    assert str(found.value) == said
    assert found.value.stopped == stopped
    measurement = found.value.measurement
    assert [row["what"] for row in measurement.rows] == ["costs", "costs", "schedule"]
    assert draw(measurement, tmp_path / "speedup.png").stat().st_size > 10_000


def test_a_recipe_is_measured_and_its_prediction_checked(tmp_path, monkeypatch):
    recipe, task = small(tmp_path, monkeypatch)
    found = measure_speedup(recipe, task, orders=[2, 4, 8], path=[(0, 8), (6, 2)], repeats=1)
    *costs, wanted, checked = found.rows
    assert [row["order"] for row in costs] == [2, 4, 8]
    assert all(row[name] > 0 for row in costs for name in ("train_s", "evaluate_s", "cut_s"))
    assert {row["recapture_s"] for row in costs} == {0}
    assert (wanted["orders"], checked["orders"]) == ("8 → 2", "8 → 4 → 2")
    assert "measured_speedup" not in wanted
    parts = sum(checked[f"measured_{part}_s"] for part in ("training", "evaluation", "cuts", "recaptures"))
    assert checked["measured_speedup"] == pytest.approx(checked["measured_whole_s"] / parts)
    assert torch.get_num_threads() >= 1
    assert [len(grid.rows) for grid in grids(found)] == [3, 7, 7]
    assert draw(found, tmp_path / "speedup.png").stat().st_size > 10_000
