"""Whatever a model is made of and whatever is asked for: orders only fall, nothing breaks, and bits repeat."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compressm.adapters import find
from compressm.compression.compressor import compress_
from compressm.compression.optimizer import Restart, Slice, Transport
from compressm.compression.policies import Budget, EnergyTolerance, ErrorBound, KeepFraction, TargetOrder
from compressm.control import hankel_singular_values
from compressm.families.choices import Largest, Random, Smallest, WhiteNoise
from compressm.layers import LRU, S4D, S5
from compressm.models import SequenceClassifier

ORDERS = st.integers(1, 7)

# Dead layers are not cut, and a warning says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:not cut, because all values of their states are zero"),
    pytest.mark.filterwarnings("ignore:nothing was cut. with round_to"),
]


class Stack(nn.Module):
    """Layers of several kinds, one after the other."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0] / 4
        return x.mean(1)


def twins(layer):
    """Every mode twice, or all but twice: equal poles, equal spectra, ties."""
    for name, axis in layer.STATE_AXES.items():
        parameter = layer.get_parameter(name)
        half = torch.arange(parameter.shape[axis]) // 2
        parameter.data = parameter.data.index_select(axis, half).contiguous()


def dead(layer):
    """Nothing comes out: all singular values are zero."""
    layer.C_re.data.zero_(), layer.C_im.data.zero_()


