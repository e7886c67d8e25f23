"""Results of our own on the paper's tasks: whole, small from the start, and cut in several ways, side by side.

sMNIST with the paper's 200 000 steps: cuts with τ tried through all of training, in the paper's way and in ours, and
gentle cuts that end at exactly 28 and 13 states; beside them, with one seed, a penalty on Hankel singular values and a
teacher, which is the whole model. smnist-falling: the same with a learning rate that begins higher and falls.
smnist-selection: four cuts to 32 states that keep the largest Hankel values, the smallest, or random ones. sCIFAR with
as many steps as there is time for: four cuts in the warm-up.

python -m compressm.experiments.results smnist --seeds 5 --processes 9 --data FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compressm.experiments.command import count, result
from compressm.experiments.outcomes import Job, collected, joined, kept, outcome, train
from compressm.experiments.trainings import Training
from compressm.runs.directory import RunDirectory
from compressm.runs.measurement import Measurement, Row
from compressm.runs.records import TruncationRecord

# What the paper's code does: no folding, Gramians of white noise, moments cut like slices.
PAPER = ("compression.fold=false", "compression.moments=slice")
OURS = ("compression.gramian=measured",)


@dataclass(frozen=True)
class Variant:
    """The order at the start, and what differs from the recipe; nothing differs in one that is never cut.

    tries: how often a cut is tried through all of training, where the recipe does not say; until: up to which share of
    the steps; at: the shares of the steps at which cuts are, in the place of both. recipe: where it is not that of the
    task; teacher: the variant whose run of the same seed teaches this one; once: trained with the first seed alone.
    """

    label: str
    order: int
    differs: tuple[str, ...] = ()
    tries: int | None = None
    until: float = 0.75
    at: tuple[float, ...] = ()
    recipe: str | None = None
    teacher: str | None = None
    once: bool = False


@dataclass(frozen=True)
class Task:
    """A recipe, its variants by name, and how long it is trained here."""

    recipe: str
    variants: dict[str, Variant]
    steps: int
    evaluations: int
    settings: tuple[str, ...] = ()


def _tolerance(label: str, tau: float, *differs: str, until: float = 0.75) -> Variant:
    return Variant(label, 256, (f"compression.tau={tau}", *differs), tries=40, until=until)


def _gently(order: int) -> Variant:
    """A tenth of the states at a time, until there are so many."""
    rule = ("compression.tau=null", "compression.rho=0.9", f"compression.at_least={order}", "compression.gate=1.0")
    return Variant(f"gently to {order}", 256, (*rule, *OURS), tries=100)


def _selected(label: str, select: str) -> Variant:
    """256 → 152 → 91 → 54 → 32 within the first tenth, as in the paper's ablation of what is kept."""
    rule = ("compression.tau=null", "compression.rho=0.594604", "compression.gate=1.0", f"compression.select={select}")
    return Variant(label, 256, rule, at=(0.025, 0.05, 0.075, 0.1))


def _smnist(variants: dict[str, Variant], *settings: str) -> Task:
    return Task("smnist", variants, 200_000, 40, ("training.precision=tf32", *settings))


