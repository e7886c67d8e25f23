"""Layers whose channels have complex states: their parameters and buffers in training, undone, followed, averaged."""

import copy

import numpy as np
import pytest
import torch

import compressm as cs
from compressm.adapters import adapter_for
from compressm.compression import load_checkpoint, save_checkpoint
from compressm.compression.planning import Options, plan_cuts, read_layers
from tests.families.selective.mixers import complex_layer, data


def runs(layer):
    return layer(data())


def cut(layer, order):
    cs.compress_(layer, keep=cs.TargetOrder(order), calibrate=runs, selective=cs.PerChannel())


class Training:
    def __init__(self, layer, *, names=False, **options):
        self.layer = layer
        members = [(f"layer.{name}", p) if names else p for name, p in layer.named_parameters()]
        groups = [{"params": members[1:], "weight_decay": 0.1}, {"params": members[:1], "weight_decay": 0.0}]  # A_log
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
        options = {"when": [2], "keep": cs.TargetOrder(6), "calibrate": self.runs, **options}
        self.compressor = cs.Compressor(layer, self.optimizer, selective=cs.PerChannel(), **options)

    def runs(self, layer):
        return layer(data().float())

    def train(self, steps, first=1):
        events = []
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            (self.layer(data().float())[0] - data(seed=7).float()).square().mean().backward()
            self.optimizer.step()
            events += self.compressor.step(step)
        return events

    def picture(self):
        return {k: v.clone() for k, v in self.layer.state_dict().items()}, copy.deepcopy(self.optimizer.state_dict())


def test_imaginary_parts_join_the_group_of_the_rates_and_are_trained():
    run = Training(complex_layer(torch.float32), when=[2, 4], keep=cs.KeepFraction(0.5))
    rates, known = id(run.layer.A_log), {id(p) for p in run.layer.parameters()}
    run.train(2)
    layer, before = run.layer, run.layer.A_imag.detach().clone()
    assert run.optimizer.param_groups[1]["params"][1] is layer.A_imag
    assert (id(layer.A_log), {id(p) for p in layer.parameters()} - {id(layer.A_imag)}) == (rates, known)
    assert layer.A_imag._no_weight_decay
    run.train(1, first=3)
    assert (layer.A_imag[before != 0] != before[before != 0]).all()
    imaginary = id(layer.A_imag)
    run.train(2, first=4)
    assert id(layer.A_imag) == imaginary
    assert run.optimizer.state[layer.A_imag]["exp_avg"].shape == layer.A_imag.shape == layer.A_log.shape
    assert layer.order <= 3


def storages(layer):
    return {tensor.data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}


def test_a_layer_that_follows_has_imaginary_parts_of_its_own():
    alone, followed = Training(complex_layer(torch.float32)), complex_layer(torch.float32)
    average = copy.deepcopy(followed)
    with torch.no_grad():
        average.A_log.mul_(1.02)
    run = Training(followed, follow=[average])
    alone.train(2)
    run.train(2)
    torch.testing.assert_close(run.picture()[0], alone.picture()[0])
    assert average.A_imag.shape == followed.A_imag.shape
    assert not storages(average) & storages(followed)
    assert not any(average.A_imag is one for group in run.optimizer.param_groups for one in group["params"])
    before = average.A_imag.detach().clone()
    run.train(1, first=3)
    assert torch.equal(average.A_imag, before)


def test_a_rollback_restores_a_layer_and_the_one_that_follows():
    layer = complex_layer(torch.float32)
    average, scores = copy.deepcopy(layer), iter([0.9, 0.1])
    guard = cs.Rollback(evaluate=lambda: next(scores), drop=0.01, settle=2, measures="accuracy")
    run = Training(layer, follow=[average], guard=guard)
    run.train(1)
    before = [one.A_log.shape for one in (layer, average)]
    run.train(3, first=2)
    assert [one.A_log.shape for one in (layer, average)] == before
    assert (layer.A_imag, average.A_imag) == (None, None)


def test_names_in_an_optimizer_go_with_its_parameters(tmp_path):
    """Of optimizers made of named_parameters(): they join, leave by a rollback, and join again from a file."""

    def named(**options):
        run = Training(complex_layer(torch.float32), names=True, **options)
        return run, run.optimizer.param_groups[1]

    run, group = named(guard=cs.Rollback(iter([1.0, 0.5]).__next__, settle=1))
    run.train(2)
    assert (group["param_names"], len(group["params"])) == (["layer.A_log", "layer.A_imag"], 2)
    run.train(1, first=3)
    assert (group["param_names"], len(group["params"])) == (["layer.A_log"], 1)
    cut_again, _ = named()
    cut_again.train(3)
    save_checkpoint(tmp_path / "c", model=cut_again.layer, optimizer=cut_again.optimizer)
    load_checkpoint(tmp_path / "c", model=run.layer, optimizer=run.optimizer)
    group = run.optimizer.param_groups[1]
    assert group["param_names"] == ["layer.A_log", "layer.A_imag"]
    assert group["params"][1] is run.layer.A_imag


def test_a_checkpoint_of_before_the_cut_loads_into_the_model_that_was_cut(tmp_path):
    run = Training(complex_layer(torch.float32))
    run.train(1)
    save_checkpoint(tmp_path / "c", model=run.layer, optimizer=run.optimizer)
    before = run.picture()
    run.train(2, first=2)
    imaginary = run.layer.A_imag
    load_checkpoint(tmp_path / "c", model=run.layer, optimizer=run.optimizer)
    assert run.layer.A_imag is None
    assert imaginary not in run.optimizer.state
    torch.testing.assert_close(run.picture(), before, rtol=0, atol=0)
    run.train(1, first=3)


