"""The selective scan in plain torch, path by path, against a sum over all that came before."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.ops.selective import ScanPath, selective_scan, selective_step
from compressm.ops.selective.reference import Selective
from compressm.ops.selective.scan import fastest_path
from tests import unhooked
from tests.ops.selective import VARIANTS, Case, exact, inputs, largest_error, options, results

PATHS = [ScanPath.LOOP, ScanPath.BLOCKED]
# Numbers of a tile, states of a step, and numbers up to which chunks are walked side by side.
CUTS = {"one tile": (2**17, 2**13, 0), "chunks": (120, 16, 2**13), "many tiles": (24, 6, 0)}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def scan(u, delta, A, B, C, D, z, state, bias, **options):
    return selective_scan(u, delta, A, B, C, D, z, state, delta_bias=bias, **options)


def doubled(given):
    return [None if x is None else x.double() for x in given]


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch):
    cut_into(CUTS[request.param], monkeypatch)


def cut_into(sizes, monkeypatch):
    for name, size in zip(("TILE", "STEP", "FEW"), sizes, strict=True):
        monkeypatch.setattr(f"compressm.ops.selective.cpu.{name}", size)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loop_is_the_sum(variant):
    case = Case(**VARIANTS[variant])
    given = doubled(inputs(case))
    assert largest_error(results(scan, given, case, path=ScanPath.LOOP), exact(given, case)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tiles_are_the_sum(variant, dtype, cut):
    case = Case(**VARIANTS[variant])
    given = [None if x is None else x.to(dtype) for x in inputs(case)]
    got = results(scan, given, case, path=ScanPath.BLOCKED)
    assert all(value.dtype == dtype for value in got)
    assert largest_error(got, exact(given, case)) < TOLERANCE[dtype]


SIZES = [(1, 1, 1, 1), (3, 1, 2, 5), (1, 37, 1, 1), (2, 30, 7, 1), (5, 13, 2, 3), (1, 61, 4, 2)]


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_need_not_be_multiples_of_anything(sizes, path, cut):
    for variant in ({}, {"own": True, "complex": True, "state": True}):
        case = Case(*sizes, **variant)
        given = doubled(inputs(case))
        assert largest_error(results(scan, given, case, path=path), exact(given, case)) < 1e-12


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 5), st.integers(1, 5)),
    flags=st.lists(st.booleans(), min_size=6, max_size=6),
    tile=st.tuples(st.integers(1, 300), st.integers(1, 30), st.sampled_from([0, 10, 10**6])),
    ends=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    orders=st.none() | st.lists(st.integers(0, 5), min_size=5, max_size=5),
)
def test_tiles_of_any_size_are_the_sum(sizes, flags, tile, ends, orders):
    batch, length, channels, n = sizes
    ends = tuple(min(end, length) for end in ends[:batch])
    orders = None if orders is None else tuple(min(order, n) for order in orders[:channels])
    case = Case(*sizes, *flags, ends, orders)
    given = doubled(inputs(case))
    with pytest.MonkeyPatch.context() as monkeypatch:
        cut_into(tile, monkeypatch)
        got = results(scan, given, case, path=ScanPath.BLOCKED)
    assert largest_error(got, exact(given, case)) < 1e-12


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("variant", ["real", "all"])
def test_gradients_are_those_of_differences(variant, path, monkeypatch):
    cut_into((20, 6, 8), monkeypatch)
    case = Case(1, 6, 2, 2, **VARIANTS[variant] | {"lengths": (5,), "orders": None})
    given = [None if x is None else x.requires_grad_() for x in doubled(inputs(case))]
    assert torch.autograd.gradcheck(lambda *given: scan(*given, **options(case), path=path), given)


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_steps_of_zero_leave_the_state_as_it_is(own, path, cut):
    case = Case(own=own, state=True, softplus=False, skip=False, gate=False)
    u, delta, A, B, C, _, _, state, _ = inputs(case)
    y, last = selective_scan(u, torch.zeros_like(delta), A, B, C, state=state, path=path)
    assert torch.equal(last, state)
    torch.testing.assert_close(y, torch.einsum("bldn,bdn->bld" if own else "bln,bdn->bld", C, state))


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("complex", [False, True])
def test_decays_may_underflow_to_zero(complex, path, cut):
    case = Case(length=30, state=True, softplus=False, complex=complex)
    u, delta, *rest = inputs(case, fastest=10.0)
    delta = delta * torch.where(torch.arange(30) % 7 == 3, 1e4, 1.0)[:, None]  # exp(−3e4) is 0 in float64 too
    got = results(scan, (u, delta, *rest), case, path=path)
    assert all(value.isfinite().all() for value in got)
    assert largest_error(got, exact((u, delta, *rest), case)) < (1e-5 if complex else 3e-6)


@pytest.mark.parametrize("path", [*PATHS, None], ids=str)
@pytest.mark.parametrize("variant", ["real", "all"])
def test_two_halves_are_the_whole(variant, path, cut):
    case = Case(**VARIANTS[variant] | {"lengths": None, "state": True})
    u, delta, A, B, C, D, z, state, bias = inputs(case)
    more = options(case) | {"path": path}
    y, last = scan(u, delta, A, B, C, D, z, state, bias, **more)
    pieces, h = [], state
    for times in (slice(0, 9), slice(9, None)):
        piece, h = scan(
            *(x[:, times] for x in (u, delta)), A, B[:, times], C[:, times], D, z[:, times], h, bias, **more
        )
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, dim=1), y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h, last, rtol=1e-5, atol=1e-5)


def test_steps_one_by_one_are_the_whole():
    case = Case(**VARIANTS["all"] | {"lengths": None})
    u, delta, A, B, C, D, z, state, bias = inputs(case)
    y, last = scan(u, delta, A, B, C, D, z, state, bias, **options(case), path=ScanPath.BLOCKED)
    h, more = state, {"softplus": True, "orders": torch.tensor(case.orders), "delta_bias": bias}
    for t in range(case.length):
        step, h = selective_step(u[:, t], delta[:, t], A, B[:, t], C[:, t], D, z[:, t], state=h, **more)
        torch.testing.assert_close(step, y[:, t], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h, last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", [*PATHS, None], ids=str)
def test_what_follows_the_length_of_a_sequence_changes_nothing(path):
    case = Case(batch=3, length=20, lengths=(20, 7, 1))
    u, delta, A, B, C, D, z, _, bias = inputs(case)
    garbage = [x.clone() for x in (u, delta, B, C)]
    for i, stop in enumerate(case.lengths):
        for x in garbage:
            x[i, stop:] = 1e3
    last = scan(*garbage[:2], A, *garbage[2:], D, z, None, bias, **options(case), path=path)[1]
    for i, stop in enumerate(case.lengths):
        alone = (x[i : i + 1, :stop] for x in (u, delta, B, C, z))
        u_i, delta_i, B_i, C_i, z_i = alone
        end = scan(u_i, delta_i, A, B_i, C_i, D, z_i, None, bias, softplus=True, path=ScanPath.LOOP)[1]
        torch.testing.assert_close(last[i], end[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("path", [*PATHS, None], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_float32(dtype, path, cut):
    case = Case(state=True)
    given = inputs(case, dtype=dtype)
    y, last, *gradients = results(scan, given, case, path=path)
    assert (y.dtype, last.dtype) == (dtype, torch.float32)
    assert [g.dtype for g in gradients] == [x.dtype for x in given if x is not None]
    wanted = exact(given, case)
    assert largest_error([last], wanted[1:2]) < 3e-6
    assert largest_error([y, last, *gradients], wanted) < TOLERANCE[dtype]


def test_autocast_changes_nothing():
    case = Case(**VARIANTS["complex"])
    given = inputs(case)
    wanted = scan(*given, **options(case), path=ScanPath.BLOCKED)
    with torch.autocast("cpu", torch.bfloat16):
        got = scan(*given, **options(case), path=ScanPath.BLOCKED)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_inputs_may_be_views():
    case = Case(own=True, complex=True)
    given = inputs(case)
    strided = [None if x is None else torch.stack([x, x], dim=-1)[..., 0] for x in given]
    assert all(x is None or x.numel() == 1 or not x.is_contiguous() for x in strided)
    got, wanted = (results(scan, x, case, path=ScanPath.BLOCKED) for x in (strided, given))
    assert largest_error(got, wanted) < 1e-6


@pytest.mark.parametrize("used", [0, 1], ids=["what is heard", "the last state"])
def test_one_of_both_results_may_be_left_unused(used):
    case = Case(state=True, skip=False, gate=False, softplus=False)
    grads = []
    for path in PATHS:
        leaves = [x.requires_grad_() for x in inputs(case) if x is not None]
        u, delta, A, B, C, state = leaves
        out = selective_scan(u, delta, A, B, C, state=state, path=path)[used]
        grads.append(torch.autograd.grad(out.square().sum(), leaves, allow_unused=True))
    for one, other in zip(*grads, strict=True):
        if one is None:  # C is not heard in the last state
            assert other.abs().max() == 0
        else:
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def saved(case, path):
    """Numbers that are kept for the backward pass, what is given left out."""
    given = [None if x is None else x.requires_grad_() for x in inputs(case)]
    own, count = {x.data_ptr() for x in given if x is not None}, []
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda x: count.append(0 if x.data_ptr() in own else x.numel()) or x, lambda x: x
    )
    with keep:
        scan(*given, **options(case), path=path)
    return sum(count)


def test_one_state_in_several_steps_is_kept_for_gradients():
    case = Case(batch=4, length=256, channels=32, n=64)
    states, signals = case.batch * case.length * case.channels * case.n, case.batch * case.length * case.channels
    assert saved(case, ScanPath.BLOCKED) < states / 16 + 10 * signals
    assert saved(case, ScanPath.LOOP) > 2 * states


def test_nothing_is_kept_without_gradients(monkeypatch):
    case = Case(length=40)
    given = [None if x is None else x.requires_grad_() for x in inputs(case)]
    from compressm.ops.selective.cpu import GroupScan

    kept, forward = [], GroupScan.forward
    monkeypatch.setattr(GroupScan, "forward", lambda *a, **k: kept.append(k["keep"]) or forward(*a, **k))
    y = scan(*given, **options(case), path=ScanPath.BLOCKED)[0]
    with torch.no_grad():
        assert torch.equal(scan(*given, **options(case), path=ScanPath.BLOCKED)[0], y)
    scan(*(None if x is None else x.detach() for x in given), **options(case), path=ScanPath.BLOCKED)
    assert kept == [True, False, False]


def test_without_keeping_the_state_none_is_returned():
    for path in (*PATHS, None):
        u, delta, A, B, C, *_ = inputs(Case(length=40))
        assert selective_scan(u, delta.abs(), A, B, C, keep_state=False, path=path)[1] is None


@pytest.mark.parametrize(
    ("sizes", "path"),
    [
        ((1, 1, 4, 2), ScanPath.LOOP),
        ((1, 8, 4, 2), ScanPath.LOOP),
        ((1, 9, 4, 2), ScanPath.BLOCKED),
        ((8, 24, 128, 16), ScanPath.LOOP),
        ((8, 25, 128, 16), ScanPath.BLOCKED),
    ],
    ids=str,
)
def test_short_sequences_are_walked_by_the_loop(sizes, path):
    u, delta, A, B, C, *_ = inputs(Case(*sizes))
    assert fastest_path(Selective(u, delta, A, B, C)) is path


def test_numbers_that_vanish_are_dropped_between_tiles(monkeypatch):
    cut_into((8, 2, 0), monkeypatch)
    u, delta = torch.zeros(1, 60, 1), torch.ones(1, 60, 1)
    u[:, 0] = 1.0
    rates, B = torch.full((1, 1), -2.0), torch.ones(1, 60, 1)
    y, last = selective_scan(u, delta, rates, B, B, path=ScanPath.BLOCKED)
    wanted = torch.exp(-2.0 * torch.arange(60, dtype=torch.float64))
    torch.testing.assert_close(y[0, :, 0].double(), wanted, rtol=1e-5, atol=1e-28)
    assert last == 0


GIVEN = """
import torch
from compressm.ops.selective import ScanPath, selective_scan
def scan(length=3, order=2, **changed):
    given = dict(u=torch.ones(2, 3, 4), delta=torch.ones(2, 3, 4), A=-torch.ones(4, 2))
    given |= dict(B=torch.ones(2, 3, 2), C=torch.ones(2, 3, 2)) | changed
    return selective_scan(**given)
