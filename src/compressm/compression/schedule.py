"""Schedules of cuts: finite collections of training steps, counted from 1, and objects that decide as they go."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Any, SupportsIndex, final

import torch
from torch import Tensor

from compressm.compression.record import require_entries
from compressm.control import trajectories, validation
from compressm.errors import CompressionError
from compressm.families.choices import require_count, require_number

# More steps than any training has; a longer range is a mistake.
_MOST_STEPS = 10_000_000
# The most steps that a text lists.
_NAMED = 8


@final
@dataclass(frozen=True)
class Try:
    """A try of an earlier look: its step, whether a layer was cut, and the number of trial cuts that it took."""

    step: int
    cut: bool
    trials: int = 0


@final
@dataclass(frozen=True)
class Answer:
    """A schedule's decision at a look; made by `Look.wait`, `Look.attempt` and `Look.stop`.

    The next look is at `again`, or, after a try that cuts nothing, at `otherwise`; None: there is none.
    """

    tries: bool
    reason: str
    again: int | None
    otherwise: int | None
    share: float
    memory: Mapping[str, Any]
    cautious: bool = False


@final
@dataclass(frozen=True)
class Look:
    """All that a schedule sees when it is asked.

    `orders` are those of the layers now, and `is_spent` is True if the options let no layer lose a state. `spectra` are
    there if the schedule wanted them. `tries` are all earlier ones, and `memory` is what the schedule returned last.
    """

    step: int
    orders: Mapping[str, int]
    is_spent: bool = False
    spectra: Mapping[str, Tensor] | None = field(default=None, repr=False)
    tries: Sequence[Try] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)

    def wait(self, until: int, reason: str = "", *, memory: Mapping[str, Any] | None = None) -> Answer:
        """Cut nothing now, and look again at step `until`."""
        return Answer(False, reason, until, until, 0.0, self._kept(memory))

    def attempt(
        self,
        reason: str = "",
        *,
        again: int | None = None,
        otherwise: int | None = None,
        share: float = 0.0,
        cautious: bool = False,
        memory: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Try a cut now, in which every layer keeps at least the share `share` of its states.

        The next look is at step `again`, or, if nothing is cut, at step `otherwise`, by default the same. If the try is
        `cautious`, a policy that tries cuts first makes sure that the loss depends on the states (`Trials.smallest`).
        """
        other = again if otherwise is None else otherwise
        return Answer(True, reason, again, other, share, self._kept(memory), cautious)

    def stop(self, reason: str) -> Answer:
        """Cut nothing now, and never look again."""
        return Answer(False, reason, None, None, 0.0, {})

    def _kept(self, memory: Mapping[str, Any] | None) -> Mapping[str, Any]:
        return self.memory if memory is None else memory


