"""A compressor refuses at once, by name and with the value, what could not be done at the first cut."""

import pytest

from tests import unhooked

PREAMBLE = """
import copy
import torch
from torch import nn
from compressm.compression import *
from compressm.layers import LRU, S5
from compressm.models import SequenceClassifier

torch.manual_seed(0)

def make():
    return SequenceClassifier(LRU, depth=2, width=4, order=8, inputs=3, classes=5)

model = make()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(2, 9, 3)).sum().backward()
optimizer.step()
before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other

def unchanged(call):
    try:
        call()
    finally:
        assert same(before, (model.state_dict(), optimizer.state_dict()))

def make_compressor(**changes):
    usual = dict(model=model, optimizer=optimizer, when=[1], keep=TargetOrder(4))
    unchanged(lambda: Compressor(**{**usual, **changes}))

def once(**changes):
    usual = dict(model=model, optimizer=optimizer, keep=TargetOrder(4))
    unchanged(lambda: compress_(**{**usual, **changes}))

def stepped(number, **changes):
    compressor = Compressor(**{**dict(model=model, optimizer=optimizer, when=[1], keep=TargetOrder(4)), **changes})
    unchanged(lambda: compressor.step(number))

def broken(name, value):
    other = make()
    other.blocks[1].ssm.get_parameter(name).data.view(-1)[0] = value
    return other

def huge():
    other = make()
    other.blocks[1].ssm.B_re.data.fill_(3e38)
    return other

def other_kind(optimizer):
    return make_compressor(optimizer=optimizer(model.parameters()))

def averaged(layer=LRU, **changes):
    usual = dict(depth=2, width=4, order=8, inputs=3, classes=5)
    return SequenceClassifier(layer, **{**usual, **changes})

def followed(change, **changes):
    average = make()
    usual = dict(model=model, optimizer=optimizer, when=[1], keep=TargetOrder(4), follow=[average])
    compressor = Compressor(**{**usual, **changes})
    change(average)
    kept = copy.deepcopy(average.state_dict())
    try:
        unchanged(lambda: compressor.step(1))
    finally:
        assert same(kept, average.state_dict())

strangers = torch.optim.Adam(make().parameters())
"""

