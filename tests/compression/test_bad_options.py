"""Policies, orders, schedules, selections and records refuse bad input by name, with what came and what is allowed."""

import pytest

from tests import unhooked

PREAMBLE = """
import itertools
import torch
from torch import inf, nan, ones, tensor, zeros
from compressm.compression import *

keep = TargetOrder(2)
spectra = {"a": ones(4).double(), "b": ones(6).double()}

def spectrum(sigma, policy=EnergyTolerance(0.1)):
    return policy({"blocks.0.ssm": sigma})

def orders(policy=keep, **options):
    return choose_orders(spectra, policy, **options)

def answer(**values):
    return orders(lambda spectra: values)

def cut(**changes):
    usual = dict(step=1, module="a", order=4, rank=2, error_bound=None, measured_error=None)
    return Cut(**{**usual, "energy_lost": 0.1, "seconds": 1.0, **changes})

def stored(**changes):
    return Cut.from_dict({**cut().as_dict(), **changes})

select = Random(0)
"""

POLICIES = {
    "tau 1": ("EnergyTolerance(1.0)", "tau is 1.0", "0 <= it < 1"),
    "tau below 0": ("EnergyTolerance(-0.1)", "tau is -0.1", "0 <= it < 1"),
    "tau not a number": ("EnergyTolerance(nan)", "tau is nan", "0 <= it < 1"),
    "tau as text": ("EnergyTolerance('0.1')", "tau is '0.1'", "number"),
    "tau True": ("EnergyTolerance(True)", "tau is True", "number"),
    "tau as a tensor": ("EnergyTolerance(tensor([0.1, 0.2]))", "tau is tensor", "number"),
    "rho 0": ("KeepFraction(0)", "rho is 0", "0 < it <= 1"),
    "rho above 1": ("KeepFraction(1.01)", "rho is 1.01", "0 < it <= 1"),
    "rho None": ("KeepFraction(None)", "rho is None", "0 < it <= 1"),
    "target 0": ("TargetOrder(0)", "n is 0", "at least 1"),
    "target 2.5": ("TargetOrder(2.5)", "n is 2.5", "integer"),
    "target True": ("TargetOrder(True)", "n is True", "integer"),
    "eps below 0": ("ErrorBound(-1e-9)", "eps is -1e-09", "0 <= it"),
    "eps infinite": ("ErrorBound(inf)", "eps is inf", "finite"),
    "relative as text": ("ErrorBound(0.1, 'no')", "relative is 'no'", "True or False"),
    "budget 0": ("Budget(0)", "total_states is 0", "at least 1"),
    "budget 10.0": ("Budget(10.0)", "total_states is 10.0", "integer"),
    "a budget too small": ("orders(Budget(1))", "total_states is 1", "2 layers"),
}

SPECTRA = {
    "NaN": ("spectrum(tensor([1.0, nan]))", "'blocks.0.ssm'", "sigma[1] is nan"),
    "infinity": ("spectrum(tensor([inf, 1.0]))", "'blocks.0.ssm'", "inf"),
    "NaN for a policy that does not look": ("spectrum(tensor([1.0, nan]), TargetOrder(1))", "sigma[1] is nan"),
    "NaN in a bank": ("spectrum(tensor([[1.0, 1.0], [1.0, nan]]), Budget(1))", "sigma[1, 1] is nan"),
    "a negative value": ("spectrum(tensor([1.0, -1.0]))", "-1.0", ">= 0"),
    "rising values": ("spectrum(tensor([1.0, 2.0]))", "2 after 1", "falling"),
    "values whose sum overflows": ("spectrum(1e308 * ones(2).double())", "1e+308", "sum is not finite"),
    "no values": ("spectrum(zeros(0))", "(0,)", ">= 1"),
    "a number": ("spectrum(tensor(1.0))", "()", "n"),
    "a list": ("spectrum([1.0])", "list", "tensor"),
    "whole numbers": ("spectrum(tensor([2, 1]))", "torch.int64", "float64"),
    "complex numbers": ("spectrum(ones(2) + 0j)", "complex64", "real"),
    "no spectra": ("keep({})", "{}", "not empty"),
    "a tensor alone": ("keep(ones(3))", "tensor", "module name"),
    "no spectra to choose from": ("choose_orders({}, keep)", "{}", "not empty"),
    "a module without a name": ("keep({0: ones(3)})", "named 0", "name of a module"),
}

