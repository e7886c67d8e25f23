"""Groups of runs that differ in their seed alone, and statistics over them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeVar, get_args

from compressm_lab.runs.directory import RunDirectory, find_runs
from compressm_lab.runs.records import RunError, TimeKind, TruncationRecord
from compressm_lab.runs.run import BestScore, Metric, Run, read_run

# None of these but the seed changes what is trained.
_INCIDENTAL = ("seed", "spectra", "description", "training.checkpoint_every", "training.keep_checkpoints")
_TEACHER = "distillation.teacher"

# Settings in a label.
_READABLE = 3


_Item = TypeVar("_Item")
_Key = TypeVar("_Key")


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Items with the same key together, in their order."""
    found: dict[_Key, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


@dataclass(frozen=True)
class Statistic:
    """Mean and standard deviation (of a sample, n − 1) over seeds; `spread` is None for one seed."""

    centre: float
    spread: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Statistic | None:
        """Mean and spread of the values that are not None; None without any."""
        found = [float(value) for value in values if value is not None]
        if not found:
            return None
        return cls(mean(found), stdev(found) if len(found) > 1 else None, len(found))


@dataclass(frozen=True)
class Group:
    """Seeds of one recipe; statistics are over those that finished, or their copies cut once to `truncated` states."""

    label: str
    runs: tuple[Run, ...]
    truncated: int | None = None

    @property
    def name(self) -> str:
        return self.runs[0].name

    @property
    def compressed(self) -> bool:
        return self.runs[0].compressed

    @property
    def plain(self) -> bool:
        return self.runs[0].plain

    @property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.finished)

    @property
    def metric(self) -> Metric:
        found = {run.metric for run in self.runs}
        return next(name for name in get_args(Metric) if name in found)

    @property
    def layers(self) -> int:
        return max(len(run.modules) for run in self.runs) or int(self.runs[0].config["model"].get("depth", 1))

    @property
    def initial_order(self) -> float:
        return self.runs[0].mean_initial_order

    @property
    def order(self) -> Statistic | None:
        return Statistic.of(self.order_of(run) for run in self.finished)

    def order_of(self, run: Run) -> float | None:
        """The final order of one of its runs, or that of its copy; None without a copy."""
        if self.truncated is None:
            return run.mean_order
        copies = self._copies(run)
        return copies[0].mean_order if copies else None

    def _copies(self, run: Run) -> list[TruncationRecord]:
        return [record for record in run.truncations if record.order == self.truncated]

    def score(self, run: Run) -> BestScore | None:
        """The score of one of its runs."""
        if self.truncated is None:
            return run.score
        found = self._copies(run)
        values = {record.split: getattr(record, run.metric) for record in found}
        step = max((record.step for record in found), default=0)
        return BestScore(run.metric, step, values.get("validation"), values.get("test")) if found else None

    @property
    def ranked(self) -> list[Run]:
        """Finished runs with a test value, the best validation first."""
        found = ((self.score(run), run) for run in self.finished)
        scored = [(score.rank, run) for score, run in found if score and score.test is not None]
        return [run for _, run in sorted(scored, key=lambda pair: -pair[0])]

    def top(self, count: int | None = None) -> Statistic | None:
        """Test values of the `count` runs that are best by validation, by default of all; None with fewer than that."""
        found = self.tests[:count]
        return None if count is not None and len(found) < count else Statistic.of(found)

    def best(self, count: int) -> Statistic | None:
        """Test values of the `count` runs that are best by test, as the paper counts; None with fewer than that."""
        found = sorted(self.tests, reverse=self.metric == "accuracy")
        return Statistic.of(found[:count]) if len(found) >= count else None

    @property
    def tests(self) -> list[float]:
        """The test value of every finished run, the best validation first."""
        return [score.test for run in self.ranked if (score := self.score(run)) and score.test is not None]

    @property
    def shown(self) -> Run:
        """The run that stands for its group in pictures of one run: the best, or the one that came furthest."""
        return self.ranked[0] if self.ranked else max(self.runs, key=lambda run: (run.finished, run.status.step))

    @property
    def seconds(self) -> Statistic | None:
        return self.time("wall time")

    def time(self, kind: TimeKind) -> Statistic | None:
        """Seconds of the finished runs by a kind of clock; None unless all have them."""
        found = [run.time(kind) for run in self.finished]
        return None if None in found and kind != "wall time" else Statistic.of(found)

    @property
    def load(self) -> Statistic | None:
        """The load average of the machine while they trained."""
        return Statistic.of(run.load for run in self.finished)

    @property
    def summed_bound(self) -> Statistic | None:
        """Error bounds summed over layers and lasting cuts; None where a cut has none, or there was no cut."""
        found = [[cut.error_bound for cut in run.lasting_cuts] for run in self.finished]
        return Statistic.of(sum(bound or 0.0 for bound in bounds) for bounds in found if bounds and None not in bounds)

    @property
    def bounds_by_cut(self) -> list[float]:
        """Error bounds summed over layers at each step of a cut, of the run that is shown."""
        by_step: dict[int, float] = {}
        for cut in self.shown.lasting_cuts:
            by_step[cut.step] = by_step.get(cut.step, 0.0) + (math.nan if cut.error_bound is None else cut.error_bound)
        return list(by_step.values())


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group runs of one recipe, labelled by what tells the groups of a name apart; the uncompressed first."""
    every = list(runs)
    pairs = zip(every, _recipes(every), strict=True)
    found = list(grouped(pairs, lambda pair: json.dumps(pair[1], sort_keys=True)).values())
    members = [tuple(sorted((run for run, _ in group), key=lambda run: run.seed)) for group in found]
    labels = _labels([group[0] for group in members], [group[0][1] for group in found])
    groups = [Group(label, group) for label, group in zip(labels, members, strict=True)]
    return sorted(groups, key=lambda group: (group.name, group.compressed, -group.runs[0].mean_order, group.label))


def reference(group: Group, groups: Sequence[Group]) -> Group | None:
    """The uncompressed group whose time counts as 1: of the same name, size and steps, at the order of the start.

    A smaller model that was never cut is held against the same one as the compressed groups of its name, as in the
    paper, or where there are none against the largest.
    """
    alike = [other for other in groups if _comparable(group, other) and other.plain and other.seconds]
    starts = {other.initial_order for other in groups if other.compressed and _comparable(group, other)}
    wanted = {group.initial_order} if group.compressed else starts or {max((g.initial_order for g in alike), default=0)}
    return next((other for other in alike if other.initial_order == max(wanted)), None)


def time_kind(group: Group, groups: Sequence[Group]) -> TimeKind:
    """The time that speed-ups of the groups of a name compare: that of GPU or CPU where all finished runs have it."""
    runs = [run for other in groups if other.name == group.name for run in other.finished]
    on_gpu = [run.time("GPU time") is not None for run in runs]
    if runs and all(on_gpu):
        return "GPU time"
    # The processors of a run on a GPU mostly wait for it.
    return "CPU time" if runs and not any(on_gpu) and all(run.time("CPU time") for run in runs) else "wall time"


def speed_ups(group: Group, groups: Sequence[Group]) -> list[float]:
    """Mean time of the reference over that of each finished run, by `time_kind`; empty without a reference."""
    base, kind = reference(group, groups), time_kind(group, groups)
    whole = None if base is None else base.time(kind)
    return [] if whole is None else [whole.centre / own for run in group.finished if (own := run.time(kind))]


def speed_up(group: Group, groups: Sequence[Group]) -> Statistic | None:
    """Mean time of the reference over that of the group: a mean of ratios would put the reference above 1."""
    base, spread = reference(group, groups), Statistic.of(speed_ups(group, groups))
    own, kind = group.time(time_kind(group, groups)), time_kind(group, groups)
    whole = None if base is None else base.time(kind)
    if whole is None or own is None or spread is None:
        return None
    return Statistic(whole.centre / own.centre, spread.spread, spread.count)


def by_name(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """The groups of every name."""
    return grouped(groups, lambda group: group.name)


def machines(runs: Iterable[Run]) -> list[str]:
    """Every machine of the runs once: accelerator, or processor and threads."""
    found = (run.environment for run in runs)
    return list(dict.fromkeys(e.accelerator or f"{e.processor}, {e.threads} thread(s)" for e in found))


def _comparable(group: Group, other: Group) -> bool:
    return other.name == group.name and _size(other.runs[0]) == _size(group.runs[0])


def _size(run: Run) -> tuple[Any, ...]:
    model, training = run.config["model"], run.config["training"]
    keys = (model.get("factory"), model.get("layer"), model.get("depth"), model.get("width"))
    return (*keys, training.get("steps"), training.get("batch"))


def _recipes(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Recipes without their seeds, and without those of their teachers where each seed has one of its own."""
    found = [{key: value for key, value in flat(run.config).items() if not _incidental(key)} for run in runs]
    keys = [json.dumps(recipe, sort_keys=True) for recipe in found]
    alike = grouped(zip(runs, keys, strict=True), lambda pair: pair[1])
    for run, recipe, key in zip(runs, found, keys, strict=True):
        if len({other.seed for other, _ in alike[key]}) == 1 and isinstance(recipe.get(_TEACHER), str):
            recipe[_TEACHER] = re.sub(rf"\bseed-{run.seed}\b", "seed-*", recipe[_TEACHER])
    return found


