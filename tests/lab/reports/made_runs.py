"""Run folders as training would write them, made of formulas: no training, milliseconds each."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from compressm_lab.runs.directory import RunDirectory, Status
from compressm_lab.runs.records import CutRecord, Evaluation, RestoredRecord, Spectrum, Timing


@dataclass(frozen=True)
class Made:
    """What a made run should look like."""

    name: str = "smnist"
    label: str = "compressed"
    seed: int = 0
    depth: int = 1
    order: int = 64
    cuts: tuple[tuple[int, float], ...] = ()  # (step, share of the states that stay)
    steps: int = 10_000
    every: int = 250
    best: float = 0.97
    regression: bool = False
    errors: bool = False  # MSE and MAE of a regression, in the units of its targets
    spectra: bool = True
    bounds: bool = True
    restored: bool = False
    state: str = "finished"
    message: str = ""
    diverges: bool = False
    tau: float = 0.04


def write(made: Made, folder: Path) -> Path:
    """The folder of one run."""
    run = RunDirectory(folder / f"{made.name}-{made.label.replace(' ', '-')}-{made.order}-{made.tau}-{made.seed}")
    run.begin(config(made))
    writer = _Writer(made, run)
    last = made.steps if made.state == "finished" else made.steps // 2
    for step in range(0, last + 1, made.every):
        writer.at(step)
    run.write_status(Status(made.state, last, made.steps, made.message))
    return run.path


def config(made: Made) -> dict:
    compression = {
        "tau": made.tau,
        "rho": None,
        "when": {"every": None, "steps": [step for step, _ in made.cuts]},
        "gramian": "white_noise",
        "fold": True,
        "moments": "transport",
        "gate": 0.95,
        "rollback": None,
    }
    return {
        "name": made.name,
        "label": made.label,
        "seed": made.seed,
        "task": {"name": made.name},
        "model": {"layer": "LRU", "depth": made.depth, "width": 8, "order": made.order, "dropout": 0.1},
        "training": {"steps": made.steps, "batch": 50, "learning_rate": 4e-4, "evaluate_every": made.every},
        "compression": compression if made.cuts else None,
        "spectra": {"every": made.every, "changes": made.bounds},
    }


class _Writer:
    def __init__(self, made: Made, run: RunDirectory):
        self.made, self.run = made, run
        self.noise = random.Random(made.seed * 1000 + made.order + made.depth)
        self.orders = {f"blocks.{k}.ssm": made.order for k in range(made.depth)}
        self.before = dict(self.orders)
        self.seconds = self.step_seconds = 0.0
        self.phase = {name: [self.noise.gauss(0, 0.25) for _ in range(made.order)] for name in self.orders}

    def at(self, step: int) -> None:
        """In the order of `training.loop`: spectra, cut, evaluation, timing."""
        if self.made.spectra:
            self._spectra(step)
        if step == 0:
            return
        before = dict(self.orders)
        cut = self._cut(step)
        if cut:
            self._timing(step, self.made.every, before, self._steps(before) | {"cut": 0.05, "optimizer": 0.008})
        mean = sum(self.orders.values()) / len(self.orders)
        spent = {} if cut else self._steps(self.orders)
        spent |= {"evaluation": 0.06 + 4e-4 * mean, "checkpoint": 0.01} | ({"capture": 0.05} if cut else {})
        self._timing(step, 0 if cut else self.made.every, self.orders, spent)
        self._evaluations(step)

    def _steps(self, orders: dict) -> dict:
        mean = sum(orders.values()) / len(orders)
        a_step = 1e-3 * self.made.depth * (0.6 + 0.011 * mean) * self.noise.uniform(0.97, 1.03)
        spectrum = 0.01 + 1e-6 * mean**2 if self.made.spectra else 0.0
        return {"steps": a_step * self.made.every, "data": 0.02, "spectrum": spectrum}

    def _timing(self, step: int, steps: int, orders: dict, spent: dict) -> None:
        self.seconds += sum(spent.values())
        self.step_seconds += spent.get("steps", 0.0)
        self.run.append(Timing(step, steps, dict(orders), spent))

    def _evaluations(self, step: int) -> None:
        made = self.made
        done = 1 - math.exp(-5 * step / made.steps)
        good = 0.1 + (made.best - 0.1) * done + self.noise.gauss(0, 0.002)
        loss = math.nan if made.diverges and step > made.steps / 4 else 2.3 * (1 - done) + 0.1 + 0.05 * (1 - good)
        for split, gap in (("train", 0.005), ("validation", 0.0), ("test", -0.003)):
            accuracy = None if made.regression else min(1.0, good + gap + self.noise.gauss(0, 0.0015))
            rate = 4e-4 * (1 - 0.9 * step / made.steps)
            errors = (4 * (loss - gap), 1.5 * (loss - gap)) if made.errors and split != "train" else ()
            self.run.append(
                Evaluation(step, split, loss - gap, accuracy, rate, self.seconds, self.step_seconds, *errors)
            )

    def _sigma(self, step: int, module: str) -> list[float]:
        """Falling geometrically; a few large ones part from the rest while it trains."""
        order, first, depth = self.orders[module], self.made.order, int(module.split(".")[1])
        done = 1 - math.exp(-8 * step / self.made.steps)
        fall = (2.0 + 5.0 * done + 0.3 * depth) / first
        moving = [
            math.exp(-fall * k + self.phase[module][k] * done + 0.05 * math.sin(9 * done + 40 * self.phase[module][k]))
            for k in range(first)
        ]
        return sorted(((0.5 + 1.5 * done) * value for value in moving), reverse=True)[:order]

    def _spectra(self, step: int) -> None:
        for module in self.orders:
            fresh = step == 0 or self.before[module] != self.orders[module]
            bound = None if fresh or not self.made.bounds else 0.004 + 0.2 * math.exp(-10 * step / self.made.steps)
            self.run.append(Spectrum(step, module, self._sigma(step, module), bound))
        self.before = dict(self.orders)

    def _cut(self, step: int) -> bool:
        share = dict(self.made.cuts).get(step)
        if share is not None:
            for depth, module in enumerate(self.orders):
                order = self.orders[module]
                wanted = round(order * min(1.0, share * (1 + 0.06 * depth)) + self.noise.gauss(0, 1))
                rank = min(order, max(1, wanted))
                tail = sum(self._sigma(step, module)[rank:])
                share_lost = tail / sum(self._sigma(step, module))
                self.run.append(CutRecord(step, module, order, rank, 2.0 * tail, None, share_lost, 0.04))
                self.orders[module] = rank
        elif self.made.restored and self.made.cuts and step == self.made.cuts[-1][0] + 2 * self.made.every:
            last = {cut.module: cut.order for cut in self.run.records(CutRecord) if cut.step == self.made.cuts[-1][0]}
            self.run.append(RestoredRecord(step, last, "accuracy 0.912 is below 0.99 times 0.951"))
            self.orders.update(last)
        return share is not None


CUTS = ((250, 0.8), (500, 0.75), (750, 0.7), (1000, 0.7))


def shallow(folder: Path, *, seeds: int = 3, order: int = 64) -> Path:
    """Large and small baselines and a compressed group, one block."""
    for seed in range(seeds):
        write(Made(label="baseline", seed=seed, order=order, best=0.976 + 0.001 * seed), folder)
        write(Made(label="baseline", seed=seed, order=order // 4, best=0.952 + 0.002 * seed), folder)
        write(Made(seed=seed, order=order, cuts=CUTS, best=0.972 + 0.001 * seed), folder)
    return folder


def deep(folder: Path, *, order: int = 48) -> Path:
    """Six blocks, cut four times; and the same uncut."""
    cuts = ((1000, 0.8), (2000, 0.75), (3000, 0.7), (4000, 0.7))
    write(Made("scifar", depth=6, order=order, cuts=cuts, best=0.86), folder)
    write(Made("scifar", "baseline", depth=6, order=order, best=0.865), folder)
    return folder


def odd(folder: Path) -> Path:
    """What goes wrong, or is rarely asked for: each a folder of its own."""
    cuts = ((1000, 0.7), (3000, 0.5))
    write(Made("regression", "one seed", regression=True, cuts=cuts, bounds=False), folder)
    write(Made("restored", "guarded", cuts=cuts, restored=True), folder)
    write(Made("broken", "diverged", diverges=True, state="failed", message="loss is NaN at step 2600"), folder)
    write(Made("broken", "stopped", cuts=cuts, state="interrupted"), folder)
    write(Made("broken", "going on", spectra=False, state="running"), folder)
    empty = RunDirectory(folder / "empty")
    empty.begin(config(Made("empty", "<b>only</b> begun & nothing more")))
    empty.write_status(Status("running", 0, 10_000))
    return folder


def without(path: Path, key: str) -> Path:
    """The same run, its recipe without one entry."""
    stored = json.loads((path / "config.json").read_text())
    del stored[key]
    (path / "config.json").write_text(json.dumps(stored))
    return path
