"""Trial cuts on real models: they change nothing, what is written is what was tried, and faults leave no trace."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from compressm.compression import (
    CompressionError,
    Compressor,
    Decision,
    EnergyTolerance,
    Fitted,
    Folded,
    LossTolerance,
    PerChannel,
    Rollback,
    Selected,
    SharedIndex,
    TargetOrder,
    TryingPolicy,
    compress_,
)
from compressm.compression.copies import copied
from compressm.compression.record import event_of
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba
from compressm.layers.parameters import form_changes
from compressm.models import SequenceClassifier
from tests.families.memory.test_forms import Decaying

INPUTS = torch.randn(12, 30, 3, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(5, (12,), generator=torch.Generator().manual_seed(1))


def loss(model):
    return cross_entropy(model(INPUTS), TARGETS)


def calibrate(model):
    return model(INPUTS)


def make(kind=LRU, depth=2, order=12, **options):
    torch.manual_seed(0)
    return SequenceClassifier(kind, depth=depth, width=4, order=order, inputs=3, classes=5, **options)


def trained(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return optimizer


def value_of(model):
    model.eval()
    with torch.no_grad():
        return float(loss(model))


def picture(model, optimizer=None):
    """Everything that a trial must leave alone, bit for bit."""
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    tensors |= {f"grad {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    if optimizer is not None:
        for k, state in enumerate(optimizer.state.values()):
            tensors |= {f"state {k} {key}": value.clone() for key, value in state.items()}
    modes = [module.training for module in model.modules()]
    # Not those of Python: the checks of shapes in tests draw from them.
    numbers = [torch.get_rng_state().tolist(), str(np.random.get_state(legacy=False))]  # noqa: NPY002
    identities = [id(parameter) for parameter in model.parameters()]
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    return tensors, modes, numbers, identities, pointers, hooks, torch.is_grad_enabled()


def same(one, other):
    (tensors, *rest), (others, *more) = one, other
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
    return rest == more


def noisy(model):
    """A loss that draws random numbers, in training mode, and changes buffers of what it is given."""
    model.train()
    draw = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
    return loss(model) + 1e-9 * draw


class Asking(TryingPolicy):
    """Somebody's own policy: it tries what it is told, and then keeps all states or takes the last."""

    def __init__(self, loss, *orders, take=False):
        self.loss, self.orders, self.take, self.losses = loss, orders, take, []

    def choose(self, spectra, trials):
        assert all(bool((sigma.diff() <= 0).all()) for sigma in spectra.values())
        self.losses = [trials.present, *(trials(dict.fromkeys(spectra, order)) for order in self.orders)]
        return dict.fromkeys(spectra, self.orders[-1]) if self.take else trials.orders


@pytest.mark.parametrize("kind", [LRU, S5, S4, S4D, LinOSS, Mamba])
def test_trials_change_no_bit_of_anything(kind):
    model = make(kind)
    optimizer = trained(model)
    before, forms = picture(model, optimizer), form_changes()
    policy = Asking(noisy, 8, 3, 1)
    compressor = Compressor(model, optimizer, when=[1], keep=policy, calibrate=calibrate)
    assert compressor.step(1)[0].action == "keep"
    assert same(before, picture(model, optimizer))
    assert form_changes() == forms  # no CUDA graph is recorded again
    assert len(set(policy.losses)) >= 3


