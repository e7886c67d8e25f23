"""The engine of experiments: arms × seeds are trainings; what is done is left alone, what was stopped goes on.

Before anything is trained `require_ready` looks whether data and devices are there. `conduct` begins each training as
soon as what it waits for is there; one that fails does not hold up the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from compressm_lab.data import DataError, DataSet, Store, make
from compressm_lab.experiments.arms import Arm, FinalOrder, Training
from compressm_lab.experiments.executors import Ended, Executor, Started
from compressm_lab.experiments.recipes import find_recipe
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import RunError
from compressm_lab.runs.run import Run, read_run
from compressm_lab.training.config import ConfigError

Say = Callable[[str], None]
UnderWay = dict[tuple[str, int], tuple[Training, Started]]


@dataclass(frozen=True)
class Campaign:
    """Arms × seeds below one folder, read from the disk each time; arm by arm, or seed by seed."""

    arms: tuple[Arm, ...]
    seeds: range
    runs: Path
    by_seed: bool = False

    def trainings(self, failed: Collection[tuple[str, int]] = ()) -> list[Training]:
        """Every training once; those that wait for an arm go on without its seeds that `failed`."""
        finals: dict[str, FinalOrder | None] = {}
        found: dict[tuple[str, int], Training] = {}
        for arm in self.arms:
            if arm.beside is not None and arm.beside.folder not in finals:
                finals[arm.beside.folder] = self.final_order(arm.beside, failed)
            resolved = arm.filled(finals[arm.beside.folder] if arm.beside else None)
            for seed in self.seeds[:1] if arm.once else self.seeds:
                training = self._training(resolved, seed)
                found.setdefault(training.key, training)
        # The sort keeps the order of arms.
        return sorted(found.values(), key=lambda training: training.seed) if self.by_seed else list(found.values())

    def resolved(self) -> Iterator[tuple[Arm, Arm | None]]:
        """Every arm as it was written, and with its order where that is known."""
        for arm in self.arms:
            if arm.beside is None:
                yield arm, arm
            else:
                final = self._mean([run for seed in self.seeds if (run := self.finished_run(arm.beside, seed))])
                yield arm, None if final is None else arm.filled(final)

    def final_order(self, arm: Arm, failed: Collection[tuple[str, int]] = ()) -> FinalOrder | None:
        """None until every seed is finished or has failed, and at least one is finished."""
        runs = [self.finished_run(arm, seed) for seed in self.seeds if (arm.folder, seed) not in failed]
        return None if None in runs else self._mean([run for run in runs if run])

    def finished_run(self, arm: Arm, seed: int) -> Run | None:
        """None where it is not trained to its end."""
        directory = RunDirectory(self.folder(arm, seed))
        return read_run(directory) if directory.finished else None

    def folder(self, arm: Arm, seed: int) -> Path:
        return self.runs / arm.folder / f"seed-{seed}"

    def _training(self, arm: Arm, seed: int) -> Training:
        if arm.teacher is None:
            return Training(arm, seed, self.folder(arm, seed))
        teacher = self.folder(arm.teacher, seed).absolute()
        return Training(arm.taught_by(teacher), seed, self.folder(arm, seed), teacher)

    @staticmethod
    def _mean(runs: list[Run]) -> FinalOrder | None:
        if not runs:
            return None
        return FinalOrder(sum(run.mean_order for run in runs) / len(runs), max(len(run.modules) for run in runs))


def require_same_recipes(trainings: Iterable[Training]) -> None:
    """Refuse runs that are there already and are of another recipe: they can neither go on nor be collected."""
    for training in trainings:
        try:
            said = training.differs
        except (ConfigError, RunError) as error:
            raise RunError(f"{error}; expected the recipe of {training}: move it, or choose --out") from None
        if said:
            raise RunError(
                f"{training.folder} holds a run of another recipe than {training}: {said}; move it, or choose --out"
            )


def require_ready(trainings: Iterable[Training], executor: Executor, data: Path | None, say: Say = print) -> None:
    """Refuse, in one error and before anything is trained, what trainings that are not done would fail by.

    Data sets are fetched here, once, where that is allowed: without a folder of `data`.
    """
    left = [training for training in trainings if not training.finished]
    if not left:
        return
    store = Store() if data is None else Store(data, offline=True)
    # Each once, also where data sets of several options are read from the same files.
    wrong = list(dict.fromkeys(said for dataset in _data_sets(left) if (said := _why_missing(dataset, store, say))))
    if wrong:
        sets = "1 data set" if len(wrong) == 1 else f"{len(wrong)} data sets"
        wrong.insert(0, f"{sets} of {len(left)} trainings cannot be had, nothing was trained")
    if trouble := executor.trouble():
        wrong.append(trouble)
    if wrong:
        raise ConfigError("\n".join(wrong))


def _data_sets(trainings: Iterable[Training]) -> list[DataSet]:
    """What the trainings read, each once, also of arms whose order is not known yet."""
    tasks = {(t.arm.recipe, tuple(s for s in t.arm.settings if s.startswith("task"))): t for t in trainings}
    found = (dict(find_recipe(recipe, settings).task) for recipe, settings in tasks)
    return list(dict.fromkeys(make(task.pop("name"), **task) for task in found))


def _why_missing(dataset: DataSet, store: Store, say: Say) -> str:
    """Empty where it is there, can be made, or could be fetched just now."""
    if dataset.present(store):
        return ""
    if not store.offline:
        say(f"{dataset.name}: not in {store.root}, to be fetched")
    try:
        for wanted in dataset.wanted:
            store.get(wanted)
    except DataError as error:
        fetched = store.offline and all(wanted.remote for wanted in dataset.wanted)
        cure = f"; `compressm data {dataset.name} --data {store.root}` fetches it" if fetched else ""
        return f"{dataset.name}: {error}{cure}"
    return ""


@dataclass
class Outcome:
    """How many trainings were done before, how many by now, and why others are not; by folder and seed."""

    before: int = 0
    done: int = 0
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    interrupted: bool = False


def conduct(plan: Campaign, executor: Executor, say: Say = lambda line: None) -> Outcome:
    """Train what is not done; Ctrl-C has every training save and end, and the outcome says so."""
    before = _done(plan, ())
    outcome = Outcome(before, before)
    under_way: UnderWay = {}
    try:
        while True:
            _submit(plan, executor, outcome, under_way)
            if not under_way:
                break
            while not (ended := [key for key, (_, started) in under_way.items() if started.done()]):
                time.sleep(executor.patience)
            for key in ended:
                training, started = under_way.pop(key)
                _note(outcome, training, started.result(), say)
    except KeyboardInterrupt:
        outcome.interrupted = True
        say(f"stopping: {len(under_way)} trainings are under way or wait; those under way save what they have")
        executor.stop()
    outcome.done = _done(plan, outcome.failed)
    return outcome


def _done(plan: Campaign, failed: Collection[tuple[str, int]]) -> int:
    return sum(training.finished for training in plan.trainings(failed) if training.arm.known)


def _submit(plan: Campaign, executor: Executor, outcome: Outcome, under_way: UnderWay) -> None:
    """Whatever is ready and was not begun yet."""
    for training in plan.trainings(outcome.failed):
        asked = training.key in under_way or training.key in outcome.failed
        if not asked and training.state in ("new", "begun"):
            under_way[training.key] = (training, executor.submit(training))


def _note(outcome: Outcome, training: Training, ended: Ended, say: Say) -> None:
    if not ended.message and training.finished:
        say(f"{training}: done")
        return
    message = ended.message or "it ended without a model"
    say(f"{training}: {'stopped' if ended.interrupted else 'failed'}: {message}")
    outcome.failed[training.key] = message
