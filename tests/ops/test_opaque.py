"""Ops for torch.compile: their results, shapes and gradients are those of the functions inside."""

import json

import pytest
import torch
from torch.library import opcheck

from compressm.ops.lti import states
from compressm.ops.lti.cost import Path
from compressm.ops.lti.forms import padded_order
from compressm.ops.lti.recurrence import by_doublings
from compressm.ops.lti.scan import linear_recurrence, lti_bank, lti_layer, recurrence_loop
from compressm.ops.opaque import define_recomputed, recomputed
from compressm.ops.selective import selective_scan
from compressm.ops.selective.conv_and_gate import plain_causal_conv, sum_of_shifts
from tests import kernels, unhooked

OPS = torch.ops.compressm
LENGTHS = torch.tensor([9, 4])
DRAW = torch.Generator().manual_seed(0)


def numbers(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=DRAW)


def log_poles(*shape):
    return torch.stack([-numbers(*shape).sigmoid() / 3, 3 * numbers(*shape)])


def layer():
    return numbers(2, 9, 3), log_poles(4), numbers(2, 4, 3), numbers(2, 5, 4), numbers(2, 2, 4)


def bank():
    return numbers(2, 9, 3), log_poles(3, 4), numbers(2, 3, 4), numbers(2, 3, 4), numbers(2, 2, 3, 4)


def selective():
    """u, delta, A, B, C, D, state and the bias of delta."""
    A = -numbers(3, 4).exp()
    return numbers(2, 9, 3), numbers(2, 9, 3), A, numbers(2, 9, 4), numbers(2, 9, 4), numbers(3), numbers(2, 3, 4)


def cases():
    for lengths in (None, LENGTHS):
        for keep in (False, True):
            for path in ("", "SCAN", "LOOP"):
                yield "lti_layer", (*layer(), lengths), (keep, path)
            yield "lti_bank", (*bank(), lengths), (keep, "")
            yield "selective_scan", (*selective(), lengths, numbers(3), None), (True, keep, "")
    yield "padded_order", layer()[1:], (4,)
    yield "padded_order", layer()[1:], (3,)


CASES = list(cases())


def directly(name, given, flags):
    """What the function inside computes."""
    if name == "padded_order":
        return padded_order(*given, *flags)
    if name == "selective_scan":
        *given, state, lengths, bias, orders = given
        options = {"delta_bias": bias, "softplus": flags[0], "orders": orders, "keep_state": flags[1]}
        return selective_scan(*given, None, state, lengths, **options)
    function = lti_bank if name == "lti_bank" else lti_layer
    return function(*given, keep_state=flags[0], path=Path[flags[1]] if flags[1] else None)


def gradients(function, given):
    leaves = [x.clone().requires_grad_() if x is not None and x.is_floating_point() else x for x in given]
    results = [x for x in function(leaves) if x is not None and x.numel()]
    sum(x.sin().sum() for x in results).backward()
    return results, [x.grad for x in leaves if x is not None and x.is_floating_point()]


@pytest.mark.parametrize(("name", "given", "flags"), CASES)
def test_an_op_and_its_gradient_are_those_of_the_function(name, given, flags):
    found, pulled = gradients(lambda given: recomputed(name, given, *flags), given)
    wanted, own = gradients(lambda given: directly(name, given, flags), given)
    assert len(found) == len(wanted)
    for a, b in zip(found + pulled, wanted + own, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("name", "given", "flags"), CASES[::5] + CASES[-2:])
def test_shapes_are_known_before_anything_is_computed(name, given, flags):
    results = getattr(OPS, name)(*given, *flags)
    tests = ("test_schema", "test_faketensor")
    found = opcheck(getattr(OPS, name).default, (*given, *flags), test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}
    opcheck(getattr(OPS, f"{name}_back").default, ([*map(torch.ones_like, results)], *given, *flags), test_utils=tests)


def recurrence(length, n, dtype):
    DRAW.manual_seed(length)
    return numbers(2, length, 2, n).to(dtype), log_poles(n).to(dtype), numbers(2, 2, n).to(dtype)


# Complex numbers in two levels, and a walk over pairs.
SIZES = [(9, 3, torch.float64), (1100, 128, torch.float32)]