ORDERS = {
    "a gate of 0": ("orders(gate=0)", "gate is 0", "0 < it <= 1"),
    "a gate above 1": ("orders(gate=1.5)", "gate is 1.5", "0 < it <= 1"),
    "a gate that is NaN": ("orders(gate=nan)", "gate is nan", "0 < it <= 1"),
    "at_least 0": ("orders(at_least=0)", "at_least is 0", "at least 1"),
    "round_to 0": ("orders(round_to=0)", "round_to is 0", "at least 1"),
    "round_to 1.5": ("orders(round_to=1.5)", "round_to is 1.5", "integer"),
    "a number as policy": ("orders(0.05)", "keep is 0.05", "EnergyTolerance(0.05)"),
    "the class of a policy": ("orders(EnergyTolerance)", "keep is <class", "EnergyTolerance(0.05)"),
    "an override that matches nothing": ("orders(overrides={'c*': keep})", "'c*' matches no module", "'a', 'b'"),
    "an override with a number": ("orders(overrides={'a': 3})", "overrides['a'] is 3", "policy"),
    "a pattern that is no text": ("orders(overrides={0: keep})", "0 matches no module"),
    "overrides as a list": ("orders(overrides=[keep])", "[TargetOrder(n=2)]", "pattern"),
    "a policy without an answer": ("orders(lambda spectra: None)", "returned None", "{module: order}"),
    "an answer without a layer": ("answer(a=1)", "no order for 'b'"),
    "an answer with another layer": ("answer(a=1, b=1, c=1)", "unknown 'c'"),
    "an order of 0": ("answer(a=0, b=1)", "order of 'a' is 0", "from 1 to 4"),
    "an order above n": ("answer(a=1, b=7)", "order of 'b' is 7", "from 1 to 6"),
    "an order that is no whole number": ("answer(a=1, b=2.5)", "order of 'b' is 2.5", "integer"),
    "an order that is True": ("answer(a=1, b=True)", "order of 'b' is True", "integer"),
}

SCHEDULES = {
    "no steps": ("as_schedule([])", "[]", "never fire"),
    "an empty range": ("as_schedule(range(5, 1))", "range(5, 1)", "never fire"),
    "an endless generator": ("as_schedule(itertools.count(1))", "count(1)", "finite collection", "no end"),
    "a generator": ("as_schedule(step for step in (1, 2))", "generator", "finite collection"),
    "one number": ("as_schedule(1000)", "when is 1000", "[1000, 2000]"),
    "nothing": ("as_schedule(None)", "when is None", "finite collection"),
    "text": ("as_schedule('12')", "when is '12'", "finite collection"),
    "step 0": ("as_schedule(range(0, 10, 5))", "holds 0", "at least 1"),
    "a negative step": ("as_schedule([-1])", "holds -1", "at least 1"),
    "half a step": ("as_schedule([1.5])", "holds 1.5", "integers"),
    "True": ("as_schedule([True])", "holds True", "integers"),
    "a number in a tensor": ("as_schedule(tensor(3))", "tensor(3)", "finite collection"),
    "too many steps": ("as_schedule(range(1, 10**9))", "999999999 steps", "10000000"),
    "more steps than can be counted": ("as_schedule(range(1, 10**30))", "range(1, 1000", "finite collection"),
    "an interval of 0": ("every(0, until=10)", "k is 0", "at least 1"),
    "an end before the start": ("every(10, until=5)", "step 10", "until = 5", "never fire"),
    "a start after the end": ("every(1, start=6, until=5)", "step 6", "until = 5", "never fire"),
    "start 0": ("every(1, start=0, until=5)", "start is 0", "at least 1"),
    "a warm-up of 0 steps": ("during_warmup(5)", "cuts is 4", "0.1 of 5 steps has 0"),
    "more cuts than steps": ("during_warmup(100, cuts=11)", "cuts is 11", "0.1 of 100 steps has 10"),
    "no cuts": ("during_warmup(100, cuts=0)", "cuts is 0", "at least 1"),
    "total_steps as a float": ("during_warmup(1e5)", "total_steps is 100000.0", "integer"),
    "a fraction of 0": ("during_warmup(100, fraction=0.0)", "fraction is 0.0", "0 < it <= 1"),
    "a fraction above 1": ("during_warmup(100, fraction=1.1)", "fraction is 1.1", "0 < it <= 1"),
}

