"""Layers with the parameters, names and calls of flash-linear-attention and mamba_ssm, in plain torch on a CPU.

Their own kernels need a GPU; the forward passes here go step by step.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import logsigmoid, normalize, silu, softplus

transformers = pytest.importorskip("transformers")
from transformers.models.mamba.modeling_mamba import MambaMixer  # noqa: E402
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer  # noqa: E402


class Convolution(nn.Conv1d):
    """ShortConvolution."""

    def __init__(self, size, bias, activation):
        super().__init__(size, size, 4, groups=size, padding=3, bias=bias)
        self.hidden_size, self.activation = size, activation

    def forward(self, x):
        found = super().forward(x.mT)[..., : x.shape[1]].mT
        return found if self.activation is None else silu(found)


class Layer(nn.Module):
    """What layers of flash-linear-attention share; `rule` gives decays of heads or key dimensions, and strengths."""

    NORM = "o_norm"

    def __init__(
        self, hidden_size=16, heads=2, keys=8, values=6, value_heads=None, conv=True, bias=False, activation="silu"
    ):
        super().__init__()
        self.hidden_size, self.num_heads, self.layer_idx = hidden_size, heads, 0
        self.use_short_conv, self.head_k_dim, self.head_v_dim = conv, keys, values
        self.key_dim, outputs = heads * keys, (value_heads or heads) * values
        self.qk_activation = activation
        for part, size in (("q", self.key_dim), ("k", self.key_dim), ("v", outputs)):
            setattr(self, f"{part}_proj", nn.Linear(hidden_size, size, bias=False))
            if conv:
                own = "silu" if activation == "silu" or part == "v" else None
                setattr(self, f"{part}_conv1d", Convolution(size, bias, own))
        self.add_module(self.NORM, nn.RMSNorm(values, eps=1e-5))
        self.o_proj = nn.Linear(outputs, hidden_size, bias=False)

    def part(self, name, x):
        x = getattr(self, f"{name}_proj")(x)
        return getattr(self, f"{name}_conv1d")(x) if self.use_short_conv else self.plain(name, x)

    def plain(self, name, x):
        return silu(x)

    def feature(self, x):
        return normalize(x, dim=-1)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, **kwargs):
        x = hidden_states if attention_mask is None else hidden_states * attention_mask[..., None]
        q, k = (self.feature(self.part(name, x).unflatten(-1, (-1, self.head_k_dim))) for name in "qk")
        v = self.part("v", x).unflatten(-1, (-1, self.head_v_dim))
        q, k = (part.repeat_interleave(v.shape[2] // self.num_heads, dim=2) for part in (q, k))
        decay, strength = self.rule(x)
        S, found = 0, []
        for t in range(x.shape[1]):
            S = (decay[:, t, ..., None] if decay.ndim > 3 else decay[:, t, :, None, None]) * S
            written = v[:, t]
            if strength is not None:
                read = 0 if t == 0 else torch.einsum("bhn,bhnp->bhp", k[:, t], S)
                written = strength[:, t, :, None] * (written - read)
            S = S + k[:, t, :, :, None] * written[:, :, None, :]
            found.append(torch.einsum("bhn,bhnp->bhp", q[:, t], S) * self.head_k_dim**-0.5)
        read = getattr(self, self.NORM)(torch.stack(found, dim=1))
        return self.o_proj(read.flatten(2)), None, past_key_values


class SimpleGLA(Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.gk_proj, self.gate_logit_normalizer = nn.Linear(self.hidden_size, self.num_heads), 16
        self.num_kv_heads, self.feature_map_fn = self.num_heads, None
        self.key_dim_per_group, self.expand_k = self.key_dim, self.key_dim / self.hidden_size

    def plain(self, name, x):
        return x

    def feature(self, x):
        return x

    def rule(self, x):
        return torch.exp(logsigmoid(self.gk_proj(x)) / self.gate_logit_normalizer), None


class GLA(SimpleGLA):
    NORM = "g_norm_swish_gate"

    def __init__(self, **options):
        super().__init__(**options)
        self.gk_proj = nn.Sequential(nn.Linear(self.hidden_size, 4, bias=False), nn.Linear(4, self.key_dim))
        self.gate_logit_normalizer, self.clamp_min = 4, -1.5

    def rule(self, x):
        logs = (logsigmoid(self.gk_proj(x)) / self.gate_logit_normalizer).clamp_min(self.clamp_min)
        return torch.exp(logs).unflatten(-1, (-1, self.head_k_dim)), None


class DeltaNet(Layer):
    def __init__(self, negative=False, **options):
        super().__init__(**options)
        self.b_proj, self.use_beta = nn.Linear(self.hidden_size, self.num_heads, bias=False), True
        self.qk_norm, self.allow_neg_eigval, self.expand_k = "l2", negative, self.key_dim / self.hidden_size

    def plain(self, name, x):
        return silu(x) if name == "v" or self.qk_activation == "silu" else x

    def rule(self, x):
        strength = (2 if self.allow_neg_eigval else 1) * torch.sigmoid(self.b_proj(x))
        return torch.ones_like(strength), strength


class GatedDeltaNet(Layer):
    def __init__(self, negative=False, **options):
        super().__init__(**options)
        heads = len(self.v_proj.weight) // self.head_v_dim
        self.a_proj, self.b_proj = (nn.Linear(self.hidden_size, heads, bias=False) for _ in "ab")
        self.A_log, self.dt_bias = nn.Parameter(torch.randn(heads)), nn.Parameter(torch.randn(heads) - 3)
        self.allow_neg_eigval, self.head_dim = negative, self.head_k_dim
        self.expand_v = self.head_v_dim / self.head_dim

    def rule(self, x):
        strength = (2 if self.allow_neg_eigval else 1) * torch.sigmoid(self.b_proj(x))
        return torch.exp(-torch.exp(self.A_log) * softplus(self.a_proj(x) + self.dt_bias)), strength


class KDA(GatedDeltaNet):
    def __init__(self, lower_bound=None, **options):
        super().__init__(**options)
        del self.a_proj
        self.gate_dim, self.lower_bound, self.num_v_heads = self.key_dim, lower_bound, self.num_heads
        self.f_proj = nn.Sequential(
            nn.Linear(self.hidden_size, self.head_v_dim, bias=False),
            nn.Linear(self.head_v_dim, self.gate_dim, bias=False),
        )
        self.dt_bias = nn.Parameter(torch.randn(self.gate_dim) - 3)

    def rule(self, x):
        logits = (self.f_proj(x) + self.dt_bias).unflatten(-1, (-1, self.head_k_dim))
        rate = torch.exp(self.A_log)[:, None]
        logs = -rate * softplus(logits) if self.lower_bound is None else self.lower_bound * torch.sigmoid(rate * logits)
        return torch.exp(logs), (2 if self.allow_neg_eigval else 1) * torch.sigmoid(self.b_proj(x))


class FlaMamba2(Mamba2Mixer):
    def __init__(self):
        super().__init__(_config("Mamba2"), 0)
        self.dt_limit = self.time_step_limit

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, **kwargs):
        return super().forward(hidden_states, None, attention_mask), None, past_key_values


class SsmMamba2(Mamba2Mixer):
    def __init__(self):
        super().__init__(_config("Mamba2"), 0)
        self.d_state, self.ngroups, self.dt_limit = self.ssm_state_size, self.n_groups, self.time_step_limit
        self.d_inner = self.d_ssm = self.intermediate_size
        del self.time_step_limit

    def forward(self, u, seqlen=None, seq_idx=None, cu_seqlens=None, inference_params=None):
        self.ssm_state_size, self.conv_dim = self.d_state, self.d_inner + 2 * self.ngroups * self.d_state
        self.time_step_limit = self.dt_limit
        return super().forward(u)


class SsmMamba(MambaMixer):
    def __init__(self):
        super().__init__(_config("Mamba"), 0)
        self.d_state, self.d_inner, self.dt_rank = self.ssm_state_size, self.intermediate_size, self.time_step_rank

    def forward(self, hidden_states, inference_params=None):
        self.ssm_state_size = self.d_state
        return super().forward(hidden_states)


def _config(name):
    sizes = {"hidden_size": 16, "state_size": 8, "num_hidden_layers": 1}
    more = (
        {"num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 8} if name == "Mamba2" else {"time_step_rank": 2}
    )
    return getattr(transformers, f"{name}Config")(**sizes, **more)


def named(path, kind):
    """The class under the name that another package gives it."""
    owner, _, name = path.rpartition(".")
    return type(name, (kind,), {"__module__": owner})


LAYERS = {
    "SimpleGLA": lambda: named("fla.layers.simple_gla.SimpleGatedLinearAttention", SimpleGLA)(conv=False),
    "SimpleGLA, convolved": lambda: named("fla.layers.simple_gla.SimpleGatedLinearAttention", SimpleGLA)(bias=True),
    "GLA": lambda: named("fla.layers.gla.GatedLinearAttention", GLA)(conv=False),
    "GLA, convolved": lambda: named("fla.layers.gla.GatedLinearAttention", GLA)(),
    "KDA": lambda: named("fla.layers.kda.KimiDeltaAttention", KDA)(),
    "KDA, bounded": lambda: named("fla.layers.kda.KimiDeltaAttention", KDA)(lower_bound=-2.0, negative=True),
    "DeltaNet": lambda: named("fla.layers.delta_net.DeltaNet", DeltaNet)(),
    "DeltaNet, linear": lambda: named("fla.layers.delta_net.DeltaNet", DeltaNet)(
        conv=False, activation="identity", negative=True
    ),
    "GatedDeltaNet": lambda: named("fla.layers.gated_deltanet.GatedDeltaNet", GatedDeltaNet)(value_heads=4),
    "GatedDeltaNet, negative": lambda: named("fla.layers.gated_deltanet.GatedDeltaNet", GatedDeltaNet)(negative=True),
    "Mamba2 of fla": named("fla.layers.mamba2.Mamba2", FlaMamba2),
    "Mamba2 of mamba_ssm": named("mamba_ssm.modules.mamba2.Mamba2", SsmMamba2),
    "Mamba of mamba_ssm": named("mamba_ssm.modules.mamba_simple.Mamba", SsmMamba),
}
