import pytest

from compressm_lab.reports import panels as canvas
from compressm_lab.reports.measurements import ReductionCurve, draw_reduction_cost, draw_reduction_error, grids
from compressm_lab.runs.measurement import Measurement, MeasurementError


def test_a_picture_of_errors_is_written_whole(tmp_path):
    curve = ReductionCurve("a system", [1.0, 0.5, 0.1], [1, 2], [1.2, 0.2], [0.8, 0.15])
    picture = draw_reduction_error([curve, curve], tmp_path / "deep" / "errors.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in picture.parent.iterdir()] == ["errors.png"]


def reduction(*orders):
    row = {"system": "initial", "width": 8, "members": 1, "device": "cpu", "speedup": 0.045}
    times = ("gramians_s", "hankel_s", "reduction_s")
    sized = [(order, {name: 1e-6 * (k + 1) * order**2 for k, name in enumerate(times)}) for order in orders]
    rows = [{**row, "order": n, "rank": n // 4, **t, **{f"plain_{k}": 2 * v for k, v in t.items()}} for n, t in sized]
    return Measurement("reduction", "t", 1, rows)


def test_a_stage_has_one_colour_by_both_formulas_and_no_guide_is_named_on_a_curve(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(canvas.plt, "close", figures.append)
    draw_reduction_cost(reduction(8, 16, 64), tmp_path / "cost.png")
    (axes,) = figures[0].axes
    curves = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    assert len(curves) == 6
    for label in ("Gramians", "Hankel singular values", "whole reduction"):
        assert curves[label].get_color() == curves[f"{label}, plain formulas"].get_color()
    ends = max(line.get_window_extent().x1 for line in curves.values())
    names = [text for text in axes.texts if text.get_text() in ("n²", "n³")]
    assert len(names) == 2
    # Half of a marker is all that is right of the last order.
    assert all(name.get_window_extent().x0 > ends - 3 for name in names)


def test_a_ratio_below_one_is_not_rounded_to_nothing():
    (grid,) = grids(reduction(8, 16))
    assert [row[-1] for row in grid.rows] == ["0.045", "0.045"]


def test_a_measurement_without_a_curve_is_refused(tmp_path):
    row = {"order": 4, "rank": 1, "system": "initial", "width": 8, "members": 1, "device": "cpu"}
    lonely = Measurement("reduction", "t", 1, [{**row, "hankel_s": 0.1, "reduction_s": 0.2}])
    with pytest.raises(MeasurementError, match="1 rows"):
        draw_reduction_cost(lonely, tmp_path / "cost.png")
    assert list(tmp_path.iterdir()) == []
