"""Models refuse bad input by name, with what came and what was expected, and before anything has changed."""

import pytest

from tests import unhooked

PREAMBLE = """
import torch
from torch import ones, randint, tensor, zeros
from compressm.layers import LRU, Mamba
from compressm.models import *

def classifier(layer=LRU, **options):
    return SequenceClassifier(layer, **({"depth": 2, "width": 6, "order": 5, "classes": 3, "inputs": 3} | options))

def writer(**options):
    return LanguageModel(LRU, **({"depth": 2, "width": 6, "order": 5, "vocabulary": 7} | options))

x, tokens = ones(4, 9, 3), zeros(4, 9, dtype=torch.int64)
reads, names, pairs, writes = classifier(), classifier(inputs=None, vocabulary=7), classifier(towers=2), writer()

def unchanged_after(call):
    before = {name: value.clone() for name, value in reads.state_dict().items()}
    try:
        call()
    except ValueError as error:
        if all(torch.equal(before[name], value) for name, value in reads.state_dict().items()):
            raise
"""
CASES = {
    "inputs and a vocabulary": ("classifier(vocabulary=7)", "inputs is 3", "vocabulary 7", "exactly one"),
    "neither inputs nor vocabulary": ("classifier(inputs=None)", "inputs is None", "exactly one"),
    "0 classes": ("classifier(classes=0)", "classes is 0", "at least 1"),
    "depth 0": ("classifier(depth=0)", "depth is 0", "at least 1"),
    "depth 1.5": ("classifier(depth=1.5)", "depth is 1.5", "integer"),
    "width 0": ("classifier(width=0)", "width is 0", "at least 1"),
    "order 0": ("classifier(order=0)", "order is 0", "at least 1"),
    "an unknown GELU": ("classifier(gelu='erf')", "gelu is 'erf'", "'exact' or 'tanh'"),
    "a GELU for Mamba": ("classifier(layer=Mamba, gelu='tanh')", "gelu is 'tanh'", "its own gate"),
    "0 inputs": ("classifier(inputs=0)", "inputs is 0", "at least 1"),
    "an empty vocabulary": ("writer(vocabulary=0)", "vocabulary is 0", "at least 1"),
    "3 towers": ("classifier(towers=3)", "towers is 3", "1 or 2"),
    "a layer that is none": ("classifier(torch.nn.Linear)", "Linear", "SSM layers"),
    "a layer given as an object": ("classifier(LRU(6, order=5))", "LRU(", "a class"),
    "dropout of everything": ("PerElement(1.0)", "1.0", "0 to below 1"),
    "a negative dropout": ("OneMask(-0.1)", "-0.1", "0 to below 1"),
    "a dropout that is no number": ("OneMask(float('nan'))", "nan", "0 to below 1"),
    "no momentum": ("BatchNorm(momentum=0.0)", "momentum is 0.0", "above 0"),
    "a sequence without a batch": ("reads(x[0])", "(9, 3)", "(batch, length, 3)"),
    "another number of inputs": ("reads(ones(4, 9, 2))", "(4, 9, 2)", "(batch, length, 3)"),
    "a sequence of length 0": ("reads(x[:, :0])", "(4, 0, 3)", "length is 0"),
    "an empty batch": ("reads(x[:0])", "(0, 9, 3)", "batch is 0"),
    "not a tensor": ("reads([1.0])", "list", "(batch, length, 3)"),
    "integers for real inputs": ("reads(x.long())", "torch.int64", "torch.float32"),
    "another dtype": ("reads(x.double())", "torch.float64", "torch.float32"),
    "another device": ("reads(x.to('meta'))", "meta", "cpu"),
    "real numbers for tokens": ("names(tokens.float())", "torch.float32", "integers"),
    "tokens with an axis too many": ("names(tokens[..., None])", "(4, 9, 1)", "(batch, length)"),
    "a token beyond the vocabulary": ("names(tokens + 7)", "7 to 7", "0 to 6"),
    "a negative token": ("writes(tokens - 1)", "-1 to -1", "0 to 6"),
    "a length beyond the sequence": ("reads(x, tensor([10, 1, 1, 1]))", "1 to 10", "1 to 9"),
    "bad lengths leave statistics alone": (
        "unchanged_after(lambda: reads(x, tensor([0, 1, 1, 1])))",
        "0 to 1",
        "1 to 9",
    ),
    "too few lengths": ("reads(x, tensor([1, 1]))", "(2,)", "(4,)"),
    "lengths that are not integers": ("writes(tokens, lengths=ones(4))", "float32", "int64"),
    "lengths as a list": ("reads(x, [9, 9, 9, 9])", "list", "(4,)"),
    "lengths elsewhere": ("reads(x, tensor([1, 1, 1, 1], device='meta'))", "meta", "cpu"),
    "one sequence for two towers": ("pairs(x)", "(4, 9, 3)", "(batch, 2, length, 3)"),
    "three sequences for two towers": ("pairs(ones(4, 3, 9, 3))", "(4, 3, 9, 3)", "(batch, 2, length, 3)"),
    "lengths of one tower": ("pairs(ones(4, 2, 9, 3), tensor([1, 1, 1, 1]))", "(4,)", "(4, 2)"),
    "a stream of pairs": ("pairs.initial_state(4)", "towers is 2", "expected 1"),
    "a stream of no sequences": ("reads.initial_state(0)", "batch is 0", "at least 1"),
    "a sequence given to step": ("reads.step(x, reads.initial_state(4))", "(4, 9, 3)", "(batch, 3)"),
    "a batch of tokens given to step": ("writes.step(tokens, writes.initial_state(4))", "(4, 9)", "(batch,)"),
    "a state of another batch": ("reads.step(x[:, 0], reads.initial_state(3))", "state", "batch 4"),
    "a state of another depth": ("writes(tokens, writes.initial_state(4)[:1])", "1 tensors", "2 blocks"),
    "a state of another order": ("writes(tokens, writer(order=4).initial_state(4))", "state", "order 5"),
    "one step of one sequence to train on": ("reads(x[:1, :1])", "(1, 1, 6)", "at least 2 steps"),
    "a negative temperature": ("writes.generate(tokens, 3, temperature=-1.0)", "-1.0", "at least 0"),
    "no tokens to write": ("writes.generate(tokens, 0)", "count is 0", "at least 1"),
}


@pytest.fixture(scope="module")
def outcomes():
    return unhooked.outcomes(PREAMBLE, {case: row[0] for case, row in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_with_what_came_and_what_was_expected(case, outcomes):
    kinds, message = outcomes[case]
    assert kinds[:1] == ["SequenceError"], f"{kinds[:1]} {message}"
    missing = [fragment for fragment in CASES[case][1:] if fragment not in message]
    assert not missing, f"{missing} not in {message!r}"
