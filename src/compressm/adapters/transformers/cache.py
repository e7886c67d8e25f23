"""A cache of transformers that goes through cuts of its model while a text is being written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from compressm.adapters.base import find
from compressm.adapters.transformers.mamba import MixerAdapter
from compressm.adapters.transformers.mapped import MappedAdapter
from compressm.errors import AdapterError
from compressm.layers.base import StateHolder, StateMap, hold_states_

_HELD = (MixerAdapter, MappedAdapter)


@final
class HeldCache(StateHolder):
    """A cache whose states go through every cut of the model, as long as this object lives.

    Ŝ = Wᵀ S is exactly the state that a reduced Mamba-2 mixer would have had on the same inputs; the delta rule would
    also have erased otherwise, so there it is near. A selection of the states of a Mamba-1 mixer is exact too, if no
    norms follow; a projection, which averages rates, is near. Windows of convolutions follow a selection in Mamba-2,
    and stay in Mamba-1; behind a fit the last steps in them are those of the rows before it.
    """

    def __init__(self, model: nn.Module, cache: Any) -> None:
        held: list[Any] = [module for module, adapter in find(model).values() if isinstance(adapter, _HELD)]
        if not held:
            raise AdapterError(
                f"a {type(model).__name__} has no Mamba mixer and no gated delta net of transformers, whose cache could"
                " be held"
            )
        layers = getattr(cache, "layers", None)
        if layers is None or not all(len(layers) > module.layer_idx for module in held):
            raise AdapterError(
                f"cache is a {type(cache).__name__}, expected the cache that the model gives with use_cache=True"
            )
        self.cache = cache
        for module in held:
            hold_states_(module, self)

    def carry_(self, layer: nn.Module, through: StateMap | None) -> Callable[[], None]:
        adapter = next(one for _, one in find(layer).values())
        assert isinstance(adapter, _HELD)
        if through is None:
            raise AdapterError(f"the cut of this {type(layer).__name__} gives no map of states: end the text first")
        own: Any = self.cache.layers[layer.layer_idx]
        before = dict(own.recurrent_states), dict(own.conv_states)

        def undo() -> None:
            for held, then in zip((own.recurrent_states, own.conv_states), before, strict=True):
                held.update(then)

        axis = adapter.STATE_AXIS if isinstance(adapter, MappedAdapter) else -1
        new = {
            k: through(S.movedim(axis, -1)).movedim(-1, axis).contiguous()
            for k, S in before[0].items()
            if S is not None
        }
        own.recurrent_states.update(new)
        if isinstance(adapter, MappedAdapter):
            windows = {k: self._window(layer, adapter, u, through) for k, u in before[1].items() if u is not None}
            own.conv_states.update(windows)
        return undo

    def _window(self, layer: nn.Module, adapter: MappedAdapter, window: Tensor, through: StateMap) -> Tensor:
        """The last inputs of the convolution, (batch, channels, steps), with the rows of the states that there are.

        Those of keys and of queries follow each other.
        """
        if getattr(through, "keeps_windows", False):
            return window
        rows = adapter.rows(layer)["conv1d.weight"]
        places = sorted(rows.places, key=lambda place: int(place[0, 0]))
        kept = [through(window[:, place].movedim(2, -1)).movedim(-1, 2).flatten(1, 2) for place in places]
        first, last = int(places[0][0, 0]), int(places[-1][-1, -1])
        return torch.cat([window[:, :first], *kept, window[:, last + 1 :]], dim=1)
