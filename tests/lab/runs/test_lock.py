"""Only one process trains in a folder: locks of living, dead and distant owners, with real processes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

import pytest

from compressm_lab.runs import lock
from compressm_lab.runs.directory import RunDirectory, Status
from compressm_lab.runs.lock import STALE, LockLostError, Owner, RunLockedError
from compressm_lab.runs.records import Evaluation, RunError, RunWriteError
from tests import unhooked

LINE = Evaluation(1, "test", 0.5, 0.5, 0.1, 1.0, 1.0)


def ago(seconds):
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat(timespec="seconds")


def locked_by(folder, **differs):
    """A lock as another process would have left it."""
    owner = replace(Owner.here(), **{"pid": os.getppid(), "started": lock._start_of(os.getppid()), **differs})
    path = folder / "lock" / f"{'0' * 32}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(owner)))
    return owner


def state(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")} | {folder: folder.stat().st_mtime_ns}


def ended_process():
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def test_a_lock_says_who_holds_it_and_is_gone_afterwards(tmp_path):
    run = RunDirectory(tmp_path / "run")
    with run.locked() as sentence:
        assert sentence == ""
        (path,) = (run.path / "lock").iterdir()
        owner = Owner(**json.loads(path.read_text()))
        assert (owner.host, owner.pid, owner.ended()) == (socket.gethostname(), os.getpid(), False)
        assert 0 <= owner.age < 60
        with pytest.raises(RunLockedError, match=f"is being trained by process {os.getpid()} on {owner.host} since "):
            RunDirectory(run.path).require_free()
    assert list(run.path.iterdir()) == []
    with run.locked() as sentence:
        assert sentence == ""


def test_a_process_does_not_take_its_own_lock_by_another_path(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run", target_is_directory=True)
    with RunDirectory(tmp_path / "run").locked():
        before = state(tmp_path)
        with pytest.raises(RunLockedError), RunDirectory(tmp_path / "link").locked():
            pass
        assert state(tmp_path) == before


PIPED = """
import sys
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import RunError
run = RunDirectory(sys.argv[1])
for enter in (run.require_free, lambda: run.locked().__enter__()):
    try:
        enter()
    except RunError as error:
        print(error)