@pytest.mark.parametrize("form", [None, Folded(), Selected(), Fitted()])
def test_trials_of_matrix_states_change_nothing_and_are_what_is_written(form):
    torch.manual_seed(0)
    model, x = Decaying(), torch.randn(6, 20, 6)
    target = torch.randn(6, 20, 6)
    policy = Asking(lambda model: (model(x) - target).square().mean(), 6, 3, take=True)
    before = picture(model)
    compressor = Compressor(model, when=[1], keep=policy, calibrate=lambda model: model(x), form=form)
    assert len(compressor.preview()) == 1
    assert same(before, picture(model))
    decision, cut = compressor.step(1)
    assert cut.loss_after == policy.losses[-1]
    with torch.no_grad():
        assert float((model(x) - target).square().mean()) == pytest.approx(cut.loss_after, rel=1e-6)
    assert "2 trials" in decision.reason


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LRU, {}),
        (LRU, {"calibrate": calibrate}),
        (LRU, {"round_to": 4, "at_least": 4}),
        (LRU, {"uniform": True, "calibrate": calibrate}),
        (LRU, {"overrides": {"blocks.0.*": TargetOrder(5)}}),
        (S5, {}),
        (S4, {}),
        (S4D, {"calibrate": calibrate}),
        (LinOSS, {}),
        (Mamba, {"calibrate": calibrate}),
        (Mamba, {"calibrate": calibrate, "selective": PerChannel()}),
        (Mamba, {"calibrate": calibrate, "selective": SharedIndex()}),
    ],
)
def test_the_loss_of_the_record_is_that_of_the_model_after_the_cut(kind, options):
    model = make(kind)
    trained(model, steps=20)
    before = value_of(model)
    cuts = compress_(model, keep=LossTolerance(0.3, loss=loss), **options)
    assert cuts
    after = value_of(model)
    assert all(cut.loss_before == pytest.approx(before, rel=1e-6) for cut in cuts)
    assert all(cut.loss_after == pytest.approx(after, rel=1e-6) for cut in cuts)
    assert after <= 1.3 * before * (1 + 1e-6)
    assert f"loss {before:.4g} -> {after:.4g}" in str(cuts[0])
    if "uniform" in options:
        assert len({block.ssm.order for block in model.blocks}) == 1
    if "overrides" in options:
        assert model.blocks[0].ssm.order == 5


def test_every_trial_begins_with_the_same_random_numbers():
    seen = []
    policy = Asking(lambda model: seen.append(torch.rand(3)) or loss(model), 8, 4, 2)
    Compressor(make(), when=[1], keep=policy).step(1)
    assert len(seen) == 4
    assert all(torch.equal(numbers, seen[0]) for numbers in seen)


def test_data_is_observed_once_for_all_trials():
    calls = []
    policy = Asking(loss, 9, 6, 3, take=True)
    compressor = Compressor(make(), when=[1], keep=policy, calibrate=lambda model: calls.append(1) or model(INPUTS))
    assert len(compressor.step(1)) == 3
    assert calls == [1]


def test_a_copy_shares_all_tensors_but_those_of_the_named_layers():
    model = make()
    model.beside = [model.blocks[0].ssm]
    model.kept = (INPUTS.clone().requires_grad_() * 2).sum()  # with a graph: it cannot be copied
    twin = copied(model, ["blocks.0.ssm"])
    own = {id(p) for p in twin.blocks[0].ssm.parameters()}
    for name, parameter in twin.named_parameters():
        assert (parameter is model.get_parameter(name)) == (id(parameter) not in own)
    assert len(own) == len(list(model.blocks[0].ssm.parameters()))
    assert twin.beside[0] is twin.blocks[0].ssm
    assert twin.kept is model.kept


class Halting(nn.Module):
    """A model that cannot be copied."""

    def __init__(self):
        super().__init__()
        self.inner = make()
        self.lines = (line for line in ())

    def forward(self, x):
        return self.inner(x)


def changes_a_weight(model):
    model.head.weight.data.add_(1)
    return loss(model)


def takes_a_step(model):
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss(model)


