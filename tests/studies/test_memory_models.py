"""Banks of models compute, train and decode what the models of transformers do."""

import pytest
import torch

import compressm as cs
from banks import Trainer, arms, calibration, schedule
from memory_models import FAMILIES, Decoder, Shape, forward, loaded_, make, scan, stacked, unit_inverse, with_order

pytest.importorskip("transformers")
# Weights of models that were never trained are so small that the ε of norms counts.
pytestmark = pytest.mark.filterwarnings("ignore:.* so small that the ε")
SHAPES = {
    "Mamba-2": Shape("Mamba-2", 20, 16, 2, 8, heads=4, groups=2),
    "Gated DeltaNet": Shape("Gated DeltaNet", 20, 16, 2, 8, heads=4, groups=2, mlp=24),
}


@pytest.fixture(params=FAMILIES)
def shape(request):
    return SHAPES[request.param]


def tokens(*size, seed=0):
    return torch.randint(20, size, generator=torch.Generator().manual_seed(seed))


def logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("length", [1, 64, 150])
def test_a_bank_computes_what_its_models_do(shape, length):
    models, ids = [make(shape, seed) for seed in range(2)], tokens(2, 3, length)
    found = forward(stacked(models), shape, ids)
    for member, model in enumerate(models):
        torch.testing.assert_close(found[member], logits(model, ids[member]), atol=2e-5, rtol=1e-4)


def test_its_gradients_are_those_of_the_models(shape):
    model, ids = make(shape), tokens(3, 70)
    model.train()(ids, use_cache=False).logits.square().sum().backward()
    bank = {name: value.requires_grad_() for name, value in stacked([model]).items()}
    forward(bank, shape, ids[None]).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(bank[name].grad[0], parameter.grad, atol=1e-3, rtol=1e-3, msg=name)


def test_every_cut_model_is_computed_too_and_tokens_one_by_one_give_the_same(shape):
    ids, checked = tokens(24, 40), 0
    for name, options in arms(shape).items():
        model = make(shape, 1)
        cs.compress_(model, keep=cs.TargetOrder(4), calibrate=calibration(ids), **options)
        bank, small = stacked([model]), with_order(shape, 4)
        found = forward(bank, small, ids[None, :2])
        torch.testing.assert_close(found[0], logits(model, ids[:2]), atol=2e-5, rtol=1e-4, msg=name)
        decoder = Decoder.of(bank, small, 2)
        one_by_one = torch.stack([decoder(ids[None, :2, t]) for t in range(40)], dim=2)
        torch.testing.assert_close(one_by_one, found, atol=2e-5, rtol=1e-4, msg=name)
        checked += 1
    assert checked >= 4


def test_half_precision_stays_near(shape):
    bank, ids = stacked([make(shape)]), tokens(1, 4, 100)
    exact, rounded = forward(bank, shape, ids), forward(bank, shape, ids, torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).norm() < 0.05 * exact.norm()


def test_tokens_of_weights_in_half_precision_have_states_in_single_precision(shape):
    bank, ids = stacked([make(shape)]), tokens(1, 4, 6)
    halves = {name: value.bfloat16() if value.ndim > 2 else value for name, value in bank.items()}
    decoder = Decoder.of(halves, shape, 4, torch.bfloat16)
    one_by_one = torch.stack([decoder(ids[..., t]) for t in range(6)], dim=2)
    assert all(state.dtype == torch.float32 for _, state in decoder.state)
    exact = forward(bank, shape, ids)
    assert (one_by_one - exact).norm() < 0.05 * exact.norm()


def test_a_smaller_state_takes_less_memory(shape):
    sizes = []
    for order in (8, 4):
        small = with_order(shape, order)
        sizes.append(Decoder.of(stacked([make(small)]), small, 3).state_bytes)
    assert sizes[1] < 0.7 * sizes[0]


