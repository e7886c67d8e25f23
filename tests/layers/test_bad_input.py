"""Every layer refuses bad input by name, with what came and what was expected."""

import pytest

from tests import unhooked

PREAMBLE = """
import torch
from torch import ones, tensor, zeros
from compressm.layers import *

x = ones(3, 40, 6)
layers = {name: build(6, order=5) for name, build in {"LRU": LRU}.items()}
"""
LAYERS = ("LRU",)

CASES = {
    "a sequence without a batch": ("layer(zeros(40, 6))", "(40, 6)", "(batch, length, width)"),
    "a sequence of another width": ("layer(zeros(3, 4, 7))", "(3, 4, 7)", "width = 6"),
    "a sequence of length 0": ("layer(zeros(3, 0, 6))", "(3, 0, 6)", "at least 1"),
    "not a tensor": ("layer([1.0])", "list", "(batch, length, width)"),
    "integers": ("layer(x.long())", "torch.int64", "torch.float32"),
    "a state of another order": ("layer(x, layer.initial_state(3)[..., :3])", "state", "order 5"),
    "a state of another batch": ("layer(x, layer.initial_state(2))", "state", "batch 3"),
    "a length beyond the sequence": ("layer(x, lengths=tensor([41, 1, 1]))", "41", "1 to 40"),
    "a length of 0": ("layer(x, lengths=tensor([0, 1, 1]))", "0", "1 to 40"),
    "lengths that are not integers": ("layer(x, lengths=tensor([1.0, 1.0, 1.0]))", "float32", "(3,)"),
    "too few lengths": ("layer(x, lengths=tensor([1, 1]))", "(2,)", "(3,)"),
    "a sequence given to step": ("layer.step(x, layer.initial_state(3))", "(3, 40, 6)", "(batch, width)"),
    "another device": ("layer(x.to('meta'))", "meta", "cpu"),
    "order 0": ("type(layer)(6, order=0)", "order is 0", "at least 1"),
    "order True": ("type(layer)(6, order=True)", "order is True", "integer"),
    "width 0": ("type(layer)(0, order=5)", "width is 0", "at least 1"),
}


@pytest.fixture(scope="module")
def outcomes():
    table = {
        f"{name}: {case}": row[0].replace("layer", f"layers[{name!r}]")
        for name in LAYERS
        for case, row in CASES.items()
    }
    return unhooked.outcomes(PREAMBLE, table)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_with_what_came_and_what_was_expected(name, case, outcomes):
    kinds, message = outcomes[f"{name}: {case}"]
    assert kinds[:1] == ["SequenceError"], message
    missing = [fragment for fragment in CASES[case][1:] if fragment not in message]
    assert not missing, f"{missing} not in {message!r}"
