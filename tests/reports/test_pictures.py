import pytest

from compressm.reports.reduction_cost import draw_reduction_cost
from compressm.reports.reduction_error import ReductionCurve, draw_reduction_error
from compressm.runs.measurement import Measurement, MeasurementError


def test_a_picture_of_errors_is_written_whole(tmp_path):
    curve = ReductionCurve("a system", [1.0, 0.5, 0.1], [1, 2], [1.2, 0.2], [0.8, 0.15])
    picture = draw_reduction_error([curve, curve], tmp_path / "deep" / "errors.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in picture.parent.iterdir()] == ["errors.png"]


def test_a_measurement_without_a_curve_is_refused(tmp_path):
    row = {"order": 4, "rank": 1, "system": "initial", "width": 8, "members": 1, "device": "cpu"}
    lonely = Measurement("reduction", "t", 1, [{**row, "hankel_s": 0.1, "reduction_s": 0.2}])
    with pytest.raises(MeasurementError, match="1 rows"):
        draw_reduction_cost(lonely, tmp_path / "cost.png")
    assert list(tmp_path.iterdir()) == []