FAULTS = {
    "NaN": (lambda model: loss(model) * math.nan, "loss returned nan"),
    "minus infinity": (lambda model: -math.inf, "loss returned -inf"),
    "infinity as it is": (lambda model: loss(model) * 0 + math.inf, "loss returned inf for the model as it is"),
    "text": (lambda model: str(loss(model)), "loss returned .*expected a number"),
    "a flag": (lambda model: bool(loss(model) > 0), "loss returned True"),
    "many numbers": (lambda model: model(INPUTS), "(?s)loss returned .*expected a number"),
    "an error": (lambda model: loss(model) / (model.blocks[0].ssm.order == 12) and 1 / 0, "division by zero"),
    "a changed weight": (changes_a_weight, "loss changed head.weight"),
    "a step": (takes_a_step, "loss called step"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_loss_leaves_everything_as_it_was(fault):
    function, said = FAULTS[fault]
    model = make()
    optimizer = trained(model)
    compressor = Compressor(model, optimizer, when=[2, 3], keep=LossTolerance(0.5, loss=function))
    compressor.step(1)
    before, state = picture(model, optimizer), compressor.state_dict()
    with pytest.raises((CompressionError, ZeroDivisionError), match=said):
        compressor.step(2)
    assert same(before, picture(model, optimizer))
    assert compressor.state_dict() == state
    with pytest.raises((CompressionError, ZeroDivisionError), match=said):  # it is due again
        compressor.step(2)


def test_a_loss_of_another_model_than_the_one_given_is_refused():
    """Every cut of the copy would look harmless."""
    model = make()
    with pytest.raises(CompressionError, match="loss did not run the model that it was given"):
        compress_(model, keep=LossTolerance(0.1, loss=lambda given: loss(model)))
    assert model.blocks[0].ssm.order == 12


def test_an_infinite_loss_of_a_cut_model_counts_as_a_bad_cut():
    model = make(depth=1)

    def overflowing(given):
        return loss(given) if given.blocks[0].ssm.order > 6 else loss(given) * 0 + math.inf

    (cut,) = compress_(model, keep=LossTolerance(50.0, loss=overflowing))
    assert cut.rank == 7


def test_a_model_that_cannot_be_copied_is_named():
    with pytest.raises(CompressionError, match=r"Halting cannot be copied for a trial cut .*generator"):
        compress_(Halting(), keep=LossTolerance(0.1, loss=loss))


def test_a_policy_that_catches_a_failed_trial_does_not_hide_it():
    class Catching(Asking):
        def choose(self, spectra, trials):
            try:
                trials(dict.fromkeys(spectra, 3))
            except ZeroDivisionError:
                return dict.fromkeys(spectra, 2)

    model = make()
    with pytest.raises(ZeroDivisionError):
        compress_(model, keep=Catching(lambda model: 1 / 0))
    assert model.blocks[0].ssm.order == 12


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        ({}, "no order for 'blocks.0.ssm', 'blocks.1.ssm'"),
        ({"blocks.0.ssm": 3, "blocks.1.ssm": 13}, "order of 'blocks.1.ssm' is 13"),
        ({"blocks.0.ssm": 3, "blocks.1.ssm": 3, "head": 1}, "unknown 'head'"),
        (None, r"returned None, expected \{module: order\}"),
        (3, "returned 3, expected"),
        ([3, 3], r"returned \[3, 3\], expected"),
    ],
)
def test_bad_orders_of_a_policy_are_refused(orders, said):
    class Odd(TryingPolicy):
        loss = staticmethod(loss)

        def choose(self, spectra, trials):
            return orders

    with pytest.raises(CompressionError, match=said):
        compress_(make(), keep=Odd())


@pytest.mark.parametrize("order", [np.int64(3), torch.tensor(3), 3], ids=["NumPy", "tensor", "Python"])
def test_one_order_for_all_channels_may_come_from_numpy_or_a_tensor(order):
    class Chosen(TryingPolicy):
        loss = staticmethod(loss)

        def choose(self, spectra, trials):
            return dict.fromkeys(spectra, order)

    (cut,) = compress_(make(Mamba, depth=1), keep=Chosen(), calibrate=calibrate, selective=PerChannel("measured"))
    assert cut.rank == 3


@pytest.mark.parametrize("order", [None, 2.5, "many"])
def test_an_odd_order_for_the_channels_of_a_layer_is_named(order):
    class Odd(TryingPolicy):
        loss = staticmethod(loss)

        def choose(self, spectra, trials):
            return dict.fromkeys(spectra, order)

    with pytest.raises(CompressionError, match=r"the order of 'blocks\.0\.ssm' is"):
        compress_(make(Mamba, depth=1), keep=Odd(), calibrate=calibrate, selective=PerChannel("measured"))