@pytest.mark.parametrize("size", [1, 2, 64])
def test_the_inverse_of_a_unit_triangular_matrix(size):
    lower = torch.randn(3, 2, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tril(-1) / 4
    whole = torch.eye(size, dtype=torch.float64) + lower
    torch.testing.assert_close(unit_inverse(lower) @ whole, torch.eye(size, dtype=torch.float64).expand_as(whole))


@pytest.mark.parametrize("erases", [False, True])
def test_the_scan_is_its_definition(erases):
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 130, 5, generator=draw), dim=-1) for _ in range(2))
    v, decay = torch.randn(2, 3, 130, 4, generator=draw), -torch.rand(2, 3, 130, generator=draw)
    beta = torch.rand(2, 3, 130, generator=draw) if erases else None
    found, last = scan(q, k, v, decay, beta)
    state = torch.zeros(2, 3, 5, 4)
    for t in range(130):
        state = torch.exp(decay[..., t, None, None]) * state
        key = k[:, None, t, :, None]
        u = v[:, :, t, None] if beta is None else beta[..., t, None, None] * (v[:, :, t, None] - key.mT @ state)
        state = state + key * u
        torch.testing.assert_close(found[:, :, t], (q[:, None, t, None] @ state)[..., 0, :], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(last, state, atol=1e-5, rtol=1e-4)


def test_a_trainer_is_adamw_with_a_rate_a_member(shape):
    models, rates, batches = (
        [make(shape, seed) for seed in range(2)],
        [1e-3, 1e-2],
        [tokens(2, 4, 21, seed=s) for s in range(3)],
    )
    trainer = Trainer(stacked(models), shape)
    for ids in batches:
        trainer.step(ids, torch.tensor(rates))
    for member, (model, rate) in enumerate(zip(models, rates, strict=True)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0)
        for ids in batches:
            found = model(ids[member, :, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), ids[member, :, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                trainer.bank[name][member], parameter.data, atol=0.02 * rate, rtol=1e-3, msg=name
            )


def test_members_of_a_trainer_go_on_alone_as_they_would_together(shape):
    together = Trainer(stacked([make(shape, seed) for seed in range(3)]), shape)
    ids, rates = tokens(3, 4, 21), torch.tensor([1e-3, 2e-3, 3e-3])
    together.step(ids, rates)
    alone = together.members([2, 0])
    for trainer, places in ((together, [0, 1, 2]), (alone, [2, 0])):
        trainer.step(ids[places], rates[places])
    torch.testing.assert_close(alone.values, together.values[[2, 0]])


def test_a_cut_of_members_is_that_of_their_models_and_keeps_their_moments(shape):
    ids = tokens(2, 24, 40)
    trainer = Trainer(stacked([make(shape, seed) for seed in range(2)]), shape)
    for k in range(3):
        trainer.step(tokens(2, 4, 21, seed=k), torch.tensor([1e-3, 1e-3]))
    small, errors = trainer.cut(4, [arms(shape)["GHOST"]] * 2, ids)
    model = loaded_(make(shape), trainer.bank, 1)
    cs.compress_(model, keep=cs.TargetOrder(4), calibrate=calibration(ids[1]), **arms(shape)["GHOST"])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(small.bank[name][1], parameter.data, msg=name)
    assert all(0 < error < 2 for error in errors)
    # A selection drops moments with their rows: what stays has been there.
    assert set(small.first[0].tolist()) <= set(trainer.first[0].tolist())
    assert small.counts.eq(3).all()
    small.step(tokens(2, 4, 21), torch.tensor([1e-3, 1e-3]))


def test_maps_that_a_cut_adds_count_their_steps_from_zero():
    shape = SHAPES["Mamba-2"]
    trainer = Trainer(stacked([make(shape)]), shape)
    trainer.step(tokens(1, 4, 21), torch.tensor([1e-3]))
    small, _ = trainer.cut(4, [arms(shape)["Mapped"]], tokens(1, 24, 40))
    counts = small._counts()
    assert {counts[name] for name in counts if name.endswith("_map")} == {0}
    assert {counts[name] for name in counts if not name.endswith("_map")} == {1}


def test_a_trainer_goes_on_from_its_file(shape, tmp_path):
    trainer, other = (Trainer(stacked([make(shape, seed)]), shape) for seed in (0, 1))
    trainer.step(tokens(1, 4, 21), torch.tensor([1e-3]))
    trainer.save(tmp_path / "trainer.pt", done=1)
    assert other.load_(tmp_path / "trainer.pt") == {"done": 1}
    for one in (trainer, other):
        one.step(tokens(1, 4, 21, seed=1), torch.tensor([1e-3]))
    assert torch.equal(trainer.values, other.values)


def test_rates_rise_and_fall_to_the_last_share():
    factors = schedule(100, 10, 0.1)
    assert factors.argmax() == 9
    assert factors[0] == pytest.approx(0.1)
    assert factors[-1] == pytest.approx(0.1)