"""


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_in_a_lock_is_named_and_not_opened(make, tmp_path):
    path = tmp_path / "lock" / f"{'0' * 32}.json"
    path.parent.mkdir()
    make(path)
    before = state(tmp_path)
    said = unhooked.run(PIPED, str(tmp_path))
    assert said == 2 * f"{path} is no regular file, expected that of a lock: move it away\n"
    assert state(tmp_path) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_a_lock_is_released_whatever_ends_the_training(tmp_path, error):
    with pytest.raises(error), RunDirectory(tmp_path).locked():
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("take_over", [False, True])
def test_the_lock_of_a_living_process_is_refused_and_nothing_is_changed(tmp_path, take_over):
    # Its heartbeat is old: it may be suspended, or its disk slow.
    owner = locked_by(tmp_path, heartbeat=ago(1e6), command="train digits")
    before = state(tmp_path)
    with pytest.raises(RunLockedError) as refused, RunDirectory(tmp_path).locked(take_over=take_over):
        pass
    for word in (f"process {owner.pid} on {owner.host}", owner.begun, owner.heartbeat, "command: train digits"):
        assert word in str(refused.value)
    assert state(tmp_path) == before


@pytest.mark.parametrize("way", ["ended", "recycled", "restarted"])
def test_the_lock_of_a_process_that_ended_here_is_named_and_taken_over(tmp_path, way):
    differs = {
        "ended": {"pid": ended_process()},
        "recycled": {"started": "0"},
        "restarted": {"machine": "before", "heartbeat": ago(STALE + 9)},
    }[way]
    owner = locked_by(tmp_path, **differs)
    RunDirectory(tmp_path).require_free()
    with RunDirectory(tmp_path).locked() as sentence:
        assert sentence.startswith(f"{tmp_path}: took over the lock of process {owner.pid} on {owner.host} since ")
        assert sentence.endswith("that process has ended")
        assert len(list((tmp_path / "lock").iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_zombie_has_ended(tmp_path):
    child = subprocess.Popen(["true"])
    while _state(child.pid) != "Z":
        time.sleep(0.01)
    locked_by(tmp_path, pid=child.pid)
    with RunDirectory(tmp_path).locked() as sentence:
        assert "that process has ended" in sentence
    child.wait()


def _state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("machine", [{"host": "elsewhere", "machine": "other"}, {"machine": "a container"}])
@pytest.mark.parametrize("take_over", [False, True])
def test_a_fresh_heartbeat_elsewhere_is_refused(tmp_path, machine, take_over):
    locked_by(tmp_path, **machine, heartbeat=ago(STALE / 2))
    before = state(tmp_path)
    with pytest.raises(RunLockedError, match="wait for it, or until it is silent for 120 s"):
        RunDirectory(tmp_path).require_free(take_over=take_over)
    with pytest.raises(RunLockedError), RunDirectory(tmp_path).locked(take_over=take_over):
        pass
    assert state(tmp_path) == before


def test_an_old_heartbeat_elsewhere_is_taken_over_only_on_request(tmp_path):
    locked_by(tmp_path, host="elsewhere", machine="other", heartbeat=ago(STALE + 60))
    before = state(tmp_path)
    with pytest.raises(RunLockedError, match=r"on elsewhere since .*may have ended: if so, --take-over"):
        RunDirectory(tmp_path).require_free()
    with pytest.raises(RunLockedError), RunDirectory(tmp_path).locked():
        pass
    assert state(tmp_path) == before
    with RunDirectory(tmp_path).locked(take_over=True) as sentence:
        assert "on elsewhere" in sentence
        assert "has been silent for 18" in sentence


@pytest.mark.parametrize("contents", ["", "{", "[]", '{"host": 3}', '{"pid": 1}', "[" * 9, "[" * 100_000])
def test_a_lock_that_cannot_be_read_goes_by_the_time_of_its_file(tmp_path, contents):
    locked_by(tmp_path)
    (path,) = (tmp_path / "lock").iterdir()
    path.write_text(contents)
    with pytest.raises(RunLockedError, match=r"on an unknown host since .*wait for it"):
        RunDirectory(tmp_path).require_free(take_over=True)
    os.utime(path, (1e9, 1e9))
    with pytest.raises(RunLockedError, match="--take-over"):
        RunDirectory(tmp_path).require_free()
    with RunDirectory(tmp_path).locked(take_over=True) as sentence:
        assert "unknown host" in sentence


def test_an_empty_lock_is_free(tmp_path):
    """It was killed between two steps of releasing, or of taking over."""
    (tmp_path / "lock").mkdir()
    with RunDirectory(tmp_path).locked() as sentence:
        assert sentence == ""


def test_an_owner_that_was_taken_over_writes_nothing_more(tmp_path):
    run = RunDirectory(tmp_path)
    with run.locked():
        run.append(LINE)
        (path,) = (tmp_path / "lock").iterdir()
        path.unlink()
        locked_by(tmp_path, pid=77, host="elsewhere")
        before = state(tmp_path)
        for write in (
            lambda: run.append(LINE),
            lambda: run.write_status(Status("running", 1, 2)),
            lambda: run.rewind(0),
            run.sync,
        ):
            with pytest.raises(LockLostError, match="taken over by process 77 on elsewhere"):
                write()
        with pytest.raises(LockLostError, match="stops"), run.writing(tmp_path / "checkpoints" / "step.pt"):
            pytest.fail("it was written")
        assert state(tmp_path) == before
    # What the new owner has stays.
    assert [path.name for path in (tmp_path / "lock").iterdir()] == [f"{'0' * 32}.json"]


def test_heartbeats_are_written_and_make_no_lock_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT", 0.01)
    monkeypatch.setattr(lock, "_now", lambda: "2001-02-03T04:05:06+00:00")
    held = lock.Lock.take(tmp_path / "lock")
    size = held.path.stat().st_size
    monkeypatch.setattr(lock, "_now", lambda: "2002-02-03T04:05:06+00:00")
    while Owner.read(held.path).heartbeat[:4] != "2002":
        time.sleep(0.01)
    assert Owner.read(held.path).begun[:4] == "2001"
    assert held.path.stat().st_size == size
    # A disk that is away for a while.
    moved = tmp_path / "away"
    os.rename(tmp_path / "lock", moved)
    time.sleep(0.05)
    assert not (tmp_path / "lock").exists()
    with pytest.raises(LockLostError, match="its lock was removed"):
        held.require_held()
    os.rename(moved, tmp_path / "lock")
    monkeypatch.setattr(lock, "_now", lambda: "2003-02-03T04:05:06+00:00")
    while Owner.read(held.path).heartbeat[:4] != "2003":
        time.sleep(0.01)
    held.require_held()
    held.release()
    assert list(tmp_path.iterdir()) == []


MANY = """
import os, sys, time
from pathlib import Path
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.lock import RunLockedError
folder, rounds, count = Path(sys.argv[1]), int(sys.argv[2]), 5
def contend(k, place, begin):
    while time.time() < begin:
        pass
    try:
        with RunDirectory(place).locked() as sentence:
            (folder / f"{place.name}-{k}-won").write_text(sentence)
            end = time.time() + 20
            while len(list(folder.glob(f"{place.name}-*"))) < count and time.time() < end:
                time.sleep(0.002)
            RunDirectory(place).path.joinpath("held").touch()
    except RunLockedError as error:
        (folder / f"{place.name}-{k}-refused").write_text(str(error))
    os._exit(0)
