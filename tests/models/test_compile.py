"""`torch.compile` of whole models, in a plain process: the tests' shape checker cannot be traced."""

import json

import pytest

from tests import unhooked

SCRIPT = """
import json
import torch, torch._dynamo
from compressm.layers import LRU
from compressm.models import LanguageModel, PerElement, SequenceClassifier

DEPTH = 6
tokens, lengths = torch.randint(7, (3, 20)), torch.tensor([20, 4, 9])

def read(model):
    return model(torch.ones(3, 20, 2).cumsum(1) / 20)

def read_padded(model):
    return model(tokens, lengths)

def write(model):
    return model(tokens, keep_state=False)[0]

sizes = {"depth": DEPTH, "width": 6, "order": 9, "dropout": PerElement(0.0)}
CASES = {
    "inputs": (SequenceClassifier(LRU, inputs=2, classes=3, **sizes), read),
    "padded tokens": (SequenceClassifier(LRU, vocabulary=7, classes=3, **sizes), read_padded),
    "language model": (LanguageModel(LRU, vocabulary=7, **sizes), write),
}

def check(model, run):
    torch._dynamo.reset()
    graphs = []
    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        run(compiled).sum().backward()
    first, orders = len(graphs), range(2, 2 + DEPTH)
    for block, order in zip(model.blocks, orders):
        block.ssm.load_state_dict(LRU(6, order=order).state_dict())
    model.zero_grad()
    logits = run(compiled)
    logits.sum().backward()
    again = len(graphs) - first
    return {"first": first, "again": again, "difference": (logits - run(model)).abs().max().item()}

print(json.dumps({name: check(*case) for name, case in CASES.items()}))
"""
CASES = ("inputs", "padded tokens", "language model")


@pytest.fixture(scope="module")
def compiled():
    return json.loads(unhooked.run(SCRIPT))


@pytest.mark.parametrize("case", CASES)
def test_changing_the_orders_compiles_nothing_again(case, compiled):
    assert compiled[case]["first"] >= 3
    assert compiled[case]["again"] == 0


@pytest.mark.parametrize("case", CASES)
def test_six_blocks_share_what_is_compiled(case, compiled):
    """Encoder, head and two pieces of a block: before the recurrence and after it."""
    assert compiled[case]["first"] <= 8


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_model_computes_what_the_eager_one_does(case, compiled):
    assert compiled[case]["difference"] < 1e-5
