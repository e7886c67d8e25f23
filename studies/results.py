"""Our own results on the paper's tasks: whole models, small ones from the start, and models cut in several ways.

smnist, with the paper's 200 000 steps: cuts with τ tried through all of training, in the paper's way and in ours, and
gentle cuts that end at exactly 28 and 13 states; beside them, with one seed, penalties on Hankel singular values and a
teacher, which is the whole model. smnist-falling: the same with a learning rate that begins higher and falls;
smnist-time: and with the paper's inputs, which have a channel t / 784.
smnist-choices: what else can be chosen, one choice at a time and with one seed. smnist-selection: four cuts to 32
states that keep the largest Hankel values, the smallest, or random ones. scifar, with as many steps as there is time
for: four cuts in the warm-up.

python studies/results.py smnist smnist-falling --seeds 5 --processes 9 --data FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from compressm_lab.experiments.engine import Campaign
from compressm_lab.experiments.recipes import BASELINE, TEACHER, Arm
from compressm_lab.experiments.rows import ResultFile, concurrency, count, options, outcome, train_and_write
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Row
from compressm_lab.runs.records import RunError, TruncationRecord

# What the paper's code does: no folding, Gramians of white noise, moments cut like slices.
PAPER = ("compression.fold=false", "compression.moments=slice")
OURS = ("compression.gramian=measured",)


@dataclass(frozen=True)
class Variant:
    """A model to train: its label, its order at the start, and settings of its cuts, none if it is never cut.

    training: other settings. tries: the number of cuts tried in all of training, if the recipe does not say; since,
    until: the shares of the steps between which they are; at: the shares of the steps of all cuts, instead of these.
    recipe: one other than that of the task; teacher: the variant whose run of the same seed teaches this one; once:
    trained with the first seed only.
    """

    label: str
    order: int
    differs: tuple[str, ...] = ()
    training: tuple[str, ...] = ()
    tries: int | None = None
    since: float = 0.0
    until: float = 0.75
    at: tuple[float, ...] = ()
    recipe: str | None = None
    teacher: str | None = None
    once: bool = False

    def when(self, steps: int) -> tuple[str, ...]:
        """Settings of the steps of its cuts, in a training of `steps` steps."""
        if self.at:
            found: list[int] = []
            for share in self.at:  # none twice, however few steps there are
                found.append(max(round(share * steps), found[-1] + 1 if found else 1))
            return (f"compression.when={{steps: {found}}}",)
        if self.tries is None:
            return ()
        every = max(1, steps // self.tries)
        first, last = max(every, round(self.since * steps)), max(every, round(self.until * steps))
        begin = f"first: {first}, " if self.since else ""
        return (f"compression.when={{every: {every}, {begin}last: {max(first, last)}}}",)


@dataclass(frozen=True)
class Lineup:
    """Variants of a recipe by name that share a table, and the length of their training."""

    name: str
    title: str
    recipe: str
    variants: dict[str, Variant]
    steps: int
    evaluations: int
    settings: tuple[str, ...] = ()

    def arm(self, name: str, steps: int, task: str = "") -> Arm:
        """Make the arm of a variant; with fewer steps its cuts are earlier too. Errors name its `task`."""
        variant = self.variants[name]
        teacher = None if variant.teacher is None else self.arm(variant.teacher, steps, task)
        settings = (
            f"label={variant.label!r}",
            "spectra=null",
            f"training.steps={steps}",
            f"training.evaluate_every={max(1, steps // self.evaluations)}",
            f"training.checkpoint_every={max(1, steps // 4)}",
            *self.settings,
            *variant.training,
            *variant.differs,
            *variant.when(steps),
            *((f"distillation.teacher={TEACHER}",) if teacher else ()),
            *(() if variant.differs or variant.recipe else BASELINE),
            f"model.order={variant.order}",
        )
        # Runs lie in folders whose names begin with that of the lineup.
        place = (variant.recipe or self.recipe, f"{self.name}-{name}-{steps}")
        return Arm(task, variant.label, "", *place, settings, teacher=teacher, seeds=1 if variant.once else None)

    def plan(self, out: Path, names: Sequence[str], seeds: range, steps: int | None = None, task: str = "") -> Campaign:
        """Plan the trainings of these variants, seed by seed."""
        arms = tuple(self.arm(name, steps or self.steps, task) for name in dict.fromkeys(names))
        return Campaign(arms, seeds, out / "runs", by_seed=True)

    def file(self, out: Path, plan: Campaign, steps: int | None = None) -> ResultFile:
        """The result file of a plan."""
        path, steps = out / f"results-{self.name}.json", steps or self.steps
        return ResultFile(path, self.title, plan.trainings(), _found, steps)


def _tolerance(label: str, tau: float, *differs: str, until: float = 0.75) -> Variant:
    return Variant(label, 256, (f"compression.tau={tau}", *differs), tries=40, until=until)


def _gently(order: int, *way: str) -> Variant:
    """Cut a tenth of the states at a time, until `order` are left."""
    rule = ("compression.tau=null", "compression.rho=0.9", f"compression.at_least={order}", "compression.gate=1.0")
    return Variant(f"gently to {order}", 256, (*rule, *way), tries=100)


def _penalised(weight: float | None = None) -> Variant:
    """Train with a penalty of the recipe's weight, which is the paper's, or another; then cut to 28 states."""
    given = () if weight is None else (f"regulariser.beta={weight}",)
    label = "Σσ penalty" if weight is None else f"Σσ penalty of {weight:g}"
    cut = ("truncation={orders: [28]}",)
    return Variant(f"{label}, then cut to 28", 256, cut, given, recipe="smnist-hnn", once=True)


def _selected(label: str, select: str) -> Variant:
    """Cut 256 → 153 → 91 → 54 → 32 within the first tenth, as in the paper's ablation of what is kept."""
    rule = ("compression.tau=null", "compression.rho=0.6", "compression.gate=1.0", f"compression.select={select}")
    return Variant(label, 256, rule, at=(0.025, 0.05, 0.075, 0.1))


