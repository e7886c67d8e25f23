"""A callback that cuts a model while the Trainer of Lightning trains it."""

from __future__ import annotations

from typing import Any

from torch import nn

from compressm.errors import CompressionError
from compressm.integrations.training import (
    CallbackOfTrainer,
    When,
    metrics,
    plain_optimizer,
    require_package,
    saved_state,
)
from compressm.saving.orders import accept_orders_

require_package("lightning", "lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402

# Strategies by a part of their name that keep parts of parameters in every process.
_SHARDING = ("FSDP", "DeepSpeed", "ModelParallel", "XLA")


class CompressionCallback(CallbackOfTrainer, Callback):
    """A callback for `Trainer(callbacks=[CompressionCallback(when=..., keep=...)])`; it cuts by `Compressor`.

    `when` are numbers of `trainer.global_step`, which counts the steps of all optimizers, or a function of the number
    of all of them; further options are those of `Compressor`. Checkpoints hold its state, and `ckpt_path` resumes any
    of them, whatever its orders are.
    """

    def __init__(self, *, when: When, keep: Any, **options: Any) -> None:
        super().__init__(when=when, keep=keep, **options)
        self._saved: Any = None
        self._ready: Any = None
        self._states = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the model load weights of other orders, before the checkpoint is read."""
        self._optimizers = []
        if stage == "fit":
            self._compressor = self._saved = None
        if self._ready is not None:
            self._ready.remove()
        self._ready = accept_orders_(pl_module, lambda: self._optimizers)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the model as it was before."""
        if self._ready is not None:
            self._ready.remove()
        self._ready = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the compressor, and restore its state if the training resumes."""
        kind = type(trainer.strategy).__name__
        if any(part in kind for part in _SHARDING):
            raise CompressionError(f"strategy: a {kind} shards the model, expected one device or DDPStrategy")
        model = trainer.strategy.model
        self._model = model if isinstance(model, nn.Module) else pl_module
        self._optimizers = [plain_optimizer(one) for one in trainer.optimizers]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        total = trainer.max_steps if trainer.max_steps > 0 else trainer.estimated_stepping_batches
        self._begin_(schedulers, total=total, step=trainer.global_step, saved=self._saved)
        self._saved = None
        self._states = metrics([], self._model)["states"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Cut if that is due; the progress bar and the loggers say so."""
        assert self._compressor is not None
        assert self._model is not None
        if events := self._compressor.step(trainer.global_step):
            found = metrics(events, self._model)
            self._states = found["states"]
            for logger in trainer.loggers:
                logger.log_metrics({name: float(value) for name, value in found.items()}, step=trainer.global_step)
            if (bar := trainer.progress_bar_callback) is not None:
                bar.print("\n".join(map(str, events)))
        pl_module.log("states", float(self._states), prog_bar=True, logger=False, on_step=True, on_epoch=False)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint of the trainer."""
        if self._compressor is None or self._model is None:
            return {}
        return saved_state(self._compressor, self._model, self._optimizers)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until the model and the optimizers are loaded."""
        self._saved = state_dict
