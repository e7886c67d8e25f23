"""A callback that cuts a model while the Trainer of Lightning trains it."""

from __future__ import annotations

from typing import Any

from torch import nn

from compressm.errors import CompressionError
from compressm.integrations.training import CallbackOfTrainer, When, plain_optimizer, require_package
from compressm.layers.parameters import hold_
from compressm.saving.orders import accept_orders_

require_package("lightning", "lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402

# Strategies by a part of their name that keep parts of parameters in every process.
_SHARDING = ("FSDP", "DeepSpeed", "ModelParallel", "XLA")


class CompressionCallback(CallbackOfTrainer, Callback):
    """A callback for `Trainer(callbacks=[CompressionCallback(when=..., keep=...)])`; it cuts by `Compressor`.

    `when` are numbers of `trainer.global_step`, which counts the steps of all optimizers, or a function of the number
    of all of them; further options are those of `Compressor`. Checkpoints hold its state, and `ckpt_path` resumes any
    of them, whatever its orders are. Averages of `WeightAveraging` and `StochasticWeightAveraging` follow the cuts. If
    a trainer has several callbacks, such as for other layers at other steps, all but one need a `name` of their own.

    A module that holds its own average is cut by `part="model", follow=["average"]`, paths in the module: functions
    such as `calibrate` then get the part.
    """

    def __init__(self, *, when: When, keep: Any, name: str = "", part: str = "", **options: Any) -> None:
        super().__init__(when=when, keep=keep, name=name, part=part, **options)
        self._saved: Any = None
        self._ready: list[Any] = []
        self._states = 0

    @property
    def state_key(self) -> str:
        """The place of this callback's state in checkpoints."""
        return f"{super().state_key} {self._name}".rstrip()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let the model load weights of other orders, before the checkpoint is read."""
        if stage == "fit":
            self._compressor, self._saved, self._optimizers = None, None, []
        self._leave_()
        # An average that is copied from the model later has the model's hook.
        for model in (pl_module, *_averages(trainer)):
            self._ready.append(accept_orders_(model, lambda: self._optimizers))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the model as it was before."""
        self._leave_()
        if self._compressor is not None:
            hold_(self._compressor.model, self._compressor, ())  # its optimizers are not used again

    def _leave_(self) -> None:
        while self._ready:
            self._ready.pop().remove()

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
        averages = _averages(trainer)
        self._begin_(schedulers, total=total, step=trainer.global_step, saved=self._saved, averages=averages)
        self._saved = None
        self._states = self._metrics([])["states"]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Cut if that is due; the progress bar and the loggers say so."""
        if events := self._step_(trainer.global_step):
            found = self._metrics(events)
            self._states = found["states"]
            for logger in trainer.loggers:
                logger.log_metrics({name: float(value) for name, value in found.items()}, step=trainer.global_step)
            if (bar := trainer.progress_bar_callback) is not None:
                bar.print("\n".join(map(str, events)))
        pl_module.log("states", float(self._states), prog_bar=True, logger=False, on_step=True, on_epoch=False)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint of the trainer."""
        return {} if self._compressor is None else self._saved_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until the model and the optimizers are loaded."""
        self._saved = state_dict


def _averages(trainer: Trainer) -> list[nn.Module]:
    """The models in which callbacks of Lightning average the weights."""
    found = (vars(callback).get("_average_model") for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return [average for average in found if isinstance(average, nn.Module)]
