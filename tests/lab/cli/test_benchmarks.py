"""Every benchmark of the command line on its smallest case, and its result file shown again."""

import json
import multiprocessing
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from compressm_lab.bench import cut as cut_bench
from compressm_lab.bench import cut as cut_cases
from compressm_lab.bench import peers as peers_bench
from compressm_lab.bench import scans as scan_paths
from compressm_lab.bench import train_step
from compressm_lab.bench import train_step as growth_bench
from compressm_lab.bench.speedup import NotChecked
from compressm_lab.bench.timing import Ceilings
from compressm_lab.bench.train_step import StepCase
from compressm_lab.cli import bench as terminal
from compressm_lab.reports.measurements import grids
from compressm_lab.runs.measurement import Measurement
from compressm_lab.training import Interrupted
from tests.cli.test_commands import plain, run

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
TINY = StepCase(task="tiny", depth=1, width=4, order=2, batch=2, length=8, inputs=1, classes=2)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(train_step, "measure_ceilings", lambda *_: Ceilings(1e10, 1e10, 0.0))
    monkeypatch.setattr(growth_bench, "MIDDLE", TINY)
    monkeypatch.setattr(growth_bench, "RANGES", {"order": (2, 4), "length": (8,), "width": (4,)})
    for module, function, shapes in (
        (peers_bench, "measure_peers", [(2, 5, 3)]),
        (scan_paths, "measure_paths", [(2, 16, 3, 2)]),
    ):
        measure = getattr(module, function)
        monkeypatch.setattr(module, function, lambda measure=measure, shapes=shapes, **rest: measure(shapes, **rest))


