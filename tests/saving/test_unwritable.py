"""Full disks and read-only folders: a named error with path and bytes, the old file as it was, no scratch left."""

import errno
import os
import resource
import stat
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from compressm import files, load_model, save_model
from compressm.compression import Compressor, Rollback, SavingError, TargetOrder, load_checkpoint, save_checkpoint
from compressm.errors import UnwritableFileError
from compressm.files import remove_scratch, replacing
from compressm.layers import LRU
from compressm.models import SequenceClassifier


def make(order=8):
    torch.manual_seed(0)
    return SequenceClassifier(LRU, depth=1, width=16, order=order, inputs=3, classes=2)


def saved_checkpoint(folder, order):
    save_checkpoint(folder / "c.pt", model=make(order), step=order)


def saved_model(folder, order):
    save_model(make(order), folder)


def saved_file(folder, order):
    save_model(make(order), folder / "m.safetensors")


def guarded(folder, order):
    model = make(order)
    optimizer = torch.optim.Adam(model.parameters())
    guard = Rollback(evaluate=lambda: 1.0, folder=folder)
    compressor = Compressor(model, optimizer, when=[1], keep=TargetOrder(1), guard=guard)
    try:
        compressor.step(1)
    except SavingError:
        assert model.blocks[0].ssm.order == order
        assert compressor.history == []
        raise


def written(folder, order):
    with replacing(folder / "t.txt") as scratch:
        scratch.write_text("a" * 1000 * order)


WRITERS = [saved_checkpoint, saved_model, saved_file, guarded, written]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def mounted(folder, options):
    """A small disk of its own, where this process may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this process may not mount a disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_full_disk_is_named_with_path_and_bytes_and_the_old_file_stays(write, tmp_path):
    # A cut of many states takes long: its snapshot is refused by a smaller disk.
    size, order = ("32k", 400) if write is guarded else ("200k", 2000)
    with mounted(tmp_path, f"size={size}"):
        if write is not guarded:
            write(tmp_path, 2)
        before = contents(tmp_path)
        with pytest.raises(UnwritableFileError, match=r"cannot be written") as refused:
            write(tmp_path, order)
        assert isinstance(refused.value, SavingError | OSError)
        said = str(refused.value)
        assert str(tmp_path) in said
        assert "It needs " in said
        assert " bytes are free in " in said
        assert contents(tmp_path) == before


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_read_only_folder_is_named(write, tmp_path):
    with mounted(tmp_path, "size=200k,ro"):
        with pytest.raises(UnwritableFileError, match=rf"{tmp_path}.*cannot be written: Read-only file system"):
            write(tmp_path, 2)
        with pytest.raises(UnwritableFileError, match="Read-only file system"):
            write(tmp_path / "inside" / "of it", 2)
        assert list(tmp_path.iterdir()) == []


@contextmanager
def limited(size):
    """No file of this process may become longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_file_that_may_not_be_so_long_is_named_wherever_it_ends(write, share, tmp_path):
    if write is not guarded:
        write(tmp_path / "there", 50)
    write(tmp_path / "whole", 100)
    size = max(path.stat().st_size for path in (tmp_path / "whole").iterdir())
    (tmp_path / "there").mkdir(exist_ok=True)
    before = contents(tmp_path / "there")
    with limited(int(share * size)), pytest.raises(UnwritableFileError, match="cannot be written") as refused:
        write(tmp_path / "there", 100)
    assert contents(tmp_path / "there") == before
    assert str(tmp_path / "there") in str(refused.value)


FAULTS = [(os, "replace"), (os, "fsync"), (os, "open"), (files.Path, "mkdir")]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[1])
def test_every_error_of_the_system_is_named(fault, code, tmp_path, monkeypatch):
    saved_checkpoint(tmp_path, 2)
    before = contents(tmp_path)

    def fails(*args, **options):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(*fault, fails)
        with pytest.raises(
            UnwritableFileError, match=rf"c\.pt cannot be written: {os.strerror(code)}.*bytes"
        ) as refused:
            saved_checkpoint(tmp_path, 3)
    assert refused.value.errno == code
    assert contents(tmp_path) == before
    assert load_checkpoint(tmp_path / "c.pt", model=make(2)).step == 2


def test_the_bytes_needed_are_about_those_of_the_file(tmp_path, monkeypatch):
    saved_checkpoint(tmp_path, 100)
    saved_file(tmp_path, 100)
    monkeypatch.setattr(os, "replace", lambda *paths: os.rename(tmp_path / "none", tmp_path / "none"))
    for write, name in ((saved_checkpoint, "c.pt"), (saved_file, "m.safetensors")):
        with pytest.raises(UnwritableFileError, match="cannot be written") as refused:
            write(tmp_path, 100)
        needed = int(str(refused.value).split("It needs about ")[1].split(" bytes")[0].replace(",", ""))
        assert needed == pytest.approx((tmp_path / name).stat().st_size, rel=0.5)


