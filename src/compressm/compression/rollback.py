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
from compressm.compression.distributed import as_first_process
from compressm.compression.errors import CompressionError
from compressm.compression.record import Restored
from compressm.compression.snapshot import Snapshot, Subject


@final
@dataclass(frozen=True)
class Rollback:
    """Undo a cut after which `evaluate()`, higher is better, stays more than the share `drop` below what it was.

    It is asked before a cut and again `settle` steps after it (the paper: 1 % of the value, 1 % of all steps). With a
    `folder` what may have to come back waits there in a file instead of in memory.
    """

    evaluate: Callable[[], float]
    drop: float = 0.01
    settle: int = 100
    folder: Path | str | None = None

    def __post_init__(self) -> None:
        if not callable(self.evaluate):
            raise CompressionError(
                f"Rollback: evaluate is {self.evaluate!r:.100}, expected a function without arguments"
            )
        object.__setattr__(self, "drop", require_number("Rollback: drop", self.drop, 0, 1, below=True))
        object.__setattr__(self, "settle", require_count("Rollback: settle", self.settle, low=0))
        if self.folder is not None:
            object.__setattr__(self, "folder", Path(self.folder))

    def value(self) -> float:
        """What `evaluate` says, on all processes that of the first."""
        value = self.evaluate()
        try:
            return as_first_process(float(value))
        except (TypeError, ValueError):
            raise CompressionError(f"Rollback: evaluate returned {value!r:.100}, expected a number") from None

    def accepts(self, value: float, before: float) -> bool:
        """Whether the value is at least before − drop·|before|; NaN is not."""
        return value >= before - self.drop * abs(before)

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
    ) -> None:
        self.guard, self.model = guard, model
        self.subject = Subject((model, *follow), optimizer, scheduler)
        self.snapshot: Snapshot | None = None
        self.before = math.nan
        self.due = -1

    def begin(self, step: int) -> None:
        """A cut is about to be made. One that comes before the last was judged is judged together with that."""
        if self.snapshot is None:
            self.before = self.guard.value()
            if not math.isfinite(self.before):
                raise CompressionError(
                    f"Rollback: evaluate returned {self.before} before a cut, expected a finite number"
                )
            self.snapshot = Snapshot.of(self.subject, self.guard.path(step))
        self.due = step + self.guard.settle

    def cancel(self) -> None:
        """There was no cut after all."""
        if self.snapshot is not None:
            self.snapshot.discard()
        self.snapshot = None

    def settle(self, step: int) -> Restored | None:
        """At the step that is due, or later: nothing if all is well, else everything is brought back."""
        if self.snapshot is None or step < self.due:
            return None
        value = self.guard.value()
        harmless = self.guard.accepts(value, self.before)
        if not harmless:
            self.snapshot.restore_(self.subject)
        self.cancel()
        if harmless:
            return None
        orders = {name: adapter.read(module).order for name, (module, adapter) in find(self.model).items()}
        allowed = f"{100 * self.guard.drop:g} %"
        return Restored(step, orders, f"evaluate fell from {self.before:.6g} to {value:.6g}, more than {allowed}")

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text; with the snapshot, if a cut has not been judged."""
        snapshot = None if self.snapshot is None else self.snapshot.state_dict()
        return {"snapshot": snapshot, "before": self.before, "due": self.due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; the snapshot is then in memory."""
        self.cancel()
        self.snapshot = None if state["snapshot"] is None else Snapshot.from_state_dict(state["snapshot"])
        self.before, self.due = float(state["before"]), int(state["due"])
