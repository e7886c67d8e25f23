"""Mixers of Mamba-2 and gated delta nets that keep maps of keys and queries behind convolution and activation."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from compressm.adapters.base import adapter_of, named_kinds, parameter_of
from compressm.adapters.memory import KEY_MAP, QUERY_MAP, MemoryAdapter
from compressm.adapters.transformers.config import PACKAGE


class MappedForward(nn.Module, ABC):
    """A mixer with a forward pass of its own while it has maps of keys and queries; the state then has fewer rows.

    The convolution keeps all its channels, and so does its cache.
    """

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        if self._parameters.get(KEY_MAP) is None:
            own: Tensor = super().forward(hidden_states, cache_params, attention_mask, **kwargs)
            return own
        return self.mapped_forward(hidden_states, cache_params, attention_mask)

    @abstractmethod
    def mapped_forward(self, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
        """The forward pass with maps."""


class MappedMamba2(MappedForward):
    """A Mamba-2 mixer with B ← B · key_map and C ← C · query_map."""

    def mapped_forward(self, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
        mixer: Any = self
        u = _without_padding(x, mask)
        projected = mixer.in_proj(u * getattr(mixer, "ssm_in_multiplier", 1)) * getattr(mixer, "mup_vector", 1)
        gate, u, step = torch.split(projected, [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
        state = _last_state(cache, mixer.layer_idx)
        u = _without_padding(_convolved(mixer, u, mixer.act, cache), mask)
        inner, per_group = mixer.intermediate_size, (mixer.conv_dim - mixer.intermediate_size) // 2
        values, B, C = torch.split(u, [inner, per_group, per_group], dim=-1)
        B, C = _through_maps(mixer, B, C, mixer.n_groups)
        y = _scanned(mixer, values, step, B, C, state, cache).to(x)
        return _projected_out(mixer, y, gate)


class MappedDeltaNet(MappedForward):
    """A gated delta net with k ← k · key_map and q ← q · query_map before their norms: keys keep the length 1."""

    def mapped_forward(self, x: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
        mixer: Any = self
        adapter: Any = adapter_of(type(self))
        given = _without_padding(x, mask)
        u, gate = adapter.inputs(mixer, given)
        strength, step = adapter.gates(mixer, given)
        state = _last_state(cache, mixer.layer_idx)
        u = _convolved(mixer, u, silu, cache)
        queries, keys, values = torch.split(u, [mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        keys, queries = _through_maps(mixer, keys, queries, mixer.num_k_heads)
        shared = mixer.num_v_heads // mixer.num_k_heads
        is_step = state is not None and x.shape[1] == 1
        rule = _function(mixer, f"torch_{'recurrent' if is_step else 'chunk'}_gated_delta_rule")
        y, last = rule(
            *(part.repeat_interleave(shared, dim=2) for part in (queries, keys)),
            values.reshape(*x.shape[:2], -1, mixer.head_v_dim),
            g=-torch.exp(mixer.A_log.float()) * softplus(step.float() + mixer.dt_bias),
            beta=strength,
            initial_state=state,
            output_final_state=cache is not None,
            use_qk_l2norm_in_kernel=True,
        )
        if cache is not None:
            cache.update_recurrent_state(last, mixer.layer_idx)
        return adapter.read_out(mixer, y.reshape(-1, mixer.head_v_dim), gate, x.shape)


class MappedAdapter(MemoryAdapter[nn.Module]):
    """An adapter of mixers that may keep maps of keys and queries behind convolution and activation."""

    OPTIONAL = frozenset({KEY_MAP, QUERY_MAP})
    UNDECAYED = OPTIONAL
    # The axis of states in caches.
    STATE_AXIS: ClassVar[int] = -1
    # The forward pass with maps.
    FORWARD: ClassVar[type[MappedForward]]

    def maps(self, module: nn.Module) -> tuple[Tensor, Tensor] | None:
        keys, queries = (module._parameters.get(name) for name in (KEY_MAP, QUERY_MAP))
        return None if keys is None or queries is None else (keys, queries)

    def place(self, module: nn.Module, path: str) -> tuple[Any, str]:
        return (MapPlace(module), path) if path in self.OPTIONAL else super().place(module, path)

    def rows_and_maps(self, module: nn.Module) -> tuple[int, int | None]:
        """The number of rows of every member of the bank, and the number of states if maps follow them."""
        maps = self.maps(module)
        return next(iter(self.rows(module).values())).places[0].shape[-1], None if maps is None else maps[0].shape[-1]

    def sizes_at(self, module: nn.Module, order: int) -> dict[str, tuple[int, int]]:
        """The axis of rows, and their number at this order, of every parameter and buffer that grows with it."""
        fewer = self.rows_and_maps(module)[0] - order
        found = {}
        for name, rows in self.rows(module).items():
            blocks = sum(len(place) for place in rows.places)
            found[name] = (0, len(parameter_of(module, name)) - blocks * fewer)
        return found

    def add_maps_(self, module: nn.Module, order: int) -> None:
        """Give the module empty maps of this order."""
        bank, rows = next(iter(self.rows(module).values())).places[0].shape
        like = parameter_of(module, self.JOINS[KEY_MAP])
        for name in (KEY_MAP, QUERY_MAP):
            empty = torch.empty(bank, rows, order, device=like.device, dtype=like.dtype)
            setattr(*self.place(module, name), nn.Parameter(empty))


def window_bytes(module: nn.Module, channels: int) -> int:
    """The bytes of the last inputs of this many channels of the convolution."""
    weight = parameter_of(module, "conv1d.weight")
    return channels * weight.shape[-1] * weight.element_size()


def _without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask[:, :, None].to(x)


def _through_maps(mixer: Any, keys: Tensor, queries: Tensor, bank: int) -> tuple[Tensor, Tensor]:
    """Keys and queries behind the maps: (batch, length, bank, states)."""
    keys, queries = (
        torch.einsum("blgn,gnr->blgr", part.reshape(*part.shape[:2], bank, -1), matrix.to(part))
        for part, matrix in ((keys, mixer.key_map), (queries, mixer.query_map))
    )
    return keys, queries


def _last_state(cache: Any, layer: int) -> Tensor | None:
    """The state after the steps before; caches of transformers 5.17 have no method for it."""
    if cache is None or not cache.has_previous_state(layer):
        return None
    found: Tensor = cache.layers[layer].recurrent_states[0]
    return found


def _convolved(mixer: Any, u: Tensor, activation: Callable[[Tensor], Tensor], cache: Any) -> Tensor:
    """The activation of the causal convolution; the cache gives and takes the last inputs."""
    length, u = u.shape[1], u.mT
    if cache is not None:
        u = cache.update_conv_state(u, mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size)
    return activation(mixer.conv1d(u)[..., : u.shape[-1]][..., -length:]).mT


def _scanned(
    mixer: Any, values: Tensor, step: Tensor, B: Tensor, C: Tensor, state: Tensor | None, cache: Any
) -> Tensor:
    """The scan of transformers, with kernels where it has them; it takes the size of the state from B."""
    batch, length, _ = values.shape
    A, values = -torch.exp(mixer.A_log.float()), values.view(batch, length, mixer.num_heads, mixer.head_dim)
    if state is not None and length == 1:
        wide = (mixer.num_heads, mixer.head_dim)
        found = _function(mixer, "mamba2_selective_state_update")(
            state,  # changed in place
            *(values[:, 0], step.mT.expand(-1, *wide), A[:, None, None].expand(*wide, B.shape[-1]), B[:, 0], C[:, 0]),
            mixer.D[:, None].expand(wide),
            dt_bias=mixer.dt_bias[:, None].expand(wide),
            dt_softplus=True,
        )
    else:
        found = _function(mixer, "mamba2_chunk_scan")(
            *(values, step, A, B, C),
            chunk_size=mixer.chunk_size,
            D=mixer.D,
            dt_bias=mixer.dt_bias,
            initial_states=state,
            dt_softplus=True,
            dt_limit=mixer.time_step_limit,
            return_final_states=cache is not None,
        )
        if cache is not None:
            found, last = found
            cache.update_recurrent_state(last, mixer.layer_idx)
    y: Tensor = found.reshape(batch, length, -1)
    return y


def _function(mixer: nn.Module, name: str) -> Any:
    """A function of the file that defines the mixer's own class."""
    own = next(kind for kind in type(mixer).__mro__ if kind.__module__.partition(".")[0] == PACKAGE)
    return vars(sys.modules[own.__module__])[name]


