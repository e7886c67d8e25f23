"""Two processes that want to train in one folder: one does, the other says who, and ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from typer.testing import CliRunner

from compressm.cli.app import app
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.lock import LockLostError, Owner, RunLockedError
from compressm_lab.runs.records import Evaluation, RunError
from compressm_lab.runs.run import read_run
from compressm_lab.training import Interrupted, train
from compressm_lab.training.steps import task_objective
from tests import unhooked
from tests.lab.training.test_parallel import AS_TORCHRUN_DOES, TASK
from tests.lab.training.tiny import CUTS, SPECTRA, Sending, check_same_run, copies, lines, recipe, tokens

FULL = recipe(CUTS, SPECTRA)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(FULL, tokens(), tmp_path_factory.mktemp("runs") / "whole").path


@pytest.fixture
def half(tmp_path):
    with pytest.raises(Interrupted):
        train(FULL, tokens(), tmp_path / "run", objective=Sending(tokens().kind, 7))
    return tmp_path / "run"


@pytest.fixture
def commanded(tmp_path):
    """A stopped run whose data a command can find; the folder, and the command that goes on with it."""
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(recipe(TASK, "model.pooling=steps"), copies(), folder, objective=Sending(copies().kind, 7))
    return folder, ["train", str(folder), "--resume", "--offline", "--data", str(tmp_path / "data")]


def state(folder):
    return {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


BOTH = """
import os, sys, time
from compressm_lab.runs.lock import RunLockedError
from compressm_lab.training import train
from compressm_lab.training.steps import task_objective
from tests.lab.training.test_two_processes import FULL
from tests.lab.training.tiny import tokens
folder, resume, begin, inner = sys.argv[1], sys.argv[2] == "resume", time.time() + 0.2, task_objective(tokens().kind)
def slow(model, batch):
    time.sleep(0.02)
    return inner(model, batch)
other = os.fork()
while time.time() < begin:
    pass
try:
    train(FULL, tokens(), folder, resume=resume, objective=slow)
    said = "trained"
except RunLockedError as error:
    said = f"refused {error}"
print(f"{os.getpid()}: {said}", flush=True)
if other:
    os.waitpid(other, 0)
