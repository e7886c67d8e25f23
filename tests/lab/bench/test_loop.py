"""Steps in a user's own loop."""

from dataclasses import replace

import pytest
import torch

from compressm_lab.bench.loop import LoopCase, PlainClassifier, PlainLRU, loop_cases, measure_loops
from compressm_lab.bench.train_step import StepCase
from compressm_lab.reports.measurements import grids

TINY = StepCase(task="tiny", depth=1, width=4, order=6, batch=2, length=12, inputs=1, classes=3)
CASE = LoopCase(model="tiny", order=6, batch=2, length=12, precision="float32", classifier=TINY)
MAMBA = LoopCase(model="mamba", order=4, batch=2, length=8, precision="float32", depth=1, width=8, vocabulary=11)


def test_every_way_is_a_row_and_a_column():
    lines = []
    found = measure_loops([CASE, replace(CASE, order=3)], ways=("eager", "plain"), repeats=1, progress=lines.append)
    expected = [(n, way) for n in (6, 3) for way in ("eager", "plain")]
    assert [(row["order"], row["way"]) for row in found.rows] == expected
    assert all(row["step_s"] > 0 for row in found.rows)
    (grid,) = grids(found)
    assert grid.heads == ("model", "n", "precision", "eager", "plain")
    assert len(grid.rows) == 2
    assert lines[0] == "tiny, n = 6, eager"


def test_the_language_model_runs_beside_that_of_transformers():
    pytest.importorskip("transformers")
    found = measure_loops([MAMBA], ways=("eager", "plain"), repeats=1)
    assert all(row["step_s"] > 0 for row in found.rows)


def test_a_plain_way_that_fails_says_why(monkeypatch):
    def fails(self, x):
        raise ValueError("out of luck\nmore")

    monkeypatch.setattr(PlainClassifier, "forward", fails)
    found = measure_loops([CASE], ways=("plain",), repeats=1)
    assert found.rows[0]["note"] == "ValueError: out of luck"
    assert "out of luck" in grids(found)[0].caption


def test_the_plain_layer_is_the_recurrence():
    torch.manual_seed(0)
    layer = PlainLRU(3, 5)
    u = torch.randn(2, 9, 3)
    poles = torch.exp(torch.complex(-torch.exp(layer.nu), torch.exp(layer.theta)))
    B, C = torch.complex(*layer.B), torch.complex(*layer.C)
    h, expected = torch.zeros(2, 5, dtype=torch.complex64), []
    for t in range(9):
        h = poles * h + u[:, t].to(B.dtype) @ B.mT
        expected.append((h @ C.mT).real + layer.D * u[:, t])
    assert torch.allclose(layer(u), torch.stack(expected, 1), atol=1e-5)


@pytest.mark.parametrize(("device", "models"), [("cpu", {"smnist"}), ("cuda", {"smnist", "scifar", "mamba"})])
def test_the_models_of_a_device(device, models):
    assert {case.model for case in loop_cases(device)} == models
