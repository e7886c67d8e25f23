"""Disks that are full or read-only in the middle of a run: a named error, a status, and a run that goes on."""

import errno
import os
import subprocess

import pytest
from typer.testing import CliRunner

from compressm.cli.app import app
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import RunWriteError
from compressm_lab.training import loop, train
from compressm_lab.training.steps import Learner, task_objective
from tests import unhooked
from tests.lab.training.tiny import CUTS, SPECTRA, check_same_run, recipe, tokens

FULL = recipe(CUTS, SPECTRA, "model.order=32", "model.width=16")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(FULL, tokens(), tmp_path_factory.mktemp("runs") / "whole").path


@pytest.fixture
def disk(tmp_path):
    """A function that mounts a small disk, or changes its options; only root may."""
    place = tmp_path / "disk"
    place.mkdir()

    def mounted(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and "remount" not in options:
            pytest.skip(f"nothing can be mounted here: {done.stderr}")
        assert done.returncode == 0, done.stderr
        return place

    yield mounted
    subprocess.run(["umount", str(place)], capture_output=True)


# Lines are the first that have no room, then checkpoints.
@pytest.mark.parametrize(("size", "file"), [(20, r"\.jsonl"), (24, ""), (56, r"00006\.pt"), (104, ""), (200, "")])
def test_a_full_disk_ends_a_run_as_failed_and_with_more_room_it_goes_on_bit_for_bit(disk, whole, size, file):
    folder = disk(f"size={size}k") / "run"
    with pytest.raises(RunWriteError, match=rf"{folder}/.*{file} cannot be written: ") as full:
        train(FULL, tokens(), folder)
    run = RunDirectory(folder)
    assert run.status().state == "failed"
    assert run.status().message == str(full.value)
    assert [path for path in folder.rglob("*") if path.name.startswith((".", "lock"))] == []
    disk("remount,size=2m")
    train(FULL, tokens(), folder, resume=True)
    check_same_run(folder, whole)
    assert run.status().state == "finished"


def test_a_disk_that_becomes_read_only_ends_a_run_and_later_it_goes_on_bit_for_bit(disk, whole):
    folder, inner, calls = disk("size=2m") / "run", task_objective(tokens().kind), []

    def objective(model, batch):
        calls.append(1)
        if len(calls) == 7:
            disk("remount,ro")
        return inner(model, batch)

    with pytest.raises(RunWriteError, match=r"metrics\.jsonl cannot be written: Read-only file system"):
        train(FULL, tokens(), folder, objective=objective)
    assert RunDirectory(folder).status().state == "running"  # it could not be written
    with pytest.raises(RunWriteError, match="lock cannot be written: Read-only file system"):
        train(FULL, tokens(), folder, resume=True)
    disk("remount,rw")
    train(FULL, tokens(), folder, resume=True)
    check_same_run(folder, whole)


LIMITED = """
import resource, sys
from compressm_lab.runs.records import RunWriteError
from compressm_lab.training import train
from tests.lab.training.test_full_disk import FULL
from tests.lab.training.tiny import tokens
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    train(FULL, tokens(), sys.argv[1])
except RunWriteError as error:
    print(error)
"""


def test_a_checkpoint_that_may_not_be_so_large_ends_a_run_as_failed(tmp_path, whole):
    folder = tmp_path / "run"
    said = unhooked.run(LIMITED, str(folder))
    assert f"{folder}/checkpoints/step-00000006.pt cannot be written: " in said
    assert RunDirectory(folder).status().state == "failed"
    assert list((folder / "checkpoints").iterdir()) == []
    train(FULL, tokens(), folder, resume=True)
    check_same_run(folder, whole)


@pytest.mark.parametrize("name", ["save_model", "save_checkpoint"])
def test_a_model_or_a_checkpoint_without_room_ends_a_run_as_failed(tmp_path, monkeypatch, whole, name):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some/file")

    with monkeypatch.context() as patched:
        patched.setattr(loop, name, full)
        with pytest.raises(RunWriteError, match=r"cannot be written: No space left on device \(some/file\)"):
            train(FULL, tokens(), tmp_path / "run")
    assert RunDirectory(tmp_path / "run").status().state == "failed"
    train(FULL, tokens(), tmp_path / "run", resume=True)
    check_same_run(tmp_path / "run", whole)


RECIPE = """
name: mine
task: {name: delayed_copy, symbols: 4, copied: 4, delay: 2, examples: 64, held_out: 16}
model: {depth: 1, width: 4, order: 6, pooling: steps}
training: {steps: 9, batch: 8, learning_rate: 0.01, evaluate_every: 3, checkpoint_every: 4}
"""


def test_the_command_says_what_could_not_be_written_and_exits_1(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    learn, calls = Learner.learn, []

    def until_full(self, indices):
        calls.append(1)
        if len(calls) == 2:
            (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
        return learn(self, indices)

    arguments = ["train", "mine.yaml", "--out", "run", "--data", str(tmp_path / "data")]
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "learn", until_full)
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "run/metrics.jsonl cannot be written: No space left on device" in done.output
    assert "make room, or the folder writable, and add --resume" in done.output
    assert "Traceback" not in done.output
    assert RunDirectory("run").status().state == "failed"
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert CliRunner().invoke(app, [*arguments, "--resume"]).exit_code == 0


def test_a_run_that_could_not_begin_is_begun_again_as_the_command_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    arguments = ["train", "mine.yaml", "--out", "run", "--data", str(tmp_path / "data")]

    def full(self, config):
        raise RunWriteError("run/config.json cannot be written: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "begin", full)
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "make room, or the folder writable, and train again" in done.output
    assert CliRunner().invoke(app, arguments).exit_code == 0
