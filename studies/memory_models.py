"""Mamba-2 and gated delta nets of transformers, several of one size at once, with a fast forward pass of our own.

A bank is K models: parameters (K, …) under the names that transformers gives them. Its forward pass computes what
theirs computes (tests compare them), in chunks of 64 steps by matrix products: a CUDA graph of a step trains many small
models in the time of one. Cuts are made by the library on the models of transformers themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu, softplus

CHUNK = 64
_EPS = {"Mamba-2": 1e-5, "Gated DeltaNet": 1e-6}
FAMILIES = tuple(_EPS)

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: `heads` of `head` values each, which share keys and queries in `groups`."""

    family: str
    vocabulary: int
    width: int
    depth: int
    order: int
    heads: int
    groups: int = 1
    mlp: int = 0  # of Gated DeltaNet; Mamba-2 has none

    @property
    def head(self) -> int:
        """The number of values of a head; together they are twice the width in Mamba-2, and the width otherwise."""
        return (2 if self.family == "Mamba-2" else 1) * self.width // self.heads


def make(shape: Shape, seed: int = 0) -> nn.Module:
    """A model of transformers, fresh."""
    torch.manual_seed(seed)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    common = {"vocab_size": shape.vocabulary, "hidden_size": shape.width, "num_hidden_layers": shape.depth, **tokens}
    if shape.family == "Mamba-2":
        from transformers import Mamba2Config, Mamba2ForCausalLM

        sizes = {"state_size": shape.order, "num_heads": shape.heads, "head_dim": shape.head, "n_groups": shape.groups}
        return Mamba2ForCausalLM(Mamba2Config(**common, **sizes, chunk_size=CHUNK)).eval()
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    sizes = {"linear_key_head_dim": shape.order, "linear_value_head_dim": shape.head}
    heads = {"linear_num_key_heads": shape.groups, "linear_num_value_heads": shape.heads}
    unused = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}  # no layer attends
    layers = {"layer_types": ["linear_attention"] * shape.depth, "intermediate_size": shape.mlp}
    layers |= {"initializer_range": 0.5 / shape.width**0.5}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**common, **sizes, **heads, **unused, **layers)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            # transformers starts with steps of 1.3, with which nearly every head forgets all at once. These are those
            # of Mamba-2, log-uniform from 0.001 to 0.1.
            step = torch.exp(torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)))
            parameter.data = step + torch.log(-torch.expm1(-step))
    return model


def stacked(models: Sequence[nn.Module]) -> Parameters:
    """The bank of some models of one size."""
    every = [dict(model.named_parameters()) for model in models]
    return {name: torch.stack([own[name].detach() for own in every]) for name in every[0]}


def loaded_(model: nn.Module, bank: Mapping[str, Tensor], member: int) -> nn.Module:
    """Put the values of one member of a bank into a model of its size."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(bank[name][member])
    return model


def forward(bank: Parameters, shape: Shape, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The logits (K, batch, length, vocabulary) of every member on its tokens (K, batch, length).

    Matrix products are in `dtype`; decays, norms and sums are in float32.
    """
    run = _Pass(bank, shape, dtype)
    hidden, _ = run.through(run.embedded(ids), None)
    return run.logits(hidden)


@dataclass
class Decoder:
    """A bank that reads one token a call; `state` holds the windows and the matrix states of its layers."""

    bank: Parameters
    shape: Shape
    state: list[tuple[Tensor, Tensor]]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, bank: Parameters, shape: Shape, batch: int, dtype: torch.dtype = torch.float32) -> Decoder:
        """A decoder of `batch` sequences that has read nothing."""
        return cls(bank, shape, list(_Pass(bank, shape, dtype).empty(batch)), dtype)

    @property
    def state_bytes(self) -> int:
        """The memory of what is kept between tokens."""
        return sum(part.numel() * part.element_size() for layer in self.state for part in layer)

    def __call__(self, ids: Tensor) -> Tensor:
        """The logits (K, batch, vocabulary) after one more token (K, batch); the state is changed in place."""
        run = _Pass(self.bank, self.shape, self.dtype)
        hidden, found = run.through(run.embedded(ids[..., None]), self.state)
        for kept, new in zip(self.state, found, strict=True):
            kept[0].copy_(new[0])
        return run.logits(hidden)[:, :, 0]


