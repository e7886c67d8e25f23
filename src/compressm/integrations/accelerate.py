"""A compressor for models and optimizers that Accelerate prepared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import finalize, ref

from torch import nn

from compressm.compression import Compressor, Schedule, rewrap_
from compressm.compression.distributed import unwrapped, wrappers_in
from compressm.compression.record import Event
from compressm.errors import CompressionError
from compressm.families.choices import require_count
from compressm.integrations.training import (
    Place,
    load_followers_,
    metrics,
    plain_optimizer,
    require_package,
    saved_state,
    sort_saved_,
)
from compressm.saving.orders import accept_orders_

require_package("accelerate", "accelerate")

from accelerate import Accelerator  # noqa: E402

_ALLOWED = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU")


class AcceleratedCompressor:
    """A compressor of what `accelerator.prepare` returned; `accelerator.save_state` and `load_state` include it.

    Make it on all processes, after `prepare`, and call `step()` after `optimizer.step()`: it counts the steps in which
    gradients were synchronised, so accumulation needs no arithmetic. Further options are those of `Compressor`.
    `load_state` takes checkpoints of any orders, before training and in its middle. Cuts are logged to the trackers.
    `part` is the path of the model in the prepared one to cut, if not all of it; `follow` may be paths too.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any | Sequence[Any] | None = None,
        *,
        when: Iterable[int] | Schedule,
        keep: Any,
        part: str = "",
        follow: Sequence[nn.Module | str] = (),
        **options: Any,
    ) -> None:
        kind = accelerator.distributed_type.name
        if kind not in _ALLOWED:
            raise CompressionError(
                f"the accelerator has the distributed type {kind}, expected one of {', '.join(_ALLOWED)}: what is"
                " sharded cannot be cut here"
            )
        given = [] if optimizer is None else list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        self._accelerator, self._model = accelerator, model
        self._optimizers = optimizers = [plain_optimizer(one) for one in given]
        self._place = Place(part, follow)
        options |= {"follow": self._place.followers(model)}
        self._compressor = Compressor(self._place.part(model), optimizers or None, when=when, keep=keep, **options)
        self._count = 0
        accept_orders_(unwrapped(model), lambda: optimizers)
        state = _StateOf(self)
        accelerator.register_for_checkpointing(state)
        # `free_memory` empties all lists of the accelerator but that of these states.
        finalize(self, _forget_, accelerator, state).atexit = False

    @property
    def compressor(self) -> Compressor:
        """The compressor itself."""
        return self._compressor

    @property
    def history(self) -> list[Event]:
        """The cuts and restorations of the training."""
        return self._compressor.history

    @property
    def count(self) -> int:
        """The number of the last step of the optimizer."""
        return self._count

    def step(self) -> list[Event]:
        """Count a step of the optimizer, unless gradients are still accumulated, and cut if that is due."""
        if not self._accelerator.sync_gradients:
            return []
        events = self._place.step_(self._compressor, self._count + 1, self._model)
        self._count += 1
        if events:
            self._accelerator.log(metrics(events, self._place.part(self._model)), step=self._count)
        return events

    def state_dict(self) -> dict[str, Any]:
        """The state that `accelerator.save_state` writes."""
        follow = self._place.outside(self._model)
        return saved_state(self._compressor, self._model, self._optimizers, follow) | {"count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, after `accelerator.load_state` has loaded model and optimizers."""
        count = require_count("count in the state of the compressor", state.get("count"), low=0)
        if wrappers_in(self._model):
            rewrap_(self._model)
        sort_saved_(self._model, self._optimizers, dict(state))
        load_followers_(self._place.outside(self._model), state)
        self._compressor.load_state_dict(state["compressor"])
        self._count = count


class _StateOf:
    """The state of a compressor in an accelerator's list, which does not keep the compressor and its model alive."""

    def __init__(self, compressor: AcceleratedCompressor) -> None:
        self._compressor = ref(compressor)

    def state_dict(self) -> dict[str, Any]:
        compressor = self._compressor()
        assert compressor is not None  # else it is in no list
        return compressor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        compressor = self._compressor()
        assert compressor is not None
        compressor.load_state_dict(state)


def _forget_(accelerator: Accelerator, state: _StateOf) -> None:
    if state in accelerator._custom_objects:
        accelerator._custom_objects.remove(state)
