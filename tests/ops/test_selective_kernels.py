"""The kernels of the selective scan against a sum over all that came before, on a GPU or in Triton's interpreter."""

import pytest
import torch

from compressm.ops.selective import ScanPath, Selective, selective_scan
from tests.kernels import DEVICE, GPU, MARK, later, nan_memory, relative
from tests.ops.selective import Case, exact, inputs, largest_error, options, results

__all__ = ["nan_memory"]

pytestmark = [MARK, pytest.mark.usefixtures("nan_memory")]

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 3e-2}
# The shortest that kernels take: the interpreter runs program after program, step after step.
SPAN = 4


@pytest.fixture
def sized(monkeypatch):
    """Short spans; with `segments` time is cut, with `most` states are taken so many at a time."""
    from compressm.ops.launching_triton import forget_plans
    from compressm.ops.selective import gpu as programs

    monkeypatch.setattr("compressm.ops.dispatch._DEVICES", (DEVICE.type,))

    def size(*, segments=False, most=128, span=SPAN, few=16):
        changed = {"SPANS": span, "_BUSY": 64 if segments else 1, "_MOST": most, "_MOST_OF_ORDERS": min(most, 32)}
        changed |= {"_NARROW": few, "_STATES": few // 4}
        for name, value in changed.items():
            held = getattr(programs, name)
            monkeypatch.setattr(programs, name, dict.fromkeys(held, value) if isinstance(held, dict) else value)
        forget_plans()

    size()
    return size


def by_kernels(u, delta, A, B, C, D, z, state, bias, **options):
    return selective_scan(u, delta, A, B, C, D, z, state, delta_bias=bias, path=ScanPath.TRITON, **options)


CASES = {
    "one step of one state": (Case(1, 1, 1, 1, state=True), {}),
    "spans": (Case(2, 6, 3, 3, lengths=(3, 6), state=True), {}),
    "segments": (Case(1, 13, 2, 3), {"segments": True}),
    "own and complex in segments": (Case(1, 13, 2, 3, own=True, complex=True, state=True), {"segments": True}),
    "orders in blocks of states": (Case(1, 5, 3, 6, orders=(6, 0, 3), state=True), {"most": 4}),
    "many states": (Case(1, 6, 2, 40, state=True), {}),
    "two narrow blocks of as many channels as lanes": (Case(1, 5, 33, 7), {"few": 4}),
}
SLOW = {
    "neither skip nor gate nor softplus": (Case(1, 11, 3, 3, skip=False, gate=False, softplus=False), {}),
    "own B and C": (Case(1, 11, 3, 5, own=True, state=True), {}),
    "complex": (Case(1, 11, 3, 3, complex=True, state=True), {}),
    "two sequences in segments": (Case(2, 22, 5, 6, state=True), {"segments": True}),
    "complex in segments": (Case(1, 22, 5, 6, complex=True, state=True), {"segments": True}),
    "many complex states": (Case(1, 13, 3, 40, complex=True, state=True), {"segments": True}),
    "many own states": (Case(1, 13, 3, 70, own=True, state=True), {"segments": True}),
    "blocks in segments": (Case(2, 22, 3, 9), {"segments": True, "most": 4}),
    "complex blocks": (Case(1, 11, 3, 9, complex=True, state=True), {"most": 4}),
    "orders in segments": (Case(2, 22, 3, 9, orders=(9, 2, 5)), {"segments": True, "most": 4}),
    "own and orders": (Case(2, 11, 3, 9, own=True, orders=(9, 2, 5), state=True), {"most": 4}),
    "all": (
        Case(2, 21, 3, 9, own=True, complex=True, orders=(9, 2, 5), lengths=(21, 10), state=True),
        {"segments": True, "most": 4},
    ),
    "lengths in segments": (Case(2, 21, 5, 6, lengths=(5, 21)), {"segments": True}),
    "as many channels as lanes": (Case(1, 5, 33, 5), {}),
    "states in scratch memory": (Case(1, 19, 3, 5, state=True), {"span": 8}),
    "more channels than lanes": (Case(1, 17, 70, 9, state=True), {"segments": True}),
}
CHOSEN = [*CASES, *map(later, SLOW)]


def check_case(name, dtype, sized):
    case, sizes = (CASES | SLOW)[name]
    sized(**sizes)
    given = inputs(case, dtype=dtype, device=DEVICE)
    got = results(by_kernels, given, case)
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
    assert largest_error(got, exact(given, case)) < TOLERANCE[dtype]


@pytest.mark.parametrize("name", CHOSEN)
def test_kernels_are_the_sum(name, sized):
    check_case(name, torch.float32, sized)


@pytest.mark.parametrize("name", ["one step of one state", *map(later, sorted(CASES | SLOW))])
def test_kernels_read_half_precision(name, sized):
    check_case(name, torch.bfloat16, sized)


def test_segments_and_blocks_are_what_is_tested(sized):
    from compressm.ops.selective import gpu as programs

    sized(segments=True, most=4)
    shape = programs.ScanSizes(1, 35, 3, 9, own=False, complex=False)
    assert len(programs.blocks_of(shape, False)) == 3
    sized(few=8)
    assert len(programs.blocks_of(shape, False)) == 2
    sized(segments=True, most=4)
    assert all(programs.ProgramTile.of(shape, 4, back=back).segments > 1 for back in (False, True))


@pytest.mark.skipif(not GPU, reason="the interpreter takes minutes")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", [{}, {"own": True}, {"complex": True}, {"n": 24}, {"n": 64}, {"n": 200}], ids=str)
def test_kernels_are_plain_torch_at_their_own_sizes(variant, dtype):
    case = Case(**{"batch": 3, "length": 333, "channels": 70, "n": 16, "state": True} | variant)
    given = inputs(case, dtype=dtype, device=DEVICE)
    got = results(by_kernels, given, case)
    exactly = [None if x is None else x.double() for x in given]
    wanted = results(in_plain_torch, exactly, case)
    for one, other in zip(got, wanted, strict=True):
        assert relative(one, other) < 4 * TOLERANCE[dtype]


def in_plain_torch(u, delta, A, B, C, D, z, state, bias, **options):
    return selective_scan(u, delta, A, B, C, D, z, state, delta_bias=bias, path=ScanPath.BLOCKED, **options)


def test_views_of_wider_tensors_are_read_where_they_are(sized):
    case = Case(1, 5, 3, 3)
    given = inputs(case, device=DEVICE)
    for k in (0, 1, 3, 4, 6):  # u, delta, B, C and z, as projections leave them: the first columns of wider rows
        given[k] = torch.cat([given[k], torch.full_like(given[k], torch.nan)], dim=-1)[..., : given[k].shape[-1]]
    assert largest_error(results(by_kernels, given, case), exact(given, case)) < TOLERANCE[torch.float32]


def test_two_halves_are_the_whole(sized):
    case = Case(1, 9, 2, 3, complex=True, state=True, gate=False)
    u, delta, A, B, C, D, _, state, bias = inputs(case, device=DEVICE)
    y, last = by_kernels(u, delta, A, B, C, D, None, state, bias, **options(case, DEVICE))
    pieces, h = [], state
    for times in (slice(0, 6), slice(6, None)):
        u_part, delta_part, B_part, C_part = (x[:, times] for x in (u, delta, B, C))
        piece, h = by_kernels(u_part, delta_part, A, B_part, C_part, D, None, h, bias, **options(case, DEVICE))
        pieces.append(piece)
    assert relative(torch.cat(pieces, dim=1), y) < 1e-5
    assert relative(h, last) < 1e-5


def test_decays_may_underflow_to_zero(sized):
    case = Case(1, 5, 2, 3, state=True, softplus=False)
    u, delta, *rest = inputs(case, device=DEVICE)
    delta[:, 2] = 1e5
    got = results(by_kernels, (u, delta, *rest), case)
    assert all(value.isfinite().all() for value in got)
    assert largest_error(got, exact((u, delta, *rest), case)) < TOLERANCE[torch.float32]


def test_the_last_state_may_be_left_out(sized):
    case = Case(1, 5, 2, 3)
    given = [None if x is None else x.requires_grad_() for x in inputs(case, device=DEVICE)]
    y, last = by_kernels(*given, **options(case, DEVICE), keep_state=False)
    assert last is None
    assert torch.equal(y, by_kernels(*given, **options(case, DEVICE))[0])
    leaves = [x for x in given if x is not None]
    wanted = torch.autograd.grad(in_plain_torch(*given, **options(case, DEVICE))[0].sum(), leaves)
    for one, other in zip(torch.autograd.grad(y.sum(), leaves), wanted, strict=True):
        assert relative(one, other) < 1e-5


def test_kernels_are_chosen_where_they_serve(sized, monkeypatch):
    from compressm.ops.selective import scan as dispatch

    u, delta, A, B, C, *_ = inputs(Case(1, 5, 2, 2), device=DEVICE)
    assert dispatch.fastest_path(Selective(u, delta, A, B, C)) is ScanPath.TRITON
    assert dispatch.fastest_path(Selective(u.double(), delta, A, B, C)) is ScanPath.LOOP


class Recorder:
    """A kernel that notes which marks it was given."""

    def __init__(self, kernel):
        self.kernel, self.marks = kernel, []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.marks.append(args[9])
            return self.kernel[grid](*args, **options)

        return launch


@pytest.mark.usefixtures("sized")
def test_no_states_are_kept_where_no_gradient_is_taken(monkeypatch):
    from compressm.ops.selective import gpu as on_gpu

    recorder = Recorder(on_gpu.kernels._scan)
    monkeypatch.setattr(on_gpu.kernels, "_scan", recorder)
    u, B, C = (torch.ones(1, 5, 3, device=DEVICE, requires_grad=True) for _ in range(3))
    A = -torch.ones(3, 3, device=DEVICE)
    with torch.no_grad():
        selective_scan(u, u.detach(), A, B, C, path=ScanPath.TRITON)
    selective_scan(u, u.detach(), A, B, C, path=ScanPath.TRITON)
    assert [marks is None for marks in recorder.marks] == [True, False]
