"""The residual block: its equation, its stream, its padding."""

import pytest
import torch

from compressm.layers import LRU, Mamba
from compressm.models import BatchNorm, Block, Blocks, LayerNorm, MixerBlock, NoNorm, OneMask, PerElement, RMSNorm

WIDTH, ORDER = 6, 5
DROPOUT = PerElement(0.1)
NORMS = [BatchNorm(), LayerNorm(), NoNorm()]


def make(norm, dropout=DROPOUT):
    torch.manual_seed(0)
    block = Block(LRU(WIDTH, order=ORDER), norm=norm, dropout=dropout).double()
    block(sequence(seed=2))  # so that running averages are not those of the constructor
    return block


def sequence(batch=3, length=12, seed=1):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_a_block_computes_its_equation(norm):
    block, x = make(norm).eval(), sequence()
    mixed, _ = block.ssm(block.norm(x))
    value, gate = block.gate(0.5 * mixed * (1 + torch.erf(mixed / 2**0.5))).chunk(2, dim=-1)
    torch.testing.assert_close(block(x)[0], x + value * torch.sigmoid(gate))


@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_hooks_on_the_layer_see_its_input_and_may_change_its_output(norm):
    block, x, seen = make(norm).eval(), sequence(), []
    handle = block.ssm.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    block(x)
    torch.testing.assert_close(seen[0], block.norm(x))
    handle.remove()
    block.ssm.register_forward_hook(lambda module, args, output: (torch.zeros_like(output[0]), output[1]))
    value, gate = block.gate.bias.chunk(2)
    torch.testing.assert_close(block(x)[0], x + value * torch.sigmoid(gate))


def test_hooks_on_the_norm_of_a_selective_layer_see_and_may_change_what_it_gives():
    torch.manual_seed(0)
    block, x, seen = MixerBlock(Mamba(WIDTH, order=ORDER), norm=RMSNorm()).eval(), sequence().float(), []
    wanted = x + block.ssm(2 * block.norm(x))[0]
    block.norm.register_forward_hook(lambda module, args, output: seen.append(args[0]) or 2 * output)
    torch.testing.assert_close(block(x)[0], wanted)
    assert seen[0] is x


@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_forward_equals_repeated_steps(norm):
    block, x = make(norm).eval(), sequence()
    state = torch.randn_like(block.ssm.initial_state(3))
    y, last = block(x, state)
    for t in range(x.shape[1]):
        stepped, state = block.step(x[:, t], state)
        torch.testing.assert_close(stepped, y[:, t])
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_padding_changes_neither_outputs_nor_state(norm):
    block, x, lengths = make(norm).eval(), sequence(), torch.tensor([12, 5, 1])
    padded = torch.where(torch.arange(12)[None, :, None] < lengths[:, None, None], x, torch.nan)
    y, state = block(padded, lengths=lengths)
    for i, stop in enumerate(lengths):
        alone, end = block(x[i : i + 1, :stop])
        torch.testing.assert_close(y[i, :stop], alone[0])
        torch.testing.assert_close(state[i], end[0])


@pytest.mark.parametrize("dropout", [PerElement(0.5), OneMask(0.5)], ids=repr)
def test_dropout_acts_in_training_only(dropout):
    block, x = make(LayerNorm(), dropout), sequence()
    assert not torch.equal(block(x)[0], block(x)[0])
    block.eval()
    assert torch.equal(block(x)[0], block(x)[0])


def test_without_keep_state_there_is_none():
    block, x = make(NoNorm()), sequence()
    assert block(x, keep_state=False)[1] is None
    assert Blocks([block])(x, keep_state=False)[1] is None


def test_a_slice_of_blocks_is_blocks():
    blocks = Blocks(make(NoNorm()) for _ in range(3))
    assert len(blocks[1:].initial_state(2)) == 2
    assert blocks[1:][0] is blocks[1]


def test_only_the_layer_has_parameters_with_the_order():
    large, small = (Block(LRU(WIDTH, order=order)) for order in (11, 7))
    differing = {
        n for (n, p), q in zip(large.named_parameters(), small.parameters(), strict=True) if p.shape != q.shape
    }
    assert differing == {f"ssm.{name}" for name in LRU.STATE_AXES}
