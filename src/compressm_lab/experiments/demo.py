"""The demo: digits as sequences, by a large model, a small one, and large ones that shrink to the small one's order."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from compressm.cli import show_warnings_plainly
from compressm_lab.data import Store, make
from compressm_lab.experiments.engine import Campaign
from compressm_lab.experiments.recipes import Arm, Training
from compressm_lab.runs.directory import RunDirectory, find_runs
from compressm_lab.runs.groups import group_runs
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.runs.records import RunError
from compressm_lab.runs.run import read_run
from compressm_lab.training import ConfigError, Plan, Silent, train
from compressm_lab.training.building import build_model

# Settings by label; the last is compressed too, with the Gramians of the paper.
MODELS: dict[str, tuple[str, ...]] = {
    "large": ("compression=null",),
    "small": ("compression=null", "model.order=4"),
    "compressed": (),
    "white noise": ("compression.gramian=white_noise",),
}
# Called with a label, a seed and a step.
Progress = Callable[[str, int, int], None]


def plan(out: Path, seeds: int, settings: Sequence[str] = ()) -> Campaign:
    """Plan all trainings, seed by seed, so that other load on the machine affects all models alike."""
    arms = (
        Arm("", label, "", "digits", label.replace(" ", "-"), (*settings, *differs, f"label={label!r}"))
        for label, differs in MODELS.items()
    )
    return Campaign(tuple(arms), range(seeds), out / "runs", by_seed=True)


def require_sound(wanted: Campaign) -> None:
    """Refuse settings with which a model cannot be built or trained, and a folder with runs of others."""
    for arm in wanted.arms:
        recipe = arm.read(0)
        Plan.of(recipe)
        source = make(**recipe.task)
        build_model(recipe.model, source.form or source.load(Store()))
    own = {arm.folder for arm in wanted.arms}
    if strange := sorted(path for path in wanted.runs.glob("*") if path.name not in own):
        raise ConfigError(f"{strange[0]} is not of a demo, which writes over its folder: choose another --out")


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """A context without the runs of an earlier demo, in which no other demo writes into the folder.

    A demo that goes on there, and a run that a living process trains, are refused, and nothing is changed.
    """
    with RunDirectory(out).locked():
        for path in (out / "runs").glob("*/*/lock"):
            RunDirectory(path.parent).require_free()
        shutil.rmtree(out / "runs", ignore_errors=True)
        yield


def collect(out: Path) -> Measurement:
    """Collect one row a finished training: orders, test accuracy where validation was best, time and bounds of cuts."""
    rows: list[Row] = []
    for run in map(read_run, find_runs([out / "runs"])):
        if run.finished and run.score is not None and run.score.test is not None and run.seconds is not None:
            bounds = ["none" if cut.error_bound is None else f"{cut.error_bound:.3g}" for cut in run.lasting_cuts]
            row: Row = {"model": run.label, "seed": run.seed}
            row |= {"initial_order": sum(run.initial_orders.values()), "order": sum(run.final_orders.values())}
            rows.append(row | {"accuracy": 100 * run.score.test, "seconds": run.seconds, "bounds": ", ".join(bounds)})
    places = list(MODELS)
    rows.sort(key=lambda row: (places.index(str(row["model"])), row["seed"]))
    return Measurement("demo", "Digits: large, small and compressed", 1, rows)


def collect_spectra(out: Path) -> Measurement | None:
    """Collect the Hankel singular values of the best compressed run, a row a snapshot; None where it has none.

    `order` is the number of states from that step on.
    """
    runs = [run for run in map(read_run, find_runs([out / "runs"])) if run.label == "compressed" and run.finished]
    if not runs or not (spectra := (shown := group_runs(runs)[0].shown).spectra):
        return None
    module = spectra[0].module
    path = shown.order_paths[module]
    rows: list[Row] = []
    for spectrum in (spectrum for spectrum in spectra if spectrum.module == module):
        order = next(order for step, order in reversed(path) if step <= spectrum.step)
        sigma = " ".join(f"{value:.4g}" for value in spectrum.sigma)
        rows.append({"seed": shown.seed, "step": spectrum.step, "order": order, "sigma": sigma})
    return Measurement("demo-spectra", "Digits: the states of a layer while it shrinks", 1, rows)


def run(wanted: Campaign, *, processes: int, progress: Progress) -> None:
    """Train everything, `processes` at a time; the first error ends it."""
    # One pool: in a process of its own a training of seconds would take longer to load than to train.
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_receive, initargs=(queue,)) as pool:
        waiting = [pool.submit(_train, training) for training in wanted.trainings()]
        try:
            for label, seed, step in _messages(queue, waiting):
                progress(label, seed, step)
            for future in waiting:
                future.result()
        except BrokenExecutor:
            begun = (training for training in wanted.trainings() if training.state == "begun")
            names = "; ".join(f"{training.arm.method}, seed {training.seed}" for training in begun)
            raise RunError(
                f"a process of the demo was killed, perhaps for want of memory; not finished: {names or 'all'}."
                " Run the demo again, with fewer --processes if memory is short"
            ) from None
        except BaseException:
            pool.shutdown(cancel_futures=True, wait=False)
            raise


def _messages(queue: Any, waiting: list[Future[None]]) -> Iterator[tuple[str, int, int]]:
    """Yield what trainings report until all have ended or one has failed."""
    while True:
        done, pending = wait(waiting, timeout=0)
        try:
            yield queue.get(timeout=0.2)
        except Empty:
            if not pending or any(future.exception() for future in done):
                return


_queue: Any = None


def _receive(queue: Any) -> None:
    """Set up a process of the pool."""
    global _queue
    _queue = queue
    show_warnings_plainly()
    torch.set_num_threads(1)  # models as small as these are slower on several threads


def _train(training: Training) -> None:
    recipe = training.arm.read(training.seed)
    task = make(**recipe.task).load(Store(training.folder.parents[2] / "data", offline=True))
    train(recipe, task, training.folder, logger=_Reporter(training))


class _Reporter(Silent):
    def __init__(self, training: Training) -> None:
        self._training = training

    def reached(self, step: int, loss: float) -> None:
        _queue.put((self._training.arm.method, self._training.seed, step))
