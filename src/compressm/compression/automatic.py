"""Cuts without a schedule to tune: they begin when the spectra have settled, and end early enough to recover."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, final

import torch
from torch import Tensor

from compressm.compression.schedule import Answer, Look, Schedule
from compressm.control import trajectories
from compressm.errors import CompressionError
from compressm.families.choices import require_count, require_number

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
    looks to the next, and one that cuts sets it back to one. In a try every layer keeps at least the share `share` of
    its states. Until a try has cut something it asks policies for caution: a loss that does not depend on the states
    yet, as at the start of a hard task, must not cut them all. The last share `recover` of training is left to recover
    in; tries end before it, or when no layer can lose a state.
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
            if (value := getattr(self, name)) is not None:
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
        if not look.memory.get("begun", False):
            return self._begin(look)
        return self._attempt(look, "the next try is due", int(look.memory.get("gap", 1)))

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

    def _attempt(self, look: Look, why: str, gap: int) -> Answer:
        gap = 1 if look.tries and look.tries[-1].cut else gap
        last = self.latest // self.interval * self.interval
        # The last try of all is at the end of the window.
        nexts = [min(look.step + looks * self.interval, last) for looks in (1, 2 * gap)]
        later = dict(zip(("again", "otherwise"), (step if step > look.step else None for step in nexts), strict=True))
        # Once states have mattered, the last ones may go.
        cautious, memory = not any(one.cut for one in look.tries), {"begun": True, "gap": 2 * gap}
        return look.attempt(why, **later, share=self.share, cautious=cautious, memory=memory)

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