MADE = {
    "tau 1": ("make_compressor(keep=EnergyTolerance(1.0))", "tau is 1.0", "0 <= it < 1"),
    "tau below 0": ("make_compressor(keep=EnergyTolerance(-0.01))", "tau is -0.01", "0 <= it < 1"),
    "tau NaN": ("once(keep=EnergyTolerance(float('nan')))", "tau is nan", "0 <= it < 1"),
    "a number for a policy": ("make_compressor(keep=0.05)", "keep is 0.05", "EnergyTolerance(0.05)"),
    "a class for a policy": ("make_compressor(keep=EnergyTolerance)", "keep is <class", "a policy"),
    "an optimizer of others": (
        "make_compressor(optimizer=strangers)",
        "does not hold blocks.0.ssm.nu_log",
        "optimizer=[first, second]",
    ),
    "no optimizer at all": ("make_compressor(optimizer='adam')", "optimizer is 'adam'", "param_groups"),
    "LBFGS": ("other_kind(torch.optim.LBFGS)", "LBFGS mixes", "expected Adam"),
    "Adafactor": ("other_kind(torch.optim.Adafactor)", "Adafactor mixes", "expected Adam"),
    "no SSM layer": ("make_compressor(model=nn.Linear(2, 2), optimizer=None)", "Linear has no SSM layer", "adapters"),
    "none that is taken": ("make_compressor(filter_fn=lambda module, name: False)", "filter_fn accepts no", "blocks.0"),
    "no model": ("make_compressor(model=[model])", "list", "nn.Module"),
    "an empty schedule": ("make_compressor(when=[])", "when is []", "never fire"),
    "an empty range": ("make_compressor(when=range(5, 5))", "range(5, 5)", "never fire"),
    "a schedule without end": ("make_compressor(when=iter([1]))", "iterator", "finite collection"),
    "step 0 in a schedule": ("make_compressor(when=[0, 5])", "when holds 0", "at least 1"),
    "measured without data": ("make_compressor(gramian=Measured())", "Measured(batches=4, stride=8)", "calibrate"),
    "measured without data, once": ("once(gramian=Measured(2))", "Measured(batches=2, stride=8)", "calibrate"),
    "a bound with data": (
        "make_compressor(keep=ErrorBound(0.1), calibrate=lambda model: None)",
        "ErrorBound(eps=0.1, relative=True) needs an error bound",
        "expected gramian=WhiteNoise()",
    ),
    "a bound with data, for one layer": (
        "once(overrides={'blocks.1.*': ErrorBound(0.1)}, calibrate=lambda model: None, gramian=Measured())",
        "ErrorBound(eps=0.1, relative=True) needs an error bound",
        "expected gramian=WhiteNoise()",
    ),
    "data that cannot be run": ("make_compressor(calibrate=3)", "calibrate is 3", "function of the model"),
    "text for a Gramian": ("make_compressor(gramian='measured')", "gramian is 'measured'", "WhiteNoise()"),
    "gate 0": ("make_compressor(gate=0)", "gate is 0", "0 < it <= 1"),
    "round_to 0": ("make_compressor(round_to=0)", "round_to is 0", "at least 1"),
    "fold as text": ("make_compressor(fold='no')", "fold is 'no'", "True or False"),
    "select as text": ("make_compressor(select='largest')", "select is 'largest'", "Largest()"),
    "moments as text": ("make_compressor(moments='slice')", "moments is 'slice'", "Slice()"),
    "a guard that is a function": ("make_compressor(guard=lambda: 1.0)", "guard is <function", "Rollback("),
    "an override for nothing": ("make_compressor(overrides={'block.*': keep})", "'block.*' matches no", "blocks.0.ssm"),
    "an override that is nearly a layer": (
        "make_compressor(overrides={'block.1.ssm': keep})",
        "'block.1.ssm' matches no module; there are 'blocks.0.ssm', 'blocks.1.ssm'; did you mean 'blocks.1.ssm'?",
    ),
    "an override that is a number": ("make_compressor(overrides={'*': 4})", "overrides['*'] is 4", "a policy"),
    "overrides as a list": ("make_compressor(overrides=[('*', keep)])", "overrides are [", "pattern"),
    "a follower without layers": ("make_compressor(follow=[nn.Linear(2, 2)])", "Linear has no SSM layer", "blocks.0"),
    "a follower that is None": ("make_compressor(follow=[make(), None])", "follow[1] is a NoneType", "a model"),
    "a follower of another class": (
        "once(follow=[averaged(S5)])",
        "follow[0]: 'blocks.0.ssm'",
        "S5, the model's is LRU",
    ),
    "a wider follower": (
        "once(follow=[averaged(width=5)])",
        "follow[0]: blocks.0.ssm.B_re",
        "(8, 5), the model's (8, 4)",
    ),
    "a follower of another order": (
        "once(follow=[averaged(order=7)])",
        "follow[0]: blocks.0.ssm",
        "(7,), the model's (8,)",
    ),
    "a follower with fewer layers": (
        "once(follow=[averaged(depth=1)])",
        "has no SSM layer 'blocks.1.ssm'",
        "blocks.0.ssm",
    ),
    "the model as its follower": ("once(follow=[model])", "the model's own layer", "a copy"),
    "one follower": ("make_compressor(follow=make())", "follow is a SequenceClassifier", "a list of models"),
    "NaN in a follower": (
        "once(follow=[make(), broken('B_im', float('nan'))])",
        "follow[1]: blocks.1.ssm: LRU.B_im[0, 0] is nan",
    ),
    "a follower that overflows": (
        "once(follow=[averaged(), huge()])",
        "follow[1]: blocks.1.ssm: in torch.float32 B_re",
    ),
    "a budget too small": ("once(keep=Budget(1))", "total_states is 1, but one state in every layer", "at least that"),
    "NaN in a layer": ("make_compressor(model=broken('B_im', float('nan')), optimizer=None)", "blocks.1.ssm", "B_im"),
    "a pole at 1": ("once(model=broken('nu_log', -800.0), optimizer=None)", "blocks.1.ssm", "< 1"),
    "an infinite layer": ("once(model=broken('nu_log', float('inf')), optimizer=None)", "blocks.1.ssm", "nu_log"),
}
STEPPED = {
    "step as text": ("stepped('1')", "step is '1'", "integer of at least 0"),
    "step True": ("stepped(True)", "step is True", "integer of at least 0"),
    "step -1": ("stepped(-1)", "step is -1", "integer of at least 0"),
    "a follower that was cut": (
        "followed(lambda average: compress_(average, keep=TargetOrder(5)))",
        "follow[0]: blocks.0.ssm.nu_log has the shape (5,), the model's (8,)",
    ),
    "a follower that was changed": (
        "followed(lambda average: average.blocks.__setitem__(1, nn.Identity()))",
        "follow[0]: SequenceClassifier has no SSM layer 'blocks.1.ssm'",
    ),
    "data that runs nothing": ("stepped(1, calibrate=lambda model: None)", "did not run 'blocks.0.ssm'", "must call"),
    "data that runs no layer by itself": (
        "compress_(LRU(2, 4), keep=keep, calibrate=lambda layer: None)",
        "calibrate did not run the model: it must call",
    ),
    "data of one step for a layer by itself": (
        "compress_(LRU(2, 4), keep=keep, calibrate=lambda layer: layer(torch.ones(1, 1, 2)))",
        "1 step through a layer of 4 states ('the model')",
    ),
    "data that is no function": (
        "once(calibrate=torch.ones(9, 9))",
        "calibrate is tensor([[1., 1.",
        ", expected a function of the model",
    ),
    "data of one step": ("stepped(1, calibrate=lambda m: m(torch.ones(1, 1, 3)))", "ran 1 step th", "at least as many"),
    "a policy that asks for 0": ("stepped(1, keep=lambda s: {n: 0 for n in s})", "is 0", "from 1 to 8"),
    "a policy that asks for more": ("stepped(1, keep=lambda s: {n: 9 for n in s})", "is 9", "from 1 to 8"),
    "a policy that forgets": ("stepped(1, keep=lambda s: {})", "no order for 'blocks.0.ssm'", "'blocks.1.ssm'"),
}
CASES = MADE | STEPPED


@pytest.fixture(scope="module")
def found():
    preamble = PREAMBLE + "\nkeep = TargetOrder(4)\n"
    return unhooked.outcomes(preamble, {case: expression for case, (expression, *_) in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name_with_what_came_and_what_is_allowed(case, found):
    kinds, message = found[case]
    assert {"CompressionError", "ControlError", "AdapterError"} & set(kinds), (kinds, message)
    for said in CASES[case][1:]:
        assert said in message
