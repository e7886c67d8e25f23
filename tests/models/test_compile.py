"""`torch.compile(model, fullgraph=True)` in a plain process: the tests' shape checker cannot be traced."""

import json

import pytest

from tests import unhooked
from tests.marks import later

COUNTED = """
import json, sys
import torch, torch._dynamo
import compressm as cs
from compressm.layers import *
from compressm.models import *

class Counted:
    def __init__(self, backend):
        self.count, self.compile = 0, torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, inputs):
        self.count += 1
        return self.compile(graph, inputs)
"""

KINDS = (
    COUNTED
    + """
x, tokens, lengths = torch.randn(3, 20, 2), torch.randint(7, (3, 20)), torch.tensor([20, 4, 9])
pairs = torch.randint(7, (3, 2, 20))

def reader(layer, *given, inputs=2, **options):
    options = {"dropout": PerElement(0.0), **options}
    kind = {"inputs": inputs} if inputs else {"vocabulary": 7}
    return SequenceClassifier(layer, depth=2, width=6, order=9, classes=3, **kind, **options), given

def writer(layer, *given, **options):
    return LanguageModel(layer, depth=2, width=6, order=9, vocabulary=7, **options), given

CASES = {
    "inputs": lambda: reader(LRU, x),
    "one mask": lambda: reader(LRU, x, dropout=OneMask(0.1)),
    "a mask for each": lambda: reader(Mamba, x, norm=RMSNorm(), dropout=0.1),
    "running averages": lambda: reader(S5, x, lengths, norm=RunningNorm()),
    "no norm": lambda: reader(S4D, x, norm=NoNorm()),
    "padded inputs": lambda: reader(S5, x, lengths),
    "padded tokens": lambda: reader(LRU, tokens, lengths, inputs=None),
    "padded tokens of Mamba": lambda: reader(Mamba, tokens, lengths, inputs=None),
    "pairs": lambda: reader(LRU, pairs, inputs=None, towers=2),
    "every step": lambda: reader(S4D, x, lengths, pooling=EveryStep()),
    "the last step": lambda: reader(LRU, x, lengths, pooling=LastStep()),
    "language": lambda: writer(S4D, tokens),
    "language of Mamba": lambda: writer(Mamba, tokens, norm=RMSNorm()),
    "padded language": lambda: writer(S5, tokens, None, lengths, tied=False),
}

def results(model, run, given, *, train):
    torch.manual_seed(1)
    out = run(*given)
    parts = [out] if isinstance(out, torch.Tensor) else [out[0], *out[1]]
    if not train:
        return parts
    model.zero_grad()
    sum(part.sin().sum() for part in parts).backward()
    return [part.detach() for part in parts] + [p.grad for p in model.parameters()]

def check(case, backend):
    torch.manual_seed(0)
    model, given = CASES[case]()
    counted, counts, worst = Counted(backend), [], 0.0
    run = torch.compile(model, backend=counted, fullgraph=True)
    for train in (True, False):
        model.train(train)
        for orders in ((9, 9), (8, 7), (7, 7), (4, 5), (2, 3)):
            for block, order in zip(model.blocks, orders):
                block.ssm.load_state_dict(type(block.ssm)(6, order=order).state_dict())
            before = {name: value.clone() for name, value in model.state_dict().items()}
            with torch.set_grad_enabled(train):
                found = results(model, run, given, train=train)
                after = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(before)
                wanted = results(model, model, given, train=train)
            pairs = [*zip(found, wanted), *((after[name], value) for name, value in model.state_dict().items())]
            worst = max([worst] + [((a - b).abs().max() / b.abs().max().clamp_min(1)).item() for a, b in pairs])
            counts.append(counted.count)
    return {"counts": counts, "worst": worst}

print(json.dumps(check(*sys.argv[1:])))
"""
)
CASES = [
    *("inputs", "one mask", "a mask for each", "running averages", "no norm", "padded inputs", "padded tokens"),
    *("padded tokens of Mamba", "pairs", "every step", "the last step", "language", "language of Mamba"),
    "padded language",
]
NOW = ("one mask", "running averages", "language of Mamba")


@pytest.mark.parametrize("case", later(CASES, *NOW))
def test_a_model_is_compiled_once_for_training_and_once_for_evaluation(case):
    """Also if layers are cut to other orders; outputs, gradients and averages are those of the eager model."""
    found = json.loads(unhooked.run(KINDS, case, "eager"))
    assert found["counts"] == [1] * 5 + [2] * 5
    assert found["worst"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["inputs", "padded tokens of Mamba", "padded language", "no norm"])
def test_generated_code_computes_what_the_eager_model_does(case):
    found = json.loads(unhooked.run(KINDS, case, "inductor"))
    assert found["counts"] == [1] * 5 + [2] * 5
    assert found["worst"] < 1e-4


TRAININGS = (
    COUNTED
    + """
x, target = torch.ones(4, 30, 3).cumsum(1) / 30 * torch.arange(1, 5)[:, None, None], torch.arange(4)

def train(layer, backend, cuts, **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = SequenceClassifier(layer, inputs=3, classes=5, depth=2, width=6, order=28, dropout=0.0)
    counted = Counted(backend) if backend else None
    run = torch.compile(model, backend=counted, fullgraph=True) if backend else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compressor = cs.Compressor(run, optimizer, when=range(1, cuts + 1), keep=cs.KeepFraction(0.87), **options)
    found = {"losses": [], "evaluated": [], "counts": [], "orders": []}
    for step in range(1, cuts + 2):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(run(x), target)
        loss.backward()
        optimizer.step()
        found["losses"].append(loss.item())
        model.eval()
        with torch.no_grad():
            found["evaluated"].append(run(x).logsumexp(1).sum().item())
        model.train()
        found["counts"].append(counted.count if backend else 0)
        found["orders"].append([block.ssm.order for block in model.blocks])
        compressor.step(step)
    return found

layer, backend, method, cuts = sys.argv[1:]
options = {"calibrate": lambda model: model(x), "selective": getattr(cs, method)()} if method else {}
print(json.dumps([train(getattr(cs.layers, layer), name, int(cuts), **options) for name in (backend, "")]))
"""
)


def trained(layer, backend, method, cuts):
    return json.loads(unhooked.run(TRAININGS, layer, backend, method, str(cuts)))


RUNS = [("LRU", "aot_eager", ""), ("LRU", "inductor", ""), ("S5", "aot_eager", ""), ("S4D", "aot_eager", "")]
RUNS += [("Mamba", "aot_eager", "Baked"), ("Mamba", "aot_eager", "SharedIndex")]


@pytest.mark.parametrize(("layer", "backend", "method"), later(RUNS, RUNS[0]))
def test_a_training_with_twelve_cuts_compiles_nothing_again(layer, backend, method):
    """The losses are those of the eager training, and so are the outputs in evaluation."""
    found, wanted = trained(layer, backend, method, 12)
    assert found["orders"] == wanted["orders"]
    assert found["orders"][-1] == [2, 2]
    assert found["counts"] == [2] * 13
    tolerance = 1e-4 if backend == "inductor" else 1e-5
    for name in ("losses", "evaluated"):
        assert found[name] == pytest.approx(wanted[name], rel=tolerance)


def test_a_cut_that_gives_every_channel_its_own_states_compiles_once():
    """The layer has maps from then on, which is other code; later cuts change sizes alone."""
    found, wanted = trained("Mamba", "eager", "PerChannel", 4)
    assert found["orders"] == wanted["orders"]
    assert found["counts"] == [2] + [4] * 4
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