def test_orders_that_were_not_tried_have_no_loss():
    class Blind(TryingPolicy):
        loss = staticmethod(loss)

        def choose(self, spectra, trials):
            return dict.fromkeys(spectra, 4)

    cuts = compress_(make(), keep=Blind())
    assert [(cut.rank, cut.loss_before, cut.loss_after) for cut in cuts] == [(4, None, None)] * 2
    assert "loss_after" not in cuts[0].as_dict()
    assert event_of(cuts[0].as_dict()) == cuts[0]


def test_it_goes_with_overrides_only_as_keep():
    tolerance = LossTolerance(0.1, loss=loss)
    with pytest.raises(CompressionError, match=r"overrides\['blocks.0.\*'\] is LossTolerance.* expected it as keep"):
        compress_(make(), keep=EnergyTolerance(0.1), overrides={"blocks.0.*": tolerance})
    model = make()
    cuts = compress_(model, keep=tolerance, overrides={"*": TargetOrder(3)})
    assert [cut.rank for cut in cuts] == [3, 3]  # nothing is left to try


def test_followers_get_the_cut_that_was_tried():
    model = make()
    trained(model, 10)
    average = copy.deepcopy(model)
    compress_(model, keep=LossTolerance(0.2, loss=loss), follow=[average])
    assert [b.ssm.order for b in average.blocks] == [b.ssm.order for b in model.blocks]
    assert value_of(average) == pytest.approx(value_of(model), rel=1e-5)


def test_cuts_of_all_tries_together_spend_one_increase():
    """A model that does not train between its cuts."""
    model = make(order=24)
    trained(model, 30)
    start, policy = value_of(model), LossTolerance(0.05, loss=loss)
    compressor = Compressor(model, when=range(1, 9), keep=policy, gate=1.0)
    for step in range(1, 9):
        compressor.step(step)
    assert model.blocks[0].ssm.order < 24
    assert value_of(model) <= 1.05 * start * (1 + 1e-6)
    kept = compressor.state_dict()["losses"]
    assert kept["added"] <= 0.05 * kept["best"] * (1 + 1e-6)


def test_what_is_spent_is_saved_and_goes_on(tmp_path):
    model = make(order=24)
    trained(model, 30)
    policy = LossTolerance(0.05, loss=loss)
    one = Compressor(model, when=range(1, 9), keep=policy, gate=1.0)
    one.step(1)
    one.step(2)
    twin, state = copy.deepcopy(model), one.state_dict()
    other = Compressor(twin, when=range(1, 9), keep=policy, gate=1.0)
    other.load_state_dict(state)
    for step in range(3, 9):
        assert [str(e) for e in one.step(step)] == [str(e) for e in other.step(step)]
    assert other.state_dict()["losses"] == one.state_dict()["losses"]
    assert value_of(model) == value_of(twin)


def test_a_guard_undoes_a_cut_that_was_tried():
    model = make()
    optimizer = trained(model)
    values = iter([1.0, 0.1])
    guard = Rollback(lambda: next(values), settle=1)
    compressor = Compressor(model, optimizer, when=[2], keep=LossTolerance(0.5, loss=loss), guard=guard)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    events = [event for step in range(1, 4) for event in compressor.step(step)]
    assert [type(event).__name__ for event in events] == ["Decision", "Cut", "Cut", "Restored"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_decision_is_a_record():
    decision = Decision(3, "keep", "because", 7)
    assert event_of(decision.as_dict()) == decision
    assert str(decision) == "keeps all states: because; looks again at step 7"
    assert str(Decision(3, "stop", "because", None)) == "cuts no more: because"
    for wrong in ({"action": "go"}, {"again": 3}, {"step": -1}):
        with pytest.raises(CompressionError, match="Decision"):
            event_of(decision.as_dict() | wrong)
