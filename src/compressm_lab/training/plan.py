"""At which steps something happens: schedules that know nothing of each other, printed before training begins."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from compressm.compression import CompressionError, during_warmup, every
from compressm_lab.training.config import ConfigError, Recipe

# Steps at most between two looks at the loss.
_WATCH = 500


@dataclass(frozen=True)
class Plan:
    """Sorted step numbers; the last step is evaluated and saved whatever the schedules say."""

    steps: int
    cuts: Sequence[int]
    judgements: Sequence[int]
    evaluations: Sequence[int]
    spectra: Sequence[int]
    checkpoints: Sequence[int]

    @classmethod
    def of(cls, recipe: Recipe) -> Plan:
        """From the recipe alone; a schedule that would never fire is an error."""
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
        interval = training.evaluate_every or max(1, training.steps // 20)
        # The spectrum of step 0 is that of the initial model.
        recorded = () if spectra is None else [0, *_multiples(spectra.every, training.steps)]
        return cls(
            training.steps,
            cuts,
            judgements,
            _multiples(interval, training.steps),
            recorded,
            _multiples(training.checkpoint_every or max(1, training.steps // 10), training.steps),
        )

    def next_after(self, step: int) -> int:
        """Where to stop next and look what there is to do."""
        index = bisect_right(self._milestones, step)
        return min(self._milestones[index], step + _WATCH)

    @cached_property
    def _milestones(self) -> list[int]:
        return sorted({*self.cuts, *self.judgements, *self.evaluations, *self.spectra, *self.checkpoints, self.steps})

    def __str__(self) -> str:
        lines = [f"{self.steps} steps"]
        for what, steps in (
            ("cuts tried", self.cuts),
            ("cuts judged", self.judgements),
            ("evaluations", self.evaluations),
            ("Hankel spectra", self.spectra),
            ("checkpoints", self.checkpoints),
        ):
            if steps:
                lines.append(f"{what}: {len(steps)}, at {_listed(steps)}")
        return "\n".join(lines)


def cut_steps(recipe: Recipe) -> list[int]:
    """When the compressor tries to cut; without a last step, as long as there is time to judge a cut."""
    assert recipe.compression is not None
    training, when = recipe.training, recipe.compression.when
    last = max(1, training.steps - (settle_steps(recipe) or 0))
    try:
        if when.warmup_cuts is not None:
            return during_warmup(training.steps, when.warmup_cuts, training.warmup)
        if when.every is not None:
            return list(every(when.every, start=when.first, until=when.last or last))
    except CompressionError as error:
        raise ConfigError(f"compression.when: {error}") from None
    return sorted(set(when.steps or ()))


def settle_steps(recipe: Recipe) -> int | None:
    """How long after a cut the guard looks; None without one."""
    if recipe.compression is None or recipe.compression.rollback is None:
        return None
    settle = recipe.compression.rollback.settle
    return max(1, recipe.training.steps // 100) if settle is None else settle


def _multiples(interval: int, steps: int) -> list[int]:
    return sorted({*range(interval, steps + 1, interval), steps})


def _listed(steps: Iterable[int]) -> str:
    steps = list(steps)
    if len(steps) <= 5:
        return ", ".join(map(str, steps))
    return f"{steps[0]}, {steps[1]}, {steps[2]}, …, {steps[-1]}"