SELECTIONS = {
    "a seed that is no whole number": ("Random(0.5)", "seed is 0.5", "integer"),
    "a seed that is None": ("Random(None)", "seed is None", "integer"),
    "no state": ("select(ones(3), 0, salt='a')", "order is 0", "from 1 to 3"),
    "more states than there are": ("Largest()(ones(3), 4, salt='a')", "order is 4", "from 1 to 3"),
    "a salt that is no text": ("select(ones(3), 1, salt=5)", "salt is 5", "text"),
    "a spectrum as a list": ("Smallest()([1.0], 1, salt='a')", "[1.0]", "tensor"),
}

RECORDS = {
    "an infinite bound": ("cut(error_bound=inf)", "error_bound is inf", "finite number or None"),
    "a NaN error": ("cut(measured_error=nan)", "measured_error is nan", "finite number or None"),
    "seconds as text": ("cut(seconds='1')", "seconds is '1'", "finite number or None"),
    "a cut that grows": ("cut(rank=5)", "rank is 5", "from 1 to 4"),
    "a cut to nothing": ("cut(rank=0)", "rank is 0", "from 1 to 4"),
    "a negative step": ("cut(step=-1)", "step is -1", "at least 0"),
    "a module that is no text": ("cut(module=3)", "module is 3", "text"),
    "an unknown field": ("stored(more=1)", "more", "expected step, module"),
    "a missing field": ("Restored.from_dict({'step': 1})", "stored as step", "expected step, orders, reason"),
    "not a record": ("Cut.from_dict([1])", "[1]", "expected step, module"),
    "orders as a list": ("Restored(1, [3], 'why')", "[3]", "{module: order}"),
    "an order of 0": ("Restored(1, {'a': 0}, 'why')", "order of 'a' is 0", "at least 1"),
    "no reason": ("Restored(1, {'a': 1}, None)", "reason is None", "text"),
}

LOOKS = {
    "an inspection of nothing": ("inspect(None)", "model is a NoneType", "nn.Module"),
    "a tracker of nothing": ("HankelTracker(None, every=1).step(1)", "model is a NoneType", "nn.Module"),
    "a filter that is a number": ("inspect(torch.nn.Identity(), filter_fn=3)", "filter_fn is 3", "a function of"),
    "a filter for a cut": ("compress_(None, keep=TargetOrder(1), filter_fn=3)", "filter_fn is 3", "a function of"),
}

GROUPS = {
    "look": LOOKS,
    "policy": POLICIES,
    "spectrum": SPECTRA,
    "orders": ORDERS,
    "schedule": SCHEDULES,
    "selection": SELECTIONS,
    "record": RECORDS,
}
CASES = {f"{group}: {case}": row for group, cases in GROUPS.items() for case, row in cases.items()}


@pytest.fixture(scope="module")
def outcomes():
    return unhooked.outcomes(PREAMBLE, {case: expression for case, (expression, *_) in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_with_the_value_and_what_is_allowed(case, outcomes):
    expression, *fragments = CASES[case]
    kinds, message = outcomes[case]
    assert kinds[:2] == ["CompressionError", "ValueError"], f"{expression}: {kinds[:1]} {message}"
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{expression}: {missing} not in {message!r}"
