"""The engine of experiments: it trains arms × seeds, leaves finished runs alone and resumes stopped ones.

`require_ready` checks data and devices before anything is trained. `conduct` begins each training as soon as its
teacher, or the order it needs, is there; one that fails does not hold up the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from compressm_lab.data import DataError, Source, Store, make
from compressm_lab.experiments.executors import Executor, Started
from compressm_lab.experiments.recipes import Arm, FinalOrder, Training, find_recipe
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import RunError
from compressm_lab.runs.run import Run, read_run
from compressm_lab.training.config import ConfigError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Campaign:
    """Trainings of arms × seeds below one folder, arm by arm or `by_seed`; the disk is read at each call."""

    arms: tuple[Arm, ...]
    seeds: range
    runs: Path
    by_seed: bool = False

    def trainings(self, failed: Collection[tuple[str, int]] = ()) -> list[Training]:
        """List every training once; those that wait for an arm do not wait for its seeds that `failed`."""
        finals: dict[str, FinalOrder | None] = {}
        found: dict[tuple[str, int], Training] = {}
        for arm in self.arms:
            if arm.beside is not None and arm.beside.folder not in finals:
                finals[arm.beside.folder] = self.final_order(arm.beside, failed)
            resolved = arm.filled(finals[arm.beside.folder] if arm.beside else None)
            for seed in self.seeds_of(arm):
                training = self._training(resolved, seed)
                found.setdefault(training.key, training)
        # The sort keeps the order of arms.
        return sorted(found.values(), key=lambda training: training.seed) if self.by_seed else list(found.values())

    def resolved(self) -> Iterator[tuple[Arm, Arm | None]]:
        """Yield every arm, and the arm with its order filled in, None while no run tells that order."""
        for arm in self.arms:
            beside = arm.beside
            runs = [self.finished_run(beside, seed) for seed in self.seeds_of(beside)] if beside else []
            resolved = arm.filled(self._mean([run for run in runs if run]))
            yield arm, resolved if resolved.known else None

    def final_order(self, arm: Arm, failed: Collection[tuple[str, int]] = ()) -> FinalOrder | None:
        """The final order of an arm; None until every seed has finished or failed, and one has finished."""
        runs = [self.finished_run(arm, seed) for seed in self.seeds_of(arm) if (arm.folder, seed) not in failed]
        return None if None in runs else self._mean([run for run in runs if run])

    def finished_run(self, arm: Arm, seed: int) -> Run | None:
        """Read a finished run; None if it is not finished."""
        directory = RunDirectory(self.folder(arm, seed))
        return read_run(directory) if directory.finished else None

    def seeds_of(self, arm: Arm) -> range:
        """The seeds of an arm: all, or its first ones if it has fewer."""
        return self.seeds[: arm.seeds]

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
    """Refuse runs in the folder that are of another recipe: they can neither be resumed nor collected."""
    for training in trainings:
        try:
            difference = training.differs
        except (ConfigError, RunError) as error:
            raise RunError(f"{error}; expected the recipe of {training}: move it, or choose --out") from None
        if difference:
            place = f"{training.folder} holds a run of another recipe than {training}"
            raise RunError(f"{place}: {difference}; move it, or choose --out")


def require_ready(trainings: Iterable[Training], executor: Executor, data: Path | None, say: Say = print) -> None:
    """Raise one error for everything that is missing, before anything is trained.

    Without a folder of `data`, data sets are fetched here, once.
    """
    left = [training for training in trainings if not training.finished]
    if not left:
        return
    store = Store() if data is None else Store(data, offline=True)
    # Each reason once: data sets of several options may be read from the same files.
    wrong = list(dict.fromkeys(why for dataset in _data_sets(left) if (why := _why_missing(dataset, store, say))))
    if wrong:
        sets = "1 data set" if len(wrong) == 1 else f"{len(wrong)} data sets"
        wrong.insert(0, f"{sets} of {len(left)} trainings cannot be had, nothing was trained")
    if trouble := executor.trouble():
        wrong.append(trouble)
    if wrong:
        raise ConfigError("\n".join(wrong))


def _data_sets(trainings: Iterable[Training]) -> list[Source]:
    """List the data sets of trainings, each once, also of arms whose order is not known yet."""
    tasks = {(t.arm.recipe, tuple(s for s in t.arm.settings if s.startswith("task"))): t for t in trainings}
    found = (dict(find_recipe(recipe, settings).task) for recipe, settings in tasks)
    return list(dict.fromkeys(make(task.pop("name"), **task) for task in found))


def _why_missing(dataset: Source, store: Store, say: Say) -> str:
    """Fetch a data set if that is allowed; words for why it is missing, empty if it is there."""
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
    """Numbers of trainings done before and by now, and why others failed, by folder and seed."""

    before: int = 0
    done: int = 0
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    interrupted: bool = False


def conduct(plan: Campaign, executor: Executor, say: Say = lambda line: None) -> Outcome:
    """Train what is not done; after Ctrl-C every training saves and ends, and the outcome says so."""
    before = _done(plan, ())
    outcome = Outcome(before, before)
    running: dict[tuple[str, int], tuple[Training, Started]] = {}
    try:
        while True:
            for training in plan.trainings(outcome.failed):
                begun = training.key in running or training.key in outcome.failed
                if not begun and training.state in ("new", "begun"):
                    running[training.key] = (training, executor.submit(training))
            if not running:
                break
            while not (ended := [key for key, (_, started) in running.items() if started.done()]):
                time.sleep(executor.patience)
            for key in ended:
                training, started = running.pop(key)
                end = started.result()
                message = end.message or ("" if training.finished else "it ended without a model")
                if message:
                    outcome.failed[key] = message
                how = f"{'stopped' if end.interrupted else 'failed'}: {message}" if message else "done"
                say(f"{training}: {how}")
    except KeyboardInterrupt:
        outcome.interrupted = True
        say(f"stopping: {len(running)} trainings are under way or wait; those under way save what they have")
        executor.stop()
    outcome.done = _done(plan, outcome.failed)
    return outcome


def _done(plan: Campaign, failed: Collection[tuple[str, int]]) -> int:
    return sum(training.finished for training in plan.trainings(failed) if training.arm.known)
