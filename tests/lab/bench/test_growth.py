from compressm_lab.bench import train_step
from compressm_lab.bench import train_step as growth
from compressm_lab.bench.timing import Ceilings
from compressm_lab.bench.train_step import MIDDLE, RANGES, growth_cases, measure_growth

from .test_train_step import tiny


def test_only_the_size_of_an_axis_changes_along_it():
    for axis, case in growth_cases(RANGES, "cpu", ["float32"]):
        others = {name: getattr(case, name) for name in RANGES if name != axis}
        assert others == {name: getattr(MIDDLE, name) for name in others}
        assert case.batch == growth.BATCH["cpu"]


def test_ranges_are_those_of_the_claim_and_hold_the_middle_point():
    assert (RANGES["order"][0], RANGES["order"][-1]) == (8, 1024)
    assert (RANGES["length"][0], RANGES["length"][-1]) == (256, 65536)
    assert (RANGES["width"][0], RANGES["width"][-1]) == (8, 1024)
    assert all(getattr(MIDDLE, axis) in sizes for axis, sizes in RANGES.items())


def test_every_point_is_measured_once(monkeypatch):
    monkeypatch.setattr(train_step, "measure_ceilings", lambda *_: Ceilings(1e10, 1e10, 0.0))
    monkeypatch.setattr(growth, "MIDDLE", tiny())
    monkeypatch.setattr(growth, "RANGES", {"order": (2, 3), "length": (12, 16), "width": (4,)})
    lines = []
    result = measure_growth(repeats=1, progress=lines.append)
    sizes = [(row["axis"], row["order"], row["length"]) for row in result.rows]
    assert sizes == [("order", 2, 12), ("order", 3, 12), ("length", 3, 12), ("length", 3, 16), ("width", 3, 12)]
    assert len(lines) == 1 + 3
    assert result.rows[1]["step_s"] == result.rows[2]["step_s"] > 0
    assert all(row["floor_s"] > 0 for row in result.rows)
