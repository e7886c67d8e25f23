"""The answer of inspect to the question which size a model needs: orders by loss, costs, and advice."""

import json
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from compressm.compression import CompressionError, PerChannel, TargetOrder, compress_, inspect
from compressm.compression.inspection import Size, Sizes
from compressm.layers import LRU, S4D, Mamba
from compressm.models import SequenceClassifier

INPUTS = torch.randn(12, 30, 3, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(5, (12,), generator=torch.Generator().manual_seed(1))


def loss(model):
    return cross_entropy(model(INPUTS), TARGETS)


def trained(kind=LRU, order=12, steps=30):
    torch.manual_seed(0)
    model = SequenceClassifier(kind, depth=2, width=4, order=order, inputs=3, classes=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (LRU, {}),
        (S4D, {"calibrate": lambda model: model(INPUTS)}),
        (Mamba, {"calibrate": lambda model: model(INPUTS)}),
        (Mamba, {"calibrate": lambda model: model(INPUTS), "selective": PerChannel()}),
    ],
)
def test_every_size_keeps_its_promise_and_a_larger_increase_needs_no_more_states(kind, options):
    model = trained(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = inspect(model, loss=loss, **options).sizes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    now = sizes.now.loss
    assert all(size.loss <= now * (1 + size.increase) + 1e-9 for size in sizes.sizes)
    states = [sum(size.orders.values()) for size in sizes.sizes]
    assert states == sorted(states, reverse=True)
    assert sizes.recommended.increase == 0.01
    assert json.loads(json.dumps(sizes.to_dict()))["advice"] == sizes.advice


def test_costs_are_those_of_a_model_that_is_cut_so():
    model = trained(S4D, order=12)
    sizes = inspect(model, loss=loss, increases=[0.5], measure={4: 1.0, 12: 3.0}).sizes
    size = sizes.sizes[1]
    assert size.orders != sizes.now.orders
    overrides = {name: TargetOrder(order) for name, order in size.orders.items()}
    compress_(model, keep=TargetOrder(12), overrides=overrides)
    assert {name: model.get_submodule(name).order for name in size.orders} == size.orders
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert size.state_bytes == sum(block.ssm.initial_state(1).nbytes for block in model.blocks)
    assert sizes.now.milliseconds == 3.0
    assert size.milliseconds < 3.0


def sizes_of(orders, now=64, halved=1.0, increase=0.01, loss=1.0):
    first = Size(0.0, dict.fromkeys(orders, now), 1.0)
    return Sizes((first, Size(increase, orders, loss)), halved, 9)


def test_the_advice_follows_the_documented_rule():
    small = sizes_of({"a": 8, "b": 5}, halved=1.03)
    assert small.is_small_enough_from_the_start
    assert "A model of that size from the start is likely as good" in small.advice
    for other in (sizes_of({"a": 9, "b": 5}, halved=1.03), sizes_of({"a": 8, "b": 5}, halved=1.031)):
        assert not other.is_small_enough_from_the_start
        assert "from the start" not in other.advice
    assert small.advice.startswith("Cut to 13 of 128 states (8, 5): the loss changes by +0 %.")
    kept = sizes_of({"a": 64, "b": 64})
    assert kept.advice == "Keep all 128 states: every cut that was tried raises the loss by more than 1 %."
    assert "change it by +inf %" in sizes_of({"a": 32}, halved=math.inf).advice
    alone = sizes_of({"a": 21}, halved=2.94, loss=0.942).advice
    assert alone == "Cut to 21 of 64 states: the loss changes by -5.8 %. Half of these again would change it by +194 %."


def test_it_prints_a_table_with_the_advice():
    said = inspect(trained(), loss=loss, measure={12: 2.0})
    lines = str(said).splitlines()
    assert lines[-1] == said.sizes.advice
    assert any(line.startswith("loss may rise by") and "bytes of states" in line and "ms" in line for line in lines)
    assert said.sizes.advice.split("'")[0] in said._repr_html_()
    assert "sizes" in said.to_dict()
    assert "sizes" not in inspect(trained()).to_dict()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"measure": {4: 1.0}}, "measure without loss"),
        ({"loss": loss, "increases": []}, "increases are empty"),
        ({"loss": loss, "increases": [-0.1]}, "increase is -0.1"),
        ({"loss": lambda model: math.nan * loss(model)}, "loss returned nan"),
        ({"loss": lambda: 0.0}, "loss takes"),
        ({"loss": loss, "measure": {4: 1.0}}, "expected one of at least 12"),
    ],
)
def test_bad_questions_are_refused(options, said):
    with pytest.raises(CompressionError, match=said):
        inspect(trained(steps=1), **options)
