"""Every optimizer goes on after a cut, with a state of the new sizes; those that cannot are refused by name."""

import copy
import math

import pytest
import torch
from torch import nn

from compressm.compression.optimizer import Restart, Slice, Transport, carried_states, require_supported
from compressm.compression.surgery import apply_cuts, prepare_cut
from compressm.errors import CompressionError
from tests.compression.trained import change_of, gradients_of, loss_of, make_layer
from tests.marks import later

optim = torch.optim


class Lion(optim.Optimizer):
    """Signs of an average of gradients (Chen et al. 2023)."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.sub_(group["lr"] * torch.sign(0.9 * state["exp_avg"] + 0.1 * p.grad))
                state["exp_avg"].lerp_(p.grad, 0.01)


class Wrapped:
    """As accelerate and others wrap an optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def step(self):
        self.optimizer.step()


OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=1e-3),
    "SGD, momentum": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "SGD, fused": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=1e-3),
    "Adam, foreach": lambda p: optim.Adam(p, lr=1e-3, foreach=True),
    "Adam, fused": lambda p: optim.Adam(p, lr=1e-3, fused=True),
    "Adam, tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(1e-3)),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-3),
    "AdamW, amsgrad": lambda p: optim.AdamW(p, lr=1e-3, amsgrad=True),
    "AdamW, amsgrad fused": lambda p: optim.AdamW(p, lr=1e-3, amsgrad=True, fused=True),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-3),
    "NAdam, foreach": lambda p: optim.NAdam(p, lr=1e-3, foreach=True),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-3),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-3),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-3, initial_accumulator_value=0.5),
    "Adagrad, fused": lambda p: optim.Adagrad(p, lr=1e-3, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3),
    "RMSprop, centred": lambda p: optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.9),
    "RMSprop, foreach": lambda p: optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.9, foreach=True),
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "Lion": Lion,
    "wrapped": lambda p: Wrapped(optim.AdamW(p, lr=1e-3)),
}


def train(layer, optimizer, steps=3):
    for _ in range(steps):
        layer.zero_grad()
        loss_of(layer).backward()
        optimizer.step()
    return loss_of(layer).item()


def cut(layer, optimizer, moments, order=4):
    """Cut, and give the entries that were there before."""
    before = {name: dict(optimizer.state.get(p, {})) for name, p in layer.named_parameters()}
    apply_cuts([prepare_cut("layer", change_of(layer, order), optimizer, moments)], optimizer)
    return before


@pytest.mark.parametrize("moments", later([Transport(), Restart(), Slice()], Transport()), ids=repr)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_after_a_cut(name, moments):
    layer = make_layer("LRU", torch.float32)
    optimizer = OPTIMIZERS[name](layer.parameters())
    train(layer, optimizer)
    groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
    dictionaries = {key: id(optimizer.state[p]) for key, p in layer.named_parameters() if p in optimizer.state}
    before = cut(layer, optimizer, moments)
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == groups
    for key, parameter in layer.named_parameters():
        state = optimizer.state.get(parameter, {})
        assert state.keys() == before[key].keys()
        assert parameter not in optimizer.state or id(state) == dictionaries[key]
        for entry, value in state.items():
            was = before[key][entry]
            if isinstance(was, torch.Tensor):
                assert (value.dtype, value.device) == (was.dtype, was.device)
                assert value.shape == (parameter.shape if was.ndim else was.shape)
                assert value.isfinite().all()
    values = copy.deepcopy(layer.state_dict())
    assert math.isfinite(train(layer, optimizer, steps=2))
    assert all((value != values[key]).any() for key, value in layer.state_dict().items())


@pytest.mark.parametrize("kind", ["S5", "S4D", "somebody's"])
@pytest.mark.parametrize("name", ["AdamW, amsgrad", "RMSprop, centred", "Adadelta"])
def test_other_layers_go_on_too(kind, name):
    layer = make_layer(kind, torch.float32)
    optimizer = OPTIMIZERS[name](layer.parameters())
    train(layer, optimizer)
    cut(layer, optimizer, Transport())
    assert math.isfinite(train(layer, optimizer))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_transport_steps_are_as_long_as_they_were(name):
    """The first update after a cut is no longer than ten times the last before it."""
    layer = make_layer("LRU", torch.float64)
    optimizer = OPTIMIZERS[name](layer.parameters())
    train(layer, optimizer, steps=20)

    def longest():
        start = {key: p.detach().clone() for key, p in layer.named_parameters()}
        train(layer, optimizer, steps=1)
        return max((p.detach() - start[key]).abs().max().item() for key, p in layer.named_parameters())

    last = longest()
    cut(layer, optimizer, Transport(), order=6)
    assert longest() <= 10 * last


def test_moments_of_parameters_without_states_stay_as_they_are():
    layer = make_layer("S4D", torch.float32)
    optimizer = optim.Adam(layer.parameters())
    train(layer, optimizer)
    kept = {name: dict(optimizer.state[layer.get_parameter(name)]) for name in ("D", "log_step")}
    for moments in (Transport(), Slice(), Restart()):
        cut(layer, optimizer, moments, order=layer.order - 2)
        for name, state in kept.items():
            now = optimizer.state[layer.get_parameter(name)]
            assert all(now[key] is value for key, value in state.items())