def test_a_name_that_is_too_long_is_named(tmp_path):
    with pytest.raises(SavingError, match="File name too long"):
        save_checkpoint(tmp_path / ("a" * 300), model=make(2))


def test_a_long_name_that_is_allowed_is_written(tmp_path):
    name = "ä" * 120
    save_checkpoint(tmp_path / name, model=make(2))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def failing(path, error):
    with replacing(path) as scratch:
        scratch.write_text("half")
        raise error


def test_other_errors_inside_the_block_stay_what_they_are(tmp_path):
    for error in (RuntimeError("other"), RuntimeError("inline_container"), SavingError("ours"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            failing(tmp_path / "f", error)
        assert caught.value is error
    assert list(tmp_path.iterdir()) == []


def test_a_model_and_its_config_stay_together_on_a_full_disk(tmp_path):
    saved_model(tmp_path, 2)
    before = contents(tmp_path)
    with limited(20_000), pytest.raises(UnwritableFileError, match=r"model\.safetensors"):
        saved_model(tmp_path, 2000)
    assert contents(tmp_path) == before
    assert load_model(tmp_path).blocks[0].ssm.order == 2


KILLED = """
import os, signal, sys
from compressm.files import replacing
with replacing(sys.argv[1]) as scratch:
    scratch.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(path):
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(files.__file__))}
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, env=environment)


def test_what_a_killed_writer_left_is_removed_and_a_living_one_is_spared(tmp_path):
    with replacing(tmp_path / "other.json") as living:
        living.write_text("half")
        killed(tmp_path / "report.json")
        (left,) = set(tmp_path.iterdir()) - {living}
        assert left.name.endswith(".scratch.json")
        assert remove_scratch(tmp_path) == [left]
        assert list(tmp_path.iterdir()) == [living]


def test_the_first_write_into_a_folder_removes_what_killed_writers_left_there(tmp_path):
    killed(tmp_path / "c.pt")
    assert len(list(tmp_path.iterdir())) == 1
    saved_checkpoint(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


def old(path, seconds):
    path.write_text("half")
    os.utime(path, (time.time() - seconds,) * 2)
    return path


def test_scratch_of_other_machines_and_versions_is_removed_after_an_hour_or_by_who_is_alone(tmp_path):
    elsewhere = f".a.1-{'0' * 12}-{'1' * 32}.scratch.json"
    earlier = f".a.{'1' * 32}.json"
    others = [tmp_path / name for name in ("a.json", ".hidden", f"{'1' * 32}.json", ".a.1234.json")]
    for path in others:
        old(path, 10_000)
    folder = tmp_path / f".b.{'1' * 32}"
    folder.mkdir()
    for name in (elsewhere, earlier):
        assert remove_scratch(tmp_path) == []
        path = old(tmp_path / name, 60)
        assert remove_scratch(tmp_path) == []
        assert remove_scratch(tmp_path, alone=True) == [path]
        old(path, 4000)
        assert remove_scratch(tmp_path) == [path]
    assert sorted(tmp_path.iterdir()) == sorted([*others, folder])


def test_a_write_leaves_hidden_files_of_others_alone(tmp_path):
    path = old(tmp_path / f".cache.{'a' * 32}.json", 10_000)
    saved_checkpoint(tmp_path, 2)
    assert path.exists()


def test_a_folder_that_is_not_there_has_no_scratch(tmp_path):
    assert remove_scratch(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "It needs about 9 bytes, and .* are free in .*: free some space, or write to another folder"),
        (errno.EROFS, "It needs about 9 bytes: make the folder writable, or write to another one"),
        (errno.EFBIG, r"It needs about 9 bytes: raise the limit of file sizes \(ulimit -f\)"),
        (errno.ENAMETOOLONG, "It needs about 9 bytes: choose a shorter name"),
    ],
)
def test_the_advice_fits_the_reason(tmp_path, number, advice):
    with pytest.raises(UnwritableFileError, match=advice), replacing(tmp_path / "a", 9):
        raise OSError(number, os.strerror(number))


TARGETS = {saved_checkpoint: "c.pt", saved_model: "model.safetensors", saved_file: "m.safetensors", written: "t.txt"}


def placed(folder, name, make_target, linked):
    """A special file, or a link to one, where a writer will write."""
    make_target(folder / "there" if linked else folder / name)
    if linked:
        (folder / name).symlink_to("there")


@pytest.mark.parametrize("linked", [False, True], ids=["itself", "linked"])
@pytest.mark.parametrize("write", TARGETS, ids=lambda write: write.__name__)
def test_a_named_pipe_stays_one_and_is_refused_by_name(write, linked, tmp_path):
    placed(tmp_path, TARGETS[write], os.mkfifo, linked)
    with pytest.raises(SavingError, match="is a named pipe, expected a file"):
        write(tmp_path, 4)
    assert (tmp_path / TARGETS[write]).is_fifo()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("write", TARGETS, ids=lambda write: write.__name__)
def test_a_link_to_itself_is_named_and_stays(write, tmp_path):
    (tmp_path / TARGETS[write]).symlink_to(TARGETS[write])
    with pytest.raises(UnwritableFileError, match=os.strerror(errno.ELOOP)):
        write(tmp_path, 4)
    assert (tmp_path / TARGETS[write]).is_symlink()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
@pytest.mark.parametrize("write", TARGETS, ids=lambda write: write.__name__)
def test_a_file_that_is_replaced_keeps_its_mode(write, mode, tmp_path):
    write(tmp_path, 4)
    target = tmp_path / TARGETS[write]
    target.chmod(mode)
    before = target.read_bytes()
    write(tmp_path, 5)
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert target.read_bytes() != before


def test_a_private_file_is_private_while_it_is_written(tmp_path):
    (tmp_path / "t.txt").touch(mode=0o600)
    with replacing(tmp_path / "t.txt") as scratch:
        scratch.write_text("a")
        assert stat.S_IMODE(scratch.stat().st_mode) == 0o600


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interruption_inside_torch_save_comes_out_as_itself(stop, tmp_path):
    """torch.save gives a RuntimeError "unexpected pos" when a write of its file is interrupted."""
    saved_checkpoint(tmp_path, 4)
    before = contents(tmp_path)

    class Interrupting:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            if self.file.tell() > 500:
                raise stop
            return self.file.write(data)

        def flush(self):
            self.file.flush()

    with pytest.raises(stop), replacing(tmp_path / "c.pt") as scratch, scratch.open("wb") as file:
        torch.save({"a": torch.zeros(1000)}, Interrupting(file))
    assert contents(tmp_path) == before


def test_saving_because_of_an_interruption_names_the_error_of_the_disk(tmp_path):
    (tmp_path / "c.pt").mkdir()
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(UnwritableFileError, match="is a directory"), replacing(tmp_path / "c.pt"):
            pass
        with pytest.raises(UnwritableFileError, match="No space"), replacing(tmp_path / "t.txt"):
            raise OSError(errno.ENOSPC, "No space left on device")  # noqa: B904


INTERRUPTED = """
import sys, torch
from pathlib import Path
from compressm.compression import save_checkpoint
from compressm.layers import LRU

model, path = LRU(2, order=2), Path(sys.argv[1]) / "c.pt"
lines = fault = 0

def at_line(frame, event, arg):
    global lines
    lines += event == "line"
    if event == "line" and lines == fault:
        sys.settrace(None)
        raise KeyboardInterrupt
    return at_line

def closing(frame, event, arg):
    names = ("__exit__", "_open_zipfile_writer", "save")
    return at_line if "torch/serialization" in frame.f_code.co_filename and frame.f_code.co_name in names else None

def save(step):
    sys.settrace(closing)
    try:
        save_checkpoint(path, model=model, step=step)
    finally:
        sys.settrace(None)

save(0)
before, total, stopped = path.read_bytes(), lines, 0
for fault in range(1, total + 1):
    lines = 0
    try:
        save(1)
    except KeyboardInterrupt:
        stopped += 1
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
print(stopped == total, stopped > 10)
"""


def test_an_interruption_at_the_end_of_torch_save_does_not_end_the_process(tmp_path):
    """The writer of torch ends its archive when it is collected, after the file was closed."""
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.parametrize("order", [2, 200])
def test_the_bytes_needed_count_the_archive_of_many_small_tensors(tmp_path, monkeypatch, order):
    model = make(order)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "c.pt", model=model, optimizer=optimizer)
    monkeypatch.setattr(os, "replace", lambda *paths: os.rename(tmp_path / "none", tmp_path / "none"))
    with pytest.raises(UnwritableFileError, match="cannot be written") as refused:
        save_checkpoint(tmp_path / "c.pt", model=model, optimizer=optimizer)
    needed = int(str(refused.value).split("It needs about ")[1].split(" bytes")[0].replace(",", ""))
    assert needed == pytest.approx((tmp_path / "c.pt").stat().st_size, rel=0.25)
