"""The sequence classifier: streams, padding, towers, loading, learning."""

import pytest
import torch

from compressm.layers import LRU
from compressm.models import (
    BatchNorm,
    LastStep,
    LayerNorm,
    MeanPooling,
    NoNorm,
    OneMask,
    PerElement,
    SequenceClassifier,
)
from compressm.models.classifier import pair_features

BATCH, LENGTH, WIDTH = 4, 12, 6
POOLINGS = [MeanPooling(), LastStep()]
READS = {"inputs": {"inputs": 3}, "tokens": {"vocabulary": 7}}
LENGTHS = torch.tensor([12, 5, 1, 8])


def make(read="inputs", order=5, **options):
    torch.manual_seed(0)
    options = {"depth": 2, "width": WIDTH, "order": order, "classes": 3} | READS[read] | options
    return SequenceClassifier(LRU, **options).double()


def sequences(read="inputs", *shape, seed=1):
    shape, generator = shape or (BATCH, LENGTH), torch.Generator().manual_seed(seed)
    if read == "tokens":
        return torch.randint(7, shape, generator=generator)
    return torch.randn(*shape, 3, generator=generator, dtype=torch.float64)


def padded(x, lengths=LENGTHS):
    """Garbage after each sequence's end: NaN, or a token that does not exist."""
    valid = torch.arange(x.shape[lengths.ndim]) < lengths[..., None]
    return torch.where(valid, x, -1) if not x.is_floating_point() else torch.where(valid[..., None], x, torch.nan)


def trained_a_little(model, read="inputs"):
    for seed in range(3):
        model(sequences(read, seed=seed))
    return model


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("pooling", POOLINGS, ids=repr)
@pytest.mark.parametrize("norm", [BatchNorm(), LayerNorm(), NoNorm()], ids=repr)
def test_after_t_steps_the_logits_are_those_of_the_first_t_steps(read, pooling, norm):
    model, x = trained_a_little(make(read, pooling=pooling, norm=norm), read).eval(), sequences(read)
    state = model.initial_state(BATCH)
    for t in range(LENGTH):
        logits, state = model.step(x[:, t], state)
        torch.testing.assert_close(logits, model(x[:, : t + 1]))
    assert state.steps.tolist() == [LENGTH] * BATCH


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("pooling", POOLINGS, ids=repr)
def test_padding_does_not_change_logits(read, pooling):
    model, x = trained_a_little(make(read, pooling=pooling), read).eval(), sequences(read)
    logits = model(padded(x), LENGTHS)
    for i, stop in enumerate(LENGTHS):
        torch.testing.assert_close(logits[i], model(x[i : i + 1, :stop])[0])


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("pooling", POOLINGS, ids=repr)
def test_padding_changes_neither_statistics_nor_gradients(read, pooling):
    x = sequences(read)
    models = [make(read, pooling=pooling, dropout=PerElement(0.0)) for _ in range(2)]
    longer = torch.cat([x, sequences(read, BATCH, 30)], dim=1)
    for model, batch in zip(models, (x, padded(longer)), strict=True):
        model(batch, LENGTHS).square().sum().backward()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    for (name, one), other in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


@pytest.mark.parametrize("pooling", POOLINGS, ids=repr)
def test_pooling_is_the_mean_or_the_last_of_the_valid_steps(pooling):
    x = padded(sequences())
    expected = [
        row[:stop].mean(0) if isinstance(pooling, MeanPooling) else row[stop - 1]
        for row, stop in zip(x, LENGTHS, strict=True)
    ]
    torch.testing.assert_close(pooling(x, LENGTHS), torch.stack(expected))
    full = torch.full((BATCH,), LENGTH)
    torch.testing.assert_close(pooling(sequences()), pooling(sequences(), full))


def test_the_mean_of_a_long_padded_half_precision_sequence_stays_in_range():
    x = torch.full((1, 4000, 1), 100.0, dtype=torch.float16)
    assert MeanPooling()(x, torch.tensor([3999])).item() == 100