def test_a_cut_to_maps_is_undone_bit_for_bit():
    scores = iter([1.0, 0.5])
    run = Training(complex_layer(torch.float32), guard=cs.Rollback(lambda: next(scores), settle=1))
    run.train(1)
    before = run.picture()
    run.compressor.step(2)
    assert run.layer.B_map is not None
    run.layer(data().float())[0].sum().backward()
    run.optimizer.step()  # gives A_imag a state
    run.compressor.step(3)
    assert run.layer.B_map is run.layer.A_imag is None
    torch.testing.assert_close(run.picture(), before, rtol=0, atol=0)
    run.train(2, first=4)


def test_a_failure_in_the_middle_of_writing_leaves_no_maps(monkeypatch):
    run = Training(complex_layer(torch.float32))
    run.train(1)
    before, groups = run.picture(), [list(group["params"]) for group in run.optimizer.param_groups]
    import compressm.compression.surgery as surgery

    def failing(owner, leaf, value):
        setattr(owner, leaf, value)
        if leaf == "A_imag" and value is not None:
            raise MemoryError("no more")

    monkeypatch.setattr(surgery, "setattr", failing, raising=False)
    with pytest.raises(MemoryError):
        run.compressor.step(2)
    monkeypatch.undo()
    torch.testing.assert_close(run.picture(), before, rtol=0, atol=0)
    assert [len(group["params"]) for group in run.optimizer.param_groups] == [len(group) for group in groups]
    run.train(2, first=2)


def test_an_average_follows_into_the_same_maps():
    layer = complex_layer()
    average = copy.deepcopy(layer)
    average.A_log.data += 1e-4 * torch.randn(layer.A_log.shape, generator=torch.Generator().manual_seed(0)).double()
    cs.compress_(layer, keep=cs.TargetOrder(6), calibrate=runs, selective=cs.PerChannel(), follow=[average])
    assert torch.equal(average.B_map, layer.B_map)
    assert torch.equal(average.orders, layer.orders)
    torch.testing.assert_close(average.A_log, layer.A_log, rtol=0, atol=1e-2)
    assert not torch.equal(average.A_log, layer.A_log)
    torch.testing.assert_close(average(data())[0], layer(data())[0], rtol=0, atol=1e-3)


def change_of(layer, method):
    options = Options(cs.TargetOrder(4), calibrate=runs, selective=method)
    return plan_cuts(read_layers(layer, options), options)[0].change()


@pytest.mark.parametrize("again", [False, True])
def test_moments_of_rates_go_as_rates_do(again):
    """Steps as a finite difference of the reduction; gradients by moving the diagonal of E_C diag(a') E_B."""
    layer = complex_layer()
    if again:
        cut(layer, 6)
    change = change_of(layer, cs.PerChannel())
    names, g = [name for name in ("A_log", "A_imag") if name in change.resized], torch.Generator().manual_seed(2)
    step, gradient = ({name: torch.randn(layer.A_log.shape, generator=g).double() for name in names} for _ in range(2))
    adapter = adapter_for(layer)

    def encoded(size):
        moved = copy.deepcopy(layer)
        for name, value in step.items():
            moved.get_parameter(name).data += size * value
        return adapter.encode(layer, change.reduction.applied(adapter.read(moved).detach()))

    one, other = encoded(1e-6), encoded(-1e-6)
    for name, value in change.update(step).items():
        torch.testing.assert_close(value, (one[name] - other[name]) / 2e-6, rtol=1e-5, atol=1e-6)
    E_B, E_C, new = (part.numpy() for part in (change.reduction.E_B, change.reduction.E_C, change.new))
    shape = new.shape
    parts = np.random.default_rng(0).standard_normal((2, *shape))
    lifted = np.einsum("cnr,cr,crn->cn", E_C, parts[0] * new.real + 1j * parts[1], E_B)  # of (A_log', A_imag')
    whole = gradient["A_log"].numpy() / change.old.real.numpy() * lifted.real
    whole = whole + gradient["A_imag"].numpy() * lifted.imag if again else whole
    carried = change.gradient(gradient)
    along = (carried["A_log"].numpy() * parts[0]).sum(1)
    if again:
        along = along + (carried["A_imag"].numpy() * parts[1]).sum(1)
        np.testing.assert_allclose(along, whole.sum(1), rtol=1e-8)
    else:  # the imaginary parts are new, and begin without moments
        flat = np.einsum("cnr,cr,crn->cn", E_C, parts[0] * new.real, E_B).real
        np.testing.assert_allclose(along, (gradient["A_log"].numpy() / change.old.numpy() * flat).sum(1), rtol=1e-8)
    assert change.first("A_log", torch.zeros(8, layer.order)).shape == shape


def test_squares_are_those_of_moments_that_vary_independently():
    layer = complex_layer()
    cut(layer, 6)
    change = change_of(layer, cs.PerChannel())
    g = torch.Generator().manual_seed(4)
    sizes = {name: torch.rand(layer.A_log.shape, generator=g).double() for name in ("A_log", "A_imag")}
    for carry, squares in ((change.gradient, change.gradient_squares), (change.update, change.update_squares)):
        total = dict.fromkeys(sizes, 0)
        for _ in range(800):
            noise = {name: size * torch.randn(size.shape, generator=g).double() for name, size in sizes.items()}
            total = {name: total[name] + value**2 for name, value in carry(noise).items()}
        for name, found in squares({name: size**2 for name, size in sizes.items()}).items():
            torch.testing.assert_close(total[name] / 800, found, rtol=0.3, atol=1e-6)