def _smnist(name: str, title: str, variants: dict[str, Variant], *settings: str) -> Lineup:
    return Lineup(name, title, "smnist", variants, 200_000, 40, ("training.precision=tf32", *settings))


def _falling(rate: float) -> tuple[str, ...]:
    """Settings of a rate that rises to `rate` in a fiftieth of the steps and falls along a cosine."""
    return ("training.schedule=cosine", "training.warmup=0.02", f"training.learning_rate={rate}")


def _chosen(variant: Variant, label: str, *training: str, since: float | None = None) -> Variant:
    """Copy a variant with one other choice, which its label names; it is trained once."""
    begun = variant.since if since is None else since
    return replace(variant, label=f"{variant.label}, {label}", training=training, since=begun, once=True)


_WHOLE, _SMALL = Variant("256 states", 256), Variant("28 states", 28)
_FROM_THE_START = {"whole": _WHOLE, "small-28": _SMALL, "small-13": Variant("13 states", 13)}
_GENTLY = {"to-28": _gently(28, *OURS), "to-13": _gently(13, *OURS)}
_TOLERANCES = {
    "tau-02": _tolerance("τ = 0.02", 0.02, *OURS),
    "tau-04": _tolerance("τ = 0.04", 0.04, *OURS),
    "paper-02": _tolerance("τ = 0.02, paper's way", 0.02, *PAPER, until=0.99),
    "paper-04": _tolerance("τ = 0.04, paper's way", 0.04, *PAPER, until=0.99),
}
FALLING = _falling(4e-3)
_TIME = "task.time=true"
_CIRCLE = "model.layer_options={max_phase: 6.283185307179586}"
_UNDROPPED = "model.dropout=0.0"
_CHOICES = {
    "circle-02": _chosen(_TOLERANCES["paper-02"], "phases up to 2π", _CIRCLE),
    "circle-04": _chosen(_TOLERANCES["paper-04"], "phases up to 2π", _CIRCLE),
    "late-falling-28": _chosen(_GENTLY["to-28"], "falling, cuts from a quarter on", *FALLING, since=0.25),
    "late-falling-13": _chosen(_GENTLY["to-13"], "falling, cuts from a quarter on", *FALLING, since=0.25),
    "undropped-28": _chosen(_GENTLY["to-28"], "falling, no dropout", *FALLING, _UNDROPPED),
    "undropped-13": _chosen(_GENTLY["to-13"], "falling, no dropout", *FALLING, _UNDROPPED),
    "white-28": _chosen(_gently(28), "falling, Gramians of white noise", *FALLING),
    "white-13": _chosen(_gently(13), "falling, Gramians of white noise", *FALLING),
    "paper-to-28": _chosen(_gently(28, *PAPER), "falling, cut in the paper's way", *FALLING),
    "paper-to-13": _chosen(_gently(13, *PAPER), "falling, cut in the paper's way", *FALLING),
    "circle": _chosen(_WHOLE, "phases up to 2π", _CIRCLE),
    "constant": _chosen(_WHOLE, "constant 4e-3", "training.learning_rate=4.0e-3"),
    "constant-28": _chosen(_SMALL, "constant 4e-3", "training.learning_rate=4.0e-3"),
    "slower": _chosen(_WHOLE, "falling from 2e-3", *_falling(2e-3)),
    "slower-28": _chosen(_SMALL, "falling from 2e-3", *_falling(2e-3)),
    "faster": _chosen(_WHOLE, "falling from 8e-3", *_falling(8e-3)),
    "faster-28": _chosen(_SMALL, "falling from 8e-3", *_falling(8e-3)),
    "late-28": _chosen(_GENTLY["to-28"], "cuts from the middle on", since=0.5),
    "undropped": _chosen(_WHOLE, "falling, no dropout", *FALLING, _UNDROPPED),
    "penalty-0.01": _penalised(1e-2),
    "penalty-0.001": _penalised(1e-3),
}
_BASELINES = {
    "penalty-28": _penalised(),
    "penalty-0.0001": _penalised(1e-4),
    "taught-28": Variant("28 states, taught", 28, recipe="smnist-distillation", teacher="whole", once=True),
}
_SELECTION = {
    "largest": _selected("largest σ kept", "largest"),
    "random": _selected("random states kept", "random"),
    "smallest": _selected("smallest σ kept", "smallest"),
    "small-32": Variant("32 states", 32),
}
_SCIFAR = {
    "whole": Variant("384 states", 384),
    "small-57": Variant("57 states", 57),
    "to-57": Variant("four cuts to 57", 384, ("compression.tau=null", "compression.rho=0.6219", *OURS)),
}
_WAYS = {**_FROM_THE_START, **_TOLERANCES, **_GENTLY}
LINEUPS = {
    lineup.name: lineup
    for lineup in (
        _smnist("smnist", "sMNIST with the paper's rate", {**_WAYS, **_BASELINES}),
        _smnist("smnist-falling", "sMNIST with a rate that falls", _WAYS, *FALLING),
        _smnist("smnist-time", "sMNIST with time as an input", {**_FROM_THE_START, **_GENTLY}, *FALLING, _TIME),
        _smnist("smnist-choices", "sMNIST, one choice at a time", _CHOICES),
        _smnist("smnist-selection", "sMNIST, four cuts to 32 states", _SELECTION),
        Lineup("scifar", "sCIFAR, four cuts in the warm-up", "scifar", _SCIFAR, steps=10_000, evaluations=4),
    )
}


