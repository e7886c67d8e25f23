"""Trainings as processes and as jobs of a cluster."""

import os
import sys
import time

import pytest

from compressm_lab.experiments.executors import LocalExecutor, SlurmExecutor, SlurmOptions
from compressm_lab.experiments.recipes import BASELINE, Arm, Training
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.training.config import ConfigError
from tests.lab.experiments.tiny import SMALL


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("COMPRESSM_COMMIT", "tests")
    monkeypatch.setenv("COMPRESSM_DATA", str(tmp_path / "data"))


# submitit's executor for debugging leaves its log files open.
leaves_files_open = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)


# Made at once, while scikit-learn, which has the digits, takes a second to load.
MADE = ("task={name: delayed_copy, symbols: 4, copied: 4, delay: 2, examples: 64, held_out: 16}", "model.pooling=steps")


def training(folder, *settings):
    return Training(Arm("", "name", "", "digits", "folder", (*SMALL, *settings, *BASELINE)), 0, folder)


@leaves_files_open
def test_a_job_of_a_cluster_writes_the_records_of_a_run(tmp_path):
    pytest.importorskip("submitit")
    wanted = training(tmp_path / "run", *MADE)
    started = SlurmExecutor(tmp_path / "slurm", SlurmOptions(cluster="debug", gpus=0)).submit(wanted)
    assert started.done()
    assert started.result().message == ""
    assert wanted.finished
    assert RunDirectory(wanted.folder).environment().commit == "tests"


@pytest.mark.slow
@leaves_files_open
def test_a_job_that_fails_says_why(tmp_path):
    pytest.importorskip("submitit")
    started = SlurmExecutor(tmp_path / "slurm", SlurmOptions(cluster="debug", gpus=0)).submit(
        Training(Arm("", "name", "", "nonsense", "folder"), 0, tmp_path / "run")
    )
    assert "'nonsense' is not a recipe" in started.result().message.replace("│", " ")


def test_without_submitit_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"pip install 'compressm\[slurm\]'"):
        SlurmExecutor(tmp_path, SlurmOptions())


@pytest.mark.slow
def test_a_folder_in_which_another_process_trains_is_not_trained_and_its_owner_is_named(tmp_path):
    wanted = training(tmp_path / "run")
    with RunDirectory(wanted.folder).locked():
        said = LocalExecutor(1).submit(wanted).result().message
    assert said.startswith("exit 2: ")
    assert f"is being trained by process {os.getpid()} on " in said
    assert not wanted.run.exists


@pytest.mark.slow
def test_processes_that_are_stopped_save_and_can_go_on(tmp_path):
    wanted = training(tmp_path / "run", "training.steps=1000000", "training.evaluate_every=1000000")
    executor = LocalExecutor(1)
    running, waiting = executor.submit(wanted), executor.submit(training(tmp_path / "other"))
    begin = time.monotonic()
    while not (wanted.folder / "status.json").exists() and time.monotonic() - begin < 60:
        time.sleep(0.1)
    executor.stop()
    ended = running.result()
    assert ended.interrupted
    assert waiting.cancelled()
    status = RunDirectory(wanted.folder).status()
    assert status.state == "interrupted"
    assert 0 < status.step < 1_000_000
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert not (tmp_path / "other").exists()
