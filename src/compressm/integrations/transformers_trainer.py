"""A callback that cuts a model while the Trainer of transformers trains it."""

from __future__ import annotations

import base64
import gc
import io
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from compressm.compression.record import Event
from compressm.errors import CompressionError, warn_caller
from compressm.integrations.training import CallbackOfTrainer, When, plain_optimizer, require_package, saved_state
from compressm.layers import SSMLayer
from compressm.saving.orders import accept_orders_
from compressm.saving.rebuilding import ssm_layers

require_package("transformers", "trainer")
require_package("accelerate", "trainer")

from transformers import Trainer, TrainerCallback  # noqa: E402

# The place of our state in trainer_state.json.
_KEY = "compressm"


class CompressionCallback(CallbackOfTrainer, TrainerCallback):
    """A callback for `Trainer(..., callbacks=[CompressionCallback(when=..., keep=...)])`; it cuts by `Compressor`.

    `when` are steps of the optimizer (`global_step`), or a function of their number; further options are those of
    `Compressor`. Checkpoints of the trainer hold its state, and any of them can be resumed, whatever its orders are. If
    a trainer has several callbacks, such as for other layers at other steps, all but one need a `name` of their own.
    `part` is the path of the model in the trainer's to cut, if not all of it; `follow` may be paths too.
    """

    def __init__(self, *, when: When, keep: Any, name: str = "", part: str = "", **options: Any) -> None:
        super().__init__(when=when, keep=keep, name=name, part=part, **options)
        self._key = f"{_KEY} {name}".rstrip()
        self._trainer: Any = lambda: None
        self._ready: Any = lambda: None
        self._is_late = True

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        """Let the model load weights of other orders: the trainer does so before training begins."""
        self._is_late = False
        self._accept_(model)
        trainer = _trainer_of(self, state)
        if trainer is not None and trainer.model_init is not None:
            trainer.model_init = self._accepting(trainer.model_init)

    def _accept_(self, model: Any) -> Any:
        if isinstance(model, nn.Module) and self._ready() is not model:
            accept_orders_(model, lambda: self._optimizers)
            self._ready = weakref.ref(model)
        return model

    def _accepting(self, model_init: Callable[..., Any]) -> Callable[..., Any]:
        """The trainer's `model_init`, whose models load weights of other orders."""

        @wraps(model_init)
        def accepting(*given: Any) -> Any:
            return self._accept_(model_init(*given))

        return accepting

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, lr_scheduler: Any = None,
        **rest: Any,
    ) -> None:  # fmt: skip
        """Make the compressor, and restore its state if the training resumes."""
        if args.deepspeed or args.fsdp:
            raise CompressionError(
                f"the trainer shards the model ({'deepspeed' if args.deepspeed else 'fsdp'}), expected a trainer on one"
                " device or with DistributedDataParallel"
            )
        trainer = _trainer_of(self, state)
        if trainer is not None:
            self._require_own_name(trainer)
        self._accept_(model)
        if self._is_late and args.save_strategy != "no":
            _warn_of_resuming(model)
        self._trainer = (lambda: None) if trainer is None else weakref.ref(trainer)
        self._model = model if trainer is None else trainer.model_wrapped
        self._compressor, self._optimizers = None, [plain_optimizer(optimizer)]
        saved = _with_tensors(state.stateful_callbacks.get(self._key))
        self._begin_([lr_scheduler], total=state.max_steps, step=state.global_step, saved=saved)
        state.stateful_callbacks[self._key] = self._state()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Cut if that is due, and log it."""
        assert self._compressor is not None
        due = self._compressor.due
        events = self._step_(state.global_step)
        # A schedule may decide something without an event.
        if (due is not None and due <= state.global_step) or self._key not in state.stateful_callbacks:
            state.stateful_callbacks[self._key] = self._state()
        state.stateful_callbacks[self._key]["compressor"]["seen"] = state.global_step
        if events:
            self._tell_others_(state)
            self._log(events, state)

    def on_save(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Warn if the checkpoint lacks something: trainer_state.json holds no tensors."""
        if self._compressor is not None and _has_snapshot(self._compressor.state_dict()):
            warn_caller(
                "this checkpoint does not hold what the guard would restore: a training that resumes from it keeps the"
                " cuts that the guard has not judged yet"
            )
        if self._model is not None and self._place.outside(self._model):
            warn_caller(
                "this checkpoint does not hold the models in follow: save the state of each yourself, and load it"
                " before a training that resumes"
            )

    def _require_own_name(self, trainer: Trainer) -> None:
        others = [one for one in trainer.callback_handler.callbacks if isinstance(one, CompressionCallback)]
        if any(other is not self and other._key == self._key for other in others):
            raise CompressionError(
                f"name: the trainer has {len(others)} of these callbacks, two of them with the name {self._name!r};"
                " expected a name of its own for each, CompressionCallback(..., name='second'), which is the place of"
                " its state in checkpoints"
            )

    def _tell_others_(self, state: Any) -> None:
        """Give the states of other callbacks the orders after a cut of this one."""
        saved = state.stateful_callbacks[self._key]
        for key, other in state.stateful_callbacks.items():
            if key.startswith(f"{_KEY} ") or key == _KEY:
                other.update(orders=saved["orders"], groups=saved["groups"])

    def _state(self) -> dict[str, Any]:
        assert self._compressor is not None
        assert self._model is not None
        saved = saved_state(self._compressor, self._model, self._optimizers)
        if _has_snapshot(saved["compressor"]):
            saved["compressor"]["watch"] = None
        return _as_json(saved)

    def _log(self, events: list[Event], state: Any) -> None:
        found: dict[str, Any] = dict(self._metrics(events))
        if (trainer := self._trainer()) is not None:
            trainer.log(found)  # to state.log_history, and to all that reports
        else:
            state.log_history.append({**found, "step": state.global_step})