def _projected_out(mixer: Any, y: Tensor, gate: Tensor) -> Tensor:
    """The gated norm, which FalconH1 may leave out, and the output projection."""
    y = mixer.norm(y, gate) if getattr(mixer, "mamba_rms_norm", True) else y * silu(gate)
    found: Tensor = mixer.out_proj(y.to(mixer.out_proj.weight.dtype))
    return found


@cache
def mapped_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a kind of mixers that can keep maps."""
    adapter = adapter_of(kind)
    assert isinstance(adapter, MappedAdapter)
    # For pickles: the metaclass of abstract classes would take its own module.
    own = {"__doc__": f"A {kind.__name__} that keeps maps.", "__module__": __name__}
    return type(f"Mapped{kind.__name__}", (adapter.FORWARD, kind), own)


def __getattr__(name: str) -> Any:
    """The kinds of `mapped_kind` by name, for pickles."""
    for path in named_kinds():
        owner, _, kind = path.rpartition(".")
        if name == f"Mapped{kind}" and owner in sys.modules:
            return mapped_kind(vars(sys.modules[owner])[kind])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def set_map_(mixer: nn.Module, name: str, value: nn.Parameter | None) -> None:
    """Give the mixer a map, or take it away; the mixer becomes one of `mapped_kind`."""
    if not isinstance(mixer, MappedForward):
        mixer.__class__ = mapped_kind(type(mixer))  # type: ignore[arg-type]  # mypy takes its hash for that of a module
        for other in (KEY_MAP, QUERY_MAP):
            mixer.register_parameter(other, None)
    setattr(mixer, name, value)


class MapPlace:
    """A mixer as the owner of its maps, which it does not have before the first cut that gives it some."""

    def __init__(self, mixer: nn.Module) -> None:
        vars(self)["mixer"] = mixer

    def __getattr__(self, name: str) -> nn.Parameter | None:
        return vars(self)["mixer"]._parameters.get(name) if name in (KEY_MAP, QUERY_MAP) else vars(self)[name]

    def __setattr__(self, name: str, value: nn.Parameter | None) -> None:
        set_map_(vars(self)["mixer"], name, value)
