"""One run read back whole: its recipe, its scores, and its orders over training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal, get_args

from compressm_lab.runs.directory import RunDirectory, Status
from compressm_lab.runs.measurement import Environment
from compressm_lab.runs.records import (
    CutRecord,
    DecisionRecord,
    Evaluation,
    PenaltyRecord,
    RestoredRecord,
    RunError,
    Spectrum,
    SplitName,
    TimeKind,
    Timing,
    TruncationRecord,
    require_kind,
)

Metric = Literal["accuracy", "mse", "loss"]
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
    """The records of a run folder, in the order they were written; spectra are read when they are first asked for.

    With `up_to` there are only those that a run keeps which goes on from a checkpoint of that step.
    """

    path: str
    config: Mapping[str, Any]
    environment: Environment
    status: Status
    evaluations: tuple[Evaluation, ...] = ()
    events: tuple[RunEvent, ...] = ()
    timings: tuple[Timing, ...] = ()
    up_to: int | None = None
    together: int | None = None  # the most trainings at a time, this one among them

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

    def time(self, kind: TimeKind) -> float | None:
        """Seconds of the training by a kind of clock; None where a record lacks them, as those of earlier versions."""
        if kind == "wall time":
            return self.seconds
        found = [timing.gpu if kind == "GPU time" else timing.cpu for timing in self.timings]
        # Copies that are cut when training has ended are no part of it.
        phases = [{**spent, "truncation": 0.0} for spent in found if spent is not None]
        return sum(sum(spent.values()) for spent in phases) if found and len(phases) == len(found) else None

    @property
    def load(self) -> float | None:
        """The load average of the machine while it trained; None where a record lacks it."""
        loads = [timing.load for timing in self.timings]
        weights = [sum(timing.seconds.values()) for timing in self.timings]
        known = [load for load in loads if load is not None]
        return fmean(known, weights) if known and len(known) == len(loads) and sum(weights) else None

    @property
    def metric(self) -> Metric:
        """Accuracy, or of a regression the mean squared error, for which earlier versions only had the loss."""
        metrics: tuple[Metric, ...] = ("accuracy", "mse")
        return next((name for name in metrics if any(getattr(e, name) is not None for e in self.evaluations)), "loss")

    def curve(self, split: SplitName) -> list[tuple[int, float]]:
        """Pairs (step, value of the metric) of every evaluation of a split, NaN included."""
        found = (record for record in self.evaluations if record.split == split)
        metric = self.metric
        values = ((record.step, getattr(record, metric)) for record in found)
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
        directory = RunDirectory(self.path)
        found = directory.records(Spectrum, up_to=self.up_to)
        _require_once(directory, Spectrum.file, [(spectrum.step, spectrum.module) for spectrum in found])
        for why in _spectrum_damages(self, found):
            raise RunError(f"{directory.path / why}: the file is damaged; put it back as it was")
        if self.finished:
            directory.require_own_records(Spectrum.file)
        return tuple(found)

    @cached_property
    def penalties(self) -> tuple[PenaltyRecord, ...]:
        """The penalty in the loss, evaluation by evaluation."""
        directory = RunDirectory(self.path)
        found = directory.records(PenaltyRecord, up_to=self.up_to)
        _require_once(directory, PenaltyRecord.file, [(penalty.step, penalty.kind) for penalty in found])
        if self.finished:
            directory.require_own_records(PenaltyRecord.file)
        return tuple(found)

    @cached_property
    def truncations(self) -> tuple[TruncationRecord, ...]:
        """Scores of copies of the final model that were cut once."""
        directory = RunDirectory(self.path)
        found = directory.records(TruncationRecord)
        _require_once(directory, TruncationRecord.file, [(cut.step, f"{cut.order} {cut.split}") for cut in found])
        wanted = (self.config.get("truncation") or {"orders": ()})["orders"]
        there = {(cut.order, cut.split) for cut in found}
        missing = {order for order in wanted for split in ("validation", "test") if (order, split) not in there}
        if self.finished and missing:
            said = f"lacks copies cut to order {', '.join(map(str, sorted(missing)))}"
            raise RunError(
                f"{directory.path / TruncationRecord.file} {said}: the file is damaged; put it back as it was, or"
                f" delete {directory.model}, and --resume writes both again"
            )
        if self.finished:
            directory.require_own_records(TruncationRecord.file)
        return tuple(found)

    @property
    def cut_records(self) -> tuple[CutRecord, ...]:
        """Every cut, whether or not it was undone later."""
        return tuple(event for event in self.events if isinstance(event, CutRecord))

    @property
    def restorations(self) -> tuple[RestoredRecord, ...]:
        return tuple(event for event in self.events if isinstance(event, RestoredRecord))

    @cached_property
    def decisions(self) -> tuple[DecisionRecord, ...]:
        """The decisions of a schedule of cuts without listed steps, with reasons."""
        directory = RunDirectory(self.path)
        found = directory.records(DecisionRecord, up_to=self.up_to)
        for why in _decision_damages(self, found):
            raise RunError(f"{directory.path / why}: the file is damaged; put it back as it was")
        if self.finished:
            directory.require_own_records(DecisionRecord.file)
        return tuple(found)

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

    @property
    def mae(self) -> float | None:
        """The mean absolute error on the test split where the score is; None where nobody recorded it."""
        at = None if self.score is None else self.score.step
        return next((found.mae for found in self.evaluations if (found.step, found.split) == (at, "test")), None)


def read_run(directory: RunDirectory) -> Run:
    """Read everything but checkpoints and weights; a folder that is not a run, or a damaged one, is refused by name."""
    config = directory.config()
    _require_recipe(directory, config)
    status = directory.status()  # first: a run that finishes in the meantime has more records, not fewer
    run = _read_records(directory, config, status)
    directory.require_own_recipe()
    _require_whole(directory, (*_damages(run), *_model_damages(run, directory.model_sizes())))
    directory.require_own_model()
    if run.finished:
        directory.require_own_records(Evaluation.file, CutRecord.file, Timing.file)
    return run


def require_readable(directory: RunDirectory, step: int, steps: int) -> None:
    """Refuse a run to go on with after `step` of `steps` if a report would refuse the records that it keeps."""
    run = _read_records(directory, directory.config(), Status("running", step, steps), up_to=step)
    _require_whole(directory, _damages(run))
    _ = run.spectra, run.penalties, run.decisions  # as a report reads them


def _read_records(directory: RunDirectory, config: dict[str, Any], status: Status, up_to: int | None = None) -> Run:
    """A run with its records, none of them twice, and in the order of their steps."""
    cuts, restored = directory.records(CutRecord, up_to=up_to), directory.records(RestoredRecord, up_to=up_to)
    events: list[RunEvent] = [*cuts, *restored]
    run = Run(
        path=str(directory.path),
        config=config,
        environment=directory.environment(),
        status=status,
        evaluations=tuple(directory.records(Evaluation, up_to=up_to)),
        # At one step cuts come before a restoration, after which there are none.
        events=tuple(sorted(events, key=lambda event: event.step)),
        timings=tuple(directory.records(Timing, up_to=up_to)),
        up_to=up_to,
        together=directory.together,
    )
    _require_once(directory, Evaluation.file, [(found.step, found.split) for found in run.evaluations])
    _require_once(directory, CutRecord.file, [(cut.step, cut.module) for cut in cuts])
    _require_once(directory, CutRecord.file, [(event.step, "the guard") for event in restored])
    return run


def _require_whole(directory: RunDirectory, damages: Iterable[str]) -> None:
    """Refuse a run by the first of its damages."""
    for why in damages:
        raise RunError(
            f"{directory.path / why}: the file is damaged; put it back as it was, or train the recipe again in a new"
            " folder"
        )


def evaluation_interval(every: int | None, steps: int) -> int:
    """Steps between two evaluations of a run; the last step is evaluated whatever it is."""
    return every or max(1, steps // 20)


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


def _damages(run: Run) -> Iterator[str]:
    """Yield every way in which records contradict each other, after the name of the file.

    Files of a run that has not finished may end at different steps: a crash cut them off, or it goes on just now.
    """
    for record in (*run.evaluations, *run.events, *run.timings):
        if record.step > run.status.steps:
            yield f"{record.file} has step {record.step}, and the run has {run.status.steps} steps"
    reached, before = 0, None
    for timing in run.timings:
        # Each counts the steps since the one before; those that count none differ in their seconds.
        if timing.step - timing.steps != reached or timing == before:
            yield f"{Timing.file} counts {timing.steps} steps up to step {timing.step}, after a line of step {reached}"
        reached, before = timing.step, timing
    evaluated = max((found.step for found in run.evaluations), default=0)
    for file, last in ((Evaluation.file, evaluated), (Timing.file, reached)):
        if run.finished and last < run.status.step and (run.timings or file != Timing.file):
            yield f"{file} ends at step {last}, and the run finished at step {run.status.step}"
    if run.timings:  # a run that was written by hand has none, and may evaluate what and when it likes
        yield from _evaluation_damages(run, evaluated)
    yield from _order_damages(run)


def _evaluation_damages(run: Run, last: int) -> Iterator[str]:
    """Yield evaluations that lack a split, and those of the plan of a finished run that are not there."""
    splits: dict[int, set[str]] = {}
    for found in run.evaluations:
        splits.setdefault(found.step, set()).add(found.split)
        # A training whose loss is not finite has failed before it is recorded.
        if run.finished and found.split == "train" and not math.isfinite(found.loss):
            yield f"{Evaluation.file} has the training loss {found.loss} at step {found.step}"
    for step, there in splits.items():
        # The last one of a run that has not finished may be half written.
        if (step < last or run.finished) and (lost := [name for name in get_args(SplitName) if name not in there]):
            yield f"{Evaluation.file} lacks {' and '.join(lost)} of step {step}"
    if run.finished:
        steps = run.status.steps
        interval = evaluation_interval(run.config["training"].get("evaluate_every"), steps)
        # At most one more is looked at than there are.
        if (lost_step := next((at for at in range(interval, steps, interval) if at not in splits), None)) is not None:
            yield f"{Evaluation.file} lacks step {lost_step}, and the recipe evaluates at multiples of {interval}"


def _order_damages(run: Run) -> Iterator[str]:
    """Yield cuts that do not begin at the order before them, and orders of timings that cuts do not lead to."""
    first = run.timings[0].orders if run.timings else {}
    start = int(run.config["model"]["order"])
    paths = {module: [(0, first.get(module, start))] for module in first or {cut.module for cut in run.cut_records}}
    for event in run.events:
        for module, order in event.orders.items():
            if module not in paths:
                yield f"{event.file}, step {event.step}: {module!r:.80} is no layer of the run, expected {[*paths]}"
                continue
            was = paths[module][-1][1]
            if isinstance(event, CutRecord) and event.order != was:
                yield f"{event.file}, step {event.step}: {module} is cut from {event.order} states, and it had {was}"
            paths[module].append((event.step, order))
    for timing in run.timings if run.finished else ():
        for module, order in timing.orders.items():
            path = paths.get(module, [])
            before = [one for step, one in path if step < timing.step]
            if order not in (*before[-1:], *(one for step, one in path if step == timing.step)):
                yield (
                    f"{CutRecord.file} does not lead {module} to {order} states,"
                    f" which it has at step {timing.step} of {Timing.file}"
                )


def _spectrum_damages(run: Run, spectra: Sequence[Spectrum]) -> Iterator[str]:
    """Yield spectra of a finished run that are not of its states; those of a step are recorded before its cut."""
    known = run.finished and (run.cut_records or any(timing.orders for timing in run.timings))
    for spectrum in spectra if known else ():
        path, count = run.order_paths.get(spectrum.module, []), len(spectrum.sigma)
        before = [order for step, order in path if step < spectrum.step or step == 0]
        if path and not 0 < count <= before[-1]:
            at = f"{Spectrum.file} has {count} values of {spectrum.module} at step {spectrum.step}"
            yield f"{at}, and the layer had {before[-1]} states"


def _decision_damages(run: Run, decisions: Sequence[DecisionRecord]) -> Iterator[str]:
    """Yield decisions that are not there, or not where they belong: each says where the next look is.

    Only after a try that kept all states a look may say nothing: tries are rarer then. After a restoration there is no
    look, and the files of a run that has not finished may end at different steps.
    """
    file, pairs = DecisionRecord.file, pairwise(enumerate(decisions, start=1))
    for (before, last), (number, now) in pairs:
        at = f"{file}, line {number}: it is of step {now.step}, and"
        if last.again is None:
            yield f"{at} line {before} is of the last look"
        elif now.step < last.again:
            yield f"{at} line {before} looks again at step {last.again}"
        elif now.step > last.again and last.action != "keep":
            yield f"{at} a line of step {last.again}, where line {before} looks again, is missing"
    if not run.finished:
        return
    cut, tried = {cut.step for cut in run.cut_records}, {one.step for one in decisions if one.action == "cut"}
    for number, one in enumerate(decisions, start=1):
        if one.action == "cut" and one.step not in cut:
            yield f"{file}, line {number}: it cuts at step {one.step}, and {CutRecord.file} has no cut there"
    when = (run.config["compression"] or {}).get("when")
    if (decisions or (isinstance(when, dict) and when.get("automatic"))) and (lost := sorted(cut - tried)):
        yield f"{file} lacks the cut of step {lost[0]} of {CutRecord.file}"
    again = decisions[-1].again if decisions and not run.restorations else None
    if again is not None and again <= run.status.steps:
        yield f"{file} ends with line {len(decisions)}, of step {decisions[-1].step}, which looks again at step {again}"


def _model_damages(run: Run, saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield sizes in which the saved model is not that of the run; its weights are not read."""
    sizes, orders, recipe = saved.get("model"), saved.get("orders"), run.config["model"]
    if not run.finished or not isinstance(sizes, dict) or not isinstance(orders, dict):
        return
    for key in ("depth", "width", "order"):
        if key in sizes and key in recipe and sizes[key] != recipe[key]:
            yield f"model has {key} {sizes[key]!r:.20}, and the recipe of the run {recipe[key]}"
    ended = {module: order for module, order in run.final_orders.items() if module in orders}
    if run.timings and ended != orders:
        yield f"model has the orders {orders!r:.200}, and the run ended with {run.final_orders}"


