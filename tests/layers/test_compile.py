"""`torch.compile(layer, fullgraph=True)` in a plain process: the tests' shape checker cannot be traced."""

import functools
import json

import pytest

from tests import unhooked
from tests.marks import later

SCRIPT = """
import json, sys
import torch, torch._dynamo
import compressm.layers as layers
from compressm.ops import Path

ORDERS = (40, 33, 32, 31, 20, 19, 13, 8, 7, 6, 5, 3, 2)
x = torch.randn(3, 30, 6, generator=torch.Generator().manual_seed(0))

class Counted:
    def __init__(self, backend):
        self.count, self.compile = 0, torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, inputs):
        self.count += 1
        return self.compile(graph, inputs)

def gradients(layer, run, *given, **options):
    layer.zero_grad()
    y, last = run(x, *given, **options)
    ((y * torch.arange(y.numel()).view_as(y).sin()).sum() + (0 if last is None else last.square().sum())).backward()
    return y.detach(), None if last is None else last.detach(), [p.grad for p in layer.parameters()]

def far(found, wanted):
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).item() for a, b in zip(found, wanted))

def compare(layer, run, *given, **options):
    y, last, grads = gradients(layer, run, *given, **options)
    y_, last_, grads_ = gradients(layer, layer, *given, **options)
    states = ([], []) if last is None else ([last], [last_])
    return max(far([y, *states[0]], [y_, *states[1]]), far(grads, grads_))

def cut(build, backend="aot_eager", **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, counted = build(ORDERS[0]), Counted(backend)
    run, worst, counts = torch.compile(layer, backend=counted, fullgraph=True), 0.0, []
    for order in ORDERS:
        layer.load_state_dict(build(order).state_dict())
        worst = max(worst, compare(layer, run, **options))
        counts.append(counted.count)
    with torch.no_grad():
        before = counted.count
        for order in ORDERS:
            layer.load_state_dict(build(order).state_dict())
            worst = max(worst, far([run(x, **options)[0]], [layer(x, **options)[0]]))
        evaluated = counted.count - before
    return {"counts": counts, "evaluated": evaluated, "worst": worst}

def stream(build):
    torch._dynamo.reset()
    layer, counted = build(ORDERS[0]), Counted("eager")
    run, worst, counts = torch.compile(layer.step, backend=counted, fullgraph=True), 0.0, []
    for order in ORDERS:
        layer.load_state_dict(build(order).state_dict())
        state = own = layer.initial_state(3)
        with torch.no_grad():
            for t in range(3):
                (y, state), (y_, own) = run(x[:, t], state), layer.step(x[:, t], own)
        worst = max(worst, far([y, state], [y_, own]))
        counts.append(counted.count)
    return {"counts": counts, "worst": worst}

def twice(build, backend):
    torch._dynamo.reset()
    layer = build(4)
    y, _ = torch.compile(layer, backend=backend, fullgraph=True)(x)
    try:
        torch.autograd.grad(y.sin().sum(), list(layer.parameters()), create_graph=True)
    except RuntimeError as error:
        return str(error)

def kind(name, **options):
    return lambda order: getattr(layers, name)(6, order=order, **options)

lengths = torch.tensor([30, 7, 1])
CASES = {
    "traced": lambda name: cut(kind(name), "eager"),
    "compiled": lambda name: cut(kind(name)),
    "padded": lambda name: cut(kind(name), "eager", lengths=lengths, keep_state=False),
    "padded with states": lambda name: cut(kind(name), "eager", lengths=lengths),
    "scanned": lambda name: cut(kind(name, path=Path.SCAN), "eager"),
    "generated": lambda name: cut(kind(name), "inductor"),
    "streamed": lambda name: stream(kind(name)),
    "twice": lambda name: [twice(kind(name), backend) for backend in ("eager", "aot_eager")],
}
print(json.dumps(CASES[sys.argv[1]](sys.argv[2])))
"""

LAYERS = ("LRU", "S5", "S4", "S4D", "LinOSS", "Mamba")
NOW = [*(("traced", name) for name in LAYERS), ("compiled", "LRU"), ("padded", "Mamba"), ("scanned", "LRU")]
LATER = [
    *((case, name) for case in ("compiled", "generated", "padded", "padded with states") for name in LAYERS),
    ("scanned", "S5"),
]


@functools.cache
def found(case, name):
    return json.loads(unhooked.run(SCRIPT, case, name))


def cases(now, later):
    return [*now, *(pytest.param(*one, marks=pytest.mark.slow) for one in later if one not in now)]


@pytest.mark.parametrize(("case", "name"), cases(NOW, LATER))
def test_twelve_cuts_compile_nothing_again(case, name):
    """Neither for training nor for evaluation; outputs and gradients are those of the eager layer."""
    assert found(case, name)["counts"] == [1] * 13
    assert found(case, name)["evaluated"] == 1
    assert found(case, name)["worst"] < (1e-4 if case == "generated" else 1e-5)


@pytest.mark.parametrize("name", later(LAYERS, "Mamba"))
def test_steps_of_a_stream_are_compiled_again_after_the_first_cut_only(name):
    """The state is an argument, whose size is a constant until it changes."""
    first, *rest = found("streamed", name)["counts"]
    assert rest == [2 * first] * 12
    assert found("streamed", name)["worst"] < 1e-5


@pytest.mark.parametrize("name", later(LAYERS, "LRU"))
def test_a_compiled_gradient_that_is_to_be_differentiated_again_is_refused(name):
    """By us where the compiler keeps our code, and by torch where it generates its own."""
    ours, theirs = found("twice", name)
    assert ours.startswith("create_graph=True: gradients of layers and models cannot be differentiated again")
    assert "create_graph=False" in theirs