"""
REFUSED = {
    "no sequence": ("scan(u=torch.ones(2, 4))", "u is (2, 4)", "(batch, length, channels)"),
    "no steps": ("scan(u=torch.ones(2, 0, 4))", "u is (2, 0, 4)", "at least 1"),
    "other steps": ("scan(delta=torch.ones(2, 3, 5))", "delta is (2, 3, 5)", "(2, 3, 4)"),
    "rates of other channels": ("scan(A=-torch.ones(5, 2))", "(5, 2)", "(4, n)"),
    "three parts": ("scan(A=-torch.ones(3, 4, 2))", "(3, 4, 2)", "(2, 4, n)"),
    "another order": ("scan(B=torch.ones(2, 3, 3))", "B is (2, 3, 3)", "(2, 3, 2)"),
    "C of its own alone": ("scan(C=torch.ones(2, 3, 4, 2))", "C is (2, 3, 4, 2)", "(2, 3, 2)"),
    "real C of complex rates": (
        "scan(A=-torch.ones(2, 4, 2), B=torch.ones(2, 3, 2, 2))",
        "C is (2, 3, 2)",
        "(2, 3, 2, 2)",
    ),
    "another skip": ("scan(D=torch.ones(3))", "D is (3,)", "(4,)"),
    "another gate": ("scan(z=torch.ones(2, 3, 1))", "z is (2, 3, 1)", "(2, 3, 4)"),
    "another state": ("scan(state=torch.ones(2, 4, 3))", "state is (2, 4, 3)", "(2, 4, 2)"),
    "lengths of others": ("scan(lengths=torch.tensor([1]))", "lengths is (1,)", "(2,)"),
    "half orders": ("scan(orders=torch.ones(4))", "orders are torch.float32", "integers"),
    "integers": ("scan(u=torch.ones(2, 3, 4, dtype=torch.int64))", "u has dtype torch.int64", "torch.float32"),
    "complex rates as such": ("scan(A=-torch.ones(4, 2) + 0j)", "A has dtype torch.complex64", "torch.float32"),
    "another device": ("scan(D=torch.ones(4, device='meta'))", "D is on meta", "expected cpu like u"),
    "a path by name": ("scan(path='blocked')", "'blocked'", "ScanPath.BLOCKED"),
    "kernels on a CPU": ("scan(path=ScanPath.TRITON)", "ScanPath.TRITON", "cpu", "GPU"),
}


@pytest.fixture(scope="module")
def outcomes():
    return unhooked.outcomes(GIVEN, {case: row[0] for case, row in REFUSED.items()})


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case, outcomes):
    kinds, message = outcomes[case]
    assert kinds[:1] == ["SequenceError"], message
    assert all(fragment in message for fragment in REFUSED[case][1:]), message


def test_gradients_have_first_derivatives_only():
    u, delta, A, B, C, *_ = (x if x is None else x.requires_grad_() for x in inputs(Case()))
    y = selective_scan(u, delta, A, B, C, path=ScanPath.BLOCKED)[0]
    with pytest.raises(RuntimeError, match=r"create_graph=True.*torch\.func"):
        torch.autograd.grad(y.square().sum(), u, create_graph=True)


def test_sequences_longer_than_a_tile_keep_six_digits():
    case = Case(batch=1, length=3000, channels=2, n=3, gate=False)
    given = inputs(case, slowest=1e-4)
    got = results(scan, given, case, path=ScanPath.BLOCKED)
    wanted = results(scan, doubled(given), case, path=ScanPath.LOOP)
    assert largest_error(got, wanted) < 1e-5