for number in range(rounds):
    place = folder / f"run{number}"
    if number % 2:  # a stale lock
        owner = os.fork()
        if owner == 0:
            RunDirectory(place).locked().__enter__()
            os.kill(os.getpid(), 9)
        os.waitpid(owner, 0)
    begin = time.time() + 0.05
    children = [os.fork() or contend(k, place, begin) for k in range(count)]
    for child in children:
        os.waitpid(child, 0)
"""


def test_of_many_processes_at_once_one_gets_a_free_or_a_stale_lock(tmp_path):
    unhooked.run(MANY, str(tmp_path), "6", loaded=False)
    for number in range(6):
        won = list(tmp_path.glob(f"run{number}-*-won"))
        refused = list(tmp_path.glob(f"run{number}-*-refused"))
        assert (len(won), len(refused)) == (1, 4)
        # The one that removed a stale lock names it; another may have been faster to make the new one.
        assert won[0].read_text() == "" or (number % 2 and "that process has ended" in won[0].read_text())
        assert all("is being trained by process" in path.read_text() for path in refused)
        assert [path.name for path in (tmp_path / f"run{number}").iterdir()] == ["held"]


def test_a_lock_that_is_released_while_it_is_looked_at_is_free(tmp_path, monkeypatch):
    locked_by(tmp_path)
    listed = os.listdir

    def then_gone(path):
        found = listed(path)
        shutil.rmtree(path)
        return found

    monkeypatch.setattr(os, "listdir", then_gone)
    RunDirectory(tmp_path).require_free()
    assert lock.holder(tmp_path / "lock") is None


def test_half_written_files_of_killed_processes_are_removed_and_others_stay(tmp_path):
    dead, name = tmp_path / "run", "0123456789abcdef" * 2
    left = [dead / f".status.{name}.json", dead / "checkpoints" / f".step-00000006.{name}.pt"]
    left += [dead / "model" / f".model.{name}.safetensors", dead / f"lock.{name}" / "x.json"]
    left += [dead / "snapshots" / f".before-step-9-77.{name}.pt"]
    kept = [dead / "metrics.jsonl", dead / "checkpoints" / "step-00000006.pt", dead / ".hidden"]
    for path in (*left, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with RunDirectory(dead).locked():
        assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)
    assert sorted(path.name for path in dead.iterdir()) == [
        ".hidden",
        "checkpoints",
        "metrics.jsonl",
        "model",
        "snapshots",
    ]


def test_files_of_a_living_writer_are_not_removed(tmp_path):
    locked_by(tmp_path)
    scratch = tmp_path / f".status.{'a' * 32}.json"
    scratch.touch()
    with pytest.raises(RunLockedError), RunDirectory(tmp_path).locked():
        pass
    assert scratch.exists()


def test_an_impossible_process_has_ended(tmp_path):
    locked_by(tmp_path, pid=10**30)
    with RunDirectory(tmp_path).locked() as sentence:
        assert "that process has ended" in sentence


def test_a_file_in_the_place_of_the_lock_is_named(tmp_path):
    (tmp_path / "lock").touch()
    RunDirectory(tmp_path).require_free()
    with pytest.raises(RunError, match=r"lock is a file, expected the folder of the lock: move it away"):
        RunDirectory(tmp_path).locked().__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunWriteError, match=r"file/run/lock cannot be written: Not a directory \(.*file/run\)"):
        RunDirectory(tmp_path / "file" / "run").locked().__enter__()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux alone has a file that is always full")
def test_a_line_for_which_there_is_no_room_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunWriteError, match=r"metrics\.jsonl cannot be written: No space left on device"):
        RunDirectory(tmp_path).append(LINE)


def test_lines_are_on_disk_before_the_status_that_counts_on_them(tmp_path, monkeypatch):
    run, synced = RunDirectory(tmp_path), []
    run.append(LINE)
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    run.write_status(Status("finished", 1, 1))
    assert synced[0] == str(tmp_path / "metrics.jsonl")
    assert len(synced) == 3  # the scratch of the status, and the folder
    synced.clear()
    run.write_status(Status("finished", 1, 1))
    assert len(synced) == 2


def test_a_killed_owner_leaves_a_lock_that_the_next_process_takes(tmp_path):
    script = """
