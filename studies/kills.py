"""Trainings that are killed, by SIGKILL, at random moments: each is resumed and compared with one never killed.

python studies/kills.py --seeds 100     # as many trainings, each killed once, twice or three times
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import compressm.compression as compression
from command import Progress, run, silent
from compressm_lab.data import Digits, Store, Task
from compressm_lab.experiments.recipes import find_recipe
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.training import Recipe, train
from compressm_lab.training import loop as training_loop
from compressm_lab.training.clock import Clock

SETTINGS = (
    "task={name: digits, side: 4}",
    "model={depth: 1, width: 8, order: 24, dropout: 0.1, dropout_form: element}",
    "training={steps: 60, batch: 20, learning_rate: 8.0e-3, evaluate_every: 10, checkpoint_every: 4}",
    "spectra={every: 6, changes: true}",
)
CUTS = "compression={rho: 0.5, gate: 1.0, gramian: measured, at_least: 2, when: {steps: [9, 21, 23, 37, 50]}"
# Without a guard, and with one whose snapshots are in memory, as in every recipe, or in files.
GUARDS = {
    "none": "}",
    "memory": ", rollback: {drop: 0.05, settle: 5}}",
    "files": ", rollback: {drop: 0.05, settle: 5}}",
}
_ORDER = ("memory", "files", "none", "files", "memory")  # four of five trainings have a guard
_SEEDS = 3  # of recipes
# Moments to kill at; "any" is one of the whole run, the others begin with a part of the work.
PHASES = ("any", "steps", "cut", "snapshot", "checkpoint", "evaluation", "spectrum", "model", "start")
# Clocks differ, and are all that may.
_TIMES = ("seconds", "step_seconds")
_NAME = 24


class Marks:
    """The present phase of a training, in memory that outlives its process, and a pipe for one moment."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NAME)
        self.reader, self.writer = os.pipe()
        self._counts: dict[str, int] = {}
        self.wanted: tuple[str, int] = ("", 0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context in which this is the phase; the pipe is told when the wanted one begins."""
        before = bytes(self._memory[:_NAME])
        self._memory[:_NAME] = name.encode().ljust(_NAME)
        self._counts[name] = self._counts.get(name, 0) + 1
        if (name, self._counts[name]) == self.wanted:
            os.write(self.writer, b"!")
        try:
            yield
        finally:
            self._memory[:_NAME] = before

    @property
    def now(self) -> str:
        """The phase that the process was in; "any" between the others, and before its first."""
        return bytes(self._memory[:_NAME]).decode().strip(" \0") or "any"

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def close(self) -> None:
        """Close pipe and memory."""
        for handle in (self.reader, self.writer):
            os.close(handle)
        self._memory.close()


def recipe_of(guard: str, seed: int) -> Recipe:
    """The recipe of a training."""
    return find_recipe("digits", (*SETTINGS, f"{CUTS}{GUARDS[guard]}", f"seed={seed}"))


def _watched(kind: Any, name: str, marks: Marks, phase: str | None) -> None:
    """Make a function mark its phase; None: its second argument names it."""
    inner = getattr(kind, name)

    def marked(*arguments: Any, **options: Any) -> Any:
        with marks.phase(phase or ""):
            return inner(*arguments, **options)

    @contextmanager
    def timed(clock: Clock, which: str) -> Iterator[None]:
        with marks.phase(which), inner(clock, which):
            yield

    setattr(kind, name, timed if phase is None else marked)


def _train(task: Task, guard: str, seed: int, folder: Path, marks: Marks, told: Any) -> None:
    """Train or resume, in a process of its own; `told` gets the number of times that each phase began."""
    torch.set_num_threads(1)
    _watched(Clock, "phase", marks, None)
    _watched(compression.rollback.Snapshot, "of", marks, "snapshot")
    _watched(training_loop, "save_model", marks, "model")
    _watched(RunDirectory, "begin", marks, "start")
    if guard == "files":
        setattr(compression, "Rollback", partial(compression.Rollback, folder=folder / "snapshots"))  # noqa: B010
    with marks.phase("any"):
        train(recipe_of(guard, seed), task, folder, resume=RunDirectory(folder).exists)
    told.put(marks.counts)


class Subject:
    """A training, and the run that was never killed to compare it with."""

    def __init__(self, task: Task, guard: str, seed: int, out: Path) -> None:
        self.task, self.guard, self.seed = task, guard, seed
        self.whole = out / f"whole-{guard}-{seed}"
        begun = time.perf_counter()
        self.counts = self.finished(self.whole)
        self.seconds = time.perf_counter() - begun

    def finished(self, folder: Path) -> dict[str, int]:
        """Train to the end; returns how often each phase began."""
        marks = Marks()
        try:
            counts = self.trained(folder, marks, lambda process, marks: None)
        finally:
            marks.close()
        if counts is None:
            raise RuntimeError(f"{folder}: somebody else killed the training")
        return counts

    def trained(
        self, folder: Path, marks: Marks, meanwhile: Callable[[multiprocessing.Process, Marks], None]
    ) -> dict[str, int] | None:
        """Train in a process; returns how often each phase began, None if the process was killed."""
        context = multiprocessing.get_context("fork")  # what is loaded need not be loaded again
        told = context.SimpleQueue()
        process = context.Process(target=_train, args=(self.task, self.guard, self.seed, folder, marks, told))
        process.start()
        meanwhile(process, marks)  # type: ignore[arg-type]
        process.join()
        if process.exitcode not in (0, -signal.SIGKILL):
            raise RuntimeError(f"{folder}: the training ended with {process.exitcode}")
        return told.get() if process.exitcode == 0 else None

    def killed(self, folder: Path, chance: random.Random) -> str | None:
        """Train until a random moment; returns the phase in which it was killed, None if it ended before."""
        possible = [phase for phase in PHASES if phase in self.counts]
        phase = chance.choice(possible)
        marks = Marks()
        marks.wanted = (phase, chance.randint(1, self.counts[phase]))
        longest = self.seconds if phase == "any" else 0.004
        delay = longest * chance.random()

        def kill(process: multiprocessing.Process, marks: Marks) -> None:
            os.set_blocking(marks.reader, False)
            while process.is_alive():
                try:
                    os.read(marks.reader, 1)
                except BlockingIOError:
                    time.sleep(0.0002)
                else:
                    time.sleep(delay)
                    process.kill()
                    return

        try:
            done = self.trained(folder, marks, kill)
            return None if done is not None else marks.now.replace("any", "between")
        finally:
            marks.close()

    def differs(self, folder: Path) -> str:
        """Words for what is not as in the run that was never killed; empty if nothing is."""
        mine, whole = (load_file(path / "model" / "model.safetensors") for path in (folder, self.whole))
        found = [name for name in {**mine, **whole} if not _same(mine.get(name), whole.get(name))]
        found += [name for name in ("metrics", "cuts", "spectra") if _lines(folder, name) != _lines(self.whole, name)]
        found += [] if RunDirectory(folder).finished else ["status"]
        found += [path.name for path in folder.rglob(".*")]  # what a killed process left half written
        RunDirectory(folder).require_free()
        return ", ".join(found)


def _same(mine: torch.Tensor | None, whole: torch.Tensor | None) -> bool:
    return mine is not None and whole is not None and torch.equal(mine, whole)


def _lines(folder: Path, name: str) -> list[Mapping[str, Any]]:
    found = (json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in _TIMES} for line in found]


def measure_kills(*, seeds: int = 100, quick: bool = False, progress: Progress = silent) -> Measurement:
    """Measure one row a kill: its guard, the phase in which it came, and if the end was the same, bit for bit."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        out = Path(place)
        task = Digits(side=4).load(Store(out / "data", offline=True))
        subjects: dict[tuple[str, int], Subject] = {}
        for number in range(seeds):
            chance = random.Random(number)
            guard, seed = _ORDER[number % len(_ORDER)], chance.randrange(1 if quick else _SEEDS)
            if (guard, seed) not in subjects:
                subjects[guard, seed] = Subject(task, guard, seed, out)
            rows += _one(subjects[guard, seed], number, chance, out / f"run-{number}")
            progress(f"training {number + 1} of {seeds}: {_said(rows, number)}")
    return Measurement("kills", "Trainings killed at random moments and resumed", seeds, rows)


def _one(subject: Subject, number: int, chance: random.Random, folder: Path) -> list[Row]:
    """Kill one training one to three times, let it end, and compare."""
    wanted, phases = chance.choice((1, 1, 2, 3)), list[str]()
    while len(phases) < wanted:
        phase = subject.killed(folder, chance)
        if phase is not None:
            phases.append(phase)
        elif phases:
            break  # it ended before the next kill
        else:
            folder = folder.with_name(f"{folder.name}-again")
    subject.finished(folder)
    differs = subject.differs(folder)
    common: Row = {"training": number, "seed": subject.seed, "guard": subject.guard, "device": "cpu"}
    same: Row = {"same": int(not differs), "differs": differs}
    return [{**common, "kill": k, "phase": phase, **same} for k, phase in enumerate(phases, start=1)]


def _said(rows: list[Row], number: int) -> str:
    own = [row for row in rows if row["training"] == number]
    end = "same bits" if own[0]["same"] else f"differs in {own[0]['differs']}"
    return f"guard {own[0]['guard']}, killed in {', '.join(str(row['phase']) for row in own)}: {end}"


if __name__ == "__main__":
    run(measure_kills, seeds=100, description=__doc__ or "")
