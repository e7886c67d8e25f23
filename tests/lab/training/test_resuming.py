"""A run that was stopped, however, ends with the same bits as one that was not."""

import json
import shutil
import signal

import pytest
import torch
from rich.progress import Progress

from compressm.compression import SavingError, save_checkpoint
from compressm_lab.cli.opening import open_run
from compressm_lab.cli.train import Spoken
from compressm_lab.experiments.comparisons import comparison
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import Evaluation, RunError
from compressm_lab.runs.run import read_run
from compressm_lab.training import ConfigError, Interrupted, Silent, loop, train
from compressm_lab.training.reading import make_recipe
from tests import unhooked
from tests.lab.training.tiny import CUTS, SPECTRA, Sending, check_same_run, lines, recipe, teacher, tokens

FULL = recipe(CUTS, SPECTRA)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(FULL, tokens(), tmp_path_factory.mktemp("runs") / "whole").path


def stopped(folder, at, *signals, found=FULL, resume=False):
    with pytest.raises(Interrupted) as end:
        train(found, tokens(), folder, objective=Sending(tokens().kind, at, *signals), resume=resume)
    return end.value


@pytest.fixture(scope="module")
def halted(tmp_path_factory):
    """A run that was stopped at step 13; tests change copies of it."""
    stopped(folder := tmp_path_factory.mktemp("runs") / "halted", 13)
    return folder


@pytest.fixture(scope="module")
def other_seed(tmp_path_factory):
    return train(recipe(CUTS, SPECTRA, "seed=1"), tokens(), tmp_path_factory.mktemp("runs") / "other").path


class Ear(Silent):
    def __init__(self):
        self.heard = []

    def begins(self, recipe, plan, step):
        self.heard.append(step)


@pytest.mark.parametrize(("step", "number"), [(2, signal.SIGINT), (7, signal.SIGTERM), (13, signal.SIGINT)])
def test_a_run_stopped_before_between_or_after_cuts_goes_on_bit_for_bit(step, number, whole, tmp_path):
    folder = tmp_path / "run"
    said = stopped(folder, step, number)
    assert said.step == step
    assert f"{number.name} at step {step}: saved in {folder}" in str(said)
    status = RunDirectory(folder).status()
    assert (status.state, status.step, status.message) == ("interrupted", step, number.name)
    assert not (folder / "model").exists()
    ear = Ear()
    times = train(FULL, tokens(), folder, resume=True, logger=ear).records(Evaluation)
    check_same_run(folder, whole)
    assert ear.heard == [step]
    # Clocks go on from what they were.
    assert [e.seconds for e in times] == sorted(e.seconds for e in times)
    assert [e.step_seconds for e in times] == sorted(e.step_seconds for e in times)


def test_a_run_stopped_after_every_step_goes_on_bit_for_bit(whole, tmp_path):
    folder = tmp_path / "run"
    for step in range(1, 17):
        assert stopped(folder, 1, resume=step > 1).step == step
    train(FULL, tokens(), folder, resume=True)
    check_same_run(folder, whole)
    assert sum(timing["steps"] for timing in lines(folder, "timings")) == 16


class Ascending(Sending):
    """What it learns makes a model worse."""

    def __call__(self, model, batch):
        outcome = super().__call__(model, batch)
        return outcome._replace(loss=-outcome.loss)


def test_a_run_with_a_cut_that_waits_for_its_judgement_goes_on_bit_for_bit(tmp_path):
    guarded = "compression={order: 1, gate: 1.0, gramian: measured, when: {steps: [5]}, rollback: {drop: 0, settle: 4}}"
    found = recipe(guarded, "model.layer=S5", "model.pooling=steps", "model.norm=running", SPECTRA)
    whole = train(found, teacher(), tmp_path / "whole", objective=Ascending(teacher().kind, 0)).path
    with pytest.raises(Interrupted, match="at step 7"):
        train(found, teacher(), tmp_path / "run", objective=Ascending(teacher().kind, 7))
    train(found, teacher(), tmp_path / "run", resume=True, objective=Ascending(teacher().kind, 0))
    check_same_run(tmp_path / "run", whole)
    cut, restored = lines(whole, "cuts")
    assert cut["rank"] == 1
    assert restored["reason"].startswith("validation loss rose by ")


