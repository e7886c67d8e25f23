"""The same figures as TensorBoard events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressm.compression import Cut, Restored
from compressm.runs.records import Evaluation, PenaltyRecord, TruncationRecord
from compressm.training.config import ConfigError, Recipe
from compressm.training.listening import Silent
from compressm.training.plan import Plan


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
