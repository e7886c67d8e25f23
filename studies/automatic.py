"""Automatic cuts against every other way: accuracy by final order and by time, with one setting for all tasks.

Arms: `Automatic` with `LossTolerance` at 0.5, 1, 3 and 10 %; a τ tried through training; gentle cuts, four cuts in the
warm-up and four at 25 to 55 % of training, each to the small orders; small from the start; uncut. digits trains on a
CPU; smnist (five seeds), fashion, forda, scifar, listops (one seed) are for a GPU, fashion and forda also with S5, S4D.
LRUs on small tasks are also cut automatically with other options, and under a penalty on what bounds Σσ; S5 and S4D
before their first step, and late with moments that begin anew. With --advice the uncut models are inspected with their
loss: what the tool recommends, beside what came out.

python studies/automatic.py digits --seeds 1
python studies/automatic.py smnist --seeds 5 --processes 9 --data FOLDER
python studies/automatic.py fashion fashion-s5 fashion-s4d forda forda-s5 forda-s4d --seeds 3 --data FOLDER --advice
python studies/automatic.py scifar listops --seeds 1 --data FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from compressm.compression import inspect
from compressm_lab.cli.opening import open_run
from compressm_lab.experiments.recipes import AUTOMATIC, Training
from compressm_lab.experiments.rows import count, options, outcome, train_and_write
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Environment, Measurement, Row
from compressm_lab.training.config import POLICIES
from results import FALLING, OURS, Lineup, Variant

TOLERANCES, PENALTIES = (0.005, 0.01, 0.03, 0.1), (1e-4, 1e-3, 1e-2)
# Of `Automatic`, by default 0.25 and 0.5: how much of training is left to recover, and of a layer in a try.
OPTIONS = (("recover", 0.0), ("recover", 0.1), ("recover", 0.5), ("share", 0.25), ("share", 0.8))
_NO_POLICY = tuple(f"compression.{name}=null" for name in POLICIES)
_NAMES = {
    "digits": "Digits",
    "smnist": "sMNIST",
    "fashion": "Fashion-MNIST",
    "forda": "FordA",
    "scifar": "sCIFAR",
    "listops": "ListOps",
}
_WARM_UP, _LATE = (0.025, 0.05, 0.075, 0.1), (0.25, 0.35, 0.45, 0.55)


def _once(*settings: str) -> tuple[str, ...]:
    """The settings with every key once, as the last of them sets it."""
    values = dict(setting.split("=", 1) for setting in settings)
    return tuple(f"{key}={value}" for key, value in values.items())


def _automatic(order: int, tolerance: float) -> Variant:
    rule = (part for part in AUTOMATIC if not part.startswith("label"))
    share = f"compression.loss_tolerance={tolerance}"
    return Variant(f"automatic, {100 * tolerance:g} %", order, _once(*rule, share))


def _penalised(order: int, weight: float) -> Variant:
    """Automatic cuts at 1 % under a penalty on (tr P + tr Q) / 2, an upper bound of Σσ that costs little."""
    plain, penalty = _automatic(order, 0.01), f"regulariser={{kind: hankel-majoriser, beta: {weight}}}"
    return replace(plain, label=f"{plain.label}, penalty {weight:g}", training=(penalty,))


def _changed(order: int, option: str, value: float) -> Variant:
    """Automatic cuts at 1 % with one option of `Automatic` changed."""
    plain = _automatic(order, 0.01)
    differs = _once(*plain.differs, f"compression.when={{automatic: {{{option}: {value}}}}}")
    return replace(plain, label=f"{plain.label}, {option} = {value:g}", differs=differs)


def _four(order: int, small: int, name: str, at: tuple[float, ...]) -> Variant:
    """Four equal cuts that end at exactly `small` states."""
    rho = (small / order) ** (1 / len(at))
    way = (f"compression.rho={rho:.6f}", f"compression.at_least={small}", "compression.gate=1.0", *OURS)
    return Variant(f"{name} to {small}", order, _once(*_NO_POLICY, *way), at=at)


def _variants(order: int, small: Sequence[int]) -> dict[str, Variant]:
    """All arms of a task whose models have `order` states, and those that end at each of the small orders."""
    found = {"whole": Variant(f"{order} states", order)}
    found |= {f"automatic-{100 * tolerance:g}": _automatic(order, tolerance) for tolerance in TOLERANCES}
    for tau in (0.02, 0.05):
        rule = _once(*_NO_POLICY, f"compression.tau={tau}", *OURS)
        found[f"tau-{100 * tau:g}"] = Variant(f"τ = {tau}", order, rule, tries=40)
    for few in small:
        way = ("compression.rho=0.9", f"compression.at_least={few}", "compression.gate=1.0", *OURS)
        gently = _once(*_NO_POLICY, *way)
        found |= {
            f"gently-{few}": Variant(f"gently to {few}", order, gently, tries=100),
            f"warm-up-{few}": _four(order, few, "in the warm-up", _WARM_UP),
            f"late-{few}": _four(order, few, "late", _LATE),
            f"small-{few}": Variant(f"{few} states", few),
        }
    return found


def _choices(order: int) -> dict[str, Variant]:
    """Automatic cuts with other options, and under a penalty."""
    found = {f"{option}-{value:g}": _changed(order, option, value) for option, value in OPTIONS}
    return found | {f"penalised-{weight:g}": _penalised(order, weight) for weight in PENALTIES}


def _questions(order: int, few: int) -> dict[str, Variant]:
    """Cuts that ask why a model falls behind: its new basis alone, or the moments that follow it."""
    late = _four(order, few, "late, moments anew,", _LATE)
    return {
        f"at-once-{few}": _four(order, few, "before training", (0.0,)),
        f"anew-{few}": replace(late, differs=(*late.differs, "compression.moments=restart")),
    }


def _lineup(name: str, recipe: str, order: int, small: Sequence[int], steps: int, *settings: str) -> Lineup:
    task, _, layer = name.partition("-")
    title = f"{_NAMES[task]}, {layer.upper() or 'LRU'}: automatic cuts and other ways"
    return Lineup(f"automatic-{name}", title, recipe, _variants(order, small), steps, 40, settings)


_FASHION = (
    "task={name: fashion}",
    "model={depth: 2, width: 32, order: 64, dropout: 0.1}",
    *("training.learning_rate=4.0e-3", "training.schedule=cosine"),
)
_LAYERS = {"": (), "-s5": ("model.layer=S5",), "-s4d": ("model.layer=S4D",)}


def _with(lineup: Lineup, more: dict[str, Variant]) -> Lineup:
    return replace(lineup, variants=lineup.variants | more)


def _on_every_layer(name: str, recipe: str, *settings: str) -> Iterator[Lineup]:
    """Small models of two layers, of LRUs, S5 and S4D; the last two with questions."""
    for end, layer in _LAYERS.items():
        lineup = _lineup(f"{name}{end}", recipe, 64, (8,), 12_000, *settings, *layer)
        yield _with(lineup, _questions(64, 8) if end else _choices(64))


LINEUPS = {
    lineup.name.removeprefix("automatic-"): lineup
    for lineup in (
        replace(_with(_lineup("digits", "digits", 128, (4, 13), 1500), _choices(128)), evaluations=10),
        _lineup("smnist", "smnist", 256, (28, 13), 200_000, "training.precision=tf32", *FALLING),
        *_on_every_layer("fashion", "smnist", *_FASHION),
        *_on_every_layer("forda", "forda"),
        _lineup("scifar", "scifar", 384, (57,), 40_000),
        _lineup("listops", "listops", 256, (57,), 20_000),
    )
}


def advice(trainings: Sequence[Training], lineup: Lineup, out: Path, data: Path | None) -> Path | None:
    """Inspect the uncut models of finished trainings with their loss, and write OUT/NAME-advice.json.

    Beside it stands what trainings of the same seed gave: uncut, the best of the models that are small from the start,
    and the best of those that were cut to the same orders.
    """
    found: dict[int, dict[str, Training]] = {}
    for training in trainings:
        if training.finished:
            way = training.arm.folder.removeprefix(f"{lineup.name}-").rpartition("-")[0]
            found.setdefault(training.seed, {})[way] = training
    rows: list[Row] = []
    for ways in found.values():
        accuracies = {way: float(outcome(RunDirectory(training.folder))["best"]) for way, training in ways.items()}
        small = [accuracies[way] for way in accuracies if way.startswith("small-")]
        cut = [accuracies[way] for way in accuracies if way.startswith(("gently-", "warm-up-", "late-"))]
        if "whole" not in ways or not small or not cut:
            continue
        saved = open_run(ways["whole"].folder, with_data=True, data=data, offline=True)
        sizes = inspect(saved.model, saved.calibrate, loss=saved.loss, selective=saved.selective()).sizes
        assert sizes is not None
        mean = sum(sizes.recommended.orders.values()) / len(sizes.recommended.orders)
        said = {"order": mean, "small_from_the_start": float(sizes.is_small_enough_from_the_start)}
        came = {"whole": accuracies["whole"], "small": max(small), "cut": max(cut)}
        rows.append(ways["whole"].names | said | came | {"advice": sizes.advice})
    if not rows:
        return None
    path = out / f"{lineup.name}-advice.json"
    title = f"{lineup.title.partition(':')[0]}: what inspect recommends for uncut models, and what came out"
    Measurement(path.stem, title, 1, rows, Environment.here()).write(path)
    return path


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Train what is not done yet and write OUT/automatic-TASK.json of each task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("tasks", nargs="+", choices=list(LINEUPS), metavar="TASK", help=f"of {', '.join(LINEUPS)}")
    options(parser, seeds=3, steps=", ".join(f"{name} {lineup.steps}" for name, lineup in LINEUPS.items()))
    parser.add_argument("--first-seed", type=partial(count, least=0), default=0, help="the first of them (%(default)s)")
    parser.add_argument("--only", action="append", help="one arm of every task; again for more")
    parser.add_argument("--advice", action="store_true", help="inspect the uncut models too")
    given = parser.parse_args(arguments)
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    plans, files, lineups = [], [], [LINEUPS[name] for name in dict.fromkeys(given.tasks)]
    for lineup in lineups:
        names = given.only or list(lineup.variants)
        if unknown := [name for name in names if name not in lineup.variants]:
            parser.error(
                f"--only {unknown[0]}: expected one of {', '.join(lineup.variants)}, the arms of {lineup.name}"
            )
        plans.append(lineup.plan(given.out, names, seeds, given.steps, lineup.name if len(given.tasks) > 1 else ""))
        files.append(replace(lineup.file(given.out, plans[-1], given.steps), path=given.out / f"{lineup.name}.json"))
    written = train_and_write(parser, given, replace(plans[0], arms=sum((plan.arms for plan in plans), ())), files)
    if given.advice:
        pairs = zip(files, lineups, strict=True)
        found = [advice(file.trainings, lineup, given.out, given.data) for file, lineup in pairs]
        written += [path for path in found if path is not None]
    return written


if __name__ == "__main__":
    main()
