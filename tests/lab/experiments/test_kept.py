"""Tables from rows of a result file, where the runs themselves are not there."""

from dataclasses import replace

import pytest

from compressm_lab.experiments import kept
from compressm_lab.experiments.catalogue import exhibit, find_experiment
from compressm_lab.experiments.engine import conduct
from compressm_lab.experiments.kept import Kept
from compressm_lab.reports.reproduction import paper_form_grids, trained_grid
from compressm_lab.runs.measurement import Environment, Measurement, MeasurementError
from compressm_lab.training.config import ConfigError
from tests.lab.experiments.test_students import chosen
from tests.lab.experiments.tiny import Inline, plan, shown

HERE = Environment("2026-01-01", "abc", "CPU", 1, "NVIDIA H200", "3.11", "2.11", 1)


def row(variant, seed, best, **values):
    common = {"truncated": 0, "steps": 200_000, "initial_order": 256.0, "order": 256.0, "last": best, "steps_s": 90.0}
    rest = {"seconds": 100.0, "cuts_s": 1.0, "step_s": 0.001, "recording_s": 1.0, "together": 1, "date": "2026-01-01"}
    here = {"commit": "abc", "machine": "NVIDIA H200"}
    return {"variant": f"smnist-paper/{variant}", "seed": seed, "best": best} | common | rest | here | values


@pytest.fixture
def file(monkeypatch, tmp_path):
    """Rows of ten seeds with τ = 0.04 and of one that is never cut, in the place of the package's own."""
    path = tmp_path / "ours.json"
    bests = (95.0, 94.0, 96.0, 93.0, 92.0, 91.0, 90.0, 89.0, 97.0, 88.0)
    rows = [
        row("tau-0.04", k, best, order=10.0 + k % 3, validation=50 + k, seconds=50.0) for k, best in enumerate(bests)
    ]
    Measurement("reproduce", "Made", 1, [*rows, row("n-256", 0, 97.5)], HERE).write(path)
    monkeypatch.setattr(kept, "FILE", path)
    return path


def cells_of(table, folder, seeds=None):
    found = exhibit(table, table.plan(folder, seeds), quick=False)
    return found, {(cell.task, cell.method, cell.column): cell for cell in found.cells}


def test_cells_are_filled_from_rows_that_are_kept_and_the_others_have_their_command(file, tmp_path):
    found, cells = cells_of(find_experiment("results"), tmp_path)
    cut = cells["sMNIST", "CompreSSM", "τ = 0.04"]
    # The three best by test are 97, 96 and 95; by validation they were 88, 97 and 89.
    top, every = found.ours(cut, "accuracy"), found.ours(cut, "mean")
    assert (top.centre, top.count, every.centre, every.count) == (96, 3, 92.5, 10)
    assert (found.ours(cut, "best").centre, found.ours(cut, "order").centre) == (97, 10.9)
    assert found.ours(cut, "speed-up").centre == 2
    (table,) = (grid for grid in paper_form_grids(found) if grid.title == "sMNIST")
    texts = {line[0]: line[1:] for line in table.rows}
    assert texts["CompreSSM: top three by test, %"][0] == "96.0 ± 1.0\n(95.9 ± 0.2)"
    assert texts["CompreSSM: mean of all, %"][0] == "92.5 ± 3.0"
    assert texts["CompreSSM: top three by test, %"][1] == "–\n(96.9 ± 0.0)"
    assert "compressm reproduce results --only sMNIST" in table.caption
    lines = {line[:3]: line for line in trained_grid(found).rows}
    assert "10 kept" in lines["sMNIST", "CompreSSM", "τ = 0.04"]
    missing = lines["IMDB", "CompreSSM", "τ = 0.15"]
    assert "not trained: compressm reproduce results --only imdb-paper/tau-0.15" in missing


def test_the_baseline_beside_rows_that_are_kept_has_their_mean_order(file, tmp_path):
    measured = Measurement.read(file)
    replace(measured, rows=[*measured.rows, row("n-11", 0, 90.5, order=11.0)]).write(file)
    found, cells = cells_of(find_experiment("results"), tmp_path)
    assert found.ours(cells["sMNIST", "baseline, our mean order", "τ = 0.04"], "mean").centre == 90.5


def test_fewer_seeds_show_fewer_rows(file, tmp_path):
    found, cells = cells_of(find_experiment("results"), tmp_path, seeds=2)
    assert found.ours(cells["sMNIST", "CompreSSM", "τ = 0.04"], "mean").centre == 94.5


def test_rows_of_trainings_here_are_the_table_of_their_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPRESSM_COMMIT", "tests")
    wanted = plan(tmp_path, chosen=chosen())
    conduct(wanted, Inline())
    before = shown(wanted)
    path = kept.write(wanted, tmp_path / "ours.json")
    monkeypatch.setattr(kept, "FILE", path)
    after = shown(replace(wanted, runs=tmp_path / "elsewhere"))
    for here, there in zip(before.cells, after.cells, strict=True):
        assert (there.runs, here.kept, len(there.kept)) == ((), (), 2)
        for quantity in ("order", "accuracy", "mean", "best"):
            ours, theirs = before.ours(here, quantity), after.ours(there, quantity)
            assert (theirs.centre, theirs.count) == (pytest.approx(ours.centre), ours.count)
        assert there.seconds.centre == pytest.approx(here.seconds.centre)
        assert (there.steps, there.commits) == (here.steps, here.commits)


def test_new_rows_take_the_place_of_kept_ones_and_the_others_stay(file, tmp_path, monkeypatch):
    monkeypatch.setenv("COMPRESSM_COMMIT", "tests")
    wanted = plan(tmp_path, seeds=1)
    conduct(wanted, Inline())
    rows = Measurement.read(kept.write(wanted, tmp_path / "new.json")).rows
    assert sum(row["variant"] == "smnist-paper/tau-0.04" for row in rows) == 10
    assert {row["commit"] for row in rows if row["variant"] == "digits/n-8"} == {"tests"}
    assert kept.write(plan(tmp_path / "empty"), tmp_path / "none.json") is None


def test_a_file_of_something_else_is_refused(tmp_path):
    path = Measurement("cut", "Cuts", 1, [{"seconds": 1.0}], HERE).write(tmp_path / "ours.json")
    with pytest.raises(MeasurementError, match="cut is not a result of `compressm reproduce`"):
        Kept.read(path)


def test_parts_of_a_table_are_trained_with_what_they_wait_for():
    table = find_experiment("knowledge-distillation")
    (cell,) = (arm for arm in table.arms if arm.folder == "scifar-paper/student-57")
    assert [arm.folder for arm in table.only([cell.folder]).arms] == ["scifar-paper/n-384", cell.folder]
    beside = table.only(["baseline, our mean order"]).arms
    assert {arm.method for arm in beside} == {"CompreSSM", "baseline, our mean order"}
    whole = find_experiment("results")
    assert {arm.task for arm in whole.only(["IMDB", "sMNIST"]).arms} == {"IMDB", "sMNIST"}
    with pytest.raises(ConfigError, match=r"'sMNST' is no part of results; expected CIFAR10, .*did you mean 'sMNIST'"):
        whole.only(["sMNST"])
