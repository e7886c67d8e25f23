"""Who is told what a run does: the command line, a notebook, or nobody."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from compressm.compression import Cut, Restored
from compressm.runs.records import Evaluation, PenaltyRecord, TruncationRecord
from compressm.training.config import Recipe
from compressm.training.plan import Plan


@runtime_checkable
class Listener(Protocol):
    """Every method is called on the first process only."""

    def begins(self, recipe: Recipe, plan: Plan, step: int) -> None:
        """After everything was built; `step` is above 0 where a run goes on."""

    def reached(self, step: int, loss: float) -> None:
        """The mean loss since the record before."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """One split."""

    def happened(self, event: Cut | Restored) -> None:
        """A cut, or its undoing."""

    def kept(self, step: int) -> None:
        """A cut was due, and no layer had enough to lose."""

    def compared(self, record: PenaltyRecord | TruncationRecord) -> None:
        """The value of a penalty at an evaluation, or one split by the final model cut once."""


class Silent:
    """Hears nothing."""

    def begins(self, recipe: Recipe, plan: Plan, step: int) -> None: ...

    def reached(self, step: int, loss: float) -> None: ...

    def evaluated(self, evaluation: Evaluation) -> None: ...

    def happened(self, event: Cut | Restored) -> None: ...

    def kept(self, step: int) -> None: ...

    def compared(self, record: PenaltyRecord | TruncationRecord) -> None: ...


class Several:
    """Tells all of them, in their order."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    def begins(self, recipe: Recipe, plan: Plan, step: int) -> None:
        for listener in self.listeners:
            listener.begins(recipe, plan, step)

    def reached(self, step: int, loss: float) -> None:
        for listener in self.listeners:
            listener.reached(step, loss)

    def evaluated(self, evaluation: Evaluation) -> None:
        for listener in self.listeners:
            listener.evaluated(evaluation)

    def happened(self, event: Cut | Restored) -> None:
        for listener in self.listeners:
            listener.happened(event)

    def kept(self, step: int) -> None:
        for listener in self.listeners:
            listener.kept(step)

    def compared(self, record: PenaltyRecord | TruncationRecord) -> None:
        for listener in self.listeners:
            listener.compared(record)
