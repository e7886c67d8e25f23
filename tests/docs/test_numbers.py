"""Numbers in README and docs are those of the committed result files, and those meet their targets."""

import importlib.util
from pathlib import Path
from statistics import fmean

import pytest

from compressm.runs.measurement import Measurement

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())


def result(name):
    return Measurement.read(ROOT / "benchmarks" / "results" / f"{name}.json")


def rows(name, **wanted):
    return [row for row in result(name).rows if all(row[key] == value for key, value in wanted.items())]


def milliseconds(name, column, **wanted):
    (row,) = rows(name, **wanted)
    return 1e3 * float(row[column])


def step(task, order, precision):
    return milliseconds("step-cuda", "step_s", task=task, order=order, precision=precision)


def cut(name, task, run="warm"):
    wanted = {"gramian": "white noise", "moments": "Transport", "ranks": "equal", "run": run, "task": task}
    return milliseconds(name, "total_s", **wanted)


def accuracy(way):
    return fmean(row["accuracy"] for row in rows("one_shot", setting="two blocks, 64 steps", way=way, rank=16))


def script():
    spec = importlib.util.spec_from_file_location("fill_tables", ROOT / "benchmarks" / "fill_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_the_measured_ones(page):
    text = page.read_text()
    assert script().filled(text) == text


def test_figures_in_the_readme_are_the_measured_ones():
    assert f"takes {step('scifar', 384, 'bfloat16'):.1f} ms with 384 states and" in README
    assert f"and {step('scifar', 57, 'bfloat16'):.1f} ms with 57" in README
    assert f"384 to 161 states takes {cut('cut-cuda', 'scifar'):.0f} ms up to the first step" in README
    assert f"from 256 to 28 states in {cut('cut-cpu', 'smnist'):.0f} ms" in README
    before = fmean(row["full_accuracy"] for row in rows("one_shot", setting="two blocks, 64 steps"))
    assert f"{before:.3f} before, {accuracy('paper'):.3f} the paper's way, **{accuracy('measured'):.3f} with" in README


def test_the_gpu_figure_of_a_reduction_is_the_measured_one():
    wanted = {"order": 384, "rank": 161, "width": 512, "system": "initial"}
    assert (
        f"go to 161 in {milliseconds('reduction-cuda', 'reduction_s', **wanted):.0f} ms"
        in (ROOT / "docs" / "speed.md").read_text()
    )


def test_steps_that_met_their_targets_still_do():
    assert step("smnist", 256, "tf32") <= 0.20
    assert step("smnist", 13, "float32") <= 0.15
    assert step("scifar", 384, "bfloat16") <= 8
    assert step("scifar", 57, "bfloat16") <= 5


def test_cuts_take_no_longer_than_they_may():
    assert cut("cut-cuda", "scifar") <= 500
    assert cut("cut-cpu", "smnist") <= 150
    assert result("cut-cpu").environment.threads == 1


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_results_name_a_machine_and_a_clean_commit(path):
    environment = Measurement.read(path).environment
    assert environment.processor
    assert len(environment.commit) == 12


@pytest.mark.parametrize("name", ["reduction", "step", "cut", "growth"])
def test_results_of_a_gpu_name_it(name):
    assert "H200" in result(f"{name}-cuda").environment.accelerator


def test_reductions_take_no_longer_than_they_may():
    def reduction(order, rank, column="reduction_s"):
        return milliseconds("reduction-cpu", column, order=order, rank=rank, width=8, system="initial")

    assert result("reduction-cpu").environment.threads == 1
    assert reduction(256, 64) <= 40
    assert reduction(512, 128) <= 250
    assert reduction(256, 64, "hankel_s") <= 15
    for order in (256, 512, 1024):
        assert reduction(order, order // 4, "speedup") >= 4e3
    assert milliseconds("reduction-cuda", "reduction_s", order=384, rank=161, width=512, system="initial") <= 350


def test_the_cost_rule_picks_a_path_that_was_measured_fastest_or_nearly():
    for row in result("scan-cpu").rows:
        times = {name.removesuffix("_s").upper(): float(row[name]) for name in row if name.endswith("_s")}
        assert times[row["chosen"]] <= 1.25 * min(times.values()), row