def _found(directory: RunDirectory) -> Row:
    """Summarise a run; one that is cut after training, as it is after the cut."""
    found = outcome(directory) | concurrency(directory)
    cuts = {record.split: record for record in directory.records(TruncationRecord)}  # the last of each split
    if "test" in cuts and cuts["test"].accuracy is not None:
        accuracy = 100 * cuts["test"].accuracy
        found |= {"order": cuts["test"].mean_order, "best": accuracy, "last": accuracy}
        if "validation" in cuts and cuts["validation"].accuracy is not None:
            found["validation"] = 100 * cuts["validation"].accuracy
    elif directory.config().get("truncation") is not None:
        raise RunError(f"{directory.path} is finished, but has no test of the model that was cut after training")
    return found


def _require_variants(parser: argparse.ArgumentParser, given: argparse.Namespace, lineup: Lineup) -> None:
    """Refuse unknown variants, and a student whose teacher is neither trained nor asked for."""
    for name in given.only or ():
        if name not in lineup.variants:
            parser.error(f"--only {name}: expected one of {', '.join(lineup.variants)}, the variants of {lineup.name}")
        teacher = lineup.variants[name].teacher
        if teacher is None or teacher in given.only or given.only_collect:
            continue
        first = range(given.first_seed, given.first_seed + 1)
        (student,) = lineup.plan(given.out, [name], first, given.steps).trainings()
        if student.state == "waits":
            parser.error(f"--only {name}: its teacher, {teacher}, is not trained; add --only {teacher}")


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Train what is not done yet, all tasks in one pool of processes, and write OUT/results-TASK.json of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("tasks", nargs="+", choices=list(LINEUPS), metavar="TASK", help=f"of {', '.join(LINEUPS)}")
    options(parser, seeds=5, steps=", ".join(f"{name} {lineup.steps}" for name, lineup in LINEUPS.items()))
    parser.add_argument("--first-seed", type=partial(count, least=0), default=0, help="the first of them (%(default)s)")
    parser.add_argument("--only", action="append", help="one variant of every task; again for more")
    given = parser.parse_args(arguments)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    lineups = [LINEUPS[name] for name in dict.fromkeys(given.tasks)]
    plans, files = [], []
    for lineup in lineups:
        _require_variants(parser, given, lineup)
        task = lineup.name if len(lineups) > 1 else ""
        plans.append(lineup.plan(given.out, given.only or list(lineup.variants), seeds, given.steps, task))
        files.append(lineup.file(given.out, plans[-1], given.steps))
    return train_and_write(parser, given, replace(plans[0], arms=sum((plan.arms for plan in plans), ())), files)


if __name__ == "__main__":
    main()