_FROM_THE_START = {
    "whole": Variant("256 states", 256),
    "small-28": Variant("28 states", 28),
    "small-13": Variant("13 states", 13),
}
_GENTLY = {"to-28": _gently(28), "to-13": _gently(13)}
# Runs lie in folders whose names begin with these.
TASKS = {
    "smnist": _smnist(
        {
            **_FROM_THE_START,
            "tau-02": _tolerance("τ = 0.02", 0.02, *OURS),
            "tau-04": _tolerance("τ = 0.04", 0.04, *OURS),
            "paper-02": _tolerance("τ = 0.02, paper's way", 0.02, *PAPER, until=0.99),
            "paper-04": _tolerance("τ = 0.04, paper's way", 0.04, *PAPER, until=0.99),
            **_GENTLY,
            "penalty-28": Variant(
                "Σσ penalty, then cut to 28", 256, ("truncation={orders: [28]}",), recipe="smnist-hnn", once=True
            ),
            "taught-28": Variant("28 states, taught", 28, recipe="smnist-distillation", teacher="whole", once=True),
        }
    ),
    "smnist-falling": _smnist(
        {**_FROM_THE_START, **_GENTLY},
        *("training.schedule=cosine", "training.warmup=0.02", "training.learning_rate=4.0e-3"),
    ),
    "smnist-selection": _smnist(
        {
            "largest": _selected("largest σ kept", "largest"),
            "random": _selected("random states kept", "random"),
            "smallest": _selected("smallest σ kept", "smallest"),
            "small-32": Variant("32 states", 32),
        }
    ),
    "scifar": Task(
        "scifar",
        {
            "whole": Variant("384 states", 384),
            "small-57": Variant("57 states", 57),
            "to-57": Variant("four cuts to 57", 384, ("compression.tau=null", "compression.rho=0.6207", *OURS)),
        },
        steps=10_000,
        evaluations=4,
    ),
}


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
        return (f"compression.when={{steps: {[max(1, round(share * steps)) for share in variant.at]}}}",)
    if variant.tries is None:
        return ()
    every = max(1, steps // variant.tries)
    return (f"compression.when={{every: {every}, last: {max(every, round(variant.until * steps))}}}",)


def _stages(task: str, wanted: Sequence[Job]) -> tuple[list[Job], list[Job]]:
    """Those that learn alone, and those that have a teacher among them, which come after."""
    taught = {variant.label for variant in TASKS[task].variants.values() if variant.teacher}
    return [job for job in wanted if job.variant not in taught], [job for job in wanted if job.variant in taught]


def collect(task: str, wanted: Sequence[Job], *, together: int) -> Measurement:
    """One row a training that is done, so many of them `together`; of one that is cut afterwards what is left then."""
    return collected(f"results-{task}", f"{task}: small models by several ways", wanted, partial(_found, together))


def _found(together: int, directory: RunDirectory) -> Row:
    found = outcome(directory) | {"together": together}
    cuts = [record for record in directory.records(TruncationRecord) if record.split == "test"]
    if cuts and cuts[-1].accuracy is not None:
        accuracy = 100 * cuts[-1].accuracy
        found |= {"order": cuts[-1].mean_order, "best": accuracy, "last": accuracy}
    return found


def main(arguments: Sequence[str] | None = None) -> Path:
    """Train what is not done yet, and write OUT/results-TASK.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("task", choices=list(TASKS), help="what to train on")
    parser.add_argument("--out", type=Path, default=Path("out/studies"), help="folder of result and runs (%(default)s)")
    parser.add_argument("--seeds", type=count, default=5, help="trainings of each (%(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them (%(default)s)")
    parser.add_argument("--only", action="append", help="one variant; again for more")
    parser.add_argument(
        "--processes", type=count, default=1, help="trainings at a time; times compare only one by one (%(default)s)"
    )
    parser.add_argument("--data", type=Path, help="folder of data sets")
    parser.add_argument("--steps", type=count, help="of each training (smnist 200000, scifar 10000)")
    parser.add_argument(
        "--add", type=result, nargs="+", default=[], help="results of other trainings, as of an earlier day"
    )
    given = parser.parse_args(arguments)
    known = TASKS[given.task].variants
    if strange := [name for name in given.only or () if name not in known]:
        parser.error(f"--only {strange[0]}: expected one of {', '.join(known)}")
    if other := [one.name for one in given.add if one.name != f"results-{given.task}"]:
        parser.error(f"--add of a result named {other[0]}: expected results-{given.task}")
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    wanted = jobs(given.task, given.out, given.only or known, seeds, given.steps)
    for stage in _stages(given.task, wanted):
        train(stage, processes=given.processes, data=given.data)
    new = collect(given.task, wanted, together=given.processes)
    found = joined(new, given.add)
    return kept(found, given.out / f"results-{given.task}.json", wanted)


if __name__ == "__main__":
    main()