def half_dead(layer):
    """The last modes do nothing."""
    axis = layer.STATE_AXES["C_re"]
    for parameter in (layer.C_re, layer.C_im):
        parameter.data.narrow(axis, parameter.shape[axis] // 2, (parameter.shape[axis] + 1) // 2).zero_()


def as_made(layer):
    """Random."""


KINDS, SPOILT = st.sampled_from([LRU, S5, S4D]), st.sampled_from([as_made, as_made, twins, dead, half_dead])


@st.composite
def recipes(draw):
    """(kind, order, spoilt) of every layer, the width, and whether they stand in blocks of a classifier."""
    width, in_blocks = draw(st.integers(1, 4)), draw(st.booleans())
    layers = draw(st.lists(st.tuples(KINDS, ORDERS, SPOILT), min_size=1, max_size=3))
    if in_blocks:
        layers = [(layers[0][0], layers[0][1], spoil) for _, _, spoil in layers]
    return layers, width, in_blocks


def build(recipe):
    layers, width, in_blocks = recipe
    torch.manual_seed(0)
    if in_blocks:
        kind, order, _ = layers[0]
        sizes = {"depth": len(layers), "width": width, "order": order}
        model = SequenceClassifier(kind, inputs=width, classes=3, **sizes)
    else:
        model = Stack([kind(width, order) for kind, order, _ in layers])
    for layer, (_, _, spoil) in zip(ssm_layers(model), layers, strict=True):
        spoil(layer)
    return model


def ssm_layers(model):
    return [module for module in model.modules() if isinstance(module, LRU | S5 | S4D)]


def orders(model):
    return [layer.order for layer in ssm_layers(model)]


def policies(count):
    return st.one_of(
        st.builds(EnergyTolerance, st.sampled_from([0.0, 1e-12, 0.01, 0.2, 0.999])),
        st.builds(ErrorBound, st.sampled_from([0.0, 1e-6, 0.1, 100.0]), st.booleans()),
        st.builds(KeepFraction, st.sampled_from([0.01, 0.5, 0.9, 1.0])),
        st.builds(TargetOrder, ORDERS),
        st.builds(Budget, st.integers(count, 3 * 7)),
    )


OPTIONS = st.fixed_dictionaries(
    {
        "fold": st.booleans(),
        "select": st.sampled_from([Largest(), Largest(), Smallest(), Random(3)]),
        "gate": st.sampled_from([0.5, 0.95, 1.0]),
        "round_to": st.integers(1, 4),
        "moments": st.sampled_from([Transport(), Restart(), Slice()]),
    }
)
OPTIMIZERS = st.sampled_from([torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])


def train(model, optimizer, x):
    optimizer.zero_grad()
    y = model(x)
    y.square().sum().backward()
    optimizer.step()
    return y.detach()


def check_cut(model, optimizer, keep, options):
    """One cut, with what every cut promises."""
    before = orders(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Budget.* cannot be met|nothing was cut: with keep=KeepFraction")
        cuts = compress_(model, keep=keep, optimizer=optimizer, **options)
    after = orders(model)
    assert all(1 <= new <= old for new, old in zip(after, before, strict=True))
    changed = [(old, new) for old, new in zip(before, after, strict=True) if new != old]
    assert [(cut.order, cut.rank) for cut in cuts] == changed
    assert all(new <= options["gate"] * old for old, new in changed)
    for parameter, state in optimizer.state.items():
        for value in state.values():
            assert not isinstance(value, torch.Tensor) or value.numel() == 1 or value.shape == parameter.shape
    return cuts


def cut_twice(recipe, keep, kind, options):
    """Train, cut, train, cut with the same policy, train; all of it as one row of numbers."""
    model = build(recipe)
    optimizer = kind(model.parameters(), lr=1e-3)
    width = recipe[1]
    x = torch.randn(3, 12, width, generator=torch.Generator().manual_seed(1))
    if "calibrate" in options:
        data = torch.randn(4, 24, width, generator=torch.Generator().manual_seed(2))
        options = {**options, "calibrate": lambda model: model(data)}
    outputs = [train(model, optimizer, x)]
    for _ in range(2):
        check_cut(model, optimizer, keep, options)
        outputs.append(train(model, optimizer, x))
    row = torch.cat([part.detach().flatten() for part in (*outputs, *model.parameters())])
    assert torch.isfinite(row).all()
    return row


CASES = (st.data(), recipes(), OPTIMIZERS, OPTIONS, st.booleans())


def check_repeated(data, recipe, kind, options, calibrate):
    keep = data.draw(policies(len(recipe[0])))
    options = {**options, "calibrate": None} if calibrate else options
    options = {**options, "gramian": WhiteNoise()} if isinstance(keep, ErrorBound) else options
    assert torch.equal(cut_twice(recipe, keep, kind, options), cut_twice(recipe, keep, kind, options))


@settings(max_examples=10)
@given(*CASES)
def test_orders_only_fall_and_training_goes_on_and_bits_repeat(data, recipe, kind, options, calibrate):
    check_repeated(data, recipe, kind, options, calibrate)


@pytest.mark.slow
@settings(max_examples=500)
@given(*CASES)
def test_the_same_of_five_hundred_models(data, recipe, kind, options, calibrate):
    check_repeated(data, recipe, kind, options, calibrate)


@settings(max_examples=12)
@given(recipes(), st.sampled_from([0.0, 0.05, 0.3]))
def test_a_tolerance_of_nothing_changes_nothing_and_a_second_cut_takes_its_share_of_what_is_left(recipe, tau):
    model = build(recipe).eval()
    x = torch.randn(3, 12, recipe[1], generator=torch.Generator().manual_seed(1))
    before = model(x)
    first = compress_(model, keep=EnergyTolerance(tau))
    if tau == 0:
        assert torch.allclose(model(x), before, rtol=1e-3, atol=1e-4)
    second = compress_(model, keep=EnergyTolerance(tau))
    assert all(cut.energy_lost <= tau + 1e-12 for cut in first + second)
    again = {cut.module for cut in second}
    assert tau > 0 or not again & {cut.module for cut in first}


@settings(max_examples=12)
@given(recipes(), st.data())
def test_a_fixed_target_is_reached_once(recipe, data):
    """Cut twice to the same orders, the second time there is nothing to do; a layer that says nothing is left alone."""
    keep = data.draw(st.one_of(st.builds(TargetOrder, ORDERS), st.builds(Budget, st.integers(len(recipe[0]), 21))))
    model = build(recipe)
    silent = [not hankel_singular_values(adapter.read(layer)).any() for layer, adapter in find(model).values()]
    before = orders(model)
    compress_(model, keep=keep)
    reached = orders(model)
    assert all(now == then for now, then, still in zip(reached, before, silent, strict=True) if still)
    if isinstance(keep, TargetOrder):
        assert all(order <= keep.n for order, still in zip(reached, silent, strict=True) if not still)
    else:
        assert any(silent) or sum(reached) <= keep.total_states
    assert compress_(model, keep=keep) == []
    assert orders(model) == reached