@pytest.mark.parametrize("name", ["Adam", "Adam, fused", "AdamW, amsgrad", "NAdam", "RAdam", "Adamax"])
def test_step_counts_are_kept_by_transport_and_dropped_by_a_restart(name):
    for moments, expected in ((Transport(), 3), (Slice(), 3), (Restart(), 0)):
        layer = make_layer("LRU", torch.float32)
        optimizer = OPTIMIZERS[name](layer.parameters())
        train(layer, optimizer)
        cut(layer, optimizer, moments)
        assert all(optimizer.state[layer.get_parameter(key)]["step"] == expected for key in layer.STATE_AXES)
        assert optimizer.state[layer.D]["step"] == 3


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_restarted_optimizer_steps_like_a_new_one(name):
    layer = make_layer("LRU", torch.float64)
    optimizer = OPTIMIZERS[name](layer.get_parameter(key) for key in layer.STATE_AXES)
    train(layer, optimizer)
    cut(layer, optimizer, Restart())
    twin = copy.deepcopy(layer)
    fresh = OPTIMIZERS[name](twin.get_parameter(key) for key in twin.STATE_AXES)
    train(layer, optimizer, steps=2)
    train(twin, fresh, steps=2)
    for key in layer.STATE_AXES:
        torch.testing.assert_close(layer.get_parameter(key), twin.get_parameter(key), rtol=1e-12, atol=1e-12)


def test_a_first_moment_is_the_gradient_of_the_layer_as_it_becomes():
    """SGD's buffer after one step is the gradient; with all states kept autograd gives the new one."""
    layer = make_layer("LRU")
    optimizer = optim.SGD(layer.parameters(), lr=0.0, momentum=0.9)
    train(layer, optimizer, steps=1)
    cut(layer, optimizer, Transport(), order=8)
    expected = gradients_of(layer)
    for name, parameter in layer.named_parameters():
        buffer = optimizer.state[parameter]["momentum_buffer"]
        torch.testing.assert_close(buffer, expected[name], rtol=1e-10, atol=1e-12)


def test_amsgrads_maximum_stays_above():
    layer = make_layer("LRU")
    optimizer = OPTIMIZERS["AdamW, amsgrad"](layer.parameters())
    train(layer, optimizer, steps=10)
    cut(layer, optimizer, Transport())
    for parameter in layer.parameters():
        state = optimizer.state[parameter]
        assert (state["max_exp_avg_sq"] >= state["exp_avg_sq"] * (1 - 1e-12)).all()


def test_an_optimizer_without_a_step_has_nothing_to_carry():
    layer = make_layer("LRU", torch.float32)
    optimizer = optim.Adam(layer.parameters())
    assert cut(layer, optimizer, Transport()) == {name: {} for name, _ in layer.named_parameters()}
    assert math.isfinite(train(layer, optimizer))


@pytest.mark.parametrize("moments", [Transport(), Restart(), Slice()], ids=repr)
def test_momentum_that_has_not_begun_stays_none(moments):
    layer = make_layer("LRU", torch.float32)
    optimizer = optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9)
    train(layer, optimizer)
    begun = optimizer.state[layer.C_re]["momentum_buffer"]
    for parameter in layer.parameters():
        optimizer.state[parameter]["momentum_buffer"] = begun if parameter is layer.C_re else None
    cut(layer, optimizer, moments)
    assert optimizer.state[layer.C_re]["momentum_buffer"].shape == layer.C_re.shape
    assert all(optimizer.state[p]["momentum_buffer"] is None for p in layer.parameters() if p is not layer.C_re)
    assert math.isfinite(train(layer, optimizer))


def test_frozen_parameters_need_no_optimizer():
    layer = make_layer("LRU", torch.float32)
    for name in ("nu_log", "theta_log"):
        layer.get_parameter(name).requires_grad_(False)
    optimizer = optim.Adam([p for p in layer.parameters() if p.requires_grad])
    train(layer, optimizer)
    cut(layer, optimizer, Transport())
    assert layer.nu_log not in optimizer.state
    assert math.isfinite(train(layer, optimizer))


def test_half_precision_parameters_keep_their_precision():
    layer = make_layer("LRU", torch.bfloat16)
    optimizer = optim.AdamW(layer.parameters(), lr=1e-3)
    train(layer, optimizer)
    cut(layer, optimizer, Transport())
    assert all(optimizer.state[p]["exp_avg"].dtype == torch.bfloat16 for p in layer.parameters())
    assert math.isfinite(train(layer, optimizer))


class Strange(optim.Adam):
    """One entry more, of whatever kind."""

    def __init__(self, params, entry):
        super().__init__(params)
        self.entry = entry

    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["strange"] = self.entry(p)


class Adafactor(optim.Optimizer):
    pass


def never_held(layer):
    return optim.Adam([nn.Parameter(torch.ones(2))])


