"""Every layer refuses bad input by name, with what came and what was expected."""

import pytest

from tests import unhooked

PREAMBLE = """
import torch
from torch import ones, tensor, zeros
from compressm.layers import *

x = ones(3, 40, 6)

def broken(layer):
    import copy
    layer = copy.deepcopy(layer)
    next(layer.parameters()).data.view(-1)[0] = float("nan")
    return layer

kinds = {"LRU": LRU, "S5": S5, "S4": S4, "S4D": S4D, "LinOSS": LinOSS, "Mamba": Mamba}
layers = {name: build(6, order=5) for name, build in kinds.items()}
"""
LAYERS = ("LRU", "S5", "S4", "S4D", "LinOSS", "Mamba")

CASES = {
    "a sequence without a batch": ("layer(zeros(40, 6))", "(40, 6)", "(batch, length, width)"),
    "a sequence of another width": ("layer(zeros(3, 4, 7))", "(3, 4, 7)", "width = 6"),
    "a sequence of length 0": ("layer(zeros(3, 0, 6))", "(3, 0, 6)", "at least 1"),
    "not a tensor": ("layer([1.0])", "list", "(batch, length, width)"),
    "integers": ("layer(x.long())", "torch.int64", "torch.float32"),
    "a state of another order": ("layer(x, layer.initial_state(3)[..., :3])", "state", "order 5"),
    "a state of another batch": ("layer(x, layer.initial_state(2))", "state", "batch 3"),
    "a complex state": ("layer(x, layer.initial_state(3) * 1j)", "complex64", "real numbers"),
    "a step from a complex state": ("layer.step(x[:, 0], layer.initial_state(3) * 1j)", "complex64", "real numbers"),
    "a length beyond the sequence": ("layer(x, lengths=tensor([41, 1, 1]))", "41", "1 to 40"),
    "a length of 0": ("layer(x, lengths=tensor([0, 1, 1]))", "0", "1 to 40"),
    "lengths that are not integers": ("layer(x, lengths=tensor([1.0, 1.0, 1.0]))", "float32", "(3,)"),
    "too few lengths": ("layer(x, lengths=tensor([1, 1]))", "(2,)", "(3,)"),
    "a sequence given to step": ("layer.step(x, layer.initial_state(3))", "(3, 40, 6)", "(batch, width)"),
    "another device": ("layer(x.to('meta'))", "meta", "cpu"),
    "a step without a state": ("layer.step(x[:, 0], None)", "NoneType", "order 5"),
    "a step in another precision": ("layer.step(x[:, 0].double(), layer.initial_state(3))", "float64", "float32"),
    "a parameter that is not finite": ("check_finite(broken(layer))", "not finite", "1 entries"),
    "order 0": ("type(layer)(6, order=0)", "order is 0", "at least 1"),
    "order True": ("type(layer)(6, order=True)", "order is True", "integer"),
    "width 0": ("type(layer)(0, order=5)", "width is 0", "at least 1"),
}

CONTINUOUS = ("S5", "S4D")
OPTIONS = {
    "a step of 0": ("step_min=0.0", "step_min is 0.0", "0 < step_min < step_max"),
    "a negative step": ("step_min=-1e-3", "step_min is -0.001", "0 < step_min < step_max"),
    "steps the wrong way round": ("step_min=1e-1, step_max=1e-2", "step_max 0.01", "step_min < step_max"),
    "equal steps": ("step_min=1e-2, step_max=1e-2", "step_max 0.01", "step_min < step_max"),
    "a step that is not a number": ("step_min=float('nan')", "step_min is nan", "step_min < step_max"),
    "an endless step": ("step_max=float('inf')", "step_max inf", "step_min < step_max"),
    "the name of a discretisation": ("discretisation='zoh'", "'zoh'", "ZOH() or Bilinear()"),
    "the class of a discretisation": ("discretisation=ZOH", "ZOH", "ZOH() or Bilinear()"),
}
INITIALISATIONS = {"the name of an initialisation": "'lin'", "the class of an initialisation": "Lin"}


@pytest.fixture(scope="module")
def outcomes():
    table = {
        f"{name}: {case}": row[0].replace("layer", f"layers[{name!r}]")
        for name in LAYERS
        for case, row in CASES.items()
    }
    for case, row in OPTIONS.items():
        table |= {f"{name}: {case}": f"{name}(6, order=5, {row[0]})" for name in CONTINUOUS}
    table |= {case: f"S4D(6, order=5, initialisation={value})" for case, value in INITIALISATIONS.items()}
    return unhooked.outcomes(PREAMBLE, table)


def check_refusal(outcome, *expected):
    kinds, message = outcome
    assert kinds[:1] == ["SequenceError"], message
    missing = [fragment for fragment in expected if fragment not in message]
    assert not missing, f"{missing} not in {message!r}"


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_with_what_came_and_what_was_expected(name, case, outcomes):
    check_refusal(outcomes[f"{name}: {case}"], *CASES[case][1:])


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("case", OPTIONS)
def test_bad_steps_and_discretisations_are_refused(name, case, outcomes):
    check_refusal(outcomes[f"{name}: {case}"], *OPTIONS[case][1:])


@pytest.mark.parametrize("case", INITIALISATIONS)
def test_bad_initialisations_are_refused(case, outcomes):
    check_refusal(outcomes[case], INITIALISATIONS[case], "Lin(), Inv() or Legs()")
