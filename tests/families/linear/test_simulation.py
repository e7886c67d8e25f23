"""States at sampled steps against a loop, for chunks of any length, and without forming the other states."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compressm.adapters import adapter_for
from compressm.control import DiagonalSystem
from compressm.families.choices import Measured
from compressm.families.linear.observer import LinearObserver, scaled_gramian
from compressm.families.linear.simulation import chunk_of, outputs, outputs_by_products, sampled_states
from compressm.families.observing import Observations, sampled_steps
from compressm.layers import LRU, S4D, S5, LinOSS


def loop(system, u):
    """Every state, one step after the other: (batch, length, *bank, n)."""
    B, h, states = system.B.to(torch.complex128), 0, []
    for x in u.unbind(1):
        driven = x[..., None] * B[..., 0] if system.bank else x.to(B.dtype) @ B.mT
        states.append(h := system.poles * h + driven)
    return torch.stack(states, dim=1)


def at(states, steps):
    """The states at these steps: (*bank, batch · samples, n)."""
    return states[torch.arange(len(steps))[:, None], steps].flatten(0, 1).movedim(0, -2)


def system_of(kind, width=3, order=5):
    torch.manual_seed(0)
    layer = kind(width, order=order)
    return adapter_for(layer).read(layer).detach()


@pytest.mark.parametrize("chunk", [None, 1, 2, 7, 40])
@pytest.mark.parametrize(("length", "stride"), [(1, 1), (7, 8), (40, 1), (63, 8), (64, 5)])
@pytest.mark.parametrize("kind", [LRU, S5, S4D, LinOSS])
def test_sampled_states_are_those_of_a_loop(kind, length, stride, chunk):
    system, u = system_of(kind), torch.randn(4, length, 3, dtype=torch.float64)
    steps = sampled_steps(4, length, stride)
    expected = at(loop(system, u), steps)
    found = sampled_states(system, u, steps, None if chunk is None else min(chunk, length))
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, rtol=0, atol=1e-13 * float(expected.abs().max()))


@pytest.mark.parametrize("bank", [(), (2,)])
def test_poles_at_zero_and_real_poles_keep_what_they_should(bank):
    B = torch.ones(*bank, 3, 1 if bank else 2, dtype=torch.float64)
    system = DiagonalSystem(torch.tensor([0.0, 0.5, -0.9], dtype=torch.float64).expand(*bank, 3), B, B.mT)
    u, steps = torch.randn(2, 30, 2, dtype=torch.float64), sampled_steps(2, 30, 4)
    states = loop(system, u)
    assert torch.allclose(sampled_states(system, u, steps), at(states, steps), atol=1e-13)
    y = (states * system.C[..., 0, :]).sum(-1) if bank else states @ system.C.mT.to(states.dtype)
    assert torch.allclose(outputs(system, u), y.real, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 7, 36, 63, 1100])
@pytest.mark.parametrize("kind", [LRU, S5])
def test_outputs_by_products_are_those_of_a_loop(kind, length):
    system, u = system_of(kind), torch.randn(2, length, 3, dtype=torch.float64)
    expected = (loop(system, u) @ system.C.mT).real
    found = outputs_by_products(system, u)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("lengths", [None, [50, 31, 1, 44, 17, 50, 6, 50]])
@pytest.mark.parametrize("kind", [LRU, S4D])
def test_the_measured_gramian_is_the_mean_over_the_sampled_states_of_a_loop(kind, lengths):
    torch.manual_seed(1)
    layer, batches = kind(3, order=5), torch.randn(2, 8, 50, 3)
    system = adapter_for(layer).read(layer).detach()
    observer = LinearObserver(Observations("layer"), layer, system, Measured(stride=8))
    inside = None if lengths is None else torch.arange(50) < torch.tensor(lengths)[:, None]
    for x in batches:
        observer.add(x, inside)
    squares, count = 0, 0
    for x in batches.double():
        x = x if inside is None else torch.where(inside[..., None], x, 0)
        steps = observer.sampled_steps(x, inside)
        samples = at(loop(system, x), steps)
        if inside is not None:
            samples = samples[..., inside.gather(1, steps).flatten(), :]
        squares = squares + torch.einsum("...si,...sj->...ij", samples, samples.conj())
        count += samples.shape[-2]
    found, scale = scaled_gramian(observer.observations)
    assert bool((scale == 1).all())
    assert torch.allclose(found, squares / count, rtol=0, atol=1e-13 * float((squares / count).abs().max()))


class Largest(TorchDispatchMode):
    """Remember the most numbers in one result."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel() * (2 if tensor.is_complex() else 1))
        return result


@pytest.mark.parametrize(("kind", "width"), [(S4D, 8), (LRU, 2)])
def test_states_between_the_samples_are_never_formed(kind, width):
    system, u = system_of(kind, width, 32), torch.randn(4, 256, width, dtype=torch.float64)
    steps = sampled_steps(4, 256, 8)
    with Largest() as largest:
        sampled_states(system, u, steps)
    assert largest.numbers <= 2 * system.poles.numel() * 4 * 256 // 4


def test_chunks_are_long_for_few_inputs_and_short_for_many():
    assert [chunk_of(32, 256, inputs, gpu=False) for inputs in (1, 16, 512)] == [16, 4, 2]
    assert [chunk_of(samples, 256, 512, gpu=True) for samples in (32, 256)] == [32, 4]
    assert chunk_of(1, 1, 1, gpu=True) == 1
