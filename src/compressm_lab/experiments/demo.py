"""The demo: digits as sequences, by a large model, a small one, and large ones that shrink to the small one's order."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from compressm_lab.data import Store, make
from compressm_lab.experiments.catalogue import find_recipe
from compressm_lab.runs.directory import find_runs
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.runs.run import read_run
from compressm_lab.training import Recipe, Silent, train

# Labels, and what differs from the recipe; the last is compressed too, with the Gramians of the paper.
MODELS: dict[str, tuple[str, ...]] = {
    "large": ("compression=null",),
    "small": ("compression=null", "model.order=4"),
    "compressed": (),
    "white noise": ("compression.gramian=white_noise",),
}
# Which model, which seed, how many steps are done.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Job:
    """One training of the demo."""

    label: str
    seed: int
    folder: Path
    settings: tuple[str, ...]

    def recipe(self) -> Recipe:
        return find_recipe(
            "digits", (*self.settings, *MODELS[self.label], f"label={self.label!r}", f"seed={self.seed}")
        )


def jobs(out: Path, seeds: int, settings: Sequence[str] = ()) -> list[Job]:
    """All trainings, seed by seed: what else the machine does falls on all models alike."""
    names = {label: label.replace(", ", "-").replace(" ", "-") for label in MODELS}
    return [
        Job(label, seed, out / "runs" / names[label] / f"seed-{seed}", tuple(settings))
        for seed in range(seeds)
        for label in MODELS
    ]


def collect(out: Path) -> Measurement:
    """One row a training that is done: its orders, its test accuracy where validation was best, its time and cuts."""
    rows: list[Row] = []
    for run in map(read_run, find_runs([out / "runs"])):
        if run.finished and run.score is not None and run.score.test is not None and run.seconds is not None:
            bounds = [cut.error_bound for cut in run.lasting_cuts]
            rows.append(
                {
                    "model": run.label,
                    "seed": run.seed,
                    "initial_order": sum(run.initial_orders.values()),
                    "order": sum(run.final_orders.values()),
                    "accuracy": 100 * run.score.test,
                    "seconds": run.seconds,
                    "bounds": ", ".join("none" if bound is None else f"{bound:.3g}" for bound in bounds),
                }
            )
    places = list(MODELS)
    rows.sort(key=lambda row: (places.index(str(row["model"])), row["seed"]))
    return Measurement("demo", "Digits: large, small and compressed", 1, rows)


def run(wanted: Sequence[Job], *, processes: int, progress: Progress) -> None:
    """Train all of them, `processes` at a time; the first error ends it."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_receive, initargs=(queue,)) as pool:
        waiting = [pool.submit(_train, job) for job in wanted]
        try:
            for label, seed, step in _messages(queue, waiting):
                progress(label, seed, step)
            for future in waiting:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True, wait=False)
            raise


def _messages(queue: Any, waiting: list[Future[None]]) -> Iterator[tuple[str, int, int]]:
    while True:
        done, pending = wait(waiting, timeout=0)
        try:
            yield queue.get(timeout=0.2)
        except Empty:
            if not pending or any(future.exception() for future in done):
                return


_queue: Any = None


def _receive(queue: Any) -> None:
    """In every process of the pool: models as small as these are slower on several threads."""
    global _queue
    _queue = queue
    torch.set_num_threads(1)


def _train(job: Job) -> None:
    recipe = job.recipe()
    options = {key: value for key, value in recipe.task.items() if key != "name"}
    task = make(recipe.task["name"], **options).load(Store(job.folder.parents[2] / "data", offline=True))
    train(recipe, task, job.folder, listener=_Reporter(job))


class _Reporter(Silent):
    def __init__(self, job: Job) -> None:
        self._job = job

    def reached(self, step: int, loss: float) -> None:
        _queue.put((self._job.label, self._job.seed, step))
