"""A block by kernels computes, learns and tracks what the plain one does."""

import copy
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from compressm.layers import LRU, S5
from compressm.models import BatchNorm, Block, Blocks, LayerNorm, NoNorm, OneMask, PerElement, RunningNorm
from compressm.models import block as block_module
from compressm.ops.dispatch import only_reads, trained_kernels
from tests.kernels import DEVICE, GPU, MARK, normal, relative
from tests.marks import later

pytestmark = MARK

TOLERANCE = 2e-4  # of float32, through an LRU of order 5


@pytest.fixture(autouse=True)
def _kernels_serve_here(monkeypatch):
    monkeypatch.setattr("compressm.ops.dispatch._DEVICES", (DEVICE.type,))


def make(width=6, norm=BatchNorm(), dropout=OneMask(0.3), layer=LRU, gelu="exact"):  # noqa: B008
    torch.manual_seed(0)
    return Block(layer(width, order=5), norm=norm, dropout=dropout, gelu=gelu).to(DEVICE)


def trained(block, x, lengths=None):
    """Output, gradients and buffers after one forward and backward pass with the masks of one seed."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    out, _ = block(x, lengths=lengths, keep_state=False)
    valid = slice(None) if lengths is None else torch.arange(x.shape[1], device=DEVICE) < lengths[:, None]
    (out[valid] * normal(*x.shape, seed=2).to(x)[valid]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in block.named_parameters()}
    return {"out": out[valid].detach(), "x": x.grad, **gradients, **dict(block.named_buffers())}


def check_against_the_plain_block(block, x, lengths=None):
    plain = copy.deepcopy(block).double()
    got, wanted = trained(block, x, lengths), trained(plain, x.double(), lengths)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == (torch.int64 if "tracked" in name else torch.float32), name
        assert relative(got[name], value) < TOLERANCE, name


RUNNING = [RunningNorm(through=True), RunningNorm(affine=True)]


@pytest.mark.parametrize("norm", [BatchNorm(), BatchNorm(affine=False), *RUNNING, LayerNorm(), NoNorm()], ids=repr)
@pytest.mark.parametrize("width", [6, 40])
def test_it_learns_what_the_plain_block_does(norm, width):
    check_against_the_plain_block(make(width, norm), normal(3, 12, width, seed=1))


@pytest.mark.parametrize("width", [6, 40])
def test_it_learns_the_same_where_checkpoints_save_memory(width):
    block, x = make(width), normal(3, 12, width, seed=1)
    wanted = trained(copy.deepcopy(block), x)
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    out, _ = checkpoint(block, x, keep_state=False, use_reentrant=False)
    (out * normal(*x.shape, seed=2)).sum().backward()
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter.grad, wanted[name]), name
    assert torch.equal(x.grad, wanted["x"])


@pytest.mark.parametrize("dropout", [PerElement(0.3), PerElement(0.0)], ids=repr)
@pytest.mark.parametrize("layer", [LRU, S5])
def test_it_does_so_with_any_dropout_and_layer(dropout, layer):
    check_against_the_plain_block(make(dropout=dropout, layer=layer), normal(3, 12, 6, seed=1))


@pytest.mark.parametrize("norm", [BatchNorm(), RunningNorm(through=True)], ids=repr)
def test_it_does_so_with_padding(norm):
    check_against_the_plain_block(make(norm=norm), normal(3, 12, 6, seed=1), torch.tensor([12, 5, 1], device=DEVICE))


@pytest.mark.parametrize("width", [6, 40])
def test_it_does_so_with_the_gelu_by_tanh(width):
    check_against_the_plain_block(make(width, RUNNING[0], gelu="tanh"), 3 * normal(3, 12, width, seed=1))


def test_it_does_so_with_frozen_statistics():
    block = make()
    block(normal(3, 12, 6))
    check_against_the_plain_block(block.eval(), normal(3, 12, 6, seed=1))


@functools.cache
def trained_whole():
    """What the block learns with nothing frozen, computed once for all that may be."""
    return trained(make(), normal(3, 12, 6, seed=1))


@pytest.mark.parametrize("frozen", ["ssm.", "norm.", "gate.", "ssm.D"])
def test_what_is_frozen_changes_no_other_gradient(frozen):
    part = make()
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    wanted = trained_whole()
    for name, value in trained(part, normal(3, 12, 6, seed=1)).items():
        if value is None:
            assert name.startswith(frozen)
        else:
            assert relative(value, wanted[name]) < 1e-6, name


@pytest.fixture
def scanned(monkeypatch):
    """As on a GPU: wide layers scan, and learn through the links of the norm before them."""
    from compressm.ops import Path
    from compressm.ops.block import lru_block_triton as whole
    from compressm.ops.lti import scan as dispatch
    from compressm.ops.lti import scan_triton as triton

    calls = []
    pulled = triton.drive_gradient
    monkeypatch.setattr(dispatch, "runs_kernels", lambda u: u.dtype != torch.float64)
    monkeypatch.setattr(dispatch, "cheapest_path", lambda *_, gpu: Path.SCAN)
    for module in (triton, whole):
        monkeypatch.setattr(module, "compile_walks", lambda *_: None)
        monkeypatch.setattr(module, "drive_gradient", lambda *args: calls.append(args) or pulled(*args))
    return calls


@pytest.mark.parametrize("norm", [BatchNorm(), BatchNorm(affine=False), *RUNNING], ids=repr)
@pytest.mark.parametrize("layer", later([LRU, S5], LRU))
def test_it_learns_the_same_where_sums_come_along_with_gradients(norm, layer, scanned):
    check_against_the_plain_block(make(40, norm, layer=layer), normal(3, 12, 40, seed=1))
    assert len(scanned) == 1


@pytest.mark.parametrize("length", [16, 17])
def test_gradients_of_a_narrow_block_need_no_whole_chunks(length):
    check_against_the_plain_block(make(6), normal(2, length, 6, seed=1))


def test_a_narrow_block_scans_a_long_sequence_of_few_states(scanned, monkeypatch):
    monkeypatch.setattr("compressm.ops.lti.cost._LONG", 8)
    monkeypatch.setattr("compressm.ops.block.lru_block_triton.train_lru_block", None)
    check_against_the_plain_block(make(6), normal(3, 12, 6, seed=1))


@pytest.mark.parametrize("change", [lambda u: 2 * u, lambda u: u.view_as(u)], ids=["twice", "the same"])
def test_a_hook_may_change_what_the_layer_is_given(change, scanned):
    def hooked(block):
        block.ssm.register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))
        return block

    x, block = normal(3, 12, 40, seed=1), make(40)
    plain = hooked(copy.deepcopy(block).double())
    got, wanted = trained(hooked(block), x), trained(plain, x.double())
    assert not scanned
    for name, value in wanted.items():
        assert relative(got[name], value) < TOLERANCE, name


def test_a_hook_may_change_what_the_norm_gives():
    def hooked(block):
        block.norm.register_forward_hook(lambda module, args, output: 2 * output)
        return block

    x, block = normal(3, 12, 40, seed=1), make(40)
    plain = hooked(copy.deepcopy(block).double())
    got, wanted = trained(hooked(block), x), trained(plain, x.double())
    for name, value in wanted.items():
        assert relative(got[name], value) < TOLERANCE, name


def test_a_penalty_on_what_the_layer_is_given_is_learned_from_too():
    def penalised(block, x):
        seen = []
        handle = block.ssm.register_forward_hook(lambda module, args, output: seen.append(args[0]))
        x = x.clone().requires_grad_()
        torch.manual_seed(1)
        out, _ = block(x, keep_state=False)
        handle.remove()
        return torch.autograd.grad(out.square().sum() + (seen[0] ** 3).sum(), [x, *block.parameters()])

    x, block = normal(3, 12, 40, seed=1), make(40)
    plain = copy.deepcopy(block).double()
    for got, wanted in zip(penalised(block, x), penalised(plain, x.double()), strict=True):
        assert relative(got, wanted) < TOLERANCE


def stacked(width=40, depth=3, norm=BatchNorm()):  # noqa: B008
    return Blocks([make(width, norm, PerElement(0.0)) for _ in range(depth)])


@pytest.mark.parametrize(
    "norm",
    later([BatchNorm(), BatchNorm(momentum=1.0, affine=False), *RUNNING], BatchNorm(momentum=1.0, affine=False)),
    ids=repr,
)
def test_a_stack_leaves_moments_for_the_norms_between_its_blocks(norm, monkeypatch):
    from compressm.ops.block import lru_block_triton as whole

    read = []
    normalise = whole.normalise

    def reading(*args, **options):
        read.append(args[-1] is not None)
        return normalise(*args, **options)

    monkeypatch.setattr(whole, "normalise", reading)
    check_against_the_plain_block(stacked(norm=norm), 5 + normal(3, 12, 40, seed=1))
    assert read == [False, True, True]


def test_a_running_norm_that_has_seen_batches_learns_by_kernels_too():
    block = make(norm=RunningNorm(through=True))
    block(3 + normal(3, 12, 6))
    check_against_the_plain_block(block, normal(3, 12, 6, seed=1))


def test_what_is_written_into_between_blocks_is_measured_anew():
    def changed(block, args, output):
        output[0].mul_(2)
        return output

    blocks = stacked()
    blocks[0].register_forward_hook(changed)
    check_against_the_plain_block(blocks, normal(3, 12, 40, seed=1))


def test_a_stream_equals_the_sequence():
    block, x = make(), normal(3, 12, 6, seed=1)
    block(x)
    y, last = block.eval()(x)
    state = block.ssm.initial_state(3)
    for t in range(x.shape[1]):
        stepped, state = block.step(x[:, t], state)
        torch.testing.assert_close(stepped, y[:, t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


def test_hooks_on_the_layer_see_its_input_and_its_whole_output():
    block, x, seen = make(), normal(3, 12, 6, seed=1), []
    block.ssm.register_forward_hook(lambda module, args, output: seen.append((args[0], output[0])))
    block(x)
    u, y = seen[0]
    normalised = (x - x.mean((0, 1))) / x.var((0, 1), correction=0).sqrt()
    torch.testing.assert_close(u, normalised, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(y, copy.deepcopy(block.ssm)(u)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep_state", [True, False])
@pytest.mark.parametrize("width", [6, 40])
def test_a_graph_that_is_kept_gives_the_same_gradients_again(keep_state, width):
    block, x = make(width), normal(3, 12, width, seed=1).requires_grad_()
    out, _ = block(x, keep_state=keep_state)
    first, second = (torch.autograd.grad(out.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.skipif(not GPU, reason="autocast of a GPU")
@pytest.mark.parametrize("width", [8, 128])
def test_under_autocast_it_stays_close_to_the_plain_block(width):
    block, x = make(width), normal(3, 65, width, seed=1)
    plain = copy.deepcopy(block).double()
    with torch.autocast("cuda", torch.bfloat16):
        got = trained(block, x)
    for name, value in trained(plain, x.double()).items():
        assert relative(got[name], value) < 5e-2, name


@pytest.mark.parametrize("width", [8, 40])
def test_a_gradient_that_is_the_same_at_every_step_is_not_written_out_and_counts_the_same(width):
    from compressm.ops.block.gated_residual_triton import NarrowGatedResidual, WideGatedResidual
    from compressm.ops.block.norm_triton import FusedBatchNorm

    gated = NarrowGatedResidual if width <= 32 else WideGatedResidual
    y, x, row = normal(3, 20, width), normal(3, 20, width, seed=1), normal(3, width, seed=2)
    weight, bias, scale = normal(2 * width, width, seed=3), normal(2 * width, seed=4), normal(width, seed=5)

    def gradients(dout):
        leaves = [tensor.clone().requires_grad_() for tensor in (y, x, weight, bias, scale)]
        running = torch.zeros(width, device=x.device), torch.ones(width, device=x.device)
        count = torch.zeros((), dtype=torch.int64, device=x.device)
        u, kept, *_ = FusedBatchNorm.apply(leaves[1], leaves[4], None, None, *running, count, 0.1, 1e-5)
        out = gated.apply(leaves[0] + u, kept, leaves[2], leaves[3], *[None] * 5, 0.0, torch.float32)
        return torch.autograd.grad(out, leaves, dout)

    shared = gradients(row[:, None].expand(3, 20, width))
    for one, other in zip(shared, gradients(row[:, None].repeat(1, 20, 1)), strict=True):
        assert relative(one, other) < 1e-6


@pytest.mark.parametrize("width", [6, 40])
def test_observed_in_evaluation_mode_it_runs_the_kernels_of_training(width, monkeypatch):
    """Others would be compiled in the middle of a calibration: without a mask, and without D ⊙ u."""
    given, gated = {}, block_module.gated_residual
    monkeypatch.setattr(
        block_module, "gated_residual", lambda *args, **options: given.update(options) or gated(*args, **options)
    )
    block, x, seen = make(width).eval(), normal(3, 12, width, seed=1), []
    plain = copy.deepcopy(block).double()
    block.ssm.register_forward_pre_hook(only_reads(lambda module, args: seen.append(args[0])))
    with torch.no_grad(), trained_kernels():
        out, _ = block(x, keep_state=False)
    assert len(seen) == 1
    assert given["u"] is not None
    assert given["keep"].all()
    assert relative(out, plain(x.double())[0]) < TOLERANCE
    with torch.no_grad():
        again, _ = block(x, keep_state=False)
    assert given["keep"] is None
    assert relative(out, again) < TOLERANCE
