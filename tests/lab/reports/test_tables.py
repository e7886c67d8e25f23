import pytest

from compressm_lab.reports.grid import Grid, amount, duration
from compressm_lab.reports.measurements import draw_growth, grids, markdown
from compressm_lab.runs.measurement import Measurement, MeasurementError

STEP = {"task": "smnist", "order": 13, "precision": "float32", "device": "cuda", "step_s": 2e-4}
GROWTH = {"depth": 2, "batch": 16, "order": 64, "length": 1024, "width": 64, "device": "cuda", "floor_s": 1e-4}


def growth(*points):
    rows = [{**GROWTH, "axis": axis, "precision": name, axis: size, "step_s": s} for axis, name, size, s in points]
    return Measurement("growth", "t", 1, rows)


def test_times_and_bytes_are_readable():
    assert [duration(s) for s in (2.5, 0.0123456, 6e-6, 1.2e-7)] == ["2.5 s", "12.3 ms", "0.006 ms", "120 ns"]
    assert [amount(b) for b in (12.0, 3.1e3, 4e6, 1.25e10)] == ["12 B", "3.1 kB", "4 MB", "12.5 GB"]


def test_a_bar_in_a_cell_does_not_end_it():
    assert Grid("t", ("a",), (("|λ|",),)).markdown().splitlines()[-1] == "| \\|λ\\| |"


def test_a_step_shows_its_floor_launches_and_memory_where_they_were_measured():
    whole = {**STEP, "floor_s": 1e-5, "kernels": 100, "launch_s": 1e-6, "peak_bytes": 2_000_000}
    (grid,) = grids(Measurement("step", "t", 1, [whole, STEP]))
    assert grid.heads == ("task", "n", "precision", "step", "floor", "launches", "memory")
    assert grid.rows[0] == ("smnist", "13", "float32", "0.2 ms", "0.01 ms", "0.1 ms", "2 MB")
    assert grid.rows[1] == ("smnist", "13", "float32", "0.2 ms", "", "", "")
    (old,) = grids(Measurement("step", "t", 1, [STEP]))
    assert old.heads == ("task", "n", "precision", "step")


def test_growth_has_a_column_a_precision_and_a_gap_where_one_was_not_measured():
    measured = growth(("order", "float32", 8, 1e-3), ("order", "float32", 16, 2e-3), ("order", "bfloat16", 16, 1e-3))
    (grid,) = grids(measured)
    assert grid.heads == ("n", "float32", "floor", "bfloat16", "floor")
    assert grid.rows == (("8", "1 ms", "0.1 ms", "", ""), ("16", "2 ms", "0.1 ms", "1 ms", "0.1 ms"))
    assert "2 blocks, batch 16, L = 1024, H = 64" in grid.caption


def test_several_tables_come_with_their_titles():
    text = markdown(growth(("order", "float32", 8, 1e-3), ("width", "float32", 8, 1e-3)))
    assert "One training step against the order (median; " in text
    assert "One training step against the width (median; " in text


def test_growth_along_an_unknown_axis_is_refused(tmp_path):
    strange = growth(("order", "float32", 8, 1e-3))
    strange.rows[0]["axis"] = "depth"
    with pytest.raises(MeasurementError, match="row 0 has 'depth' as axis, expected one of order, length, width"):
        draw_growth(strange, tmp_path / "growth.png")
    assert list(tmp_path.iterdir()) == []


def test_a_table_of_something_else_is_refused():
    with pytest.raises(MeasurementError, match="no table for results named 'cooking'"):
        markdown(Measurement("cooking", "t", 1, []))
    with pytest.raises(MeasurementError, match="step is not a result of `compressm bench step` with rows"):
        markdown(Measurement("step", "t", 1, []))
