"""States of selective systems, block by block, are those of the recurrence taken step by step."""

import pytest
import torch

from compressm.adapters import find
from compressm.families.selective import simulation
from compressm.families.selective.simulation import states, steps_at_once
from compressm.layers import Mamba


def system(kind):
    torch.manual_seed(0)
    layer, n = Mamba(3, order=5), 4
    inner, pair = layer.inner, (2,) if kind == "complex maps" else ()
    if kind != "shared":
        imaginary = {"A_imag": torch.randn(inner, n)} if pair else {}
        B_map, C_map = torch.randn(inner, *pair, n, 5), torch.randn(inner, *pair, 5, n)
        layer.keep_maps_(B_map, C_map, torch.arange(inner) % n + 1, torch.randn(inner, n), **imaginary)
    ((module, adapter),) = find(layer).values()
    return adapter.read(module).detach()


def one_after_the_other(system, u):
    delta, B, _ = system.selected(u)
    h, found = torch.zeros_like(system.rates).expand(len(u), -1, -1), []
    for t in range(u.shape[1]):
        b = B[:, t, None]
        if system.maps is not None:
            b = (system.maps.B @ B[:, t, None, :, None].to(system.maps.B.dtype))[..., 0]
        h = torch.exp(delta[:, t, :, None] * system.rates) * h + (delta[:, t] * u[:, t])[..., None] * b
        found.append(h)
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["shared", "real maps", "complex maps"])
@pytest.mark.parametrize("enough", [1, 2**13])
@pytest.mark.parametrize(("length", "steps"), [(1, 8), (7, 7), (37, 16), (50, 64), (200, 1)])
def test_blocks_are_the_recurrence(kind, enough, length, steps, monkeypatch):
    """With one chunk a block, and with several."""
    monkeypatch.setattr(simulation, "_ENOUGH", enough)
    selective = system(kind)
    u = torch.randn(2, length, selective.channels, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    blocks = list(states(selective, u, steps))
    assert [len(block) for block in blocks] == [len(part) for part in torch.arange(length).split(steps)]
    torch.testing.assert_close(torch.cat(blocks), one_after_the_other(selective, u), rtol=1e-10, atol=1e-12)


def test_a_long_sequence_of_few_states_takes_far_fewer_calls_than_steps():
    selective = system("shared")
    u = torch.randn(2, 1024, selective.channels, dtype=torch.float64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        list(states(selective, u, steps_at_once(selective, batch=2)))
    calls = sum(event.count for event in profile.key_averages() if event.key == "aten::addcmul_")
    assert calls <= 2 * 1024**0.5


def test_blocks_fit_into_their_memory():
    selective = system("shared")
    numbers = selective.rates.numel()
    assert steps_at_once(selective, batch=3) * 3 * numbers <= 2**18
    assert steps_at_once(selective, batch=2**20) == 1
