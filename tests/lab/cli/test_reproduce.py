"""`compressm reproduce` as a person meets it; what it trains is in tests/lab/experiments."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from compressm.cli.app import app
from compressm_lab.cli import reproduce
from compressm_lab.experiments import kept
from compressm_lab.experiments.catalogue import Experiment, experiment_names
from compressm_lab.reports import run_report
from compressm_lab.runs.measurement import Measurement
from tests.lab.experiments.tiny import Inline, arms


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("COMPRESSM_COMMIT", "tests")
    monkeypatch.setenv("COMPRESSM_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)], env={"COLUMNS": "250"})


def plain(done):
    return words(done.output)


def words(text):
    return " ".join(text.replace("│", " ").split())


def small(monkeypatch, executor):
    wanted = Experiment("results", "A small table", arms(), 2)
    monkeypatch.setattr(reproduce, "find_experiment", lambda name, quick: wanted)
    monkeypatch.setattr(reproduce, "_executor", lambda *given: executor)
    # Pictures have tests of their own, and take longer than all of this.
    monkeypatch.setattr(run_report, "write_files", lambda *_: [])
    monkeypatch.setattr(run_report, "inline_svg", lambda *_, **__: "")


def test_the_list_has_every_name_with_its_runs():
    done = run("LIST")
    assert done.exit_code == 0
    rows = {line.split("│")[1].strip(): line for line in done.output.splitlines() if "│" in line}
    assert set(experiment_names()) <= set(rows)
    assert [cell.strip() for cell in rows["sanity"].split("│")[3:5]] == ["50", "0"]
    assert "bench reduction" in rows["reduction-complexity"]


def test_a_dry_run_says_what_would_be_trained_and_writes_nothing(tmp_path):
    done = run("hnn_vs_compressm", "--quick", "--seeds", 1, "--dry-run")
    assert done.exit_code == 0
    said = plain(done)
    assert "sMNIST, CompreSSM, τ = 0.04, seed 0: begins" in said
    assert "compressm train digits --seed 0 --out out/quick/runs/digits/tau-0.04/seed-0" in said
    assert (
        "sMNIST, baseline, our mean order, τ = 0.04, seed 0: takes the mean final order of sMNIST, CompreSSM, τ = 0.04"
        in said
    )
    assert list(tmp_path.iterdir()) == []


def test_it_trains_reports_and_finds_everything_done_the_next_time(monkeypatch):
    small(monkeypatch, Inline())
    done = run("results", "--quick")
    assert done.exit_code == 0, done.output
    assert "6 of 6 trainings are done" in plain(done)
    assert "report: out/quick/results/report.md" in plain(done)
    again = run("results", "--quick")
    assert again.exit_code == 0
    assert "results: 6 trainings, 6 done" in plain(again)
    assert "6 of 6" in plain(run("results", "--quick", "--only-report"))


def test_the_table_of_the_paper_is_printed_with_ours_and_the_command_of_what_is_missing(monkeypatch, tmp_path):
    small(monkeypatch, Inline())
    monkeypatch.setattr(kept, "FILE", tmp_path / "none.json")
    done = run("results", "--only", "CompreSSM", "--out", "out")
    assert done.exit_code == 0, done.output
    assert "2 of 2 trainings are done" in plain(done)
    assert "(95.9 ± 0.2)" in plain(done)
    assert "(97.3 ± 0.1)" in plain(done)
    # The baseline beside it now has its order, and is not trained either.
    assert "2 of 3 cells are not trained: compressm reproduce results --only sMNIST" in plain(done)
    rows = Measurement.read(tmp_path / "out" / "results" / "ours.json").rows
    assert [(row["variant"], row["seed"]) for row in rows] == [("digits/tau-0.04", 0), ("digits/tau-0.04", 1)]
    monkeypatch.setattr(kept, "FILE", tmp_path / "out" / "results" / "ours.json")
    again = plain(run("results", "--only-report", "--out", "elsewhere"))
    assert "0 of 6 trainings are done" in again
    (line,) = (line for line in done.output.splitlines() if "CompreSSM: mean of all" in line)
    assert words(line) in again


def test_exit_codes_say_how_it_ended(monkeypatch):
    small(monkeypatch, Inline(breaks=["n-8/seed-0"]))
    done = run("results", "--out", "failed")
    assert done.exit_code == 1
    assert "not done: sMNIST, baseline, τ = 0, seed 0: exit 1: the loss is not finite" in plain(done)
    small(monkeypatch, Inline(until=1))
    done = run("results", "--out", "stopped")
    assert done.exit_code == 130
    assert "the same command goes on" in plain(done)


def test_a_report_before_anything_is_trained_is_one_file_and_says_so(monkeypatch, tmp_path):
    small(monkeypatch, Inline())
    done = run("results", "--only-report", "--out", "early")
    assert done.exit_code == 0
    assert "report: early/results/report.md, without a page: no run has begun" in plain(done)
    assert [path.name for path in (tmp_path / "early" / "results").iterdir()] == ["report.md"]


def test_a_run_that_cannot_be_read_is_named(monkeypatch, tmp_path):
    small(monkeypatch, Inline())
    assert run("results", "--out", "out").exit_code == 0
    folder = next((tmp_path / "out" / "runs").rglob("n-8/seed-0"))
    for name in ("metrics.jsonl", "truncations.jsonl", "status.json"):
        whole = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).write_text("{\n")
        done = run("results", "--out", "out", "--only-report")
        assert done.exit_code == 2, name
        assert f"n-8/seed-0/{name}" in plain(done).replace(" ", "")
        (folder / name).unlink()
        if whole is not None:
            (folder / name).write_bytes(whole)
    assert run("results", "--out", "out", "--only-report").exit_code == 0


def test_a_benchmark_that_is_only_reported_is_not_measured_again(tmp_path):
    folder = tmp_path / "bench" / "reduction-complexity"
    done = run("reduction-complexity", "--out", "bench", "--only-report")
    assert done.exit_code == 2
    assert "nothing was measured yet" in plain(done)
    folder.mkdir(parents=True)
    measured = (Path(__file__).parents[3] / "benchmarks" / "results" / "reduction-cpu.json").read_bytes()
    (folder / "reduction-cpu.json").write_bytes(measured)
    assert run("reduction-complexity", "--out", "bench", "--only-report").exit_code == 0
    assert (folder / "reduction-cpu.json").read_bytes() == measured
    assert "fig:reduction-complexity" in (folder / "report.md").read_text()


def test_missing_data_are_named_once_before_any_training_begins(monkeypatch, tmp_path):
    monkeypatch.setattr(reproduce.LocalExecutor, "submit", lambda *_: pytest.fail("trained"))
    done = run("results", "--data", tmp_path / "none", "--processes", 4)
    assert done.exit_code == 2
    said = plain(done)
    assert "6 data sets of 865 trainings cannot be had, nothing was trained" in said
    for name in ("scifar", "listops", "aan", "imdb", "pathfinder", "smnist"):
        assert said.count(f" {name}: ") == 1
    assert "put https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz at" in said
    assert not (tmp_path / "out").exists()


def test_a_machine_without_slurm_is_named(monkeypatch):
    pytest.importorskip("submitit", reason="needs the package submitit")
    monkeypatch.setenv("PATH", "")
    done = run("sanity", "--executor", "slurm")
    assert done.exit_code == 2
    assert "--executor slurm: Could not detect" in plain(done)


@pytest.mark.slow
def test_the_figure_that_is_a_benchmark_has_its_report_too(tmp_path):
    done = run("reduction-complexity", "--quick", "--out", "bench")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "bench" / "reduction-complexity" / "report.md").read_text()
    assert "fig:reduction-complexity" in text
    assert "| 128 → 32 |" in text
    assert (tmp_path / "bench" / "reduction-complexity" / "figures" / "reduction.png").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("santiy",), "did you mean 'sanity'"),
        (("sanity", "--seeds", "0"), "0 is too small"),
        (("sanity", "--executor", "cloud"), "'cloud' is not one of 'local', 'slurm'"),
        (("sanity", "--hours", "many"), "'many' is not a number"),
        (("sanity", "--executor", "slurm", "--hours", "0"), "hours is 0, expected a number above 0"),
    ],
)
def test_bad_values_are_refused(arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in plain(done)
