import pytest

from compressm_lab.reports.measurements import draw, grids, markdown
from compressm_lab.reports.study_tables import WINDOW, continuity
from compressm_lab.runs.measurement import Measurement, MeasurementError


def curve(way, seed, loss, kept=10):
    steps = {f"{k:+d}": loss + (0.5 if k > WINDOW else 0.0) for k in range(-2, WINDOW + 4)}
    return {"way": way, "seed": seed, "states": 16, "kept": kept, "device": "cpu", **steps}


def curves(*rows):
    return Measurement("loss_continuity", "t", 2, [curve(*row) for row in rows])


TWO_WAYS = curves(("uncut", 0, 1.0, 16), ("uncut", 1, 3.0, 16), ("paper", 0, 1.5), ("paper", 1, 7.0))


def one_shot(*rows):
    names = ("seed", "way", "rank", "accuracy")
    common = {"setting": "two blocks", "order": 64, "full_accuracy": 0.9, "device": "cpu"}
    return Measurement("one_shot", "t", 2, [common | dict(zip(names, row, strict=True)) for row in rows])


def test_one_shot_shows_the_mean_and_spread_of_every_way():
    (grid,) = grids(
        one_shot((0, "paper", 32, 0.5), (0, "folded", 32, 0.8), (1, "paper", 32, 0.7), (1, "folded", 32, 0.8))
    )
    assert grid.heads == ("n → r", "paper", "folded")
    assert grid.rows == (("64 → 32", "0.600 ± 0.141", "0.800 ± 0.000"),)
    assert "before the cut 0.900 ± 0.000" in grid.caption


def test_the_loss_after_a_cut_is_compared_with_the_spread_of_the_uncut_runs():
    found = continuity(TWO_WAYS)
    assert found["uncut"].distance == pytest.approx(0.5**0.5)  # of two runs each is this far from their mean
    assert found["paper"].losses == (1.5, 7.0)
    assert found["paper"].distance == pytest.approx(5 / 2**0.5)
    assert found["paper"].paired == pytest.approx(2.25)
    (grid,) = grids(TWO_WAYS)
    assert grid.rows[1][:2] == ("paper", "16 → 10")


def test_curves_are_drawn_whole(tmp_path):
    assert draw(TWO_WAYS, tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("paper", 0, 1.0)], "0 uncut runs; a spread needs 2"),
        ([("uncut", 0, 1.0), ("uncut", 1, 1.0), ("paper", 0, 1.0)], "the seeds differ between ways"),
        ([], "not a result of `python studies/loss_continuity.py` with rows"),
    ],
)
def test_curves_that_cannot_be_compared_are_refused(rows, message):
    with pytest.raises(MeasurementError, match=message):
        markdown(curves(*rows))