"""


@pytest.mark.parametrize("way", ["resume", "new"])
def test_of_two_trainings_at_the_same_time_one_trains_and_one_is_refused(way, half, whole, tmp_path):
    folder = half if way == "resume" else tmp_path / "new"
    said = dict(line.split(": ", 1) for line in unhooked.run(BOTH, str(folder), way).splitlines())
    (trained,) = (pid for pid, words in said.items() if words == "trained")
    (refused,) = (words for words in said.values() if words != "trained")
    assert f"{folder} is being trained by process {trained} on " in refused
    assert "last heartbeat" in refused
    check_same_run(folder, whole)
    assert not (folder / "lock").exists()


def test_a_folder_that_is_being_trained_is_refused_by_the_command_with_exit_code_2(commanded, tmp_path):
    folder, resumed = commanded
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(FULL.as_dict()))
    for given in (resumed, ["train", str(tmp_path / "mine.yaml"), "--out", str(folder)]):
        with RunDirectory(folder).locked():
            before = state(folder)
            done = CliRunner().invoke(app, given, env={"COLUMNS": "250"})
            assert done.exit_code == 2, done.output
            assert f"is being trained by process {os.getpid()} on " in " ".join(done.output.replace("│", " ").split())
            assert state(folder) == before


KILLED = """
import os, signal, sys
from compressm_lab.training import train
from tests.lab.training.tiny import CUTS, SPECTRA, Sending, recipe, tokens
train(recipe(CUTS, SPECTRA), tokens(), sys.argv[1], objective=Sending(tokens().kind, 9, signal.SIGKILL))
"""


class Ear:
    """A logger that keeps the sentences about locks."""

    def __init__(self):
        self.sentences = []

    def took_over(self, sentence):
        self.sentences.append(sentence)

    def __getattr__(self, name):
        return lambda *_: None


def test_a_killed_owner_is_named_and_its_run_goes_on_bit_for_bit(whole, tmp_path):
    folder, ear = tmp_path / "run", Ear()
    unhooked.run(KILLED, str(folder), code=-signal.SIGKILL)
    (path,) = (folder / "lock").iterdir()
    pid = Owner.read(path).pid
    train(FULL, tokens(), folder, resume=True, logger=ear)
    check_same_run(folder, whole)
    (sentence,) = ear.sentences
    assert f"took over the lock of process {pid} on " in sentence
    assert sentence.endswith("that process has ended")
    assert not (folder / "lock").exists()


def elsewhere(folder, age):
    """The lock of a process of another machine."""
    with RunDirectory(folder).locked():
        (path,) = (folder / "lock").iterdir()
        owner = json.loads(path.read_text())
    path.parent.mkdir()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - age))
    path.write_text(json.dumps(owner | {"host": "elsewhere", "machine": "other", "heartbeat": stamp}))


def test_a_silent_process_elsewhere_is_taken_over_only_on_request(half, whole):
    elsewhere(half, age=1000)
    before = state(half)
    with pytest.raises(RunLockedError, match="on elsewhere since"):
        train(FULL, tokens(), half, resume=True)
    assert state(half) == before
    ear = Ear()
    train(FULL, tokens(), half, resume=True, take_over=True, logger=ear)
    assert "that process has been silent for 100" in ear.sentences[0]
    check_same_run(half, whole)


def test_the_command_takes_over_with_its_option_and_says_so(commanded):
    folder, given = commanded
    elsewhere(folder, age=1000)
    refused = CliRunner().invoke(app, given, env={"COLUMNS": "250"})
    assert refused.exit_code == 2
    assert "--take-over" in refused.output
    done = CliRunner().invoke(app, [*given, "--take-over"], env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    assert "took over the lock of process" in done.output


@pytest.mark.parametrize("removed", [False, True])
def test_an_owner_that_was_taken_over_stops_before_it_writes(half, removed):
    inner, calls, before = task_objective(tokens().kind), [], {}

    def objective(model, batch):
        calls.append(1)
        if len(calls) == 2:
            shutil.rmtree(half / "lock")
            if not removed:
                elsewhere(half, age=0)
            before.update(state(half))
        return inner(model, batch)

    said = "its lock was removed" if removed else "it was taken over by process .* on elsewhere"
    with pytest.raises(LockLostError, match=said):
        train(FULL, tokens(), half, resume=True, objective=objective)
    assert state(half) == before


@pytest.mark.parametrize("moved", [False, True])
def test_a_folder_that_is_moved_or_deleted_ends_the_run_and_is_not_made_again(moved, half, whole, tmp_path):
    inner, calls, new = task_objective(tokens().kind), [], tmp_path / "new"

    def objective(model, batch):
        calls.append(1)
        if len(calls) == 2:
            half.rename(new) if moved else shutil.rmtree(half)
        return inner(model, batch)

    with pytest.raises(LockLostError, match="the folder was moved or deleted; where it was moved to, --resume goes on"):
        train(FULL, tokens(), half, resume=True, objective=objective)
    assert not half.exists()
    if moved:
        train(FULL, tokens(), new, resume=True)
        check_same_run(new, whole)


HOW_IT_ENDS = "sys.exit(end.code or os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))"
assert HOW_IT_ENDS in AS_TORCHRUN_DOES
BOTH_END = AS_TORCHRUN_DOES.replace(
    HOW_IT_ENDS, "print('the other ended with', os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])); sys.exit(end.code)"
)


def test_both_processes_of_torchrun_end_if_the_folder_is_being_trained(half, tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(FULL.as_dict() | {"label": ""}))
    task = "{name: delayed_copy, symbols: 4, copied: 4, delay: 2, examples: 64, held_out: 16}"
    given = ["train", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "new"), "--data", str(tmp_path / "data")]
    (tmp_path / "new").mkdir()
    with RunDirectory(tmp_path / "new").locked():
        before = state(tmp_path / "new")
        done = unhooked.finished(BOTH_END, *given, "--set", f"task={task}", "--set", "model.pooling=steps", code=2)
        said = " ".join(done.stderr.replace("│", " ").split())
        assert "is being trained by" in said
        assert "process 0 failed while looking for another process" in said
        assert "the other ended with 2" in done.stdout
        assert state(tmp_path / "new") == before


@pytest.mark.slow
def test_two_commands_that_resume_at_once_leave_one_run(tmp_path):
    found = recipe(
        "training.steps=3000",
        "training.checkpoint_every=100",
        "training.evaluate_every=20",
        "task={name: digits, side: 4}",
    )
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(found.as_dict()))
    command = [sys.executable, "-m", "compressm.cli", "train"]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    first = subprocess.Popen([*command, "mine.yaml", "--out", "run"], **options)
    for line in first.stdout:
        if line.startswith("step 40:"):
            first.kill()
            break
    first.communicate()
    assert RunDirectory(tmp_path / "run").status().state == "running"
    both = [subprocess.Popen([*command, "run", "--resume"], **options) for _ in range(2)]
    said = [one.communicate(timeout=300)[0] for one in both]
    assert sorted(one.returncode for one in both) == [0, 2], said
    run = read_run(RunDirectory(tmp_path / "run"))
    assert len(run.evaluations) == 3 * 150


@pytest.mark.parametrize("way", ["twice", "back"])
def test_a_report_refuses_lines_of_two_trainings(whole, tmp_path, way):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    path = folder / "metrics.jsonl"
    found = path.read_text().splitlines()
    other = [*found, *found[:3]] if way == "twice" else [*found[3:], *found[:3]]
    path.write_text("".join(f"{line}\n" for line in other))
    count = len(lines(whole, "metrics"))
    said = f"has {count + 3} lines where {count} belong" if way == "twice" else "has step 4 after step 16"
    with pytest.raises(RunError, match=rf"metrics\.jsonl {said}.*: two processes wrote into the folder"):
        read_run(RunDirectory(folder))
    assert len(RunDirectory(folder).records(Evaluation)) == len(other)
