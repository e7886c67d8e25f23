"""Models of layers that bring a gate of their own: streams, padding, towers, files, learning."""

import pytest
import torch

from compressm import load_model, save_model
from compressm.layers import LRU, Mamba, SequenceError
from compressm.models import (
    BatchNorm,
    Block,
    Blocks,
    LanguageModel,
    LastStep,
    LayerNorm,
    MeanPooling,
    MixerBlock,
    NoNorm,
    PerElement,
    RMSNorm,
    SequenceClassifier,
)

BATCH, LENGTH, WIDTH = 3, 9, 4
LENGTHS = torch.tensor([9, 4, 1])
NORMS = [BatchNorm(), LayerNorm(), RMSNorm(), NoNorm()]


def classifier(**options):
    torch.manual_seed(0)
    given = {"depth": 2, "width": WIDTH, "order": 3, "inputs": 2, "classes": 3} | options
    return SequenceClassifier(Mamba, **given).double()


def sequences(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (BATCH, LENGTH)), 2, generator=generator, dtype=torch.float64)


def padded(x):
    return torch.where((torch.arange(LENGTH) < LENGTHS[:, None])[..., None], x, torch.nan)


def test_the_block_adds_what_the_layer_makes_of_the_norm():
    block = MixerBlock(Mamba(WIDTH, 3), norm=RMSNorm()).double()
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    y, state = block(x, lengths=LENGTHS)
    mixed, last = block.ssm(block.norm(x), lengths=LENGTHS)
    torch.testing.assert_close(y, x + mixed)
    torch.testing.assert_close(state, last)


def test_dropout_stands_behind_the_layer():
    torch.manual_seed(0)
    block = MixerBlock(Mamba(WIDTH, 3), norm=NoNorm(), dropout=PerElement(0.5))
    x = torch.randn(BATCH, LENGTH, WIDTH)
    change, whole = block(x)[0] - x, block.eval()(x)[0] - x
    kept = change != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(change[kept], 2 * whole[kept])


def test_layers_with_a_gate_get_no_other():
    assert [type(block) for block in classifier().blocks] == [MixerBlock, MixerBlock]
    with pytest.raises(SequenceError, match="the mixer is a Mamba, expected a linear layer"):
        Block(Mamba(WIDTH))


def test_both_kinds_of_blocks_stand_in_one_stack():
    blocks = Blocks([MixerBlock(Mamba(WIDTH, 3)), Block(LRU(WIDTH, 5)), MixerBlock(Mamba(WIDTH, 2))]).double()
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    blocks(x)
    whole, last = blocks.eval()(x)
    first, state = blocks(x[:, :5])
    second, end = blocks(x[:, 5:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(end, last)


@pytest.mark.parametrize("pooling", [MeanPooling(), LastStep()], ids=repr)
@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_after_t_steps_the_logits_are_those_of_the_first_t_steps(norm, pooling):
    model, x = classifier(norm=norm, pooling=pooling), sequences()
    model(x)
    model.eval()
    state = model.initial_state(BATCH)
    for t in range(LENGTH):
        logits, state = model.step(x[:, t], state)
        torch.testing.assert_close(logits, model(x[:, : t + 1]))


@pytest.mark.parametrize("norm", NORMS, ids=repr)
def test_padding_changes_neither_logits_nor_gradients(norm):
    x = sequences()
    models = [classifier(norm=norm, dropout=PerElement(0.0)) for _ in range(2)]
    for model, batch in zip(models, (torch.nan_to_num(padded(x)), padded(x)), strict=True):
        model(batch, LENGTHS).square().sum().backward()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    logits = models[0].eval()(padded(x), LENGTHS)
    for i, stop in enumerate(LENGTHS):
        torch.testing.assert_close(logits[i], models[0](x[i : i + 1, :stop])[0])


def test_two_towers_compare_pairs():
    model, x = classifier(towers=2, norm=RMSNorm()).eval(), sequences(BATCH, 2, LENGTH)
    lengths = torch.stack([LENGTHS, LENGTHS.flip(0)], dim=1)
    swapped = model(x.flip(1), lengths.flip(1))
    assert model(x, lengths).shape == (BATCH, 3)
    assert not torch.allclose(swapped, model(x, lengths))


def test_a_language_model_writes_as_it_reads():
    torch.manual_seed(0)
    model = LanguageModel(Mamba, vocabulary=7, depth=2, width=WIDTH, order=3, norm=RMSNorm()).double().eval()
    tokens = torch.randint(7, (BATCH, LENGTH))
    logits, last = model(tokens)
    state = model.initial_state(BATCH)
    for t in range(LENGTH):
        stepped, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(stepped, logits[:, t])
    torch.testing.assert_close(state, last)
    written = model.generate(tokens, 4, temperature=0.0, lengths=LENGTHS)
    for i, stop in enumerate(LENGTHS):
        assert torch.equal(written[i], model.generate(tokens[i : i + 1, :stop], 4, temperature=0.0)[0])


def test_a_changed_stack_is_saved_and_comes_back(tmp_path):
    model = classifier(norm=RMSNorm(), towers=2)
    model.blocks.append(MixerBlock(Mamba(WIDTH, 5, conv_width=2), norm=RMSNorm(affine=False)).double())
    save_model(model, tmp_path)
    x = sequences(BATCH, 2, LENGTH)
    assert torch.equal(load_model(tmp_path)(x), model.eval()(x))


def test_bfloat16_autocast_trains_and_streams():
    model, x = classifier(norm=RMSNorm()).float(), sequences().float()
    with torch.autocast("cpu", torch.bfloat16):
        model(x, LENGTHS).float().square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    model.eval()
    state = model.initial_state(BATCH)
    for t in range(LENGTH):
        with torch.autocast("cpu", torch.bfloat16):
            logits, state = model.step(x[:, t], state)
    torch.testing.assert_close(logits.float(), model(x), rtol=0.05, atol=0.05)


def test_a_small_classifier_finds_what_stands_after_a_mark():
    """The class is the token after a mark, wherever the mark stands."""
    generator = torch.Generator().manual_seed(0)

    def batch(size):
        tokens = torch.randint(2, (size, 12), generator=generator)
        place = torch.randint(11, (size,), generator=generator)
        tokens[torch.arange(size), place] = 2
        return tokens, tokens[torch.arange(size), place + 1]

    torch.manual_seed(0)
    model = SequenceClassifier(
        Mamba, depth=1, width=16, order=4, vocabulary=3, classes=2, norm=RMSNorm(), dropout=PerElement(0.0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        tokens, labels = batch(32)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
    tokens, labels = batch(400)
    assert (model.eval()(tokens).argmax(-1) == labels).float().mean() > 0.95
