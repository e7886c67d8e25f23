"""One run read back whole: its recipe, its scores, and its orders over training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

from compressm_lab.runs.directory import RunDirectory, Status
from compressm_lab.runs.measurement import Environment
from compressm_lab.runs.records import (
    CutRecord,
    Evaluation,
    PenaltyRecord,
    RestoredRecord,
    RunError,
    Spectrum,
    SplitName,
    Timing,
    TruncationRecord,
)

Metric = Literal["accuracy", "loss"]
RunEvent = CutRecord | RestoredRecord


@dataclass(frozen=True)
class BestScore:
    """The test value at the step where validation was best; None where the task has no such split."""

    metric: Metric
    step: int
    validation: float | None
    test: float | None

    @property
    def rank(self) -> float:
        """A number to sort by, higher is better: of validation, or of test where nothing else was recorded."""
        value = self.test if self.validation is None else self.validation
        return -math.inf if value is None else value if self.metric == "accuracy" else -value


@dataclass(frozen=True)
class Run:
    """The records of a run folder, in the order they were written; spectra are read when they are first asked for."""

    path: str
    config: Mapping[str, Any]
    environment: Environment
    status: Status
    evaluations: tuple[Evaluation, ...] = ()
    events: tuple[RunEvent, ...] = ()
    timings: tuple[Timing, ...] = ()

    @property
    def name(self) -> str:
        return str(self.config["name"])

    @property
    def label(self) -> str:
        return str(self.config["label"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def compressed(self) -> bool:
        """True where cuts were planned, whether or not any was made."""
        return self.config["compression"] is not None

    @property
    def plain(self) -> bool:
        """True where nothing but the task was trained: no cuts, no penalty, no teacher."""
        return all(self.config.get(part) is None for part in ("compression", "regulariser", "distillation"))

    @property
    def finished(self) -> bool:
        return self.status.state == "finished"

    @property
    def steps(self) -> int:
        """Steps of the whole plan."""
        return max(self.status.steps, self.status.step)

    @property
    def seconds(self) -> float | None:
        """Training time up to the last evaluation, interruptions left out."""
        return max((found.seconds for found in self.evaluations), default=None)

    @property
    def metric(self) -> Metric:
        """Accuracy, or the loss where the task is a regression."""
        return "accuracy" if any(found.accuracy is not None for found in self.evaluations) else "loss"

    def curve(self, split: SplitName) -> list[tuple[int, float]]:
        """Pairs (step, value of the metric) of every evaluation of a split, NaN included."""
        found = (record for record in self.evaluations if record.split == split)
        values = ((record.step, record.accuracy if self.metric == "accuracy" else record.loss) for record in found)
        return [(step, float(value)) for step, value in values if value is not None]

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The layers that any record names, block by block."""
        names = {module for timing in self.timings for module in timing.orders}
        names |= {cut.module for cut in self.cut_records}
        return tuple(sorted(names or {spectrum.module for spectrum in self.spectra}, key=_natural))

    @cached_property
    def spectra(self) -> tuple[Spectrum, ...]:
        """Hankel singular values, nearly all bytes of a run: 13 MB for six layers of 384 states at 180 steps."""
        return tuple(RunDirectory(self.path).records(Spectrum))

    @cached_property
    def penalties(self) -> tuple[PenaltyRecord, ...]:
        """The penalty in the loss, evaluation by evaluation."""
        return tuple(RunDirectory(self.path).records(PenaltyRecord))

    @cached_property
    def truncations(self) -> tuple[TruncationRecord, ...]:
        """Scores of copies of the final model that were cut once."""
        return tuple(RunDirectory(self.path).records(TruncationRecord))

    @property
    def cut_records(self) -> tuple[CutRecord, ...]:
        """Every cut, whether or not it was undone later."""
        return tuple(event for event in self.events if isinstance(event, CutRecord))

    @property
    def restorations(self) -> tuple[RestoredRecord, ...]:
        return tuple(event for event in self.events if isinstance(event, RestoredRecord))

    @cached_property
    def lasting_cuts(self) -> tuple[CutRecord, ...]:
        """The cuts that no restoration undid."""
        lasting: tuple[CutRecord, ...] = ()
        for event in self.events:
            if isinstance(event, CutRecord):
                lasting += (event,)
            else:
                lasting = tuple(cut for cut in lasting if cut.rank >= event.orders.get(cut.module, 0))
        return lasting

    @cached_property
    def initial_orders(self) -> dict[str, int]:
        first = dict.fromkeys(self.modules, int(self.config["model"]["order"]))
        if self.timings:
            first.update(self.timings[0].orders)
        for cut in reversed(self.cut_records):
            first[cut.module] = cut.order
        return first

    @cached_property
    def final_orders(self) -> dict[str, int]:
        return {module: path[-1][1] for module, path in self.order_paths.items()}

    @cached_property
    def order_paths(self) -> dict[str, list[tuple[int, int]]]:
        """The path of each layer, (step, order from there on), from step 0."""
        paths = {module: [(0, order)] for module, order in self.initial_orders.items()}
        for event in self.events:
            for module, order in event.orders.items():
                if module in paths and paths[module][-1][1] != order:
                    paths[module].append((event.step, order))
        return paths

    @property
    def mean_order(self) -> float:
        """The mean over layers at the end, as the paper reports deep models."""
        return fmean(self.final_orders.values() or [self.config["model"]["order"]])

    @property
    def mean_initial_order(self) -> float:
        """The mean over layers at the start."""
        return fmean(self.initial_orders.values() or [self.config["model"]["order"]])

    @cached_property
    def score(self) -> BestScore | None:
        """The test value at the best validation since the orders last changed, of a model with the orders reported."""
        # At the step of a cut the evaluation comes after it.
        since = max((event.step for event in self.events), default=0)
        test = {step: value for step, value in self.curve("test") if step >= since}
        validation = {step: value for step, value in self.curve("validation") if step >= since and math.isfinite(value)}
        best: Callable[..., int] = max if self.metric == "accuracy" else min
        if not validation:
            return BestScore(self.metric, max(test), None, test[max(test)]) if test else None
        # Where the test split is evaluated less often, only steps with both can be reported.
        both = {step: value for step, value in validation.items() if step in test} or validation
        step = best(both, key=both.__getitem__)
        return BestScore(self.metric, step, both[step], test.get(step))


