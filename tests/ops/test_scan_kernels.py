"""The kernels of recurrences and layers against the definition, on a GPU or in Triton's interpreter."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from compressm.ops.block.norm import Link
from compressm.ops.lti.lru_system import plain_system
from compressm.ops.lti.scan import lti_loop, recurrence_loop
from tests.kernels import DEVICE, GPU, MARK, later, nan_memory, normal, relative, some_of

__all__ = ["nan_memory"]

pytestmark = MARK

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 3e-2}
DTYPES = tuple(TOLERANCE)
GIVEN = (True, False)


def poles(n, *, slowest=1e-4, fastest=None):
    draw = torch.rand(2, n, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    logs = torch.stack([-slowest - 0.1 * draw[0], 6.28 * draw[1]])
    if fastest is not None:
        logs[0, 0] = -fastest
    return logs.float().to(DEVICE)


@pytest.fixture
def short_spans(monkeypatch):
    """The interpreter is slow: spans of 16 steps instead of 64, and nothing compiled that is not asked for."""
    if not GPU:
        monkeypatch.setattr("compressm.ops.lti.scan_triton._SPAN", 16)
        monkeypatch.setattr("compressm.ops.lti.scan_triton.compile_walks", lambda *_: None)


def gradients(outputs, weights, inputs):
    total = sum((value.to(weight) * weight).sum() for value, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(total, [tensor for tensor in inputs if tensor is not None], allow_unused=True)


def check_against(function, definition, inputs, tolerance):
    """Outputs and gradients of `function` in float32 against those of `definition` in float64."""
    leaves = [None if tensor is None else tensor.clone().requires_grad_() for tensor in inputs]
    exact = [None if tensor is None else tensor.double().requires_grad_() for tensor in inputs]
    got, wanted = function(*leaves), definition(*exact)
    weights = [normal(*value.shape, seed=50 + k, dtype=torch.float64) for k, value in enumerate(wanted)]
    pairs = [*zip(got, wanted, strict=True)]
    pairs += zip(gradients(got, weights, leaves), gradients(wanted, weights, exact), strict=True)
    for k, (one, other) in enumerate(pairs):
        assert one.shape == other.shape
        # Gradients that cancel to almost nothing have no relative error.
        assert relative(one, other) < tolerance or (one - other).abs().max() < 1e-6, k


RECURRENCES = [(2, 1, 1), (1, 15, 5), (2, 16, 64), (1, 17, 130), (2, 50, 3)]


@pytest.mark.parametrize(("sizes", "dtype", "given"), some_of(RECURRENCES, DTYPES, GIVEN), ids=str)
def test_a_recurrence_is_the_definition(sizes, dtype, given, nan_memory, short_spans):
    from compressm.ops.lti.scan_triton import triton_recurrence

    batch, length, n = sizes
    state = normal(batch, 2, n, seed=1) if given else None
    inputs = (normal(batch, length, 2, n, dtype=dtype), poles(n, fastest=9.0 if n > 1 else None), state)
    check_against(triton_recurrence, recurrence_loop, inputs, TOLERANCE[dtype])


def test_conjugates_of_all_states(short_spans):
    from compressm.ops.lti.scan_triton import triton_recurrence

    sign = torch.tensor([1.0, -1.0], device=DEVICE)[:, None]

    def conjugated(*inputs):
        h, last = recurrence_loop(*inputs)
        return h * sign, last

    inputs = (normal(2, 20, 2, 6), poles(6), normal(2, 2, 6, seed=1))
    check_against(lambda *inputs: triton_recurrence(*inputs, conjugate=True), conjugated, inputs, 5e-6)


def test_the_last_state_may_be_left_out(short_spans):
    from compressm.ops.lti.scan_triton import triton_recurrence

    def alone(*inputs):
        h, last = triton_recurrence(*inputs, keep_last=False)
        assert last is None
        return (h,)

    inputs = (normal(2, 20, 2, 4), poles(4), normal(2, 2, 4, seed=1))
    check_against(alone, lambda *i: (recurrence_loop(*i)[0],), inputs, 5e-6)


@pytest.mark.parametrize("used", [0, 1], ids=["all states", "the last state"])
def test_one_of_both_outputs_may_be_left_unused(used, short_spans):
    from compressm.ops.lti.scan_triton import triton_recurrence

    inputs = (normal(2, 20, 2, 4), poles(4), normal(2, 2, 4, seed=1))
    check_against(lambda *i: (triton_recurrence(*i)[used],), lambda *i: (recurrence_loop(*i)[used],), inputs, 5e-6)


def test_many_segments_look_back_at_all_before_them(monkeypatch, short_spans):
    from compressm.ops.lti import scan_triton as triton

    monkeypatch.setattr(triton, "_THREADS", 10**9)
    length = 300 if GPU else 150  # more segments than the eight that are looked at together
    assert triton._segments(1, length, 2)[0] == -(-length // triton._SPAN)
    check_against(triton.triton_recurrence, recurrence_loop, (normal(1, length, 2, 2), poles(2), None), 1e-5)


DRIVEN = [(2, 1, 1, 1), (2, 40, 8, 5), (1, 17, 70, 33)]


@pytest.mark.parametrize(("sizes", "dtype", "given"), some_of(DRIVEN, DTYPES, GIVEN), ids=str)
def test_a_driven_recurrence_sends_gradients_with_their_sums(sizes, dtype, given, short_spans):
    from compressm.ops.lti.scan_triton import driven_recurrence

    batch, length, n, p = sizes
    u = normal(batch, length, p, dtype=dtype)

    def by_kernels(log_poles, B, state, carrier, totals):
        return driven_recurrence(Link(u, carrier, totals), log_poles, B, state, conjugate=False)

    def defined(log_poles, B, state, carrier, totals):
        x = torch.einsum("blp,knp->blkn", u.double() + carrier + totals[0] + totals[1] * u.double(), B)
        return recurrence_loop(x, log_poles, state)

    B = normal(2, n, p, seed=1, dtype=dtype) / p**0.5
    state, zeros = normal(batch, 2, n, seed=2) if given else None, torch.zeros(2, p, device=DEVICE)
    inputs = (poles(n), B, state, torch.zeros_like(u), zeros)
    check_against(by_kernels, defined, inputs, TOLERANCE[dtype])


LAYERS = [
    # (batch, length, n, p, q), whether a state is given
    ((2, 25, 5, 3, 2), True),
    ((1, 9, 40, 1, 5), False),
    ((1, 3, 3, 8, 8), True),
    ((1, 1, 1, 1, 1), False),
    later((2, 25, 5, 3, 2), False),
    later((3, 16, 16, 8, 8), True),
    later((3, 16, 16, 8, 8), False),
    later((2, 20, 40, 1, 16), True),
    later((2, 20, 40, 1, 16), False),
    later((1, 60, 3, 8, 8), True),
    later((1, 60, 3, 8, 8), False),
    later((1, 1, 1, 1, 1), True),
]


@pytest.mark.parametrize(("sizes", "given"), LAYERS, ids=str)
def test_a_layer_of_few_channels(sizes, given, nan_memory):
    from compressm.ops.lti.layer_triton import ChunkedLayer

    batch, length, n, p, q = sizes
    state = normal(batch, 2, n, seed=4) if given else None
    matrices = normal(2, n, p, seed=2), normal(2, q, n, seed=3)
    inputs = (normal(batch, length, p), poles(n), *matrices, state)
    check_against(lambda *i: (ChunkedLayer.apply(*i),), lambda *i: (lti_loop(*i)[0],), inputs, 5e-6)


def test_a_layer_of_few_channels_gives_gradients_where_checkpoints_save_memory():
    from compressm.ops.lti.layer_triton import ChunkedLayer

    inputs = [
        x.requires_grad_() for x in (normal(2, 20, 3), poles(4), normal(2, 4, 3, seed=2), normal(2, 2, 4, seed=3))
    ]
    wanted = torch.autograd.grad(ChunkedLayer.apply(*inputs, None).sum(), inputs)
    got = torch.autograd.grad(checkpoint(ChunkedLayer.apply, *inputs, None, use_reentrant=False).sum(), inputs)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@pytest.fixture
def short_tiles(monkeypatch):
    """A tile of 16 chunks instead of 64."""
    from compressm.ops.launching_triton import forget_plans

    monkeypatch.setattr("compressm.ops.lti.layer_triton._CHUNKS", 16)
    forget_plans()
    yield
    forget_plans()


@pytest.mark.parametrize("given", GIVEN)
def test_a_layer_carries_its_state_from_tile_to_tile_of_chunks(given, short_tiles, nan_memory):
    from compressm.ops.lti.layer_triton import ChunkedLayer

    state = normal(1, 2, 2, seed=4) if given else None
    slow = torch.tensor([[-1e-5, -0.3], [3.1, 0.5]], device=DEVICE)
    inputs = (normal(1, 40 * 16 - 3, 2), slow, normal(2, 2, 2, seed=2), normal(2, 3, 2, seed=3), state)
    check_against(lambda *i: (ChunkedLayer.apply(*i),), lambda *i: (lti_loop(*i)[0],), inputs, 5e-6)


def test_a_slow_pole_keeps_its_phase_over_many_tiles(short_tiles):
    from compressm.ops.lti.layer_triton import ChunkedLayer

    tiles = 24
    slow = torch.tensor([[-1e-7], [3.1]], device=DEVICE)
    u = torch.zeros(1, tiles * 256, 1, device=DEVICE)
    inputs = (u, slow, normal(2, 1, 1, seed=2), normal(2, 1, 1, seed=3), normal(1, 2, 1, seed=4))
    got = ChunkedLayer.apply(*inputs)
    wanted, _ = lti_loop(*(x.double() for x in inputs))
    assert relative(got, wanted) < 2e-6


@pytest.mark.parametrize("length", [16, 20])
def test_a_layer_of_few_channels_reads_half_precision(length, nan_memory):
    from compressm.ops.lti.layer_triton import ChunkedLayer

    u = normal(2, length, 4, dtype=torch.bfloat16)
    inputs = (u, poles(5), normal(2, 5, 4, seed=2), normal(2, 3, 5, seed=3), normal(2, 2, 5, seed=4))
    assert ChunkedLayer.apply(*inputs).dtype == torch.bfloat16
    check_against(lambda *i: (ChunkedLayer.apply(*i),), lambda *i: (lti_loop(*i)[0],), inputs, 1e-2)


def test_a_layer_of_few_channels_takes_poles_of_float64_as_they_are():
    from compressm.ops.lti.layer_triton import ChunkedLayer

    # In float32 the phase of 3.1 is 9e-8 off, 6e-6 of a turn after 400 steps.
    slow = torch.tensor([[-1e-5, -1e-4], [3.1, 0.7]], dtype=torch.float64, device=DEVICE)
    inputs = (normal(1, 400, 1), slow, normal(2, 2, 1, seed=2), normal(2, 1, 2, seed=3), None)
    check_against(lambda *i: (ChunkedLayer.apply(*i),), lambda *i: (lti_loop(*i)[0],), inputs, 5e-6)


@pytest.mark.parametrize(("n", "p", "q"), [(13, 8, 8), (57, 70, 3), (1, 1, 1), (16, 5, 20)])
def test_the_system_of_a_linear_recurrent_unit(n, p, q, nan_memory):
    from compressm.ops.lti.lru_system_triton import LRUSystem

    shapes = ((n,), (n,), (n,), (n, p), (n, p), (q, n), (q, n))
    inputs = [normal(*shape, seed=k) for k, shape in enumerate(shapes)]

    def kept(*parameters):
        logs, B, C = LRUSystem.apply(*parameters, torch.float32)
        assert logs.shape[1] % 8 == 0
        assert B[:, n:].abs().sum() == C[..., n:].abs().sum() == 0
        assert (logs[0, n:] < 0).all()
        return logs[:, :n], B[:, :n], C[..., :n]

    check_against(kept, plain_system, inputs, 1e-6)


def test_the_system_sums_the_parts_of_the_gradient_of_its_poles(nan_memory):
    from compressm.ops.lti.lru_system_triton import system_gradient

    parameters = tuple(normal(*shape, seed=k) for k, shape in enumerate(((5,), (5,), (5,), (5, 3), (5, 3))))
    parts, dB, dC = normal(70, 16, seed=6), normal(16, 3, seed=7), normal(2, 16, seed=8)
    whole = system_gradient(parameters, 2, parts.double().sum(0).float().view(2, 8), dB, dC)
    for one, other in zip(system_gradient(parameters, 2, parts, dB, dC), whole, strict=True):
        assert relative(one, other) < 1e-6


def test_the_system_comes_in_the_precision_asked_for():
    from compressm.ops.lti.lru_system_triton import LRUSystem

    parameters = [normal(*shape) for shape in ((4,), (4,), (4,), (4, 3), (4, 3), (2, 4), (2, 4))]
    logs, B, C = LRUSystem.apply(*parameters, torch.bfloat16)
    assert (logs.dtype, B.dtype, C.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)


MAPS = [(7, 1, 8), (33, 5, 1), (90, 3, 140)]


@pytest.mark.parametrize(
    ("sizes", "dtype"), [*some_of(MAPS, DTYPES), *(later((300, 3, 200), d) for d in DTYPES)], ids=str
)
def test_a_linear_map_of_few_inputs(sizes, dtype, nan_memory):
    from compressm.ops.block.encoder_triton import LinearOfFew

    rows, inputs, width = sizes
    x = normal(3, rows, inputs, dtype=dtype)
    parameters = normal(width, inputs, seed=1), normal(width, seed=2)
    check_against(
        lambda weight, bias: (LinearOfFew.apply(x, weight, bias, dtype),),
        lambda weight, bias: (torch.nn.functional.linear(x.double(), weight, bias),),
        parameters,
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("length", "width"), [(1, 1), (300, 8), (1100, 33)])
def test_a_mean_over_time(length, width, dtype, monkeypatch):
    from compressm.ops.block import pooling as dispatch

    monkeypatch.setattr("compressm.ops.dispatch._DEVICES", (DEVICE.type,))
    x = normal(3, length, width, dtype=dtype)
    assert dispatch.kernels_serve(x)
    check_against(lambda x: (dispatch.time_mean(x),), lambda x: (x.mean(1),), (x,), TOLERANCE[dtype])
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(dispatch.time_mean(x).sum(), x)
    assert length == 1 or gradient.stride(1) == 0


@pytest.mark.parametrize("learning", [True, False])
def test_few_and_many_modes_are_compiled_at_the_first_use(learning, monkeypatch):
    from compressm.ops.lti import scan_triton as triton

    built = []
    monkeypatch.setattr(triton, "Walk", lambda x, logs, *, flip: built.append((x.shape[-1], flip)) or Walk())

    class Walk:
        def forward(self, x, state, *, keep_last):
            built.append(("forward", state is not None, keep_last))

        def backward(self, dh, h, state, dlast, *, summed):
            built.append(("backward", state is not None, dlast, summed))

    triton.compile_walks.__wrapped__(torch.float32, torch.float32, DEVICE, -1, True, False, learning, True)
    backward = [("backward", True, None, True)] if learning else []
    forward = ("forward", True, False)
    assert built == [(1, -1), forward, *backward, (65, -1), forward, *backward]