def _has_snapshot(state: dict[str, Any]) -> bool:
    return state["watch"] is not None and state["watch"].get("snapshot") is not None


def _as_json(saved: dict[str, Any]) -> dict[str, Any]:
    """A state whose memory, which may hold tensors, is text."""
    compressor = saved["compressor"]
    if "decided" not in compressor:
        return saved
    torch.save(compressor["decided"]["memory"], stored := io.BytesIO())
    memory = base64.b64encode(stored.getvalue()).decode()
    return {**saved, "compressor": {**compressor, "decided": {**compressor["decided"], "memory": memory}}}


def _with_tensors(saved: Any) -> Any:
    """A state as `_as_json` got it; others are left for `load_state_dict` to refuse."""
    compressor: Any = saved.get("compressor") if isinstance(saved, dict) else None
    decided: Any = compressor.get("decided") if isinstance(compressor, dict) else None
    if not isinstance(decided, dict) or not isinstance(decided.get("memory"), str):
        return saved
    try:
        memory = torch.load(io.BytesIO(base64.b64decode(decided["memory"])), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever damaged text raises
        raise CompressionError(
            f"trainer_state.json: the memory of the schedule cannot be read ({type(error).__name__}: {error}):"
            " resume from another checkpoint"
        ) from error
    return {**saved, "compressor": {**compressor, "decided": {**decided, "memory": memory}}}


def _warn_of_resuming(model: Any) -> None:
    """Say what a callback that was added later cannot do: the trainer loads a checkpoint before it calls it."""
    if not all(isinstance(layer, SSMLayer) for layer in ssm_layers(model).values()):
        warn_caller(
            "this CompressionCallback was added to the trainer later, so no checkpoint from after a cut can be resumed:"
            " torch would report a size mismatch; pass it to the constructor, Trainer(..., callbacks=[callback])"
        )


def _trainer_of(callback: TrainerCallback, state: Any) -> Trainer | None:
    """The trainer that calls a callback with its state; transformers does not tell."""
    for thing in gc.get_objects():
        if issubclass(type(thing), Trainer) and vars(thing).get("state") is state:
            handler = vars(thing).get("callback_handler")
            if handler is not None and any(own is callback for own in handler.callbacks):
                return thing
    return None
