"""The table over all tasks, from result files."""

from pathlib import Path

import pytest

from compressm_lab.experiments.kept import Kept
from compressm_lab.reports.summary import summary_grid
from compressm_lab.runs.measurement import Environment, Measurement
from tests.lab.experiments.result_rows import row

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
HERE = Environment("2026-01-01", "abc", "CPU", 1, None, "3.11", "2.11", 1)


def lines(results, *kept):
    return {line[:2]: line[2:] for line in summary_grid(results, Kept(kept)).rows}


def mine(seed, best, variant="smnist-paper/tau-0.04", **values):
    return row(variant, seed, best=best, truncated=0, **values)


def test_the_paper_and_its_code_stand_there_without_any_result(tmp_path):
    found = lines(tmp_path)
    assert found["sMNIST", "cut, τ = 0.04"] == ("95.9 ± 0.2 at 12.7 ± 3.0", "–", "–", "–")
    assert found["IMDB", "95 states"] == ("82.7 ± 0.1", "–", "–", "–")
    assert ("sMNIST, 40 000 steps", "28 states") not in found
    assert {task for task, _ in found} == {"sMNIST", "CIFAR10", "IMDB", "ListOps"}


def test_our_own_choices_stand_beside_the_cells_of_the_paper():
    found = lines(RESULTS)
    assert found["sMNIST", "cut, τ = 0.04"][3].startswith("97.")
    assert " at 13 (" in found["sMNIST", "cut, τ = 0.04"][3]
    assert found["CIFAR10", "57 states"][3].endswith("(1 seed, 40\u202f000 steps)")
    assert found["sMNIST, 40 000 steps", "28 states"][1] == "89.5 (1 seed)"


@pytest.mark.parametrize(
    ("bests", "said"),
    [
        ((95.0, 97.0, 96.0, 90.0), "96.0 at 12 (94.5 ± 3.1 of 4 seeds)"),
        ((95.0, 97.0), "96.0 ± 1.4 at 12 (2 seeds)"),
        ((95.0,), "95.0 at 12 (1 seed)"),
    ],
)
def test_seeds_in_the_papers_setting_are_counted_as_the_paper_counts(bests, said, tmp_path):
    rows = [mine(seed, best, order=12.0, steps=200_000) for seed, best in enumerate(bests)]
    assert lines(tmp_path, *rows)["sMNIST", "cut, τ = 0.04"][2] == said


def test_fewer_steps_than_those_of_the_paper_are_said(tmp_path):
    rows = [mine(0, 97.0, "smnist-paper/n-256", order=256.0, steps=40_000)]
    assert lines(tmp_path, *rows)["sMNIST", "256 states"][2] == "97.0 (1 seed, 40\u202f000 steps)"


def test_our_own_cuts_in_the_papers_setting_have_a_row_where_they_are_trained(tmp_path):
    assert ("sMNIST", "our cuts to 13") not in lines(tmp_path)
    found = lines(tmp_path, mine(0, 96.0, "smnist-paper/ours-13", order=13.0, steps=200_000))
    assert found["sMNIST", "our cuts to 13"] == ("–", "–", "96.0 at 13 (1 seed)", "–")
    assert ("sMNIST", "our cuts to 28") not in found


def test_an_empty_result_file_is_a_dash(tmp_path):
    Measurement("results-scifar", "t", 1, [], HERE).write(tmp_path / "results-scifar.json")
    assert lines(tmp_path)["CIFAR10", "384 states"][3] == "–"
