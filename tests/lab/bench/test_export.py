"""The benchmark of exports: a row for every cell, with a difference or the runtime's own reason."""

import itertools

from compressm_lab.bench.export import FORMATS, ExportCase, default_cases, measure_export
from compressm_lab.reports.measurements import grids

SMALL = {"order": 6, "rank": 3, "depth": 2, "width": 4, "formats": ("torch.export",)}


def test_steps_are_timed_before_and_after_the_cut_beside_the_model_itself():
    said = []
    measurement = measure_export([ExportCase("LRU", "classifier", "step", **SMALL)], repeats=1, progress=said.append)
    assert [(row["cut"], row["runtime"]) for row in measurement.rows] == list(
        itertools.product(("before", "after"), ("eager step", "Stream", "torch.export"))
    )
    assert all(row["step_s"] > 0 for row in measurement.rows)
    assert [row["orders"] for row in measurement.rows] == ["6 6"] * 3 + ["3 3"] * 3
    assert all(row["difference"] < row["tolerance"] for row in measurement.rows if "bytes" in row)
    times, differences = grids(measurement)
    assert times.heads == ("layer", "model", "orders", "eager step", "Stream", "torch.export")
    assert times.rows[0][:3] == ("LRU", "classifier", "6 → 3")
    assert differences.rows[0][:5] == ("step", "LRU", "classifier", "float32", "6 → 3")
    assert said == ["step of a LRU classifier, 6 → 3"]


def test_a_refused_cell_keeps_the_reason_of_the_runtime():
    case = ExportCase("LRU", "language model", "step", 6, 3, 2, 4, "bfloat16", unequal=True, formats=("onnxruntime",))
    measurement = measure_export([case], repeats=1)
    assert all("NOT_IMPLEMENTED" in row["reason"] for row in measurement.rows)
    (differences,) = grids(measurement)
    assert differences.rows[0][3:] == ("bfloat16", "6 → 3, 2", "no")


def test_cases_are_those_that_are_promised():
    cases = default_cases()
    wanted = set(itertools.product(("LRU", "S5", "S4D", "Mamba"), ("classifier", "language model")))
    for what, formats in (("step", set(FORMATS)), ("forward", {"torch.export", "onnxruntime"})):
        plain = [case for case in cases if (case.what, case.precision, case.unequal) == (what, "float32", False)]
        assert {(case.layer, case.model) for case in plain} == wanted
        assert all(set(case.formats) == formats for case in plain)
    assert any(case.unequal for case in cases)
    assert any(case.precision == "bfloat16" for case in cases)