@dataclass
class _Pass:
    """One forward pass of a bank."""

    bank: Parameters
    shape: Shape
    dtype: torch.dtype

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x (K, batch, length, width) times a weight (K, out, width)."""
        weight = self.bank[name].to(self.dtype)
        return (x.flatten(1, 2).to(self.dtype) @ weight.mT).unflatten(1, x.shape[1:3])

    def wide(self, name: str) -> Tensor:
        """A vector of every member, for (K, batch, length, …)."""
        value = self.bank[name]
        return value.view(len(value), *(1,) * (4 - value.ndim), *value.shape[1:])

    def embedded(self, ids: Tensor) -> Tensor:
        """The rows of the embedding; as a product, whose gradient needs no sorting."""
        table = self.bank[self.names["embedding"]]
        chosen = ids[..., None] == torch.arange(table.shape[1], device=ids.device)
        return (chosen.flatten(1, 2).to(self.dtype) @ table.to(self.dtype)).unflatten(1, ids.shape[1:]).float()

    @property
    def names(self) -> dict[str, str]:
        """The names of what is not in a layer, and of a layer."""
        if self.shape.family == "Mamba-2":
            return {"embedding": "backbone.embeddings.weight", "norm": "backbone.norm_f.weight", "layer": "backbone"}
        return {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "layer": "model"}

    @property
    def is_mamba(self) -> bool:
        return self.shape.family == "Mamba-2"

    def normed(self, x: Tensor, name: str) -> Tensor:
        """RMS norm; the weights of Qwen are around 0."""
        weight = self.wide(name) + (0.0 if self.is_mamba else 1.0)
        return _rms(x.float(), _EPS[self.shape.family]) * weight

    def logits(self, hidden: Tensor) -> Tensor:
        return self.linear(self.normed(hidden, self.names["norm"]), "lm_head.weight").float()

    def empty(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Windows and states of all layers before the first token."""
        for k in range(self.shape.depth):
            taps = self.bank[f"{self.layer(k)}.conv1d.weight"]
            members, channels, _, width = taps.shape
            rows = (self.shape.groups, self.shape.heads // self.shape.groups, self.order(k), self.shape.head)
            yield (
                taps.new_zeros(members, batch, width - 1, channels, dtype=self.dtype),
                taps.new_zeros(members, batch, *rows, dtype=torch.float32),
            )

    def layer(self, k: int) -> str:
        """The path of a mixer."""
        return f"{self.names['layer']}.layers.{k}.{'mixer' if self.is_mamba else 'linear_attn'}"

    def order(self, k: int) -> int:
        """The states of a layer, behind its maps if it has any."""
        maps = self.bank.get(f"{self.layer(k)}.key_map")
        return self.rows(k) if maps is None else maps.shape[-1]

    def rows(self, k: int) -> int:
        """The rows of keys of a group."""
        channels = self.bank[f"{self.layer(k)}.conv1d.weight"].shape[1]
        return (channels - self.shape.heads * self.shape.head) // (2 * self.shape.groups)

    def through(
        self, x: Tensor, state: list[tuple[Tensor, Tensor]] | None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """All layers, and the state after them; without a state they read whole sequences."""
        after = []
        for k in range(self.shape.depth):
            path = self.layer(k).rpartition(".")[0]
            mix = self.mamba if self.is_mamba else self.delta
            y, new = mix(self.normed(x, f"{path}.{'norm' if self.is_mamba else 'input_layernorm'}.weight"), k, state)
            x = x + y
            after.append(new)
            if not self.is_mamba:
                u = self.normed(x, f"{path}.post_attention_layernorm.weight")
                gated = silu(self.linear(u, f"{path}.mlp.gate_proj.weight")) * self.linear(
                    u, f"{path}.mlp.up_proj.weight"
                )
                x = x + self.linear(gated, f"{path}.mlp.down_proj.weight")
        return x, after

    def convolved(self, u: Tensor, k: int, state: Any) -> tuple[Tensor, Tensor]:
        """SiLU of the causal convolution of every channel, and the window for the next token."""
        taps, bias = self.bank[f"{self.layer(k)}.conv1d.weight"], self.bank.get(f"{self.layer(k)}.conv1d.bias")
        width, length = taps.shape[-1], u.shape[2]
        past = pad(u, (0, 0, width - 1, 0)) if state is None else torch.cat([state[k][0], u], dim=2)
        taps = taps[:, None, None, :, 0].to(u)
        found = sum(past[:, :, j : j + length] * taps[..., j] for j in range(width))
        assert isinstance(found, Tensor)
        return silu(found if bias is None else found + bias[:, None, None].to(u)), past[:, :, length:]

    def mamba(self, x: Tensor, k: int, state: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        path, shape = self.layer(k), self.shape
        inner, keys = shape.heads * shape.head, shape.groups * self.rows(k)
        gate, u, step = self.linear(x, f"{path}.in_proj.weight").split([inner, inner + 2 * keys, shape.heads], dim=-1)
        u, window = self.convolved(u, k, state)
        values, B, C = u.split([inner, keys, keys], dim=-1)
        step = softplus(step.float() + self.wide(f"{path}.dt_bias"))
        decay = -torch.exp(self.wide(f"{path}.A_log")) * step
        values = values.unflatten(-1, (shape.heads, -1))
        written = values * step[..., None].to(values)
        q, k_ = (
            self.mapped(part.unflatten(-1, (shape.groups, -1)), k, name) for part, name in ((C, "query"), (B, "key"))
        )
        y, last = self.scanned(q, k_, written, decay, None, None if state is None else state[k][1])
        y = y + self.bank[f"{path}.D"][:, None, None, :, None] * values
        y = _rms(y.flatten(-2).float() * silu(gate.float()), _EPS[shape.family]) * self.wide(f"{path}.norm.weight")
        return self.linear(y, f"{path}.out_proj.weight"), (window, last)

    def delta(self, x: Tensor, k: int, state: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        path, shape = self.layer(k), self.shape
        keys, inner = shape.groups * self.rows(k), shape.heads * shape.head
        u, window = self.convolved(self.linear(x, f"{path}.in_proj_qkv.weight"), k, state)
        q, k_, values = u.split([keys, keys, inner], dim=-1)
        q, k_ = (
            _unit(self.mapped(part.unflatten(-1, (shape.groups, -1)).float(), k, name))
            for part, name in ((q, "query"), (k_, "key"))
        )
        strength = torch.sigmoid(self.linear(x, f"{path}.in_proj_b.weight").float())
        step = softplus(self.linear(x, f"{path}.in_proj_a.weight").float() + self.wide(f"{path}.dt_bias"))
        decay = -torch.exp(self.wide(f"{path}.A_log")) * step
        values = values.unflatten(-1, (shape.heads, -1))
        q = q / self.order(k) ** 0.5
        y, last = self.scanned(q, k_, values, decay, strength, None if state is None else state[k][1])
        y = _rms(y.float(), _EPS[shape.family]) * self.bank[f"{path}.norm.weight"][:, None, None, None]
        gate = self.linear(x, f"{path}.in_proj_z.weight").float()
        return self.linear(y.flatten(-2) * silu(gate), f"{path}.out_proj.weight"), (window, last)

    def mapped(self, part: Tensor, k: int, name: str) -> Tensor:
        """Keys or queries (K, batch, length, groups, rows) behind the layer's map."""
        maps = self.bank.get(f"{self.layer(k)}.{name}_map")
        return part if maps is None else torch.einsum("kblgn,kgnr->kblgr", part, maps.to(part))

    def scanned(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The scan of (K, batch, length, groups or heads, …), and the state after it."""
        groups = self.shape.groups
        q, k = (part.movedim(-2, 2) for part in (q, k))
        v, decay = v.unflatten(-2, (groups, -1)).movedim(2, 4), decay.unflatten(-1, (groups, -1)).movedim(2, 4)
        beta = None if strength is None else strength.unflatten(-1, (groups, -1)).movedim(2, 4)
        if state is None:
            found, last = scan(q, k, v, decay, beta, self.dtype)
        else:
            found, last = _one_step(q[..., 0, :], k[..., 0, :], v[..., 0, :], decay[..., 0], beta, state)
        return found.movedim(4, 2).flatten(3, 4), last


def scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """o[t] = S[t]ᵀ q[t] with S[t] = α[t] S[t−1] + k[t] u[t]ᵀ, and the last S.

    q and k are (…, length, n), shared by the heads of v (…, heads, length, p). u = v, or with strengths β those of the
    delta rule, u[t] = β[t] (v[t] − α[t] S[t−1]ᵀ k[t]). In a chunk it is one system for all U,
    (I + β (K Kᵀ ∘ D below its diagonal)) U = β (V − K S).
    """
    length = v.shape[-2]
    size = min(CHUNK, 1 << (length - 1).bit_length())  # a power of two, as `unit_inverse` needs it
    extra = -length % size
    q, k = (pad(part.to(dtype), (0, 0, 0, extra)).unflatten(-2, (-1, size))[..., None, :, :, :] for part in (q, k))
    v = pad(v.to(dtype), (0, 0, 0, extra)).unflatten(-2, (-1, size))
    logs = pad(log_decay, (0, extra)).unflatten(-1, (-1, size)).cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
    D = torch.exp((logs[..., :, None] - logs[..., None, :]).masked_fill(later, -torch.inf))
    since, until = torch.exp(logs)[..., None], torch.exp(logs[..., -1:] - logs)[..., None]
    scores = ((q @ k.mT) * D).to(dtype)
    ends, gains = (k * until).to(dtype).mT, since[..., -1:, :]
    erased = None
    if beta is not None:
        weight = pad(beta, (0, extra)).unflatten(-1, (-1, size))[..., None]
        inverse = unit_inverse((weight * (k @ k.mT) * D).tril(-1)).to(dtype)
        v, erased = inverse @ (weight * v).to(dtype), inverse @ (weight * since * k).to(dtype)
    state = torch.zeros(*v.shape[:-3], k.shape[-1], v.shape[-1], device=v.device)
    added = None if erased is not None else ends @ v
    before, written = [], []
    for chunk in range(v.shape[-3]):
        before.append(state)
        if erased is None:
            new = added[..., chunk, :, :]
        else:
            written.append(v[..., chunk, :, :] - erased[..., chunk, :, :] @ state.to(dtype))
            new = ends[..., chunk, :, :] @ written[-1]
        state = gains[..., chunk, :, :] * state + new
    u = torch.stack(written, dim=-3) if written else v
    found = scores @ u + since * (q @ torch.stack(before, dim=-3).to(dtype))
    return found.flatten(-3, -2)[..., :length, :], state


def unit_inverse(lower: Tensor) -> Tensor:
    """(I + L)⁻¹ of a strictly lower triangular L, by blocks of twice the size at a time: products alone."""
    size, whole = 1, lower.shape[-1]
    inverse = torch.ones_like(lower[..., :1, :1])[..., None, :, :].expand(*lower.shape[:-2], whole, 1, 1)
    while size < whole:
        blocks = lower.unflatten(-1, (-1, 2 * size)).unflatten(-3, (-1, 2 * size))
        corner = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., size:, :size]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        left = torch.cat([first, -(second @ corner @ first)], dim=-2)
        inverse = torch.cat([left, torch.cat([torch.zeros_like(second), second], dim=-2)], dim=-1)
        size *= 2
    return inverse[..., 0, :, :]


def _one_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The read-out after one step (…, heads, 1, p); the state (…, heads, n, p) is changed in place."""
    q, k = (part.float()[..., None, None, :] for part in (q, k))
    v = v.float()[..., None, :]
    state *= torch.exp(log_decay)[..., None, None]
    u = v if beta is None else beta[..., 0, None, None] * (v - k @ state)
    state.addcmul_(k.mT, u)
    return q @ state, state


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def with_order(shape: Shape, order: int) -> Shape:
    """The same sizes at another order."""
    return replace(shape, order=order)