class Schedule(ABC):
    """A schedule that decides during training when a compressor looks at the model, and if it then tries to cut.

    It has no state of its own: it gets back what it returned as `memory`, tensors, numbers, text and containers of
    them, which the compressor saves. Its decisions depend on a look alone, so a resumed training decides the same.
    """

    @abstractmethod
    def first(self, after: int) -> int | None:
        """The first step after `after` at which it wants to be asked if it never was; None if there is none."""

    @abstractmethod
    def decide(self, look: Look) -> Answer:
        """The decision at a look. One with a reason is recorded; the next look must come later than this one."""

    @abstractmethod
    def plan(self) -> str:
        """The earliest and latest step of a try, and the most tries, in words."""

    def wants_spectra(self, memory: Mapping[str, Any]) -> bool:
        """True if the next look needs spectra; they cost a pass over the calibration data."""
        return False

    def require_memory(self, what: str, memory: Mapping[str, Any]) -> None:  # noqa: B027  # most have none to check
        """Refuse a saved memory, called `what` in errors, that `decide` could not use."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


@final
@dataclass(frozen=True)
class Steps(Schedule):
    """A schedule that tries to cut at each of these steps."""

    steps: tuple[int, ...]

    def first(self, after: int) -> int | None:
        """The next of the steps."""
        return next(iter(self.steps[bisect_right(self.steps, after) :]), None)

    def decide(self, look: Look) -> Answer:
        """Try now, and again at the next of the steps."""
        return look.attempt(again=self.first(look.step))

    def plan(self) -> str:
        """The steps in one line."""
        return plan_text(self.steps)

    def __repr__(self) -> str:
        return str(list(self.steps))


# Looks in a training: the sMNIST trainings of docs/results.md tried 40 times.
_LOOKS = 40
# The spectra that are compared: crossings are found from the velocity, so from three.
_COMPARED = 3


@final
@dataclass(frozen=True)
class Automatic(Schedule):
    """A schedule that finds the steps of the cuts in a training of `total_steps` steps by itself.

    It looks every `every` steps, by default a fortieth of all. Tries begin when the spectra have settled: in every
    layer, since the last look, at most the share `settled` of the energy Σσ has moved between places of the spectrum
    (½ Σ |pᵢ' − pᵢ| of the shares pᵢ = σᵢ / Σσ), and at most the share `settled` of all pairs of states has changed
    rank, as `compressm.control.trajectories` follows them through the last three looks. They begin at the latest after
    the share `begin_by` of all steps. Then it tries at every look; each try that cuts nothing doubles the number of
    looks to the next, and one that cuts sets it back to one, as does one that caution ended. In a try every layer keeps
    at least the share `share` of its states. Until a try has cut something it asks policies for caution: a loss that
    does not depend on the states yet, as at the start of a hard task, must not cut them all. The last share `recover`
    of training is left to recover in; tries end before it, or when no layer can lose a state.
    """

    total_steps: int
    _: KW_ONLY
    every: int | None = None
    settled: float = 0.05
    begin_by: float = 0.25
    recover: float = 0.25
    share: float = 0.5

    def __post_init__(self) -> None:
        for name in ("total_steps", "every"):
            if (value := getattr(self, name)) is not None or name == "total_steps":
                object.__setattr__(self, name, require_count(f"Automatic: {name}", value))
        for name in ("settled", "begin_by", "recover", "share"):
            value = require_number(f"Automatic: {name}", getattr(self, name), 0, 1, below=True)
            object.__setattr__(self, name, value)
        if self.interval > self.latest:
            raise CompressionError(
                f"Automatic: the first look is at step {self.interval}, after the latest try, {self.latest} of"
                f" {self.total_steps} steps: expected a smaller every, or a smaller recover"
            )

    @property
    def interval(self) -> int:
        """The steps between two looks."""
        return max(1, self.total_steps // _LOOKS) if self.every is None else self.every

    @property
    def latest(self) -> int:
        """The last step at which a cut may be tried."""
        return math.floor((1 - self.recover) * self.total_steps + 1e-9)

    @property
    def forced(self) -> int:
        """The step from which on cuts are tried whether or not the spectra have settled."""
        return math.ceil(self.begin_by * self.total_steps - 1e-9)

    @property
    def earliest(self) -> int:
        """The first step at which a cut may be tried: the third look, unless they are forced before."""
        looks = (k * self.interval for k in range(1, _COMPARED + 1))
        return next((step for step in looks if step >= self.forced), _COMPARED * self.interval)

    @property
    def most_tries(self) -> int:
        """The most tries in a training."""
        return max(0, 1 + (self.latest - self.earliest) // self.interval)

    def first(self, after: int) -> int | None:
        """The next multiple of the interval, unless that is too late."""
        step = (after // self.interval + 1) * self.interval
        return step if step <= self.latest else None

    def wants_spectra(self, memory: Mapping[str, Any]) -> bool:
        """True until tries have begun."""
        return not memory.get("begun", False)

    def require_memory(self, what: str, memory: Mapping[str, Any]) -> None:
        """Refuse spectra that are none, and gaps that are no counts."""
        require_entries(
            what, {"begun": False, "gap": 1, "spectra": [], **memory}, begun=bool, gap=int, spectra=list | tuple
        )
        require_count(f"{what}: gap", memory.get("gap", 1))
        for seen in memory.get("spectra", ()):
            if not isinstance(seen, Mapping):
                raise CompressionError(f"{what}: spectra holds {seen!r:.100}, expected {{module: values}}")
            for name, sigma in seen.items():
                if not isinstance(name, str) or not _is_spectrum(sigma):
                    raise CompressionError(
                        f"{what}: spectra of {name!r:.100} is {sigma!r:.100}, expected a tensor of finite values of at"
                        " least 0, as state_dict() gave it"
                    )

    def plan(self) -> str:
        """The earliest and latest step of a try, and the most tries, in words."""
        share = f", each keeps at least {100 * self.share:g} % of a layer's states" if self.share else ""
        if not self.most_tries:
            return f"no cut is tried: the earliest is after step {self.latest}"
        forced = max(self.earliest, -(-self.forced // self.interval) * self.interval)
        begins = f"step {self.earliest}, or when the spectra have settled, by step {min(forced, self.latest)}"
        if forced == self.earliest:
            begins = f"step {self.earliest}"
        return (
            f"at most {self.most_tries} tries, from {begins}, to step {self.latest}; a look every"
            f" {self.interval} steps{share}"
        )

    def decide(self, look: Look) -> Answer:
        """Wait for settled spectra, then try, more rarely while nothing is cut."""
        if look.step > self.latest:
            return look.stop(f"the last {100 * self.recover:g} % of training are left to recover")
        if look.is_spent:
            return look.stop("the options let no layer lose a state")
        if not look.memory.get("begun", False) or not look.tries:
            return self._begin(look)
        last, gap = look.tries[-1], int(look.memory.get("gap", 1))
        # A try that only caution ended was cheap; once something was cut, caution ends none.
        if last.cut or (last.trials == 1 and not any(one.cut for one in look.tries)):
            return self._attempt(look, "the next try is due", 1)
        due = min(last.step + gap * self.interval, self._last)
        return look.wait(due) if look.step < due else self._attempt(look, "the next try is due", gap)

    def _begin(self, look: Look) -> Answer:
        now = {name: sigma.reshape(-1, sigma.shape[-1]).mean(0) for name, sigma in (look.spectra or {}).items()}
        seen = [*look.memory.get("spectra", ()), now][-_COMPARED:]
        settled, said = self.has_settled(seen)
        if settled or look.step >= self.forced:
            why = f"the spectra have settled: {said}" if settled else f"step {self.forced} has come, though {said}"
            return self._attempt(look, why, 1)
        return self._unless_late(look, f"the spectra have not settled: {said}", {"spectra": seen})

    def _unless_late(self, look: Look, reason: str, memory: Mapping[str, Any]) -> Answer:
        again = look.step + self.interval
        if again > self.latest:
            return look.stop(f"{reason}, and the next look would come after step {self.latest}")
        return look.wait(again, reason, memory=memory)

    @property
    def _last(self) -> int:
        return self.latest // self.interval * self.interval

    def _attempt(self, look: Look, why: str, gap: int) -> Answer:
        again = look.step + self.interval
        # Once states have mattered, the last ones may go.
        cautious, memory = not any(one.cut for one in look.tries), {"begun": True, "gap": 2 * gap}
        next_look = again if again <= self._last else None
        return look.attempt(why, again=next_look, share=self.share, cautious=cautious, memory=memory)

    def has_settled(self, seen: Sequence[Mapping[str, Tensor]]) -> tuple[bool, str]:
        """Tell if the last of these spectra has settled, and say why or why not."""
        alike = len(seen) == _COMPARED and all(_shapes(one) == _shapes(seen[-1]) for one in seen)
        if not alike:
            return False, f"{_COMPARED} looks at the same orders are needed"
        moved = {name: _moved(seen[-2][name], sigma) for name, sigma in seen[-1].items()}
        crossed = {name: _crossed([one[name] for one in seen]) for name in seen[-1]}
        worst = max(moved, key=lambda name: max(moved[name], crossed[name]))
        said = f"{100 * moved[worst]:.2g} % of the energy moved and {100 * crossed[worst]:.2g} % of pairs crossed"
        return max(moved[worst], crossed[worst]) <= self.settled, f"{said} in {worst or 'the model'}"


def _is_spectrum(sigma: object) -> bool:
    if not isinstance(sigma, Tensor) or sigma.ndim != 1 or not sigma.is_floating_point():
        return False
    return bool((sigma.isfinite() & (sigma >= 0)).all())


def _shapes(spectra: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: sigma.shape for name, sigma in spectra.items()}


def _moved(before: Tensor, after: Tensor) -> float:
    """½ Σ |pᵢ' − pᵢ| of the shares of the energy; 1 if one of the spectra is zero."""
    if not before.any() or not after.any():
        return 1.0
    shares = [sigma.double() / sigma.double().sum() for sigma in (before, after)]
    return float((shares[1] - shares[0]).abs().sum() / 2)


def _crossed(spectra: Sequence[Tensor]) -> float:
    """The share of all pairs of states that has changed rank since the last but one of these spectra."""
    n = spectra[-1].shape[-1]
    if n < 2:
        return 0.0
    crossings = trajectories([sigma.double() for sigma in spectra]).crossings
    return float(torch.as_tensor(crossings[-1])) / (n * (n - 1) / 2)


def require_answer(schedule: Schedule, look: Look, answer: object) -> Answer:
    """The answer of a schedule, if its next look comes later than this one and its share is one."""
    if not isinstance(answer, Answer):
        raise CompressionError(
            f"{schedule!r:.100}.decide returned {answer!r:.100}, expected look.wait(...), look.attempt(...) or"
            " look.stop(...)"
        )
    for again in (answer.again, answer.otherwise):
        if again is not None:
            require_count(f"{schedule!r:.100}: the step of the next look", again, low=look.step + 1)
    require_number(f"{schedule!r:.100}: share", answer.share, 0, 1, below=True)
    if not isinstance(answer.reason, str) or not isinstance(answer.memory, Mapping):
        said = f"reason {answer.reason!r:.60} and memory {answer.memory!r:.60}"
        raise CompressionError(f"{schedule!r:.100}.decide returned {said}, expected text and a mapping")
    return answer


def decided_of(schedule: Schedule, decided: object) -> tuple[float | None, Mapping[str, Any], tuple[Try, ...]]:
    """The next look, the memory and the tries of a saved schedule; None: it was never asked, ∞: it has ended."""
    what = "the state of a compressor: decided"
    require_entries(what, decided, look_at=int, tries=list | tuple, memory=Mapping)
    assert isinstance(decided, Mapping)
    tries: list[Try] = []
    for one in decided["tries"]:
        if not isinstance(one, list | tuple) or len(one) != 3 or not isinstance(one[1], bool):
            raise CompressionError(f"{what}: a try is {one!r:.100}, expected [step, True or False, number of trials]")
        step, cut, trials = one
        tries.append(Try(require_count(f"{what}: a try", step, low=0), cut, require_count(what, trials, low=0)))
    at = require_count(f"{what}: look_at", decided["look_at"], low=-1)
    schedule.require_memory(f"{what}: memory", decided["memory"])
    return None if at < 0 else at or math.inf, decided["memory"], tuple(tries)


def during_warmup(total_steps: int, cuts: int = 4, fraction: float = 0.1) -> list[int]:
    """`cuts` equidistant steps in the warm-up, which is the first `fraction` of all steps (sec:setup).

    The last is at its end. The paper's default is four cuts in the first 10 %: 4500, 9000, 13 500 and 18 000 of
    180 000 steps.
    """
    total_steps, cuts = require_count("total_steps", total_steps), require_count("cuts", cuts)
    fraction = require_number("fraction", fraction, 0, 1, above=True)
    # A product such as 0.29 * 100 = 28.999999999999996 means 29 steps.
    warmup = math.floor(fraction * total_steps + 1e-9)
    if warmup < cuts:
        raise CompressionError(
            f"cuts is {cuts}, but a warm-up of {fraction:g} of {total_steps} steps has {warmup}: too few"
        )
    return [warmup * cut // cuts for cut in range(1, cuts + 1)]


def every(k: int, *, until: int, start: int | None = None) -> range:
    """Every k-th step from `start`, by default k, to at most `until`.

    The paper's other schedules (sec:setup, app:reduction-details): sMNIST, cut through all of training,
    `every(5_000, until=200_000)`; IMDB, which waits 1000 steps and then cuts twice until step 3000,
    `every(1_000, start=2_000, until=3_000)`.
    """
    k, until = require_count("k", k), require_count("until", until)
    start = k if start is None else require_count("start", start)
    if start > until:
        raise CompressionError(f"the first cut is at step {start}, after until = {until}: it would never fire")
    return range(start, until + 1, k)


def as_schedule(when: Iterable[SupportsIndex]) -> list[int]:
    """The steps of a finite, non-empty collection of different integers >= 1, sorted."""
    expected = "expected a finite collection of step numbers, such as [1000, 2000] or every(1000, until=4000)"
    if isinstance(when, Mapping):
        raise CompressionError(f"when is {when!r:.100}, {expected}; a mapping has values that nothing would use")
    if isinstance(when, str | bytes) or not isinstance(when, Collection):
        raise CompressionError(f"when is {when!r:.100}, {expected}; a generator may have no end")
    try:
        size = len(when)
    except (TypeError, OverflowError):
        raise CompressionError(f"when is {when!r:.100}, {expected}") from None
    if size > _MOST_STEPS:
        raise CompressionError(f"when has {size} steps, {expected}, of at most {_MOST_STEPS}")
    steps = list(when)
    for step in steps:
        if validation.as_integer(step) is None or int(step) < 1:
            raise CompressionError(f"when holds {step!r}, expected step numbers: integers of at least 1")
    if not steps:
        raise CompressionError(f"when is {when!r:.100}: a schedule without a step would never fire")
    ordered = sorted(map(int, steps))
    again = next((step for step, later in pairwise(ordered) if step == later), None)
    if again is not None:
        raise CompressionError(
            f"when holds step {again} twice, expected each step once: a step makes one cut; {{*first, *second}} joins"
            " two schedules"
        )
    return ordered


def require_same_past(saved: Sequence[int], here: Sequence[int], until: int) -> None:
    """Refuse two schedules that differ in past steps; future steps may differ."""
    then, now = ({step for step in steps if step <= until} for steps in (saved, here))
    if then != now:
        allowed = sorted(then | {step for step in here if step > until}) or list(saved)
        raise CompressionError(
            f"the saved schedule is {list(saved)!r:.80}, this one's {list(here)!r:.80}: expected the same steps up to"
            f" step {until}, which was reached, but {sorted(then ^ now)!r:.80} are in one of them only;"
            f" later steps may differ: to go on, pass when={allowed!r:.400} (a function of the number of steps gives"
            " other steps where a training is longer or shorter)"
        )


def plan_text(schedule: Sequence[int]) -> str:
    """A schedule in one line: "4 cuts, at steps 4500, 9000, 13500, 18000"."""
    count = f"{len(schedule)} cut{'s' if len(schedule) > 1 else ''}"
    if len(schedule) <= _NAMED:
        return f"{count}, at step{'s' if len(schedule) > 1 else ''} {', '.join(map(str, schedule))}"
    gaps = {later - step for step, later in pairwise(schedule)}
    if len(gaps) == 1:
        return f"{count}, every {gaps.pop()} steps from step {schedule[0]} to {schedule[-1]}"
    first = ", ".join(map(str, schedule[: _NAMED - 2]))
    return f"{count}, at steps {first}, ..., {schedule[-1]}"