import os, sys
from compressm_lab.runs.directory import RunDirectory
with RunDirectory(sys.argv[1]).locked():
    os.kill(os.getpid(), 9)
"""
    unhooked.run(script, str(tmp_path), code=-signal.SIGKILL, loaded=False)
    assert len(list((tmp_path / "lock").iterdir())) == 1
    with RunDirectory(tmp_path).locked() as sentence:
        assert "that process has ended" in sentence


def test_a_foreign_file_in_a_lock_is_named(tmp_path):
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock" / "notes.json").touch()
    with pytest.raises(RunLockedError, match=r"lock holds 'notes\.json', which is not of a lock: move it away"):
        RunDirectory(tmp_path).locked().__enter__()
    assert [path.name for path in tmp_path.rglob("*")] == ["lock", "notes.json"]


@pytest.mark.parametrize("stale", [False, True])
def test_what_a_network_disk_keeps_of_a_removed_lock_does_not_matter(tmp_path, stale):
    (tmp_path / "lock").mkdir()
    if stale:
        locked_by(tmp_path, pid=ended_process())
    (tmp_path / "lock" / ".nfs000000000123").touch()
    with RunDirectory(tmp_path).locked():
        (path,) = (tmp_path / "lock").iterdir()
        assert Owner.read(path).pid == os.getpid()
    assert list(tmp_path.iterdir()) == []
    locked_by(tmp_path)
    (tmp_path / "lock" / ".nfs000000000123").touch()
    with pytest.raises(RunLockedError, match="is being trained by process"), RunDirectory(tmp_path).locked():
        pass


def test_a_heartbeat_in_the_future_is_taken_over_on_request_unless_its_file_is_fresh(tmp_path):
    locked_by(tmp_path, host="elsewhere", machine="other", heartbeat=ago(-9999))
    (path,) = (tmp_path / "lock").iterdir()
    with pytest.raises(RunLockedError, match=r"until it is silent for 120 s; if you know that it has ended, delete"):
        RunDirectory(tmp_path).require_free(take_over=True)
    ahead = time.time() + 9999
    os.utime(path, (ahead, ahead))
    with pytest.raises(RunLockedError, match=r"s ahead of the clock of this machine.*--take-over.*delete .*lock"):
        RunDirectory(tmp_path).require_free()
    with RunDirectory(tmp_path).locked(take_over=True) as sentence:
        assert "on elsewhere" in sentence
        assert sentence.endswith("that process tells no time that can be trusted")


@pytest.mark.parametrize("pid", [0, -1])
def test_a_number_that_is_of_no_process_has_ended(tmp_path, pid):
    locked_by(tmp_path, pid=pid, started="")
    with RunDirectory(tmp_path).locked() as sentence:
        assert "that process has ended" in sentence
