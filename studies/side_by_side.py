"""Tasks side by side in several processes, each with a file of its rows: what is done is not done again."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from command import Progress
from compressm.files import replacing
from compressm_lab.experiments.rows import count
from compressm_lab.runs.measurement import Measurement, Row


@dataclass(frozen=True)
class Job:
    """A function of a module, called as function(*given, folder, until); it returns rows, or None without the time.

    `until` is a moment of `time.time()`. A job begins when those of `after` are done and `least` seconds are left; one
    that is `alone` has the GPU for itself.
    """

    name: str
    function: Callable[..., list[Row] | None]
    given: tuple[Any, ...] = ()
    after: tuple[str, ...] = ()
    alone: bool = False
    least: float = 0.0

    def is_ready(self, folder: Path, until: float) -> bool:
        """True if it can begin."""
        return time.time() + self.least < until and all(rows_of(name, folder) is not None for name in self.after)


def rows_of(job: Job | str, folder: Path) -> list[Row] | None:
    """The rows of a job that is done, else None."""
    path = _file(job if isinstance(job, str) else job.name, folder)
    rows: list[Row] | None = json.loads(path.read_text()) if path.exists() else None
    return rows


def work(
    jobs: Sequence[Job], folder: Path, processes: int, until: float, ended: Callable[[Job, float, str], None]
) -> None:
    """Do the jobs in their order, as many at a time as there are processes; a failure stops what waits for it alone."""
    waiting = {job.name: job for job in jobs if rows_of(job, folder) is None}
    if processes == 1:
        for job in waiting.values():
            if job.is_ready(folder, until):
                ended(job, *_run(job, folder, until))
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_prepare) as pool:
        running: dict[Future[tuple[float, str]], Job] = {}
        while waiting or running:
            for job in list(waiting.values()):
                has_place = len(running) < processes and not any(one.alone for one in running.values())
                if has_place and not (job.alone and running) and job.is_ready(folder, until):
                    running[pool.submit(_run, waiting.pop(job.name), folder, until)] = job
            if not running:
                return
            done, _ = wait(running, timeout=5, return_when=FIRST_COMPLETED)
            for future in done:
                ended(running.pop(future), *future.result())


def main(
    plan: Callable[..., tuple[list[Job], Callable[[], list[Measurement]]]],
    add: Callable[[argparse.ArgumentParser], None],
    *,
    description: str,
    processes: int,
    progress: Progress,
    arguments: Sequence[str] | None = None,
) -> list[Path]:
    """Do the jobs of a plan, as far as the time goes, and write the rows that are there to OUT/NAME.json."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("out/studies"), help="folder of the result (%(default)s)")
    parser.add_argument("--minutes", type=float, default=600.0, help="end before so many minutes (%(default)s)")
    parser.add_argument("--processes", type=count, default=processes, help="jobs at a time, on one GPU (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small version, in seconds")
    add(parser)
    given = parser.parse_args(arguments)
    began = time.time()
    jobs, collect = plan(given)
    folder = given.out / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    _prepare()

    def write() -> list[Path]:
        return [one.write(given.out / f"{one.name}.json") for one in collect() if one.rows]

    def ended(job: Job, seconds: float, said: str) -> None:
        progress(f"{job.name}: {seconds:.0f} s{': ' + said if said else ''}")
        write()

    work(jobs, folder, given.processes, began + 60 * given.minutes, ended)
    left = [job.name for job in jobs if rows_of(job, folder) is None]
    if left:
        progress(f"not done: {', '.join(left)}; the same command goes on with them")
    paths = write()
    for path in paths:
        progress(f"result: {path}; `compressm bench table {path}` shows it")
    progress(f"after {(time.time() - began) / 60:.1f} minutes")
    return paths


def collected(jobs: Sequence[Job], folder: Path) -> list[Row]:
    """The rows of all jobs that are done."""
    return [row for job in jobs for row in rows_of(job, folder) or ()]


def device() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _prepare() -> None:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def _file(name: str, folder: Path) -> Path:
    return folder / f"{name}.json"


def _run(job: Job, folder: Path, until: float) -> tuple[float, str]:
    """Do a job and keep its rows; returns its seconds, and what went wrong."""
    began, said = time.time(), ""
    try:
        rows = job.function(*job.given, folder, until)
        if rows is None:
            said = "no time left"
        else:
            with replacing(_file(job.name, folder)) as scratch:
                scratch.write_text(json.dumps(rows))
    except Exception:  # other jobs go on
        said = traceback.format_exc(limit=-4)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return time.time() - began, said
