"""A selective mixer that is not ours, with the names of the authors, and independent truths: plain loops in NumPy."""

import copy
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

import compressm as cs
from compressm.adapters import SelectiveAdapter, adapts
from compressm.layers import Mamba


class Mixer(nn.Module):
    """As transformers has it: the order stands in an attribute and in a config, padding in a mask, on any side."""

    def __init__(self, width=4, order=6, rank=2):
        super().__init__()
        self.config, self.ssm_state_size, self.rank = SimpleNamespace(state_size=order), order, rank
        inner = 2 * width
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 2, groups=inner, padding=1)
        self.x_proj = nn.Linear(inner, rank + 2 * order, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, order + 1)).repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x, attention_mask=None):
        def masked(v):
            return v if attention_mask is None else v * attention_mask[..., None]

        v, z = self.in_proj(masked(x)).chunk(2, dim=-1)
        u = masked(nn.functional.silu(self.conv1d(v.mT)[..., : x.shape[1]].mT))
        n = self.ssm_state_size
        dt, B, C = self.x_proj(u).split([self.rank, n, n], dim=-1)
        delta = nn.functional.softplus(self.dt_proj(dt))
        h, outputs, rates = 0, [], -torch.exp(self.A_log)
        for t in range(x.shape[1]):
            h = torch.exp(delta[:, t, :, None] * rates) * h + (delta[:, t] * u[:, t])[..., None] * B[:, t, None]
            outputs.append((h * C[:, t, None]).sum(-1))
        y = torch.stack(outputs, dim=1) + self.D * u
        return self.out_proj(y * nn.functional.silu(z))


@adapts(Mixer)
class MixerAdapter(SelectiveAdapter):
    def counted(self, module, args, kwargs):
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        return None if mask is None else mask.bool()

    def attributes(self, module, order):
        return super().attributes(module, order) | {"ssm_state_size": order, "config.state_size": order}


def make(order=6, width=4, seed=0, kind=Mamba, dtype=torch.float64):
    """A layer whose rates differ from channel to channel."""
    torch.manual_seed(seed)
    layer = kind(width, order=order).to(dtype)
    layer.A_log.data += 0.3 * torch.randn(layer.A_log.shape, dtype=dtype)
    layer.dt_proj.bias.data += 2  # memories of some ten steps
    return layer


def data(batch=4, length=30, width=4, seed=1):
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs_of(layer, *args, **kwargs):
    """What the layer gives its x_proj."""
    found = []
    handle = layer.x_proj.register_forward_pre_hook(lambda module, given: found.append(given[0].detach().numpy()))
    with torch.no_grad():
        layer(*args, **kwargs)
    handle.remove()
    return found[0]


def chosen(layer, u):
    """Rates, Δ, B and C, for u of shape (…, channels)."""
    W, n = layer.x_proj.weight.detach().numpy(), layer.A_log.shape[1]
    rank = len(W) - 2 * n
    dt, B, C = (u @ rows.T for rows in (W[:rank], W[rank : rank + n], W[rank + n :]))
    delta = np.logaddexp(0, dt @ layer.dt_proj.weight.detach().numpy().T + layer.dt_proj.bias.detach().numpy())
    return -np.exp(layer.A_log.detach().numpy()), delta, B, C


def simulate(layer, u):
    """States (batch, length, channels, n) and outputs (batch, length, channels) by loops over everything."""
    rates, delta, B, C = chosen(layer, u)
    batch, length, channels = u.shape
    h, y = np.zeros((batch, length, channels, rates.shape[1])), np.zeros(u.shape)
    for b in range(batch):
        for i in range(channels):
            now = np.zeros(rates.shape[1])
            for t in range(length):
                now = np.exp(delta[b, t, i] * rates[i]) * now + delta[b, t, i] * B[b, t] * u[b, t, i]
                h[b, t, i], y[b, t, i] = now, C[b, t] @ now
    return h, y


def complex_layer(dtype=torch.float64):
    """One whose balanced channels have complex rates."""
    for seed in range(20):
        layer = make(order=12, seed=seed, dtype=dtype)
        if complex_one(layer):
            return layer
    raise AssertionError("none has")


def complex_one(layer):
    trial = copy.deepcopy(layer)
    runs = lambda layer: layer(data().to(layer.D.dtype))  # noqa: E731
    cs.compress_(trial, keep=cs.TargetOrder(6), calibrate=runs, selective=cs.PerChannel())
    return trial.A_imag is not None