def _require_recipe(directory: RunDirectory, config: dict[str, Any]) -> None:
    """Check the fields that a report reads; the rest of a recipe is shown as it stands."""
    file = directory.path / "config.json"
    for key, kind in (("name", str), ("label", str), ("model", dict), ("training", dict)):
        if not isinstance(config.get(key), kind):
            raise RunError(f"{file}: {key} is {config.get(key)!r:.80}, expected {kind.__name__}")
    for key in ("compression", "regulariser", "distillation", "truncation", "spectra"):
        if not isinstance(config.get(key), dict | None) or (key == "compression" and key not in config):
            came = repr(config[key])[:80] if key in config else "missing"
            raise RunError(f"{file}: {key} is {came}, expected an object or null")
    try:
        require_kind("seed", config.get("seed"), "Count")
        require_kind("model.order", config["model"].get("order"), "Order")
        for part, key in (("model", "depth"), ("model", "width"), ("training", "steps"), ("training", "batch")):
            if key in config[part]:
                require_kind(f"{part}.{key}", config[part][key], "Order")
        require_kind("training.evaluate_every", config["training"].get("evaluate_every"), "Order | None")
        if config.get("truncation") is not None:
            require_kind("truncation.orders", config["truncation"].get("orders"), "list[Order]")
        require_kind("compression.tau", (config["compression"] or {}).get("tau"), "Number | None")
    except RunError as error:
        raise RunError(f"{file}: {error}") from None


def _natural(module: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts blocks.2 before blocks.10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in module.split("."))
