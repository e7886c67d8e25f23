"""Moments of selective layers through a cut: against autograd, finite differences and simulated noise."""

import copy

import pytest
import torch
from torch import nn

from compressm.compression import Baked, Measured, Restart, SharedIndex, Slice, TargetOrder, Transport, compress_
from compressm.compression.planning import Options, read_layers
from compressm.layers import Mamba
from tests.families.selective.mixers import Mixer, data, make

KINDS = [Mamba, Mixer]


def loss_of(layer):
    y = layer(data(2, 12))
    y = y[0] if isinstance(y, tuple) else y
    return (y - data(2, 12, seed=7)).square().sum()


def gradients_of(layer):
    layer.zero_grad()
    loss_of(layer).backward()
    return {name: layer.get_parameter(name).grad.clone() for name in ("x_proj.weight", "A_log")}


BAKED = Baked()


def change_of(layer, states, method=BAKED):
    """Onto the states at these places."""
    options = Options(TargetOrder(3), calibrate=lambda layer: layer(data()), selective=method)
    (read,) = read_layers(layer, options).values()
    return read.cut([torch.tensor(states)], 0.0).change()


def equal_rates(kind, seed=0):
    """A layer in which every basis of all states is the same layer."""
    layer = make(kind=kind, seed=seed)
    layer.A_log.data = layer.A_log.data[:, :1].repeat(1, 6)
    return layer


def written(layer, change):
    changed = copy.deepcopy(layer)
    for name, value in change.values.items():
        changed.get_parameter(name).data = value
    return changed


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_become_those_of_the_changed_layer(kind):
    """In a basis of all states, and equal rates, of which the sum of gradients is a gradient."""
    layer = equal_rates(kind)
    change = change_of(layer, range(6))
    changed = written(layer, change)
    assert loss_of(changed).item() == pytest.approx(loss_of(layer).item(), rel=1e-10)
    carried, expected = change.gradient(gradients_of(layer)), gradients_of(changed)
    torch.testing.assert_close(carried["x_proj.weight"], expected["x_proj.weight"], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(carried["A_log"].sum(1), expected["A_log"].sum(1), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_states_that_are_only_sliced_have_the_gradients_they_had(kind):
    layer = make(kind=kind)
    change = change_of(layer, range(6), SharedIndex())
    for name, expected in gradients_of(layer).items():
        torch.testing.assert_close(change.gradient({name: expected})[name], expected)
        torch.testing.assert_close(change.update({name: expected})[name], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_changes_the_loss_as_it_did(kind):
    layer = equal_rates(kind)
    change = change_of(layer, range(6))
    g = torch.Generator().manual_seed(3)
    step = {"x_proj.weight": torch.randn(layer.x_proj.weight.shape, generator=g, dtype=torch.float64)}
    step["A_log"] = torch.randn(8, 1, generator=g, dtype=torch.float64).repeat(1, 6)

    def slope(module, direction, size=1e-6):
        losses = []
        for sign in (1, -1):
            moved = copy.deepcopy(module)
            for name, value in direction.items():
                moved.get_parameter(name).data += sign * size * value
            losses.append(loss_of(moved).item())
        return (losses[0] - losses[1]) / (2 * size)

    assert slope(written(layer, change), change.update(step)) == pytest.approx(slope(layer, step), rel=1e-5)


@pytest.mark.parametrize("method", [Baked(), Baked(refit=True), SharedIndex(), SharedIndex(refit=True)], ids=str)
def test_rates_and_their_moments_move_together(method):
    """A step of A_log, cut, is the cut of the stepped A_log: by finite differences."""
    layer = make()
    change = change_of(layer, [0, 1, 2], method)
    step = torch.randn(layer.A_log.shape, generator=torch.Generator().manual_seed(5)).double()
    size, moved = 1e-6, []
    for sign in (1, -1):
        rates = -torch.exp(layer.A_log.detach() + sign * size * step)
        moved.append(torch.log(-(rates @ change.reduction.mixing.mT)))
    expected = (moved[0] - moved[1]) / (2 * size)
    torch.testing.assert_close(change.update({"A_log": step})["A_log"], expected, rtol=1e-6, atol=1e-7)


def test_squares_are_those_of_moments_that_vary_independently():
    layer = make()
    change = change_of(layer, [0, 1, 2])
    g = torch.Generator().manual_seed(4)
    sizes = {name: torch.rand(layer.get_parameter(name).shape, generator=g).double() for name in change.resized}
    squares = {name: size**2 for name, size in sizes.items()}
    for carry, carry_squares in ((change.gradient, change.gradient_squares), (change.update, change.update_squares)):
        total = dict.fromkeys(sizes, 0)
        for _ in range(2000):
            noise = {name: size * torch.randn(size.shape, generator=g).double() for name, size in sizes.items()}
            total = {name: total[name] + value**2 for name, value in carry(noise).items()}
        for name, found in carry_squares(squares).items():
            assert found.shape == change.values[name].shape
            torch.testing.assert_close(total[name] / 2000, found, rtol=0.2, atol=0)


def test_a_slice_takes_the_first_rows_of_each_block():
    layer = make()
    change = change_of(layer, [0, 1, 2])
    rows = torch.arange(13.0)[:, None].expand(13, 8)
    assert change.first("x_proj.weight", rows)[:, 0].tolist() == [0, 1, 2, 3, 7, 8, 9]
    assert change.first("A_log", torch.arange(6.0).repeat(8, 1)).tolist() == [[0, 1, 2]] * 8


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
}


@pytest.mark.parametrize("moments", [Transport(), Slice(), Restart()], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_follows_and_training_goes_on(optimizer, moments):
    layer = make(dtype=torch.float32)
    optimizer = OPTIMIZERS[optimizer](layer.parameters())

    def step():
        optimizer.zero_grad()
        loss = (layer(data().float())[0] - data(seed=7).float()).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        step()
    kept = {name: id(p) for name, p in layer.named_parameters()}
    beside = {key: value.clone() for key, value in optimizer.state[layer.in_proj.weight].items() if value is not None}
    calibrate = lambda layer: layer(data().float())  # noqa: E731
    compress_(layer, keep=TargetOrder(3), optimizer=optimizer, moments=moments, calibrate=calibrate, gramian=Measured())
    assert {name: id(p) for name, p in layer.named_parameters()} == kept
    for parameter in (layer.x_proj.weight, layer.A_log):
        shapes = {value.shape for value in optimizer.state[parameter].values() if value is not None and value.ndim}
        assert shapes == {parameter.shape}
    for key, value in beside.items():
        assert torch.equal(optimizer.state[layer.in_proj.weight][key], value)
    before = layer.x_proj.weight.detach().clone()
    assert all(torch.isfinite(torch.tensor(step())) for _ in range(3))
    assert (layer.x_proj.weight != before).any(1).all()


def test_carried_first_moments_point_where_gradients_of_the_cut_layer_point():
    """Slices point anywhere."""
    cosines = {}
    for moments in (Transport(), Slice()):
        layer = make(order=16)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, momentum=0.9)
        gradients_of(layer)
        optimizer.step()
        compress_(
            layer, keep=TargetOrder(8), optimizer=optimizer, moments=moments, calibrate=lambda layer: layer(data())
        )
        held = optimizer.state[layer.x_proj.weight]["momentum_buffer"][1:]
        cosines[moments] = nn.functional.cosine_similarity(
            held.flatten(), gradients_of(layer)["x_proj.weight"][1:].flatten(), dim=0
        ).item()
    assert cosines[Transport()] > 0.9
    assert abs(cosines[Slice()]) < 0.5
