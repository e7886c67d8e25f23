"""Loggers of a run: the interface, several at once, none, and TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from compressm.compression.record import Event, orders_after
from compressm_lab.runs.records import Evaluation, PenaltyRecord, TruncationRecord
from compressm_lab.training.config import ConfigError, Recipe
from compressm_lab.training.plan import Plan


@runtime_checkable
class RunLogger(Protocol):
    """An observer of a run; the methods are called on the first process only."""

    def took_over(self, sentence: str) -> None:
        """The folder had the lock of a process that has ended; called before `begins`."""

    def begins(self, recipe: Recipe, plan: Plan, step: int) -> None:
        """Everything is built; `step` is above 0 if the run resumes."""

    def reached(self, step: int, loss: float) -> None:
        """Training reached a step; `loss` is the mean since the last evaluation."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """One split was evaluated."""

    def happened(self, event: Event) -> None:
        """A layer was cut, a cut was undone, or a schedule decided something."""

    def kept(self, step: int) -> None:
        """A cut was due, but no layer had enough states to lose; not called once a rollback has ended cutting."""

    def compared(self, record: PenaltyRecord | TruncationRecord) -> None:
        """A penalty was recorded, or a cut copy of the final model evaluated."""


class Several:
    """A logger that passes every call on to several others, in their order."""

    loggers: tuple[RunLogger, ...] = ()

    def __init__(self, *loggers: RunLogger) -> None:
        self.loggers = loggers

    def took_over(self, sentence: str) -> None:
        for logger in self.loggers:
            logger.took_over(sentence)

    def begins(self, recipe: Recipe, plan: Plan, step: int) -> None:
        for logger in self.loggers:
            logger.begins(recipe, plan, step)

    def reached(self, step: int, loss: float) -> None:
        for logger in self.loggers:
            logger.reached(step, loss)

    def evaluated(self, evaluation: Evaluation) -> None:
        for logger in self.loggers:
            logger.evaluated(evaluation)

    def happened(self, event: Event) -> None:
        for logger in self.loggers:
            logger.happened(event)

    def kept(self, step: int) -> None:
        for logger in self.loggers:
            logger.kept(step)

    def compared(self, record: PenaltyRecord | TruncationRecord) -> None:
        for logger in self.loggers:
            logger.compared(record)


class Silent(Several):
    """A logger that passes nothing on; subclasses write only the methods that they need."""


class TensorBoard(Silent):
    """A logger of TensorBoard events: every evaluation, penalty, and the order of every layer after a cut."""

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
        # A run that resumes writes again what it had written after its last checkpoint.
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

    def happened(self, event: Event) -> None:
        for module, order in orders_after(event).items():
            self._writer.add_scalar(f"order/{module or 'model'}", order, event.step)
        self._writer.flush()
