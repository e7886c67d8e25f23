"""The paper's safeguard (app:perf_compressm): look back some steps after a cut, and undo it if it did harm."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import nn

from compressm.adapters import find
from compressm.compression.checks import require_count, require_number
from compressm.compression.distributed import Processes
from compressm.compression.record import Restored
from compressm.compression.snapshot import Snapshot, Subject
from compressm.errors import CompressionError


@final
@dataclass(frozen=True)
class Rollback:
    """Undo a cut after which `evaluate()` stays worse than it was by more than the share `drop`.

    Higher is better, or with `lower_is_better`, as for a loss, lower; `measures` is its name in what a user reads.
    It is asked before a cut and again `settle` steps after it (the paper: 1 % of the value, 1 % of all steps). A cut
    that comes in between is judged together with the one before it: both stay, or neither. With a `folder` what may
    have to come back waits there in a file instead of in memory.
    """

    evaluate: Callable[[], float]
    drop: float = 0.01
    settle: int = 100
    folder: Path | str | None = None
    measures: str = "evaluate()"
    lower_is_better: bool = False

    def __post_init__(self) -> None:
        if not callable(self.evaluate):
            raise CompressionError(
                f"Rollback: evaluate is {self.evaluate!r:.100}, expected a function without arguments"
            )
        object.__setattr__(self, "drop", require_number("Rollback: drop", self.drop, 0, 1, below=True))
        object.__setattr__(self, "settle", require_count("Rollback: settle", self.settle, low=0))
        if not isinstance(self.measures, str):
            raise CompressionError(f"Rollback: measures is {self.measures!r:.100}, expected text")
        if not isinstance(self.lower_is_better, bool):
            raise CompressionError(
                f"Rollback: lower_is_better is {self.lower_is_better!r:.100}, expected True or False"
            )
        if self.folder is not None:
            if not isinstance(self.folder, str | os.PathLike) or Path(self.folder).is_file():
                raise CompressionError(f"Rollback: folder is {self.folder!r}, expected a folder, there or not, or None")
            object.__setattr__(self, "folder", Path(self.folder))

    def value(self, processes: Processes = Processes()) -> float:
        """What `evaluate` says, on all processes that of the first."""
        with processes.together("evaluating"):
            number = self._number()
        return processes.as_first(number)

    def _number(self) -> float:
        value = self.evaluate()
        try:
            return float(value)
        except (TypeError, ValueError):
            raise CompressionError(f"Rollback: evaluate returned {value!r:.100}, expected a number") from None

    def accepts(self, value: float, before: float) -> bool:
        """Whether the value is worse by at most drop·|before|; NaN is not."""
        worst = before + (self.drop if self.lower_is_better else -self.drop) * abs(before)
        return value <= worst if self.lower_is_better else value >= worst

    def verdict(self, value: float, before: float) -> str:
        """What is said of a value that is not accepted."""
        way = "rose" if self.lower_is_better else "fell"
        by = f" by {100 * abs(value - before) / abs(before):.3g} %" if before and math.isfinite(value) else ""
        allowed = f"{100 * self.drop:g} % is allowed"
        return f"{self.measures} {way}{by}, from {before:.6g} to {value:.6g} after the cut; {allowed}"

    def path(self, step: int) -> Path | None:
        """Where the snapshot of before that step goes, each process to its own; None for memory."""
        return None if self.folder is None else Path(self.folder) / f"before-step-{step}-{os.getpid()}.pt"


class Watch:
    """The cuts that have not been judged yet: what was before the first of them, and when to look."""

    def __init__(
        self,
        guard: Rollback,
        model: nn.Module,
        optimizer: Any | None = None,
        scheduler: Any | None = None,
        follow: Sequence[nn.Module] = (),
        processes: Processes = Processes(),
    ) -> None:
        self.guard, self.model, self.processes = guard, model, processes
        self.subject = Subject((model, *follow), optimizer, scheduler)
        self.snapshot: Snapshot | None = None
        self.before = math.nan
        self.due = -1
        self.latest: tuple[int, float] | None = None  # a step, and what `evaluate` said there
        # What the three were when the last cut began.
        self.earlier: tuple[Snapshot | None, float, int] = (None, self.before, self.due)

    def begin(self, step: int) -> None:
        """A cut is about to be made. One that comes before the last was judged is judged together with that."""
        self.earlier = self.snapshot, self.before, self.due
        if self.snapshot is None:
            asked = self.latest is not None and self.latest[0] == step
            before = self.latest[1] if asked and self.latest is not None else self.guard.value(self.processes)
            if not math.isfinite(before):
                raise CompressionError(f"Rollback: evaluate returned {before} before a cut, expected a finite number")
            self.before, self.snapshot = before, self._kept(step)
        self.due = step + self.guard.settle

    def _kept(self, step: int) -> Snapshot:
        snapshot: Snapshot | None = None
        try:
            with self.processes.together("keeping what was before the cut"):
                snapshot = Snapshot.of(self.subject, self.guard.path(step))
        except BaseException:
            if snapshot is not None:  # another process failed
                snapshot.discard()
            raise
        return snapshot

    def cancel(self) -> None:
        """The cut that was about to be made was not; those before it are judged when they would have been."""
        if self.snapshot is not None and self.snapshot is not self.earlier[0]:
            self.snapshot.discard()
        self.snapshot, self.before, self.due = self.earlier

    def forget(self) -> None:
        """There is nothing to judge any more."""
        if self.snapshot is not None:
            self.snapshot.discard()
        self.snapshot = None

    def settle(self, step: int) -> Restored | None:
        """At the step that is due, or later: nothing if all is well, else everything is brought back."""
        if self.snapshot is None or step < self.due:
            return None
        value = self.guard.value(self.processes)
        self.latest = step, value
        harmless = self.guard.accepts(value, self.before)
        if not harmless:
            with self.processes.together("bringing back what was before the cut"):
                self.snapshot.restore_(self.subject)
        self.forget()
        if harmless:
            return None
        orders = {name: adapter.order(module) for name, (module, adapter) in find(self.model).items()}
        return Restored(step, orders, self.guard.verdict(value, self.before))

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text; with the snapshot, if a cut has not been judged."""
        snapshot = None if self.snapshot is None else self.snapshot.state_dict()
        return {"snapshot": snapshot, "before": self.before, "due": self.due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; the snapshot is then in memory."""
        self.forget()
        self.snapshot = None if state["snapshot"] is None else Snapshot.from_state_dict(state["snapshot"])
        self.before, self.due = float(state["before"]), int(state["due"])