def read_run(directory: RunDirectory) -> Run:
    """Read everything but checkpoints and weights; a folder that is not a run is refused by name."""
    config = directory.config()
    _require_recipe(directory, config)
    try:
        environment = directory.environment()
    except TypeError:
        known = ", ".join(entry.name for entry in fields(Environment))
        raise RunError(f"{directory.path / 'environment.json'} is not an environment, expected {known}") from None
    cuts, evaluations = directory.records(CutRecord), directory.records(Evaluation)
    _require_once(directory, Evaluation.file, [(found.step, found.split) for found in evaluations])
    _require_once(directory, CutRecord.file, [(cut.step, cut.module) for cut in cuts])
    events: list[RunEvent] = [*cuts, *directory.records(RestoredRecord)]
    return Run(
        path=str(directory.path),
        config=config,
        environment=environment,
        status=directory.status(),
        evaluations=tuple(evaluations),
        # At one step cuts come before a restoration, after which there are none.
        events=tuple(sorted(events, key=lambda event: event.step)),
        timings=tuple(directory.records(Timing)),
    )


def _require_once(directory: RunDirectory, file: str, lines: Sequence[tuple[int, str]]) -> None:
    """Refuse records of two trainings in one file: lines that are there twice, or whose steps go back."""
    again = next((line for line, times in Counter(lines).items() if times > 1), None)
    back = next((pair for pair in pairwise(step for step, _ in lines) if pair[0] > pair[1]), None)
    if again is not None:
        what = f"{len(lines)} lines where {len(set(lines))} belong, step {again[0]} of {again[1]} more than once"
    elif back is not None:
        what = f"step {back[1]} after step {back[0]}"
    else:
        return
    raise RunError(
        f"{directory.path / file} has {what}: two processes wrote into the folder; train the recipe again in a new one"
    )


def _require_recipe(directory: RunDirectory, config: dict[str, Any]) -> None:
    """Check the fields that a report reads; the rest of a recipe is shown as it stands."""
    file = directory.path / "config.json"
    for key, kind in (("name", str), ("label", str), ("seed", int), ("model", dict), ("training", dict)):
        if not isinstance(config.get(key), kind):
            raise RunError(f"{file}: {key} is {config.get(key)!r:.80}, expected {kind.__name__}")
    if "compression" not in config or not isinstance(config["compression"], dict | None):
        came = repr(config["compression"])[:80] if "compression" in config else "missing"
        raise RunError(f"{file}: compression is {came}, expected an object or null")
    order = config["model"].get("order")
    if isinstance(order, bool) or not isinstance(order, int) or order < 1:
        raise RunError(f"{file}: model.order is {order!r:.80}, expected an integer of at least 1")


def _natural(module: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts blocks.2 before blocks.10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in module.split("."))
