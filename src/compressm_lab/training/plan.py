"""The plan of steps that a recipe makes: when it cuts, judges, evaluates, records and saves."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from compressm.compression import Automatic, CompressionError, during_warmup, every
from compressm_lab.runs.run import evaluation_interval
from compressm_lab.training.config import ConfigError, Recipe

_MOST_EVENTS = 10**7  # evaluations, records or cuts of one kind in a run
# The most steps between two checks of the loss.
_WATCH = 500


@dataclass(frozen=True)
class Plan:
    """Sorted steps of everything that happens; the last step is always evaluated and saved."""

    steps: int
    cuts: Sequence[int]
    judgements: Sequence[int]
    evaluations: Sequence[int]
    spectra: Sequence[int]
    checkpoints: Sequence[int]
    found: str = ""  # what is known beforehand of cuts that are found during training

    @classmethod
    def of(cls, recipe: Recipe) -> Plan:
        """Make the plan of a recipe; a schedule that would never fire is an error."""
        training, spectra = recipe.training, recipe.spectra
        cuts = cut_steps(recipe) if recipe.compression else []
        if beyond := [step for step in cuts if step > training.steps]:
            raise ConfigError(f"compression.when cuts at step {beyond[0]}, after the last step, {training.steps}")
        settle = settle_steps(recipe)
        judgements = [] if settle is None else [step + settle for step in cuts]
        if late := [step for step in judgements if step > training.steps]:
            raise ConfigError(
                f"compression.rollback judges at step {late[0]} a cut of step {late[0] - (settle or 0)}, "
                f"after the last step, {training.steps}"
            )
        evaluations = _multiples(evaluation_interval(training.evaluate_every, training.steps), training.steps)
        # The spectrum of step 0 is that of the initial model.
        recorded = () if spectra is None else [0, *_multiples(spectra.every, training.steps)]
        checkpoints = _multiples(training.checkpoint_every or max(1, training.steps // 10), training.steps)
        schedule = automatic(recipe)
        if schedule is not None and (settle or 0) + schedule.latest > training.steps:
            raise ConfigError(
                f"compression.rollback judges a cut {settle} steps later, and automatic ones are tried until step"
                f" {schedule.latest} of {training.steps}: expected a smaller settle"
            )
        found = "" if schedule is None else schedule.plan()
        return cls(training.steps, cuts, judgements, evaluations, recorded, checkpoints, found)

    def next_after(self, step: int) -> int:
        """The next step at which something happens, or the loss is checked."""
        return min(self._milestones[bisect_right(self._milestones, step)], step + _WATCH)

    @cached_property
    def _milestones(self) -> list[int]:
        return sorted({*self.cuts, *self.judgements, *self.evaluations, *self.spectra, *self.checkpoints, self.steps})

    def __str__(self) -> str:
        schedules = {
            "cuts tried": self.cuts,
            "cuts judged": self.judgements,
            "evaluations": self.evaluations,
            "Hankel spectra": self.spectra,
            "checkpoints": self.checkpoints,
        }
        lines = [f"{what}: {len(steps)}, at {_listed(steps)}" for what, steps in schedules.items() if steps]
        lines = [f"cuts tried: {self.found}", *lines] if self.found else lines
        return "\n".join([f"{self.steps} steps", *lines])


def automatic(recipe: Recipe) -> Automatic | None:
    """The schedule that finds the cuts during training; None if their steps are listed."""
    chosen = recipe.compression.when.automatic if recipe.compression is not None else None
    if not chosen:
        return None
    try:
        return Automatic(recipe.training.steps, **({} if chosen is True else asdict(chosen)))
    except CompressionError as error:
        raise ConfigError(f"compression.when: {error}") from None


def cut_steps(recipe: Recipe) -> list[int]:
    """Steps at which the compressor tries to cut; by default only while there is time to judge a cut.

    Those that are found during training are not among them.
    """
    assert recipe.compression is not None
    training, when = recipe.training, recipe.compression.when
    last = max(1, training.steps - (settle_steps(recipe) or 0))
    try:
        if when.warmup_cuts is not None:
            return during_warmup(training.steps, when.warmup_cuts, training.warmup)
        if when.every is not None:
            start, end = when.first or when.every, when.last or last
            if start > end:
                named = "the last step of a cut" if when.last is None else "last"
                raise CompressionError(f"the first cut is at step {start}, after {named}, {end}: it would never fire")
            tried = every(when.every, start=start, until=end)
            if len(tried) > _MOST_EVENTS:
                raise ConfigError(f"compression.when: {len(tried):,} cuts, expected at most {_MOST_EVENTS:,}")
            return list(tried)
    except CompressionError as error:
        raise ConfigError(f"compression.when: {error}") from None
    return sorted(set(when.steps or ()))


def settle_steps(recipe: Recipe) -> int | None:
    """Steps between a cut and its judgement by the guard; None without a guard."""
    if recipe.compression is None or recipe.compression.rollback is None:
        return None
    settle = recipe.compression.rollback.settle
    return max(1, recipe.training.steps // 100) if settle is None else settle


def _multiples(interval: int, steps: int) -> list[int]:
    if steps // interval > _MOST_EVENTS:
        raise ConfigError(f"{steps} steps with something every {interval}: expected at most {_MOST_EVENTS:,} times")
    return sorted({*range(interval, steps + 1, interval), steps})


def _listed(steps: Sequence[int]) -> str:
    if len(steps) <= 5:
        return ", ".join(map(str, steps))
    return f"{steps[0]}, {steps[1]}, {steps[2]}, …, {steps[-1]}"
