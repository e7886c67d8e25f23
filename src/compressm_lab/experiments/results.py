"""Results of our own on the paper's tasks: trains what `result_lists.py` has side by side and collects it.

python -m compressm_lab.experiments.results smnist smnist-falling --seeds 5 --processes 9 --data FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compressm_lab.experiments.command import count, earlier_results, result, seed_number
from compressm_lab.experiments.jobs import Job, company, train
from compressm_lab.experiments.outcomes import collected, joined, missing, outcome, require_none, written
from compressm_lab.experiments.result_lists import TASKS, Variant
from compressm_lab.experiments.trainings import Training, different
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.runs.records import RunError, TruncationRecord


def jobs(task: str, out: Path, names: Iterable[str], seeds: range, steps: int | None = None) -> list[Job]:
    """All trainings, seed by seed; with fewer steps cuts come as much earlier."""
    chosen = TASKS[task]
    wanted = list(dict.fromkeys(names))
    total = chosen.steps if steps is None else steps
    pairs = ((name, seed) for seed in seeds for name in wanted)
    return [
        _job(task, name, out, seed, total)
        for name, seed in pairs
        if seed == seeds.start or not chosen.variants[name].once
    ]


def _job(task: str, name: str, out: Path, seed: int, steps: int) -> Job:
    chosen = TASKS[task]
    variant = chosen.variants[name]
    settings = (
        f"label={variant.label!r}",
        "spectra=null",
        f"training.steps={steps}",
        f"training.evaluate_every={max(1, steps // chosen.evaluations)}",
        f"training.checkpoint_every={max(1, steps // 4)}",
        *chosen.settings,
        *variant.training,
        *variant.differs,
        *_when(variant, steps),
    )
    if variant.teacher is not None:
        settings += (f"distillation.teacher={_folder(task, variant.teacher, out, seed, steps).absolute()}",)
    uncut = () if variant.differs or variant.recipe else ("--baseline",)
    options = (*uncut, "--order", str(variant.order), "--seed", str(seed))
    training = Training(variant.recipe or chosen.recipe, _folder(task, name, out, seed, steps), options, settings)
    return Job(variant.label, seed, training)


def _folder(task: str, name: str, out: Path, seed: int, steps: int) -> Path:
    return out / "runs" / f"{task}-{name}-{steps}" / f"seed-{seed}"


def _when(variant: Variant, steps: int) -> tuple[str, ...]:
    if variant.at:
        found: list[int] = []
        for share in variant.at:  # none twice, however few steps there are
            found.append(max(round(share * steps), found[-1] + 1 if found else 1))
        return (f"compression.when={{steps: {found}}}",)
    if variant.tries is None:
        return ()
    every = max(1, steps // variant.tries)
    first, last = max(every, round(variant.since * steps)), max(every, round(variant.until * steps))
    begin = f"first: {first}, " if variant.since else ""
    return (f"compression.when={{every: {every}, {begin}last: {max(first, last)}}}",)


@dataclass(frozen=True)
class Asked:
    """The trainings wanted of one task, and where their result goes."""

    task: str
    path: Path
    wanted: list[Job]

    @property
    def stages(self) -> tuple[list[Job], list[Job]]:
        """Those that learn alone, and those that have a teacher among them, which come after."""
        taught = {variant.label for variant in TASKS[self.task].variants.values() if variant.teacher}
        alone = [job for job in self.wanted if job.variant not in taught]
        return alone, [job for job in self.wanted if job.variant in taught]

    def write(self, earlier: Sequence[Measurement], *, all_count: bool) -> list[Job]:
        """What is finished, beside `earlier` results; what has no row: in all of it, or of what was found here."""
        new = collect(self.task, self.wanted)
        if new is not None:
            _keep_company(new, earlier)
        if new is None and not earlier:
            print(f"no training of {self.task} was finished: there is nothing to write")
            return self.wanted
        found = joined([*earlier, new])
        written(found, self.path, self.wanted)
        return missing(found if all_count else new, self.wanted)


def collect(task: str, wanted: Sequence[Job]) -> Measurement | None:
    """One row a training that is done; of one that is cut afterwards what is left then."""
    return collected(f"results-{task}", TASKS[task].title, wanted, _found)


def _found(directory: RunDirectory) -> Row:
    found = outcome(directory) | company(directory)
    cuts = {record.split: record for record in directory.records(TruncationRecord)}  # the last of each split
    if "test" in cuts and cuts["test"].accuracy is not None:
        accuracy = 100 * cuts["test"].accuracy
        found |= {"order": cuts["test"].mean_order, "best": accuracy, "last": accuracy}
        if "validation" in cuts and cuts["validation"].accuracy is not None:
            found["validation"] = 100 * cuts["validation"].accuracy
    elif directory.config().get("truncation") is not None:
        raise RunError(f"{directory.path} is finished, but has no test of the model that was cut after training")
    return found


def _keep_company(found: Measurement, earlier: Sequence[Measurement]) -> None:
    """What says nothing of it was trained with as many at a time as an earlier result says."""
    rows = (row for one in earlier for row in one.rows if "together" in row)
    known = {(str(row["variant"]), row["seed"]): row["together"] for row in rows}
    for row in found.rows:
        key = (str(row["variant"]), row["seed"])
        if "together" not in row and key in known:
            row["together"] = known[key]


def _lengths() -> str:
    """How long the tasks are trained, if nothing is said."""
    return ", ".join(f"{name} {task.steps}" for name, task in TASKS.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("tasks", nargs="+", choices=list(TASKS), metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument(
        "--out", type=Path, default=Path("out/studies"), help="folder of results and runs (%(default)s)"
    )
    parser.add_argument("--seeds", type=count, default=5, help="trainings of each (%(default)s)")
    parser.add_argument("--first-seed", type=seed_number, default=0, help="the first of them (%(default)s)")
    parser.add_argument("--only", action="append", help="one variant of every task; again for more")
    parser.add_argument(
        "--processes", type=count, default=1, help="trainings at a time; times compare only one by one (%(default)s)"
    )
    parser.add_argument("--data", type=Path, help="folder of data sets")
    parser.add_argument("--steps", type=count, help=f"of each training ({_lengths()})")
    parser.add_argument(
        "--add", type=result, nargs="+", default=[], help="results of other trainings, as of an earlier day"
    )
    parser.add_argument("--only-collect", action="store_true", help="train nothing, write what is finished")
    return parser


def _asked(parser: argparse.ArgumentParser, given: argparse.Namespace, task: str) -> Asked:
    known = TASKS[task].variants
    if strange := [name for name in given.only or () if name not in known]:
        parser.error(f"--only {strange[0]}: expected one of {', '.join(known)}, the variants of {task}")
    steps = given.steps or TASKS[task].steps
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    wanted = jobs(task, given.out, given.only or known, seeds, steps)
    for name in given.only or ():
        teacher = known[name].teacher
        if teacher is None or teacher in given.only or given.only_collect:
            continue
        if _job(task, name, given.out, seeds[0], steps).training.finished:
            continue
        if not _job(task, teacher, given.out, seeds[0], steps).training.finished:
            parser.error(f"--only {name}: its teacher, {teacher}, is not trained; add --only {teacher}")
    if why := different(wanted):
        parser.error(why)
    named = task if len(set(given.tasks)) > 1 else ""
    return Asked(task, given.out / f"results-{task}.json", [replace(job, task=named) for job in wanted])


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Train what is not done yet, all tasks in one pool of processes, and write OUT/results-TASK.json of each."""
    parser = _parser()
    given = parser.parse_args(arguments)
    tasks = list(dict.fromkeys(given.tasks))
    names = [f"results-{task}" for task in tasks]
    if strange := [one.name for one in given.add if one.name not in names]:
        parser.error(f"--add of a result named {strange[0]}: expected {' or '.join(names)}")
    asked = [_asked(parser, given, task) for task in tasks]

    def earlier(one: Asked) -> list[Measurement]:
        """What is there now: another command may have written since."""
        added = [found for found in given.add if found.name == one.path.stem]
        return earlier_results(parser, one.path, added, given.steps or TASKS[one.task].steps)

    for one in asked:
        earlier(one)  # what would be refused at the end is refused now
    if not given.only_collect:
        for stage in (0, 1):
            train([job for one in asked for job in one.stages[stage]], processes=given.processes, data=given.data)
    absent = [job for one in asked for job in one.write(earlier(one), all_count=given.only_collect)]
    require_none(absent, [job for one in asked for job in one.wanted])
    return [one.path for one in asked]


if __name__ == "__main__":
    main()
