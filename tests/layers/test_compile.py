"""`torch.compile` around the layers, in a plain process: the tests' shape checker cannot be traced."""

import json

import pytest

from tests import unhooked

SCRIPT = """
import json, sys
import torch, torch._dynamo
import compressm.layers as layers

class Around(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.norm, self.layer = torch.nn.LayerNorm(6), layer

    def forward(self, x):
        y, _ = self.layer(self.norm(x), keep_state=False)
        return x + torch.nn.functional.gelu(y) * 2

def check(build):
    torch._dynamo.reset()
    graphs = []
    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward
    model, x = Around(build(6, order=7)), torch.randn(3, 40, 6)
    compiled = torch.compile(model, backend=backend)
    compiled(x).sum().backward()
    first = len(graphs)
    model.layer.load_state_dict(build(6, order=3).state_dict())
    difference = (compiled(x) - model(x)).abs().max().item()
    return {"first": first, "again": len(graphs) - first, "difference": difference}

print(json.dumps({name: check(getattr(layers, name)) for name in sys.argv[1:]}))
"""
LAYERS = ("LRU", "S5", "S4D", "Mamba")


@pytest.fixture(scope="module")
def compiled():
    return json.loads(unhooked.run(SCRIPT, *LAYERS))


@pytest.mark.parametrize("name", LAYERS)
def test_changing_the_order_compiles_nothing_again(name, compiled):
    """The order lives inside the op only: regions compiled around it see no new shape after a cut."""
    assert compiled[name]["first"] >= 2
    assert compiled[name]["again"] == 0


@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_model_computes_what_the_eager_one_does(name, compiled):
    assert compiled[name]["difference"] < 1e-5
