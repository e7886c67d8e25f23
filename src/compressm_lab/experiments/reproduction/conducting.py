"""All trainings of a plan, each as soon as what it waits for is there; one that fails does not hold up the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from compressm_lab.experiments.processes import Ended, Executor, Started
from compressm_lab.experiments.reproduction.plan import Job, Plan

Say = Callable[[str], None]
UnderWay = dict[tuple[str, int], tuple[Job, Started]]


@dataclass
class Outcome:
    """How many trainings were done before, how many by now, and why others are not; by folder and seed."""

    before: int = 0
    done: int = 0
    failed: dict[tuple[str, int], str] = field(default_factory=dict)
    interrupted: bool = False


def conduct(plan: Plan, executor: Executor, say: Say = lambda line: None) -> Outcome:
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
                job, started = under_way.pop(key)
                _note(outcome, job, started.result(), say)
    except KeyboardInterrupt:
        outcome.interrupted = True
        say(f"stopping: {len(under_way)} trainings are under way or wait; those under way save what they have")
        executor.stop()
    outcome.done = _done(plan, outcome.failed)
    return outcome


def _done(plan: Plan, failed: Collection[tuple[str, int]]) -> int:
    return sum(job.state == "done" for job in plan.jobs(failed))


def _submit(plan: Plan, executor: Executor, outcome: Outcome, under_way: UnderWay) -> None:
    """Whatever is ready and was not begun yet."""
    for job in plan.jobs(outcome.failed):
        if job.state in ("new", "begun") and job.key not in under_way and job.key not in outcome.failed:
            assert job.training is not None
            under_way[job.key] = (job, executor.submit(job.training))


def _note(outcome: Outcome, job: Job, ended: Ended, say: Say) -> None:
    if not ended.message and job.training is not None and job.training.finished:
        say(f"{job}: done")
        return
    message = ended.message or "it ended without a model"
    say(f"{job}: {'stopped' if ended.interrupted else 'failed'}: {message}")
    outcome.failed[job.key] = message
