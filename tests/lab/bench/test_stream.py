"""The benchmark of streams measures both ways and shows them side by side."""

import pytest

from compressm_lab.bench.stream import StreamCase, default_cases, measure_streams
from compressm_lab.reports.measurements import grids


@pytest.mark.parametrize("layer", ["LRU", "Mamba"])
def test_a_token_is_timed_by_step_and_by_stream(layer):
    said = []
    measurement = measure_streams([StreamCase(layer, 4, 2, depth=1, width=8)], repeats=1, progress=said.append)
    (row,) = measurement.rows
    assert row["stream_s"] > 0
    assert row["step_s"] > 0
    assert "unrecorded_s" not in row
    assert said == [f"{layer}, n = 4, batch 2"]
    (grid,) = grids(measurement)
    assert grid.heads == ("layer", "n", "batch", "H", "precision", "eager step", "Stream", "faster")


def test_cases_are_those_that_are_promised():
    wanted = {("LRU", n, batch) for n in (256, 28) for batch in (1, 8)}
    assert wanted <= {(case.layer, case.order, case.batch) for case in default_cases("cpu")}
    (mamba,) = [case for case in default_cases("cuda") if case.order == 16]
    assert (mamba.layer, mamba.depth, mamba.width, mamba.batch, mamba.precision) == ("Mamba", 4, 256, 8, "bfloat16")
