"""Who is told what a run does: the command line, a notebook, or nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from compressm.compression import Cut, Restored
from compressm_lab.runs.records import Evaluation, PenaltyRecord, TruncationRecord
from compressm_lab.training.config import ConfigError, Recipe
from compressm_lab.training.plan import Plan


@runtime_checkable
class RunLogger(Protocol):
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

    def __init__(self, *listeners: RunLogger) -> None:
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


class TensorBoard(Silent):
    """Loss, accuracy and learning rate of every evaluation, and the order of every layer after a cut."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"TensorBoard events need the package tensorboard: pip install tensorboard ({error})"
            ) from None
        self._open, self._folder = SummaryWriter, folder
        self._writer: Any = None

    def begins(self, recipe: Recipe, plan: Plan, step: int) -> None:
        # Where a run goes on, what it had written beyond its last checkpoint comes again.
        self._writer = self._open(str(self._folder), purge_step=step + 1 if step else None)
        self._writer.add_text("recipe", f"{recipe.name}, {recipe.label}, seed {recipe.seed}", step)

    def evaluated(self, evaluation: Evaluation) -> None:
        values = {"loss": evaluation.loss, "accuracy": evaluation.accuracy, "learning rate": evaluation.learning_rate}
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(f"{name}/{evaluation.split}", value, evaluation.step)
        self._writer.flush()

    def compared(self, record: PenaltyRecord | TruncationRecord) -> None:
        if isinstance(record, PenaltyRecord):
            self._writer.add_scalar(f"penalty/{record.kind}", record.value, record.step)
            self._writer.flush()

    def happened(self, event: Cut | Restored) -> None:
        orders = {event.module: event.rank} if isinstance(event, Cut) else event.orders
        for module, order in orders.items():
            self._writer.add_scalar(f"order/{module or 'model'}", order, event.step)
        self._writer.flush()