def test_the_end_of_cutting_after_a_rollback_is_said_once(tmp_path, capsys):
    """A later cut that is not made has nothing to do with the gate; neither has one after a resume."""
    often = "when: {steps: [5, 9, 12]}, rollback: {drop: 0, settle: 3}"
    guarded = f"compression={{order: 1, gate: 1.0, gramian: measured, {often}}}"
    found = recipe(guarded, "model.layer=S5", "model.pooling=steps", "model.norm=running")
    task = teacher()
    with Progress() as bars:
        with pytest.raises(Interrupted, match="at step 10"):
            train(found, task, tmp_path, objective=Ascending(task.kind, 10), logger=Spoken(bars))
        train(found, task, tmp_path, resume=True, objective=Ascending(task.kind, 0), logger=Spoken(bars))
    said = capsys.readouterr()
    said = " ".join((said.out + said.err).split())
    assert [event["step"] for event in lines(tmp_path, "cuts")] == [5, 8]
    assert said.count("cutting has ended") == 1
    assert "nothing cut" not in said


def test_a_run_that_is_finished_stays_as_it_is(whole, tmp_path):
    run = train(FULL, tokens(), tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    ear = Ear()
    assert train(FULL, tokens(), run.path, resume=True, logger=ear).path == run.path
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    assert ear.heard == []
    with pytest.raises(ConfigError, match="is a run of another recipe: seed was 0 and is 1"):
        train(recipe(CUTS, SPECTRA, "seed=1"), tokens(), run.path, resume=True)
    # One whose model is gone is not, and gets it back.
    shutil.rmtree(run.model)
    train(FULL, tokens(), run.path, resume=True)
    check_same_run(run.path, whole)


def test_a_broken_checkpoint_falls_back_to_the_one_before(whole, tmp_path):
    found = recipe(CUTS, SPECTRA, "training.keep_checkpoints=1")
    folder = tmp_path / "run"
    stopped(folder, 13, found=found)
    (newest,) = (folder / "checkpoints").iterdir()
    kept = newest.read_bytes()
    assert stopped(folder, 2, found=found, resume=True).step == 15
    later = folder / "checkpoints" / "step-00000015.pt"
    later.write_bytes(later.read_bytes()[:1000])
    newest.write_bytes(kept)
    # Were the broken one counted, the next whole one would be thrown away for it.
    with pytest.warns(UserWarning, match=r"removed what cannot be read: .*step-00000015\.pt is not a whole checkpoint"):
        assert stopped(folder, 1, found=found, resume=True).step == 14
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000014.pt"]
    train(found, tokens(), folder, resume=True)
    check_same_run(folder, whole)


@pytest.mark.parametrize("end", [b"{", b"{{\n", b"\xff\xfe", b'{"step": 9, "mod'])
def test_what_a_crash_left_at_the_end_of_a_file_is_forgotten(end, whole, tmp_path):
    folder = tmp_path / "run"
    stopped(folder, 7)
    for name in ("metrics", "spectra"):
        with (folder / f"{name}.jsonl").open("ab") as file:
            file.write(end)
    train(FULL, tokens(), folder, resume=True)
    check_same_run(folder, whole)


def test_a_terminal_that_is_closed_stops_a_run_that_can_go_on(whole, tmp_path):
    stopped(tmp_path / "run", 8, signal.SIGHUP)
    train(FULL, tokens(), tmp_path / "run", resume=True)
    check_same_run(tmp_path / "run", whole)


def test_a_hang_up_that_nohup_ignores_stays_ignored(whole, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        train(FULL, tokens(), tmp_path / "run", objective=Sending(tokens().kind, 8, signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    check_same_run(tmp_path / "run", whole)


def test_a_run_without_a_whole_checkpoint_is_refused_by_name(tmp_path):
    folder = tmp_path / "run"
    stopped(folder, 7)
    saved = sorted((folder / "checkpoints").iterdir())
    assert len(saved) == 2
    for path in saved:
        path.write_bytes(b"PK")
    before = lines(folder, "metrics")
    with pytest.raises(SavingError, match=r"no checkpoint of .* can be read: .*00007\.pt.*; .*00006\.pt"):
        train(FULL, tokens(), folder, resume=True)
    assert lines(folder, "metrics") == before
    assert len(list((folder / "checkpoints").iterdir())) == 2


KILLED = """
import os, signal, sys
from compressm.saving import checkpoints
from compressm_lab.training import train
from tests.lab.training.tiny import CUTS, SPECTRA, recipe, tokens
whole, calls = checkpoints.seal, []
def half(path):
    calls.append(path)
    if len(calls) == 2:
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    whole(path)
checkpoints.seal = half
train(recipe(CUTS, SPECTRA), tokens(), sys.argv[1])
"""


def test_a_run_killed_in_the_middle_of_a_checkpoint_goes_on_from_the_last_whole_one(whole, tmp_path):
    folder = tmp_path / "run"
    unhooked.run(KILLED, str(folder), code=-signal.SIGKILL)
    assert RunDirectory(folder).status().state == "running"
    assert sorted(path.name for path in (folder / "checkpoints").glob("step-*")) == ["step-00000006.pt"]
    assert len(list((folder / "checkpoints").iterdir())) == 2
    # A line that was under way, and evaluations of steps after the checkpoint.
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "spl')
    train(FULL, tokens(), folder, resume=True)
    check_same_run(folder, whole)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-00000012.pt", "step-00000016.pt"]


def test_a_run_killed_before_its_first_checkpoint_begins_again(whole, tmp_path):
    folder = tmp_path / "run"
    stopped(folder, 2)
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    train(FULL, tokens(), folder, resume=True)
    check_same_run(folder, whole)


def test_a_second_signal_ends_at_once_and_the_run_goes_on_from_its_last_checkpoint(whole, tmp_path):
    folder = tmp_path / "run"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            train(FULL, tokens(), folder, objective=Sending(tokens().kind, 8, signal.SIGTERM, signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000006.pt"]
    assert RunDirectory(folder).status().state == "interrupted"
    train(FULL, tokens(), folder, resume=True)
    check_same_run(folder, whole)


AT_ONCE = """
import os, signal, sys
from tests.lab.training.tiny import CUTS, SPECTRA, recipe, task_objective, tokens
from compressm_lab.training import train

def objective(model, batch):
    # Both wait for Python at the same time.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    for number in map(int, sys.argv[2:]):
        os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    return task_objective(tokens().kind)(model, batch)

signal.signal(signal.SIGINT, signal.default_int_handler)
train(recipe(CUTS, SPECTRA), tokens(), sys.argv[1], objective=objective)
"""


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGHUP), (signal.SIGHUP, signal.SIGTERM)])
def test_two_signals_at_once_end_the_process_without_an_error_of_python(numbers, tmp_path):
    arguments = [str(tmp_path / "run"), *(str(int(number)) for number in numbers)]
    done = unhooked.finished(AT_ONCE, *arguments, code=[-number for number in numbers])  # that which came second
    assert "race" not in done.stderr
    assert "saves and stops after the present step or cut" in done.stderr


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl", "spectra.jsonl"])
def test_records_of_another_seed_are_noticed(name, whole, halted, other_seed, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    shutil.copy(other_seed / name, tmp_path / "run" / name)
    with pytest.raises(RunError, match=f"{name} is not the file that the run ended with: .* is of another run; put it"):
        _ = read_run(RunDirectory(tmp_path / "run")).spectra
    shutil.copytree(halted, tmp_path / "stopped")
    shutil.copy(other_seed / name, tmp_path / "stopped" / name)
    before = contents(tmp_path / "stopped")
    with pytest.raises(RunError, match=f"{name} does not begin with the lines .* checkpoint of step 13 .* put it back"):
        train(FULL, tokens(), tmp_path / "stopped", resume=True)
    assert contents(tmp_path / "stopped") == before


def test_a_run_of_an_earlier_version_has_no_digests_of_its_records(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "status.json").read_text())
    assert sorted(stored["records"]) == ["cuts.jsonl", "metrics.jsonl", "spectra.jsonl", "timings.jsonl"]
    del stored["records"]
    (tmp_path / "run" / "status.json").write_text(json.dumps(stored))
    assert len(read_run(RunDirectory(tmp_path / "run")).spectra) > 1


def test_signals_are_as_before_after_a_run(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stopped(tmp_path / "run", 2)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("training.steps=20", "training.steps was 16 and is 20"),
        ("compression.rho=0.5", "compression.rho was 0.75 and is 0.5"),
        ("compression.when.steps=[5, 12]", r"compression.when.steps was \[5, 11\] and is \[5, 12\]"),
        ("spectra=null", "spectra was {'every': 3, 'changes': True} and is None"),
        ("seed=1", "seed was 0 and is 1"),
    ],
)
def test_another_recipe_is_refused_by_what_differs(setting, said, whole):
    with pytest.raises(ConfigError, match=f"is a run of another recipe: {said}$"):
        train(recipe(CUTS, SPECTRA, setting), tokens(), whole, resume=True)


def test_a_failure_is_in_the_status_and_the_run_can_go_on(whole, tmp_path):
    def objective(model, batch):
        raise OSError("the disk is on fire")

    with pytest.raises(OSError, match="fire"):
        train(FULL, tokens(), tmp_path / "run", objective=objective)
    stored = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (stored["state"], stored["message"]) == ("failed", "OSError: the disk is on fire")
    torch.rand(3)
    train(FULL, tokens(), tmp_path / "run", resume=True)
    check_same_run(tmp_path / "run", whole)


def test_a_resume_that_is_refused_leaves_the_status_as_it_was(tmp_path):
    stopped(tmp_path, 7)
    before = (tmp_path / "status.json").read_bytes()
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 7'))
    with pytest.raises(ConfigError, match=r"was trained by another recipe than config\.json says: seed was 0 and is 7"):
        train(make_recipe(json.loads(path.read_text())), tokens(), tmp_path, resume=True)
    assert (tmp_path / "status.json").read_bytes() == before


@pytest.mark.parametrize("left", [0, 1, 3])
def test_truncations_that_were_cut_off_are_written_again_whole(left, tmp_path):
    found = recipe("truncation={orders: [4, 2], gramian: measured}")
    whole = train(found, tokens(), tmp_path / "whole").path
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / "truncations.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:left]))
    with pytest.raises(RunError, match=r"lacks copies cut to order (2, 4|2): .* or delete .*model, and --resume"):
        train(found, tokens(), tmp_path / "run", resume=True)
    shutil.rmtree(tmp_path / "run" / "model")
    train(found, tokens(), tmp_path / "run", resume=True)
    check_same_run(tmp_path / "run", whole, "metrics", "truncations")
    assert len(lines(whole, "truncations")) == 4


def lines_gone(first, last=None):
    def spoil(path):
        kept = path.read_text().splitlines(keepends=True)
        del kept[first:last]
        path.write_text("".join(kept))

    return spoil


@pytest.mark.parametrize(
    ("file", "spoil", "said"),
    [
        ("spectra", lambda path: path.unlink(), "lacks 5 of its steps, the first 0"),
        ("spectra", lines_gone(1, 2), "lacks 1 of its steps, the first 3"),
        ("metrics", lambda path: path.write_text(""), "lacks 3 of its steps, the first 4"),
        ("metrics", lines_gone(4, 5), "lacks 1 of its steps, the first 8"),
        ("timings", lines_gone(0, 1), r"has the times of \d+ steps instead of 12"),
        ("cuts", lambda path: path.write_text(""), "lacks 2 of 2 changes of order, the first of step 5"),
        ("cuts", lines_gone(1, 2), "lacks 1 of 2 changes of order, the first of step 11"),
    ],
)
def test_a_run_whose_records_were_lost_does_not_go_on_with_holes(file, spoil, said, whole, halted, tmp_path):
    folder = shutil.copytree(halted, tmp_path / "run")
    spoil(folder / f"{file}.jsonl")
    with pytest.raises(RunError, match=rf"{file}\.jsonl {said}.*, which the checkpoint of step 13 counts on") as lost:
        train(FULL, tokens(), folder, resume=True)
    assert f"put the file back, or delete {folder / 'checkpoints'}, and --resume trains the run from" in str(lost.value)
    shutil.rmtree(folder / "checkpoints")
    train(FULL, tokens(), folder, resume=True)
    check_same_run(folder, whole)


def doubled(written):
    return [written[0], *written]


def shuffled(written):
    return written[::-1]


@pytest.mark.parametrize("spoil", [doubled, shuffled])
@pytest.mark.parametrize("file", ["metrics", "cuts", "spectra"])
def test_records_that_a_report_would_refuse_are_refused_before_the_run_goes_on(file, spoil, tmp_path):
    stopped(tmp_path, 13)
    path = tmp_path / f"{file}.jsonl"
    path.write_text("".join(spoil(path.read_text().splitlines(keepends=True))))
    before = contents(tmp_path)
    with pytest.raises(RunError) as report:
        _ = read_run(RunDirectory(tmp_path)).spectra
    assert f"{path} has " in str(report.value)
    with pytest.raises(RunError) as resume:
        train(FULL, tokens(), tmp_path, resume=True)
    assert str(resume.value) == str(report.value)
    assert contents(tmp_path) == before


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("first", "last"), [(-1, None), (0, 1), (3, 6)])
def test_a_finished_run_whose_evaluations_were_lost_is_not_called_finished(first, last, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    lines_gone(first, last)(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(RunError, match=r"metrics\.jsonl lacks .* of step|metrics\.jsonl lacks step 8, .* put it back"):
        train(FULL, tokens(), tmp_path / "run", resume=True)


def test_a_file_in_the_place_of_the_checkpoints_is_named(tmp_path):
    stopped(tmp_path, 2)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").touch()
    with pytest.raises(RunError, match="checkpoints is a file, expected the folder of checkpoints: move it away"):
        train(FULL, tokens(), tmp_path, resume=True)


def test_another_number_of_threads_is_named(tmp_path):
    stopped(tmp_path / "run", 14)  # threads that wait for each other take long where others train too
    torch.set_num_threads(2)
    try:
        with pytest.warns(UserWarning, match="goes on with 2 instead of 1 thread: sums are rounded otherwise"):
            assert train(FULL, tokens(), tmp_path / "run", resume=True).finished
    finally:
        torch.set_num_threads(1)


def test_a_run_of_an_earlier_version_goes_on_without_a_number_of_processes(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(loop, "save_checkpoint", without_processes)
        stopped(tmp_path / "run", 7)
    (tmp_path / "run" / "environment.json").unlink()
    train(FULL, tokens(), tmp_path / "run", resume=True)
    check_same_run(tmp_path / "run", whole)


def without_processes(path, *, extra, **parts):
    del extra["processes"]
    save_checkpoint(path, extra=extra, **parts)


@pytest.mark.parametrize("change", [('"seed": 0', '"seed": 7'), ('"width": 4', '"width": 8')])
def test_a_finished_run_whose_recipe_was_changed_is_named(change, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace(*change))
    changed = make_recipe(json.loads(path.read_text()))
    with pytest.raises(RunError, match=r"config\.json is not the recipe that was trained: it was changed afterwards"):
        train(changed, tokens(), tmp_path / "run", resume=True)
    with pytest.raises(RunError, match="is not the recipe that was trained"):
        read_run(RunDirectory(tmp_path / "run"))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.width=8", "model has width 8, and the recipe of the run 4"),
        ("compression.rho=0.5", "model has the orders .*, and the run ended with .*"),
        ("seed=3", "model is not the model that the run ended with: .*, or is of another run; put it back as it was"),
    ],
)
def test_a_model_of_another_run_is_named(setting, said, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    other = train(recipe(CUTS, SPECTRA, setting), tokens(), tmp_path / "other")
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.copytree(other.model, tmp_path / "run" / "model")
    with pytest.raises(RunError, match=said):
        train(FULL, tokens(), tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=said):
        read_run(RunDirectory(tmp_path / "run"))


def test_a_model_of_another_run_is_not_opened_and_teaches_nobody(whole, tmp_path):
    other = train(recipe(CUTS, SPECTRA, "seed=3"), tokens(), tmp_path / "other")
    shutil.copytree(whole, tmp_path / "run")
    assert RunDirectory(tmp_path / "run").status().model == RunDirectory(whole).saved_model() != other.saved_model()
    shutil.copytree(other.model, tmp_path / "run" / "model", dirs_exist_ok=True)
    with pytest.raises(SavingError, match="is not the model that the run ended with"):
        open_run(tmp_path / "run", with_data=False, data=None, offline=True)
    student = recipe(f"distillation={{teacher: {tmp_path / 'run'}}}")
    with pytest.raises(ConfigError, match=r"is no teacher, .* is not the model that the run ended with"):
        comparison(student, tokens())
    shutil.rmtree(tmp_path / "run" / "model")
    train(FULL, tokens(), tmp_path / "run", resume=True)
    check_same_run(tmp_path / "run", whole)


def test_a_run_of_a_version_that_wrote_no_digest_and_fewer_keys_stays_readable(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    fewer = {key: value for key, value in json.loads(path.read_text()).items() if value is not None}
    path.write_text(json.dumps(fewer))
    assert read_run(RunDirectory(tmp_path / "run")).finished
    stored = json.loads((tmp_path / "run" / "status.json").read_text())
    del stored["recipe"]
    (tmp_path / "run" / "status.json").write_text(json.dumps(stored))
    train(FULL, tokens(), tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "status.json").read_text()) == stored
