"""Mamba-2 mixers that keep maps of keys and queries behind convolution and activation."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from compressm.adapters.base import named_kinds
from compressm.adapters.memory import KEY_MAP, QUERY_MAP
from compressm.adapters.transformers.config import PACKAGE


class MappedForward(nn.Module):
    """The forward pass of a Mamba-2 mixer with B ← B · key_map and C ← C · query_map; the state has fewer rows.

    The convolution keeps all its channels, and so does its cache. Without maps it is the mixer's own forward pass.
    """

    def forward(
        self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        mixer: Any = self
        if mixer._parameters.get(KEY_MAP) is None:
            own: Tensor = super().forward(hidden_states, cache_params, attention_mask, **kwargs)
            return own
        x = hidden_states if attention_mask is None else hidden_states * attention_mask[:, :, None].to(hidden_states)
        projected = mixer.in_proj(x * getattr(mixer, "ssm_in_multiplier", 1)) * getattr(mixer, "mup_vector", 1)
        gate, u, step = torch.split(projected, [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
        state = _last_state(cache_params, mixer.layer_idx)
        u = _convolved(mixer, u, cache_params)
        u = u if attention_mask is None else u * attention_mask[:, :, None].to(u)
        inner, per_group = mixer.intermediate_size, (mixer.conv_dim - mixer.intermediate_size) // 2
        values, B, C = torch.split(u, [inner, per_group, per_group], dim=-1)
        B, C = (
            torch.einsum("blgn,gnr->blgr", part.view(*part.shape[:2], mixer.n_groups, -1), matrix.to(part))
            for part, matrix in ((B, mixer.key_map), (C, mixer.query_map))
        )
        y = _scanned(mixer, values, step, B, C, state, cache_params).to(hidden_states)
        return _projected_out(mixer, y, gate)


def _last_state(cache: Any, layer: int) -> Tensor | None:
    """The state after the steps before; caches of transformers 5.17 have no method for it."""
    if cache is None or not cache.has_previous_state(layer):
        return None
    found: Tensor = cache.layers[layer].recurrent_states[0]
    return found


def _convolved(mixer: Any, u: Tensor, cache: Any) -> Tensor:
    """The activation of the causal convolution; the cache gives and takes the last inputs."""
    length, u = u.shape[1], u.mT
    if cache is not None:
        u = cache.update_conv_state(u, mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size)
    found: Tensor = mixer.act(mixer.conv1d(u)[..., : u.shape[-1]][..., -length:])
    return found.mT


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
    return type(f"Mapped{kind.__name__}", (MappedForward, kind), {"__doc__": f"A {kind.__name__} that keeps maps."})


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
