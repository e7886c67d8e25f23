"""The language model: causal, the same as a stream, repeatable when it writes."""

import pytest
import torch

from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba
from compressm.models import BatchNorm, LanguageModel, LayerNorm

BATCH, LENGTH, WIDTH, VOCABULARY = 3, 12, 6, 11
LENGTHS = torch.tensor([12, 5, 1])


def make(order=5, **options):
    torch.manual_seed(0)
    options = {"vocabulary": VOCABULARY, "depth": 2, "width": WIDTH} | options
    return LanguageModel(LRU, order=order, **options).double().eval()


def text(*shape, seed=1):
    return torch.randint(VOCABULARY, shape or (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm", [LayerNorm(), BatchNorm()], ids=repr)
@pytest.mark.parametrize("tied", [True, False])
def test_forward_equals_repeated_steps(norm, tied):
    model, tokens = make(norm=norm, tied=tied), text()
    model.train()(tokens)
    model.eval()
    logits, last = model(tokens)
    state = model.initial_state(BATCH)
    for t in range(LENGTH):
        stepped, state = model.step(tokens[:, t], state)
        torch.testing.assert_close(stepped, logits[:, t])
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("cut", [1, 7])
def test_a_text_in_two_parts_equals_the_whole(cut):
    model, tokens = make(), text()
    whole, last = model(tokens)
    first, state = model(tokens[:, :cut])
    second, end = model(tokens[:, cut:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
    torch.testing.assert_close(end, last)


@pytest.mark.parametrize("t", [0, 6, LENGTH - 1])
def test_a_token_changes_no_logits_before_it_and_some_at_it(t):
    model, tokens = make(), text()
    changed = tokens.clone()
    changed[:, t] = (tokens[:, t] + 1) % VOCABULARY
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :t], after[:, :t])
    assert (before[:, t] != after[:, t]).any(-1).all()


def test_padding_changes_neither_logits_nor_state():
    model, tokens = make(), text()
    garbage = torch.where(torch.arange(LENGTH) < LENGTHS[:, None], tokens, -1)
    logits, state = model(garbage, lengths=LENGTHS)
    for i, stop in enumerate(LENGTHS):
        alone, end = model(tokens[i : i + 1, :stop])
        torch.testing.assert_close(logits[i, :stop], alone[0])
        for mine, other in zip(state, end, strict=True):
            torch.testing.assert_close(mine[i], other[0])


def test_without_keep_state_there_is_none():
    assert make()(text(), keep_state=False)[1] is None


def test_generation_is_repeatable_with_a_generator():
    model = make()
    first, again, other = (
        model.generate(text(), 20, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert first.shape == (BATCH, 20)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("temperature", [1e-31, 1e-40, 1e-300])
def test_the_coldest_temperatures_take_the_likeliest_token(temperature):
    """Logits over 1e-40 are infinite in float32, and have no softmax."""
    torch.manual_seed(0)
    model = LanguageModel(LRU, vocabulary=9, depth=1, width=4, order=4).eval()
    prompt = torch.tensor([[1, 2]])
    assert torch.equal(model.generate(prompt, 4, temperature=temperature), model.generate(prompt, 4, temperature=0.0))
    assert model.generate(prompt, 4, temperature=1e-30).shape == (1, 4)


def test_generation_at_temperature_zero_takes_the_likeliest_token_each_time():
    model, tokens = make(), text()
    written = model.generate(tokens, 6, temperature=0.0)
    for _ in range(6):
        tokens = torch.cat([tokens, model(tokens)[0][:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(written, tokens[:, LENGTH:])


def test_generation_draws_with_the_probabilities_of_the_model():
    model, prompt = make(), text(1, 4)
    drawn = model.generate(prompt.expand(20_000, -1), 1, temperature=0.5, generator=torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn[:, 0], minlength=VOCABULARY) / len(drawn)
    expected = (model(prompt)[0][0, -1] / 0.5).softmax(-1)
    assert (shares - expected).abs().max() < 0.02


def test_prompts_of_different_lengths_are_continued_from_their_own_ends():
    model, tokens = make(), text()
    written = model.generate(tokens, 5, temperature=0.0, lengths=LENGTHS)
    for i, stop in enumerate(LENGTHS):
        assert torch.equal(written[i], model.generate(tokens[i : i + 1, :stop], 5, temperature=0.0)[0])


def test_tied_logits_share_the_embedding():
    tied, untied = make(), make(tied=False)
    extra = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert extra == VOCABULARY * WIDTH
    assert len({p.data_ptr() for p in tied.state_dict().values()}) == len(tied.state_dict())


@pytest.mark.parametrize("tied", [True, False])
def test_an_untrained_model_is_about_as_good_as_guessing(tied):
    model, tokens = make(width=64, vocabulary=50, tied=tied), text(8, 40)
    loss = torch.nn.functional.cross_entropy(model(tokens)[0].flatten(0, 1), text(8, 40, seed=2).flatten())
    assert abs(loss.item() - torch.tensor(50.0).log().item()) < 1


def test_a_state_dict_of_other_orders_loads():
    reduced, full = make(order=3), make(order=9)
    full.load_state_dict(reduced.state_dict())
    assert torch.equal(full(text())[0], reduced(text())[0])


def test_bfloat16_autocast_trains_and_streams():
    model, tokens = make().float(), text()
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = model(tokens, lengths=LENGTHS, keep_state=False)
    logits.float().square().mean().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        stepped, _ = model.step(tokens[:, 0], model.initial_state(BATCH))
    torch.testing.assert_close(stepped.float(), model(tokens)[0][:, 0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("layer", [LRU, S4, S4D, S5, LinOSS, Mamba])
def test_a_model_in_bfloat16_writes_and_continues_what_it_has_read(layer):
    torch.manual_seed(0)
    model = LanguageModel(layer, vocabulary=VOCABULARY, depth=2, width=8, order=6).bfloat16().eval()
    assert model.generate(text(), count=3).shape == (BATCH, 3)
    logits, _ = model(text())
    _, state = model(text()[:, :-1])
    continued, _ = model.step(text()[:, -1], state)
    torch.testing.assert_close(continued.float(), logits[:, -1].float(), rtol=0.05, atol=0.05)


def test_a_small_model_learns_to_count():
    torch.manual_seed(0)
    model = LanguageModel(LRU, vocabulary=VOCABULARY, depth=1, width=16, order=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        tokens = (torch.randint(VOCABULARY, (16, 1)) + torch.arange(13)) % VOCABULARY
        logits, _ = model(tokens[:, :-1], keep_state=False)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    written = model.eval().generate(torch.tensor([[4, 5, 6]]), 8, temperature=0.0)
    assert written.tolist() == [[7, 8, 9, 10, 0, 1, 2, 3]]
