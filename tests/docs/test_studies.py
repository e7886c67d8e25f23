"""Tables of the studies are those of the committed result files, and those show what the page says."""

from pathlib import Path

import pytest

from compressm_lab.reports.measurements import markdown
from compressm_lab.reports.study_tables import continuity
from compressm_lab.runs.measurement import Measurement

ROOT = Path(__file__).parents[2]
RESULTS = {
    name: Measurement.read(ROOT / "benchmarks" / "results" / f"{name}.json")
    for name in ("one_shot", "hidden_system", "loss_continuity", "error_bound_floor")
}
PAGES = {"error_bound_floor": "numerics.md"}


def mean_accuracy(setting, way, rank):
    rows = [
        row for row in RESULTS["one_shot"].rows if (row["setting"], row["way"], row["rank"]) == (setting, way, rank)
    ]
    return sum(row["accuracy"] for row in rows) / len(rows)


@pytest.mark.parametrize("name", RESULTS)
def test_the_table_on_the_page_is_the_measured_one(name):
    page = (ROOT / "docs" / PAGES.get(name, "studies.md")).read_text()
    assert f"<!-- table: benchmarks/results/{name}.json -->\n{markdown(RESULTS[name])}\n<!-- end of table -->" in page


@pytest.mark.parametrize("setting", sorted({row["setting"] for row in RESULTS["one_shot"].rows}))
def test_a_quarter_of_the_states_chosen_by_data_is_nearly_as_good_and_the_papers_way_is_not(setting):
    rows = [row for row in RESULTS["one_shot"].rows if row["setting"] == setting]
    full = sum(row["full_accuracy"] for row in rows) / len(rows)
    small = 16  # n/4 of 64 states, n/16 of 256
    assert mean_accuracy(setting, "measured", small) > full - 0.03
    for way in ("paper", "folded", "random"):
        assert mean_accuracy(setting, way, small) < mean_accuracy(setting, "measured", small) - 0.05
    assert RESULTS["one_shot"].repeats == 3


def test_the_bound_finds_the_order_of_every_hidden_system_and_no_student_gets_worse():
    rows = RESULTS["hidden_system"].rows
    assert len(rows) >= 3
    for row in rows:
        assert row["states"] == 64
        assert abs(row["found"] - row["hidden"]) <= 1
        assert max(row["error"], row["error_cut"], row["error_more"]) < 1e-5


def test_no_error_of_10_000_systems_was_above_its_bound_and_most_were_above_the_plain_sum():
    measured = RESULTS["error_bound_floor"]
    rows = [row for row in measured.rows if row["form"] == "all"]
    assert measured.repeats == 10_000
    assert sum(row["violations"] for row in measured.rows) == 0
    assert sum(row["violations_of_the_tail"] for row in rows) > sum(row["cuts"] for row in rows) / 2
    # The floor is 16 of these units, 3.5 times as much as any system needed.
    assert 3 < max(row["largest_floors"] for row in rows) < 5


def test_with_the_defaults_the_loss_stays_within_two_standard_deviations_of_the_uncut_runs():
    found = continuity(RESULTS["loss_continuity"])
    assert RESULTS["loss_continuity"].repeats == 5
    for way in ("restart", "transport", "measured"):
        assert found[way].distance < 2
        assert found[way].kept < 0.95 * found[way].states
    assert found["paper"].distance > 2
