"""Steps in a user's own loop."""

import json
from dataclasses import replace

import pytest
import torch

from compressm_lab.bench.loop import LoopCase, loop_cases, measure_loops
from compressm_lab.bench.plain import PlainClassifier
from compressm_lab.bench.train_step import StepCase
from compressm_lab.reports.grid import duration
from compressm_lab.reports.measurements import grids
from compressm_lab.runs.measurement import Measurement
from tests import unhooked

TINY = StepCase(task="tiny", depth=1, width=4, order=6, batch=2, length=12, inputs=1, classes=3)
CASE = LoopCase(model="tiny", order=6, batch=2, length=12, precision="float32", classifier=TINY)
MAMBA = LoopCase(model="mamba", order=4, batch=2, length=8, precision="float32", depth=1, width=8, vocabulary=11)


def test_every_way_is_a_row_and_a_column():
    lines, kept = [], []
    cases = [CASE, replace(CASE, order=3, classifier=replace(TINY, order=3))]
    found = measure_loops(cases, ways=("eager", "plain"), repeats=1, progress=lines.append, keep=kept.append)
    expected = [(n, way) for way in ("eager", "plain") for n in (6, 3)]
    assert [(row["order"], row["way"]) for row in found.rows] == expected
    assert all(row["step_s"] > 0 for row in found.rows)
    assert [len(part.rows) for part in kept] == [1, 2, 3, 4]
    (grid,) = grids(found)
    assert grid.heads == ("model", "n", "precision", "eager", "plain")
    assert len(grid.rows) == 2
    assert lines[0] == "tiny, n = 6, eager"


COMPILED = """
import json, sys
from tests.lab.bench import test_loop
case = getattr(test_loop, sys.argv[1])
print(json.dumps(test_loop.measure_loops([case], ways=("compiled", "plain_compiled"), repeats=1).rows))
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["CASE", "MAMBA"])
def test_compilations_are_counted_apart(case):
    """In a plain process: the tests' shape checker cannot be traced."""
    rows = json.loads(unhooked.run(COMPILED, case))
    assert all(row["first_s"] > 3 * row["step_s"] > 0 for row in rows), rows
    caption = grids(Measurement("loop", "", 1, rows))[0].caption
    assert f"first step of compiled: at most {duration(rows[0]['first_s'])}; first step of plain_compiled" in caption


def test_a_way_that_needs_too_much_memory_says_so_in_its_cell():
    row = {"model": "tiny", "order": 6, "precision": "float32", "device": "cpu"}
    rows = [row | {"way": "eager", "step_s": 0.002}, row | {"way": "plain", "note": "OutOfMemoryError: 4 GiB"}]
    (grid,) = grids(Measurement("loop", "", 1, rows))
    assert grid.rows == (("tiny", "6", "float32", "2 ms", "out of memory"),)
    assert grid.caption == ""


def test_only_the_language_model_has_a_module_of_transformers():
    pytest.importorskip("transformers")
    found = measure_loops([CASE, MAMBA], ways=("transformers",), repeats=1)
    assert [row["model"] for row in found.rows] == ["mamba"]
    assert all(row["step_s"] > 0 for row in found.rows)


@pytest.mark.parametrize(
    ("case", "way"),
    [
        (replace(CASE, classifier=replace(TINY, dropout=0.0, depth=2)), "plain"),
        (MAMBA, "plain"),
        (MAMBA, "transformers"),
    ],
)
def test_every_way_computes_the_function_of_our_model(case, way):
    """With the same weights: logits and the gradient of a shared parameter."""
    if way == "transformers":
        pytest.importorskip("transformers")
    models = []
    for name in ("eager", way):
        torch.manual_seed(0)
        models.append(case.build(name))
    x, target = case.data(torch.device("cpu"))
    found = []
    for model in models:
        out = model(x)
        logits = out[0] if isinstance(out, tuple) else getattr(out, "logits", out)
        torch.nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten()).backward()
        gradients = {name.split(".ssm.")[-1].split(".mixer.")[-1]: p.grad for name, p in model.named_parameters()}
        found.append((logits, gradients["nu_log" if case is not MAMBA else "A_log"]))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4 * ours.abs().max().item())
    assert sum(p.numel() for p in models[0].parameters()) == sum(p.numel() for p in models[1].parameters())


def test_a_plain_way_that_fails_says_why(monkeypatch):
    def fails(self, x):
        raise ValueError("out of luck\nmore")

    monkeypatch.setattr(PlainClassifier, "forward", fails)
    found = measure_loops([CASE], ways=("plain",), repeats=1)
    assert found.rows[0]["note"] == "ValueError: out of luck"
    assert "out of luck" in grids(found)[0].caption


@pytest.mark.parametrize(("device", "models"), [("cpu", {"smnist", "mamba"}), ("cuda", {"smnist", "scifar", "mamba"})])
def test_the_models_of_a_device(device, models):
    assert {case.model for case in loop_cases(device)} == models
    assert {case.model for case in loop_cases(device, ["mamba"])} == {"mamba"}


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["CASE", "MAMBA"])
def test_a_gpu_runs_compiled_models_as_graphs(case):
    """In a plain process: the tests' shape checker cannot be traced."""
    code = COMPILED.replace('"compiled", "plain_compiled"', '"reduce_overhead", "plain_reduce_overhead"')
    rows = json.loads(unhooked.run(code.replace("repeats=1", 'repeats=1, device="cuda"'), case))
    assert all(row["step_s"] > 0 for row in rows), rows
