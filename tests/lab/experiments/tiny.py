"""A table small enough to be trained inside of a test, and executors that need no processes."""

import sys
from concurrent.futures import Future

from typer.testing import CliRunner

from compressm.cli.app import app
from compressm_lab.experiments.catalogue import Experiment, exhibit
from compressm_lab.experiments.engine import Campaign
from compressm_lab.experiments.executors import Ended, Executor
from compressm_lab.experiments.paper import Setting
from compressm_lab.experiments.recipes import Training

STEPS = 12
SMALL = (
    *(f"training.steps={STEPS}", "training.evaluate_every=6", "training.checkpoint_every=4", "spectra={every: 4}"),
    *("model.width=4", "training.batch=20", "task.name=digits"),
)
TINY = Setting("sMNIST", "digits", 8, STEPS, (0.04,), "{steps: [6]}", SMALL)


def arms(setting=TINY):
    # In the cell of the paper's τ = 0.04, which would leave all of 8 states.
    rule = "compression={tau: 0.4, when: {steps: [6]}}"
    compressed = setting.arm("CompreSSM", "τ = 0.04", "tau-0.04", f"model.order={setting.order}", rule)
    return compressed, setting.beside(compressed), setting.whole()


def plan(folder, *, seeds=2, chosen=None):
    return Campaign(chosen or arms(), range(seeds), folder / "runs")


def shown(wanted, *, quick=False, **options):
    """What a report shows of the plan, as it would of the paper's first table."""
    return exhibit(
        Experiment("results", "A small table", wanted.arms, len(wanted.seeds), **options), wanted, quick=quick
    )


class Inline(Executor):
    """Trains at once, in this process; `breaks` are folders of runs that fail instead, `until` how many it does."""

    patience = 0.0

    def __init__(self, *, breaks=(), until=None):
        self.commands, self.breaks, self.until, self.stopped = [], breaks, until, False

    def submit(self, training):
        if self.until is not None and len(self.commands) >= self.until:
            raise KeyboardInterrupt
        self.commands.append(training.command(None))
        ended = Future()
        if any(name in str(training.folder) for name in self.breaks):
            ended.set_result(Ended("exit 1: the loss is not finite"))
            return ended
        done = CliRunner().invoke(app, self.commands[-1][3:])
        ended.set_result(Ended() if done.exit_code == 0 else Ended(f"exit {done.exit_code}: {done.output}"))
        return ended

    def stop(self):
        self.stopped = True


def answering(monkeypatch, code):
    """Every training is a process that runs this, and ends; what it would have been is kept."""
    asked, command = [], Training.command

    def instead(training, data):
        asked.append(command(training, data)[4:])
        return [sys.executable, "-c", code]

    monkeypatch.setattr(Training, "command", instead)
    return asked