def spoilt(layer):
    optimizer = optim.Adam(layer.parameters())
    train(layer, optimizer)
    optimizer.state[layer.B_re]["exp_avg"][0, 0] = math.nan
    return optimizer


def negative(layer):
    optimizer = optim.Adam(layer.parameters())
    train(layer, optimizer)
    optimizer.state[layer.B_re]["exp_avg_sq"][0, 0] = -1
    return optimizer


def stepped(make):
    def made(layer):
        optimizer = make(layer.parameters())
        train(layer, optimizer)
        return optimizer

    return made


def lbfgs(layer):
    optimizer = optim.LBFGS(layer.parameters())
    layer.zero_grad()

    def closure():
        layer.zero_grad()
        loss = loss_of(layer)
        loss.backward()
        return loss

    optimizer.step(closure)
    return Wrapped(optimizer)


REFUSED = {
    "LBFGS": (lambda layer: optim.LBFGS(layer.parameters()), "LBFGS mixes"),
    "LBFGS inside another": (lbfgs, "the state of LBFGS"),
    "Adafactor": (lambda layer: optim.Adafactor(layer.parameters()), "Adafactor mixes"),
    "Adafactor inside another": (
        stepped(lambda p: Wrapped(optim.Adafactor(p))),
        r"'(row_var|col_var)' of .* has shape .*factored",
    ),
    "somebody's Adafactor": (lambda layer: Adafactor(layer.parameters(), {}), "Adafactor mixes"),
    "a factored entry": (
        stepped(lambda p: Strange(p, lambda q: torch.ones(3, 5))),
        r"'strange' of .*\(3, 5\).*factored",
    ),
    "a list": (stepped(lambda p: Strange(p, lambda q: [torch.ones(2)])), "'strange' of .* is a list"),
    "quantised": (
        stepped(lambda p: Strange(p, lambda q: q.detach().to(torch.uint8))),
        "'strange' of .* is torch.uint8",
    ),
    "unknown": (stepped(lambda p: Strange(p, torch.zeros_like)), r"Strange keeps 'strange'.*Restart\(\)"),
    "not held": (never_held, "does not hold layer.nu_log, layer.theta_log"),
    "no optimizer": (lambda layer: object(), "optimizer is a object, expected one with param_groups and state"),
    "NaN": (spoilt, "'exp_avg' of layer.B_re holds 1 entries that are not finite"),
    "negative": (negative, "'exp_avg_sq' of layer.B_re holds -1"),
}


def test_a_state_of_another_order_is_refused_with_both_shapes():
    """AdamW after a cut, with its state from before: it was told to be factored, and to become Adam."""
    layer = make_layer("LRU", torch.float32)
    optimizer = stepped(optim.AdamW)(layer)
    state = optimizer.state[layer.nu_log]
    state["exp_avg"] = torch.zeros(9)
    with pytest.raises(
        CompressionError, match=r"'exp_avg' of layer\.nu_log has shape \(9,\), the parameter \(\d,\)"
    ) as caught:
        prepare_cut("layer", change_of(layer, 4), optimizer, Transport())
    assert "saved at the present orders" in str(caught.value)
    assert "choose" not in str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_follow_a_cut_is_refused_by_name_before_anything_is_changed(case):
    make, said = REFUSED[case]
    layer = make_layer("LRU", torch.float32)
    optimizer = make(layer)
    values = copy.deepcopy(layer.state_dict())
    state = copy.deepcopy(dict(optimizer.state)) if case != "no optimizer" else {}
    with pytest.raises(CompressionError, match=said):
        prepare_cut("layer", change_of(layer, 4), optimizer, Transport())
    assert all(torch.equal(value, values[name]) for name, value in layer.state_dict().items())
    assert len(state) == (len(optimizer.state) if case != "no optimizer" else 0)


@pytest.mark.parametrize("moments", [Restart(), Slice()], ids=repr)
def test_entries_of_unknown_meaning_can_be_dropped_or_sliced(moments):
    layer = make_layer("LRU", torch.float32)
    optimizer = Strange(layer.parameters(), torch.ones_like)
    train(layer, optimizer)
    cut(layer, optimizer, moments)
    expected = 0 if isinstance(moments, Restart) else 1
    assert all((optimizer.state[layer.get_parameter(key)]["strange"] == expected).all() for key in layer.STATE_AXES)


def test_supported_optimizers_are_told_at_once():
    layer = make_layer("LRU", torch.float32)
    for make in OPTIMIZERS.values():
        assert require_supported(make(layer.parameters()), dict(layer.named_parameters())) is None
    with pytest.raises(CompressionError, match="does not hold D"):
        require_supported(optim.Adam([layer.nu_log]), {"D": layer.D})


def test_nothing_is_written_while_states_are_computed():
    layer = make_layer("LRU", torch.float32)
    optimizer = optim.Adam(layer.parameters())
    train(layer, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    carried_states(change_of(layer, 4), optimizer, Transport())
    after = optimizer.state_dict()
    for index, state in before["state"].items():
        assert all(torch.equal(after["state"][index][key], value) for key, value in state.items())