def _incidental(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _INCIDENTAL)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a configuration: {"model": {"order": 8}} becomes {"model.order": 8}."""
    entries: dict[str, Any] = {}
    for key, value in config.items():
        entries |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return entries


def _labels(runs: Sequence[Run], recipes: Sequence[dict[str, Any]]) -> list[str]:
    """Labels of recipes, and where several of a name share one, the settings in which they differ, or a letter.

    Letters where there are more settings than can be read beside a line; the table of recipes says what they stand for.
    """
    pairs = list(zip(runs, recipes, strict=True))
    named = grouped(pairs, lambda pair: (pair[0].name, pair[0].label))
    labels = []
    for run, own in pairs:
        alike = [recipe for _, recipe in named[run.name, run.label]]
        differing = [key for key in own if any(other.get(key) != own[key] for other in alike)]
        names = {key: key.split(".")[-1].replace("_", " ") for key in differing}
        said = [f"no {name}" if own[key] is None else f"{name} {own[key]}" for key, name in names.items()]
        lettered = f"{run.label} {_letter(alike.index(own))}"
        labels.append(lettered if len(differing) > _READABLE else ", ".join([run.label, *said]))
    return labels


def _letter(number: int) -> str:
    """A letter for a number: A … Z, AA, …"""
    rest, last = divmod(number, 26)
    return (_letter(rest - 1) if rest else "") + chr(ord("A") + last)


@dataclass(frozen=True)
class Gathered:
    """The runs that can be reported, and a sentence for each that cannot."""

    runs: tuple[Run, ...]
    broken: tuple[str, ...]


def gather(paths: Iterable[Path | str]) -> Gathered:
    """Read every run at or below the paths, each seed of a recipe once; refused where not one of them can be read."""
    folders: dict[Path, RunDirectory] = {}
    broken: list[str] = []
    for path in paths:
        try:
            for found in find_runs([path]):
                folders.setdefault(found.path.resolve(), found)
        except RunError as error:
            broken.append(str(error))
    runs: list[Run] = []
    for directory in folders.values():
        try:
            run = read_run(directory)
            _ = run.modules  # of a run that has only begun they come from its spectra
            _ = run.penalties, run.truncations, run.decisions  # a few lines, and every page asks for them
            runs.append(run)
        except RunError as error:
            broken.append(str(error))
    for part in (_each_seed_once, _with_spectra):
        runs, left_out = part(runs)
        broken += left_out
    if not runs:
        raise RunError("; ".join(broken) or "no runs given, expected at least one")
    return Gathered(tuple(runs), tuple(broken))


def _each_seed_once(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Drop runs of a recipe and seed that another run has: they would count as seeds; a finished one stays."""
    again: dict[str, str] = {}
    for group in group_runs(runs):
        for seed, alike in grouped(group.runs, lambda run: run.seed).items():
            first, *others = sorted(alike, key=lambda run: not run.finished)
            said = f"is a run of the same recipe and seed ({seed}) as {first.path}: a seed counts once"
            again |= {other.path: f"{other.path} {said}" for other in others}
    return [run for run in runs if run.path not in again], list(again.values())


def _with_spectra(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Drop runs whose spectra would be shown and cannot be read; the others' nobody looks at."""
    broken: dict[str, str] = {}
    while True:
        left = [run for run in runs if run.path not in broken]
        known = len(broken)
        for shown in (group.shown for group in group_runs(left)):
            try:
                _ = shown.spectra
            except RunError as error:
                broken[shown.path] = str(error)
        if len(broken) == known:
            return left, list(broken.values())
