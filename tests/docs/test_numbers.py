"""Numbers in the README are those of the committed result files, and those meet their targets."""

from pathlib import Path

from compressm.reports.tables import markdown
from compressm.runs.measurement import Measurement

ROOT = Path(__file__).parents[2]
CPU = Measurement.read(ROOT / "benchmarks" / "results" / "reduction-cpu.json")
GPU = Measurement.read(ROOT / "benchmarks" / "results" / "reduction-cuda.json")


def row(measurement, order, rank, width, kind="initial"):
    wanted = (order, rank, width, kind)
    (found,) = (r for r in measurement.rows if (r["order"], r["rank"], r["width"], r["system"]) == wanted)
    return found


def test_the_table_in_the_readme_is_the_measured_one():
    assert markdown(CPU) in (ROOT / "README.md").read_text()


def test_the_gpu_figure_in_the_readme_is_the_measured_one():
    milliseconds = 1e3 * float(row(GPU, 384, 161, 512)["reduction_s"])
    assert f"go to 161 in {milliseconds:.0f} ms" in (ROOT / "README.md").read_text()


STEPS = Measurement.read(ROOT / "benchmarks" / "results" / "step-cuda.json")


def test_the_table_of_steps_in_the_readme_is_the_measured_one():
    assert markdown(STEPS) in (ROOT / "README.md").read_text()


def test_steps_that_met_their_targets_still_do():
    measured = {(row["task"], row["order"], row["precision"]): 1e3 * float(row["step_s"]) for row in STEPS.rows}
    assert measured["smnist", 256, "tf32"] <= 0.20
    assert measured["smnist", 13, "float32"] <= 0.15
    assert measured["scifar", 384, "bfloat16"] <= 8


def test_results_name_a_machine_and_a_clean_commit():
    for measurement in (CPU, GPU, STEPS):
        assert measurement.environment.processor
        assert len(measurement.environment.commit) == 12
    assert CPU.environment.threads == 1
    assert "H200" in GPU.environment.accelerator
    assert "H200" in STEPS.environment.accelerator


def test_the_measured_times_meet_their_targets():
    assert row(CPU, 256, 64, 8)["reduction_s"] <= 0.040
    assert row(CPU, 512, 128, 8)["reduction_s"] <= 0.250
    assert row(CPU, 256, 64, 8)["hankel_s"] <= 0.015
    for order in (256, 512, 1024):
        assert row(CPU, order, order // 4, 8)["speedup"] >= 4
    assert row(GPU, 384, 161, 512)["reduction_s"] <= 0.350


def test_the_cost_rule_picks_a_path_that_was_measured_fastest_or_nearly():
    measured = Measurement.read(ROOT / "benchmarks" / "results" / "scan-cpu.json")
    for row in measured.rows:
        times = {name.removesuffix("_s").upper(): float(row[name]) for name in row if name.endswith("_s")}
        assert times[row["chosen"]] <= 1.25 * min(times.values()), row