def test_a_training_step_is_measured_beside_its_floor_and_written(tmp_path):
    done = run("bench", "step", "--order", "3", "--repeats", "1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["step-cpu.json"]
    assert "smnist" in done.output
    assert "floor" in done.output
    table = run("bench", "table", str(tmp_path / "step-cpu.json"))
    assert "| smnist | 3 | float32 |" in table.output


def test_no_number_is_cut_off_in_a_narrow_terminal(tmp_path, monkeypatch):
    narrow, found = Console(width=60, record=True, file=StringIO()), Measurement.read(RESULTS / "reduction-cpu.json")
    monkeypatch.setattr(terminal, "console", narrow)
    terminal.report(found, tmp_path / "result.json")
    said = narrow.export_text()
    assert "…" not in said
    lines = [line[1:-1].split() for line in said.splitlines() if line.startswith("│")]
    assert lines == [" │ ".join(row).split() for row in grids(found)[0].rows]


@pytest.fixture
def quick_processes(monkeypatch):
    """A process for every case, as always, but from one that has loaded the library."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["compressm_lab.bench.cut"])
    monkeypatch.setattr(cut_bench, "get_context", lambda method: context)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_processes")
def test_a_cut_is_measured_stage_by_stage_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(cut_cases, "default_models", lambda device: (TINY,))
    done = run("bench", "cut", "--rank", "1", "--repeats", "1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "1 layer(s) of 4 channels, 2 → 1 states" in plain(done)
    assert [path.name for path in tmp_path.iterdir()] == ["cut-cpu.json"]
    table = run("bench", "table", str(tmp_path / "cut-cpu.json")).output
    assert "| stage | Transport | Restart | Transport, measured P |" in table


def test_growth_is_one_result_with_a_table_an_axis_and_one_picture(tmp_path, small):
    done = run("bench", "growth", "--repeats", "1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["growth-cpu.json", "growth-cpu.png"]
    for axis in ("order", "length", "width"):
        assert f"against the {axis}" in plain(done)
    picture = tmp_path / "again.svg"
    assert run("bench", "draw", str(tmp_path / "growth-cpu.json"), "--picture", str(picture)).exit_code == 0
    assert "batch 2, n = 2, H = 4" in picture.read_text()
    assert "| n | float32 | floor |" in run("bench", "table", str(tmp_path / "growth-cpu.json")).output


@pytest.mark.slow
def test_one_axis_of_growth_can_be_asked_for_alone(tmp_path, small):
    done = run("bench", "growth", "--axis", "order", "--repeats", "1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "growth-cpu.json").read_text())["rows"]
    assert [(row["axis"], row["order"]) for row in rows] == [("order", 2), ("order", 4)]


def test_peers_are_listed_with_their_reason_where_they_do_not_run(tmp_path, small):
    done = run("bench", "peers", "--repeats", "1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "h[t] = λ h[t−1] + x[t]" in done.output
    assert "PyTorch loop" in done.output
    assert "needs a GPU" in run("bench", "table", str(tmp_path / "peers-cpu.json")).output


def test_a_penalty_is_measured_beside_a_step_and_the_papers_way(tmp_path):
    done = run("bench", "regulariser", "--order", "3", "--repeats", "1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.iterdir()] == ["regulariser-cpu.json"]
    table = run("bench", "table", str(tmp_path / "regulariser-cpu.json")).output
    assert "| smnist | 3 | 0.314 |" in table
    assert "| smnist | 3 | 6.28 |" in table
    assert "by autograd" in table


def test_paths_of_a_layer_are_listed_beside_the_choice(tmp_path, small):
    done = run("bench", "scan", "--repeats", "1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "chosen" in done.output
    assert "| 2 | 16 | 3 | 2 |" in run("bench", "table", str(tmp_path / "scan-cpu.json")).output


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_every_committed_result_has_a_table(path):
    done = run("bench", "table", str(path))
    assert done.exit_code == 0, done.output
    first = done.output.splitlines()[0]
    assert first.startswith("|") or first.endswith("):")  # a table, or the title of the first of several


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "growth", "--axis", "depth"), "'depth' is not one of 'order', 'length', 'width'"),
        (("bench", "growth", "--precision", "float8"), "'float8' is not one of"),
        (("bench", "step", "--task", "mnist"), "'mnist' is not one of 'smnist'"),
        (("bench", "cut", "--task", "mnist"), "'mnist' is not one of 'smnist'"),
        (("bench", "cut", "--rank", "0"), "0 is too small, expected at least 1"),
        (("bench", "peers", "--repeats", "0"), "0 is too small, expected at least 1"),
        (("bench", "speedup", "--schedule", "0:128,10:256"), "--schedule '0:128,10:256': expected steps that rise"),
        (("bench", "speedup", "--schedule", "0:128,10:0"), "orders that fall, to 1 or more"),
        (("bench", "speedup", "--set", "training.steps=200"), "cuts at step 240, after the last step, 200"),
        (("bench", "speedup", "--set", "regulariser={kind: modal-l1, beta: 1}"), "has a regulariser, whose cost"),
        (("bench", "speedup", "--set", "model.layer_options={foo: 1}"), "foo"),
        (("bench", "draw", str(RESULTS / "scan-cpu.json")), "no picture for results named 'scan', only for reduction"),
    ],
)
def test_a_bad_value_says_what_was_given_and_exits_2(arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in plain(done)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step_s": "fast"}, "row 0 has 'fast' as step_s, expected a number"),
        ({"task": 5}, "row 0 has 5 as task, expected text"),
    ],
)
def test_a_result_with_other_values_is_refused_by_name(tmp_path, change, said):
    stored = json.loads((RESULTS / "step-cpu.json").read_text())
    stored["rows"][0] |= change
    path = tmp_path / "r.json"
    path.write_text(json.dumps(stored))
    done = run("bench", "table", str(path))
    assert done.exit_code == 2
    assert said in plain(done)


@pytest.mark.parametrize("command", ["table", "draw"])
@pytest.mark.parametrize(
    ("kind", "column", "said"),
    [
        ("costs", "recapture_s", "row 0 lacks recapture_s"),
        ("schedule", "whole_s", "row 6 lacks whole_s"),
        ("costs", None, "no row has costs"),
    ],
)
def test_a_speed_up_without_a_column_is_refused_by_name(tmp_path, command, kind, column, said):
    stored = json.loads((RESULTS / "speedup-digits-cpu.json").read_text())
    for row in [row for row in stored["rows"] if row["what"] == kind]:
        stored["rows"].remove(row) if column is None else row.pop(column)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(stored))
    done = run("bench", command, str(path))
    assert done.exit_code == 2
    assert said in plain(done)
    assert list(tmp_path.iterdir()) == [path]


def test_a_stopped_check_leaves_what_was_measured_and_exit_code_130(tmp_path, monkeypatch):
    measurement = Measurement.read(RESULTS / "speedup-digits-cpu.json")

    def stopped(*_, **__):
        raise NotChecked(measurement, Interrupted("SIGTERM", 3, tmp_path))

    monkeypatch.setattr("compressm_lab.bench.speedup.measure_speedup", stopped)
    whole = tmp_path / "speedup-digits-cpu.json"
    whole.write_text("whole")
    done = run("bench", "speedup", "--out", str(tmp_path))
    assert done.exit_code == 130
    assert whole.read_text() == "whole"
    assert "stopped before the check was done; what was measured until then is kept" in plain(done)
    assert Measurement.read(tmp_path / "speedup-digits-cpu-unchecked.json") == measurement
    assert (tmp_path / "speedup-digits-cpu-unchecked.png").exists()


def test_a_result_of_an_unknown_kind_is_refused_by_name(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**json.loads((RESULTS / "step-cpu.json").read_text()), "name": "cooking"}))
    done = run("bench", "table", str(path))
    assert done.exit_code == 2
    assert "no table for results named 'cooking'" in plain(done)
