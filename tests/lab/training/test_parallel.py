"""Two processes, as torchrun starts them: one run, written by the first."""

import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import yaml

from compressm.compression import load_checkpoint, load_model
from compressm.compression.distributed import Processes
from compressm_lab.baselines import HankelNuclearNorm
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import CutRecord, Evaluation, PenaltyRecord, Spectrum
from compressm_lab.training import ConfigError, RegulariserConfig, train
from compressm_lab.training.building import build_model
from compressm_lab.training.steps import distributed, join
from tests import unhooked
from tests.lab.training.tiny import copies, recipe, weights

TASK = "task={name: delayed_copy, symbols: 4, copied: 4, delay: 2, examples: 64, held_out: 16}"
# Without dropout and batch statistics two halves of a batch are one batch.
FOUND = recipe(
    TASK,
    "model={depth: 1, width: 4, order: 6, dropout: 0.0, norm: layer, pooling: steps}",
    "compression={rho: 0.5, gate: 1.0, when: {steps: [5]}}",
    "spectra={every: 8}",
)


def arguments(tmp_path, found):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(found.as_dict() | {"label": ""}))
    where = ["--out", str(tmp_path / "run"), "--data", str(tmp_path / "data")]
    return ["train", str(tmp_path / "mine.yaml"), "--device", "cpu", *where]


# What torchrun says to its processes; forks need not load everything again.
AS_TORCHRUN_DOES = """
import os, socket, sys
from compressm.cli import main
import compressm_lab.cli.train, compressm_lab.training
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
other = os.fork()
os.environ |= {"RANK": str(int(other == 0)), "LOCAL_RANK": str(int(other == 0))}
try:
    main()
except SystemExit as end:
    if other == 0:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(end.code or 0)
    sys.exit(end.code or os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def test_two_processes_learn_what_one_learns(tmp_path):
    said = unhooked.run(AS_TORCHRUN_DOES, *arguments(tmp_path, FOUND))
    assert said.count("cuts tried: 1, at 5") == 1
    run, alone = RunDirectory(tmp_path / "run"), train(FOUND, copies(), tmp_path / "alone")
    assert run.status() == alone.status()
    assert [(c.step, c.order, c.rank) for c in run.records(CutRecord)] == [(5, 6, 3)]
    assert load_model(run.model).blocks[0].ssm.order == 3
    assert [s.step for s in run.records(Spectrum)] == [0, 8, 16]
    mine, its = run.records(Evaluation), alone.records(Evaluation)
    assert [(e.step, e.split) for e in mine] == [(e.step, e.split) for e in its]
    # The halves are summed in another order.
    assert [e.loss for e in mine] == pytest.approx([e.loss for e in its], rel=2e-3)
    assert [e.accuracy for e in mine] == pytest.approx([e.accuracy for e in its], abs=0.05)
    torch.testing.assert_close(weights(run.path), weights(alone.path), rtol=0.02, atol=0.02)


# The second process is killed, in a gradient step or while it writes a cut.
KILLED = """
def killed(owner, name, last):
    inner, calls = getattr(owner, name), []
    def function(*given):
        calls.append(1)
        if len(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*given)
    setattr(owner, name, function)
if other == 0:
    import signal
    from compressm.compression import surgery
    from compressm_lab.training.steps import Learner
    killed(*AT)
try:
    main()
"""


@pytest.mark.parametrize(
    ("at", "step", "doing"),
    [
        ("(Learner, 'learn', 7)", 6, "training"),
        ("(surgery, 'replace_data', 1)", 5, "writing the cut; nothing was changed on this process"),
    ],
)
def test_the_status_names_a_process_that_was_killed(at, step, doing, tmp_path):
    script = AS_TORCHRUN_DOES.replace("try:\n    main()\n", KILLED.replace("AT", at))
    said = unhooked.run(script, *arguments(tmp_path, FOUND), code=1)
    status = RunDirectory(tmp_path / "run").status()
    what = f"process 1 ended, or did not come within 0:30:00, the timeout of the process group, while {doing}"
    assert (status.state, status.step, status.message) == ("failed", step, what)
    assert what in said
    assert "--resume goes on from the last checkpoint" in said


def test_another_number_of_processes_is_named(tmp_path):
    script = AS_TORCHRUN_DOES.replace("try:\n    main()\n", KILLED.replace("AT", "(Learner, 'learn', 7)"))
    unhooked.run(script, *arguments(tmp_path, FOUND), code=1)
    with pytest.warns(UserWarning, match="goes on with 1 instead of 2 processes: sums are rounded otherwise"):
        run = train(FOUND, copies(), tmp_path / "run", resume=True)
    assert run.status().state == "finished"


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_once(tmp_path):
    found = recipe("training.steps=100000", TASK, "model.pooling=steps")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*command, "-m", "compressm.cli", *arguments(tmp_path, found)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in child.stdout:
        if line.startswith("step 4:"):
            child.send_signal(signal.SIGTERM)
            break
    said, _ = child.communicate(timeout=120)
    assert said.count("SIGTERM at step") == 1
    run = RunDirectory(tmp_path / "run")
    status = run.status()
    assert (status.state, status.message) == ("interrupted", "SIGTERM"), said
    newest = run.checkpoints / f"step-{status.step:08d}.pt"
    assert load_checkpoint(newest, model=build_model(found.model, copies())).step == status.step


def test_a_batch_that_cannot_be_shared_evenly_is_refused(monkeypatch):
    monkeypatch.setattr(Processes, "count", 3)
    with pytest.raises(ConfigError, match=r"training\.batch is 8, expected a multiple of the 3 processes"):
        distributed(torch.nn.Linear(1, 1), FOUND, Processes())


def test_random_numbers_differ_between_processes_and_steps(monkeypatch):
    def drawn(rank, seed, step):
        torch.manual_seed(0)
        monkeypatch.setattr(Processes, "index", rank)
        join(Processes(), seed, step)
        return torch.rand(1).item()

    first = drawn(0, 0, 0)
    torch.manual_seed(0)
    assert first == torch.rand(1).item()
    assert len({drawn(rank, seed, step) for rank in (1, 2) for seed in (0, 1) for step in (0, 8)}) == 8
    assert drawn(1, 0, 8) == drawn(1, 0, 8)


def test_two_processes_add_the_same_penalty_as_one(tmp_path):
    """Their weights stay the same only as long as what they add is: a cut would refuse them otherwise."""
    found = replace(FOUND, regulariser=RegulariserConfig(kind="hankel-nuclear-norm", beta=0.1, every=3))
    unhooked.run(AS_TORCHRUN_DOES, *arguments(tmp_path, found))
    alone = train(found, copies(), tmp_path / "alone", penalty=HankelNuclearNorm())
    mine, its = RunDirectory(tmp_path / "run").records(PenaltyRecord), alone.records(PenaltyRecord)
    assert [record.value for record in mine] == pytest.approx([record.value for record in its], rel=1e-2)
    torch.testing.assert_close(weights(tmp_path / "run"), weights(alone.path), rtol=0.02, atol=0.02)