@pytest.mark.parametrize(("length", "n", "dtype"), SIZES)
@pytest.mark.parametrize("keep_last", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
def test_the_scan_keeps_every_state_for_its_gradient(length, n, dtype, keep_last, has_state):
    x, logs, state = recurrence(length, n, dtype)
    given = (x, logs, state if has_state else None)
    found, pulled = gradients(lambda given: states.scan(*given, keep_last, given[0].shape[3]), given)
    wanted, own = gradients(lambda given: linear_recurrence(*given)[: 1 + keep_last], given)
    for a, b in zip(found + pulled, wanted + own, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 1e-10)
    if length < 100:
        tests, dlast = ("test_schema", "test_faketensor"), torch.ones_like(state) if keep_last else None
        opcheck(OPS.scan.default, (*given, keep_last, n), test_utils=tests)
        opcheck(OPS.scan_back.default, (torch.ones_like(x), dlast, x, *given[1:]), test_utils=tests)


@kernels.MARK
@pytest.mark.parametrize("keep_last", [False, True])
def test_the_scan_launches_the_kernels_of_a_gpu(keep_last, monkeypatch):
    if not kernels.GPU:
        monkeypatch.setattr("compressm.ops.lti.scan_triton.compile_walks", lambda *_: None)
        monkeypatch.setattr(states, "runs_kernels", lambda x: True)
    given = [x.to(kernels.DEVICE) for x in recurrence(70, 3, torch.float32)]
    found, pulled = gradients(lambda given: states.scan(*given, keep_last, given[0].shape[3]), given)
    exact = [x.double() for x in given]
    wanted, own = gradients(lambda given: recurrence_loop(*given)[: 1 + keep_last], exact)
    for a, b in zip(found + pulled, wanted + own, strict=True):
        assert kernels.relative(a, b) < 1e-5


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("has_state", [False, True])
def test_doublings_give_every_state(length, has_state):
    x, logs, state = recurrence(length, 3, torch.float64)
    state = state if has_state else None
    for a, b in zip(by_doublings(x, logs, state), recurrence_loop(x, logs, state), strict=True):
        torch.testing.assert_close(a, b)
    lengths = torch.tensor([1, length])
    h, last = by_doublings(x, logs, state, lengths)
    torch.testing.assert_close(last, h[torch.arange(2), lengths - 1])


@pytest.mark.parametrize("n", [1, 7, 8, 9])
def test_idle_modes_change_no_output(n):
    logs, B, C, state = log_poles(n), numbers(2, n, 3), numbers(2, 5, n), numbers(2, 2, n)
    u = numbers(2, 9, 3)
    padded = padded_order(logs, B, C, state, 8)
    assert padded[1].shape[1] % 8 == 0
    y, last = lti_layer(u, *padded)
    wanted, h = lti_layer(u, logs, B, C, state)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(last[..., :n], h)


@pytest.mark.parametrize("has_past", [False, True])
@pytest.mark.parametrize("taps", [1, 4])
def test_a_sum_of_shifts_is_the_convolution(taps, has_past):
    v, weight, bias = numbers(2, 6, 3), numbers(3, 1, taps), numbers(3)
    before = numbers(2, taps - 1, 3) if has_past else None
    torch.testing.assert_close(sum_of_shifts(v, weight, bias, before), plain_causal_conv(v, weight, bias, before))


SCRIPT = """
import json
import torch, torch._dynamo
from compressm.ops.lti.scan import _compiled_scan, lti_layer

count = 0

def backend(graph, inputs):
    global count
    count += 1
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

@torch.compile(backend=backend, fullgraph=True)
def layer(*given):
    y, last = _compiled_scan(*given, None, True, multiple=8)
    return y.sin().sum() + last.sin().sum()

def directly(*given):
    y, last = lti_layer(*given)
    return y.sin().sum() + last.sin().sum()

u, worst = torch.randn(4, 20, 3, dtype=torch.float64), 0
for n in (12, 8, 15, 16, 17, 7, 3, 24):
    shapes = ((2, n), (2, n, 3), (2, 5, n), (4, 2, n))
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    given[0][0] = -torch.rand(n) / 5
    for x, axis in zip(given, (1, 1, 2, 2)):
        torch._dynamo.maybe_mark_dynamic(x, axis)
    loss, wanted = layer(u, *(x.requires_grad_() for x in given)), directly(u, *given)
    pairs = zip(torch.autograd.grad(loss, given), torch.autograd.grad(wanted, given))
    worst = max(worst, (loss - wanted).abs().item(), *((a - b).abs().max().item() for a, b in pairs))
print(json.dumps([count, worst]))
"""


def test_the_path_of_wide_layers_on_a_gpu_is_compiled_once_for_all_orders():
    """Idle modes round the order up to a multiple of 8."""
    count, worst = json.loads(unhooked.run(SCRIPT))
    assert count == 1
    assert worst < 1e-9


def test_results_begin_where_generated_code_may_read_16_bytes_at_once():
    define_recomputed("without_first", "Tensor x", lambda x: [(2 * x)[1:]], lambda x: [x.new_empty(x.shape[0] - 1)])
    (found,) = recomputed("without_first", [torch.arange(5.0)])
    assert found.tolist() == [2, 4, 6, 8]
    assert found.data_ptr() % 16 == 0


def test_what_an_op_keeps_reaches_its_gradient_under_the_compiler():
    found = json.loads(unhooked.run(KEPT, ""))
    assert found["counts"] == [1, 1, 1]
    assert found["worst"] < 1e-12
    assert found["mean"] == found["eager mean"]


KEPT = """
import json
import torch, torch._dynamo
from compressm.ops.opaque import define_kept

def forward(x, weight, total, scale):
    total.add_(x.sum())
    root = x @ weight.mT
    return root.sin() * scale, root

def pull(grads, saved, x, weight, scale):
    inner = grads[0] * saved[0].cos() * scale
    return inner @ weight, inner.mT @ x

def fake(x, weight, total, scale):
    return tuple(x.new_empty(x.shape[0], weight.shape[0]) for _ in range(2))

define_kept("waves", "Tensor x, Tensor weight", "Tensor(a!) total", "int scale", forward, fake, pull, (1, 1))

class Waves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, x, weight):
        return torch.ops.compressm.waves(2 * x, weight, self.total, 3)[0].sum()

counts, worst = [], 0.0
plain, model = Waves(), Waves()
run = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
for n in (4, 5, 7):
    draw = torch.Generator().manual_seed(n)
    given = [torch.randn(size, 3, generator=draw, dtype=torch.float64, requires_grad=True) for size in (6, n)]
    wanted = torch.autograd.grad(plain(*given), given)
    exact = torch.autograd.grad((3.0 * (2 * given[0] @ given[1].mT).sin()).sum(), given)
    found = torch.autograd.grad(run(*given), given)
    pairs = [*zip(found, exact), *zip(wanted, exact)]
    worst = max([worst] + [(a - b).abs().max().item() for a, b in pairs])
    counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
print(json.dumps({"counts": counts, "worst": worst, "mean": model.total.item(), "eager mean": plain.total.item()}))
"""
