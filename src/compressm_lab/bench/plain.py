"""The models of `bench loop` as people write them in plain PyTorch, with the names of our parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, glu, linear, pad, silu, softplus


class PlainLRU(nn.Module):
    """An LRU without a library: h is an FFT convolution of γ B u with λᵗ along time."""

    def __init__(self, width: int, order: int) -> None:
        super().__init__()
        self.nu_log, self.theta_log, self.gamma_log = (nn.Parameter(torch.zeros(order)) for _ in range(3))
        self.B_re, self.B_im = (nn.Parameter(torch.zeros(order, width)) for _ in range(2))
        self.C_re, self.C_im = (nn.Parameter(torch.zeros(width, order)) for _ in range(2))
        self.D = nn.Parameter(torch.zeros(width))

    def forward(self, u: Tensor) -> Tensor:
        length = u.shape[1]
        steps = torch.arange(length, device=u.device)[:, None]
        with torch.autocast(u.device.type, enabled=False):
            u = u.float()
            powers = torch.exp(torch.complex(-torch.exp(self.nu_log), torch.exp(self.theta_log)) * steps)
            gamma = torch.exp(self.gamma_log)
            x = torch.complex(u @ self.B_re.mT * gamma, u @ self.B_im.mT * gamma)
            spectrum = torch.fft.fft(x, n=2 * length, dim=1) * torch.fft.fft(powers, n=2 * length, dim=0)
            h = torch.fft.ifft(spectrum, dim=1)[:, :length]
            return h.real @ self.C_re.mT - h.imag @ self.C_im.mT + self.D * u


class PlainMamba(nn.Module):
    """A Mamba layer without a library: h by a scan that doubles its reach, log₂ L times."""

    def __init__(self, width: int, order: int, *, taps: int = 4) -> None:
        super().__init__()
        inner, self.rank, self.order = 2 * width, math.ceil(width / 16), order
        self.A_log, self.D = nn.Parameter(torch.zeros(inner, order)), nn.Parameter(torch.zeros(inner))
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, taps, groups=inner, padding=taps - 1)
        self.x_proj = nn.Linear(inner, self.rank + 2 * order, bias=False)
        self.dt_proj = nn.Linear(self.rank, inner)
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        v, z = self.in_proj(x).chunk(2, dim=-1)
        u = silu(self.conv1d(v.mT)[..., : x.shape[1]].mT)
        dt, B, C = self.x_proj(u).split([self.rank, self.order, self.order], dim=-1)
        with torch.autocast(x.device.type, enabled=False):
            delta = softplus(linear(dt.float(), self.dt_proj.weight, self.dt_proj.bias))
            decay = torch.exp(delta[..., None] * -torch.exp(self.A_log))
            h = _every_state(decay, (delta * u.float())[..., None] * B.float()[:, :, None])
            y = (h * C.float()[:, :, None]).sum(-1) + self.D * u.float()
        out: Tensor = self.out_proj(y.to(z.dtype) * silu(z))
        return out


def _every_state(decay: Tensor, h: Tensor) -> Tensor:
    """h[t] = decay[t] h[t−1] + x[t] along axis 1."""
    reach = 1
    while reach < h.shape[1]:
        ahead = (0, 0) * (h.ndim - 2) + (reach, 0)
        h = h + decay * pad(h[:, :-reach], ahead)
        decay = decay * pad(decay[:, :-reach], ahead, value=1.0)
        reach *= 2
    return h


class _Part(nn.Module):
    """Modules by their names."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class PlainClassifier(nn.Module):
    """The classifier of the paper around `PlainLRU`."""

    def __init__(self, *, depth: int, width: int, order: int, inputs: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.encoder: Any = _Part({"linear": nn.Linear(inputs, width)})
        self.blocks: Any = nn.ModuleList(
            _Part({"norm": nn.BatchNorm1d(width), "ssm": PlainLRU(width, order), "gate": nn.Linear(width, 2 * width)})
            for _ in range(depth)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder.linear(x)
        for block in self.blocks:
            y = self.dropout(gelu(block.ssm(block.norm(x.mT).mT)))
            x = x + self.dropout(glu(block.gate(y)))
        logits: Tensor = self.head(x.mean(1))
        return logits


class PlainLanguageModel(nn.Module):
    """A language model with tied embeddings around `PlainMamba`."""

    def __init__(self, *, depth: int, width: int, order: int, vocabulary: int) -> None:
        super().__init__()
        self.encoder: Any = _Part({"embedding": nn.Embedding(vocabulary, width)})
        self.blocks: Any = nn.ModuleList(
            _Part({"norm": nn.RMSNorm(width, eps=1e-5), "ssm": PlainMamba(width, order)}) for _ in range(depth)
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder.embedding(tokens)
        for block in self.blocks:
            x = x + block.ssm(block.norm(x))
        return linear(self.norm(x), self.encoder.embedding.weight)


def transformers_mamba(*, depth: int, width: int, order: int, vocabulary: int) -> nn.Module:
    """The language model of transformers, which runs its kernels if their packages are installed, else a loop."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        state_size=order,
        num_hidden_layers=depth,
        use_cache=False,
        tie_word_embeddings=True,
    )
    return MambaForCausalLM(config)


_THEIRS = {"encoder.embedding.": "backbone.embeddings.", "blocks.": "backbone.layers.", ".ssm.": ".mixer."}


def transformers_name(name: str) -> str:
    """The name that one of our parameters has in `transformers_mamba`."""
    if name == "norm.weight":
        return "backbone.norm_f.weight"
    for ours, theirs in _THEIRS.items():
        name = name.replace(ours, theirs)
    return name


def take_weights_(model: nn.Module, ours: nn.Module, renamed: Callable[[str], str] = str) -> None:
    """Copy the weights of our model, so that both compute the same function."""
    held = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in ours.state_dict().items():
            held[renamed(name)].copy_(value)