def test_swapping_the_towers_swaps_their_features():
    a, b = torch.randn(2, 3, WIDTH)
    first, second, product, difference = pair_features(a, b).chunk(4, dim=-1)
    swapped = torch.cat([second, first, product, -difference], dim=-1)
    torch.testing.assert_close(pair_features(b, a), swapped)


@pytest.mark.parametrize("read", READS)
def test_two_towers_read_both_sequences_with_the_same_weights(read):
    model = trained_a_little_pairwise(make(read, towers=2), read).eval()
    x, lengths = sequences(read, BATCH, 2, LENGTH), torch.stack([LENGTHS, LENGTHS.flip(0)], dim=1)
    alone = [model.pooling(model._features(x[:, i], lengths[:, i]), lengths[:, i]) for i in range(2)]
    torch.testing.assert_close(model(padded(x, lengths), lengths), model.head(pair_features(*alone)))


def trained_a_little_pairwise(model, read):
    model(sequences(read, BATCH, 2, LENGTH, seed=3))
    return model


@pytest.mark.parametrize("read", READS)
def test_a_state_dict_of_other_orders_loads(read):
    reduced, full = trained_a_little(make(read), read).eval(), make(read, order=9).eval()
    reduced.blocks[1].ssm.load_state_dict(LRU(WIDTH, order=2).double().state_dict())
    full.load_state_dict(reduced.state_dict())
    assert [block.ssm.order for block in full.blocks] == [5, 2]
    assert torch.equal(full(sequences(read)), reduced(sequences(read)))


def test_ssm_layers_are_named_by_their_block():
    names = [name for name, module in make(depth=4).named_modules() if isinstance(module, LRU)]
    assert names == [f"blocks.{i}.ssm" for i in range(4)]


def test_options_reach_the_layer():
    model = make(layer_options={"r_min": 0.5, "r_max": 0.6})
    moduli = torch.exp(-torch.exp(model.blocks[1].ssm.nu_log))
    assert ((moduli >= 0.5) & (moduli <= 0.6)).all()


@pytest.mark.parametrize("read", READS)
def test_bfloat16_autocast_trains_and_streams(read):
    model, x = make(read).float(), sequences(read)
    x = x.float() if x.is_floating_point() else x
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(x, LENGTHS).float(), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    model.eval()
    state = model.initial_state(BATCH)
    for t in range(LENGTH):
        with torch.autocast("cpu", torch.bfloat16):
            logits, state = model.step(x[:, t], state)
    torch.testing.assert_close(logits.float(), model(x), rtol=0.05, atol=0.05)


def test_a_stream_in_bfloat16_pools_in_float32():
    torch.manual_seed(0)
    model = SequenceClassifier(LRU, depth=1, width=8, order=6, inputs=2, classes=3).bfloat16().eval()
    x = torch.randn(2, 300, 2).bfloat16()
    state = model.initial_state(2)
    for t in range(300):
        logits, state = model.step(x[:, t], state)
    assert (logits.dtype, state.pooled.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(logits.float(), model(x).float(), rtol=0.02, atol=0.01)


def test_small_integers_are_tokens_too():
    model, x = make("tokens").eval(), sequences("tokens")
    assert torch.equal(model(x.to(torch.uint8)), model(x))


@pytest.mark.parametrize("dropout", [PerElement(0.1), OneMask(0.1)], ids=repr)
def test_a_small_classifier_tells_two_frequencies_apart(dropout):
    generator = torch.Generator().manual_seed(0)

    def batch(size):
        labels = torch.randint(2, (size,), generator=generator)
        phase = 6.28 * torch.rand(size, 1, generator=generator)
        clean = torch.sin((0.3 + 0.2 * labels[:, None]) * torch.arange(40) + phase)
        return (clean + 0.3 * torch.randn(size, 40, generator=generator))[..., None], labels

    torch.manual_seed(0)
    model = SequenceClassifier(LRU, depth=1, width=8, order=8, inputs=1, classes=2, dropout=dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        x, labels = batch(32)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    x, labels = batch(400)
    assert (model.eval()(x).argmax(-1) == labels).float().mean() > 0.95
