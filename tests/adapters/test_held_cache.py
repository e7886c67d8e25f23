"""Caches of transformers that go through a cut while a text is being written."""

import pytest
import torch

import compressm as cs
from compressm.adapters import AdapterError
from compressm.adapters.transformers import HeldCache
from compressm.compression import cutting
from tests.adapters import test_delta_net, test_mamba2, test_normed_mixers, transformers_models
from tests.adapters.test_mamba2 import IDS, cut

# Weights of models that were never trained are so small that the ε of norms counts.
pytestmark = pytest.mark.filterwarnings("ignore:.*of the norm behind them counts:UserWarning")


def mamba2(**options):
    return test_mamba2.make(num_hidden_layers=1, **options)


def mamba1(name="Mamba", **options):
    if name != "Mamba":
        return test_normed_mixers.make(name, **options)
    model = transformers_models.make(**options)
    for mixer in transformers_models.mixers(model):
        for part in (mixer.in_proj, mixer.x_proj, mixer.out_proj):
            part.weight.data *= 6  # otherwise the states would hardly count in the output
    return model


def begun(model):
    """The cache of the first tokens."""
    found = model(IDS[:, :12], use_cache=True)
    return getattr(found, "cache_params", None) or found.past_key_values


def goes_on(model, cache, steps=6):
    name = "cache_params" if hasattr(model, "backbone") else "past_key_values"
    texts = (IDS[:, t : t + 1] for t in range(12, 12 + steps))
    return torch.cat([model(ids, **{name: cache}, use_cache=True).logits for ids in texts], dim=1)


def states_of(cache):
    return [
        (own.recurrent_states[0], own.conv_states[0])
        for own in cache.layers
        if getattr(own, "recurrent_states", {}).get(0) is not None
    ]


@pytest.mark.parametrize("form", [cs.Selected(), cs.Mapped()], ids=str)
def test_a_text_of_one_mamba2_layer_goes_on_as_if_the_model_had_been_small_from_the_start(form):
    model = mamba2()
    cache = begun(model)
    held = HeldCache(model, cache)
    cut(model, form=form)
    torch.testing.assert_close(states_of(held.cache), states_of(begun(model)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(goes_on(model, cache), goes_on(model, begun(model)), rtol=1e-4, atol=1e-5)


def test_maps_are_cut_again_with_the_cache():
    model = mamba2()
    cut(model, keep=cs.TargetOrder(6), form=cs.Mapped())
    cache = begun(model)
    held = HeldCache(model, cache)
    cut(model)
    torch.testing.assert_close(states_of(held.cache), states_of(begun(model)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", [cs.Selected(), cs.Mapped(), cs.Fitted(steps=2)], ids=str)
@pytest.mark.parametrize("name", ["Qwen3Next", "OlmoHybrid"])
def test_the_cache_of_a_delta_net_gets_the_sizes_of_the_small_one_and_a_text_goes_on(name, form):
    model = test_delta_net.make(name)
    cache = begun(model)
    held = HeldCache(model, cache)
    cut(model, form=form)
    new = states_of(begun(model))
    assert [[part.shape for part in pair] for pair in states_of(held.cache)] == [
        [p.shape for p in pair] for pair in new
    ]
    assert torch.isfinite(goes_on(model, cache)).all()


def check_goes_on_as_if_small_from_the_start(model, cache):
    torch.testing.assert_close(states_of(cache), states_of(begun(model)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(goes_on(model, cache), goes_on(model, begun(model)), rtol=1e-4, atol=1e-5)


SELECTIONS = [cs.SharedIndex(), cs.SharedIndex(refit=True)]


@pytest.mark.parametrize("method", SELECTIONS, ids=str)
def test_a_selection_of_states_of_mamba1_is_the_cache_that_the_small_layer_would_have(method):
    model = mamba1(num_hidden_layers=1)
    cache = begun(model)
    held, before = HeldCache(model, cache), states_of(cache)[0][0]
    cut(model, selective=method)
    (state, _) = states_of(held.cache)[0]
    assert all(any(torch.equal(row, old) for old in before.unbind(-1)) for row in state.unbind(-1))
    check_goes_on_as_if_small_from_the_start(model, cache)


@pytest.mark.parametrize("name", ["FalconMamba", "Jamba"])
def test_behind_norms_a_selection_is_that_cache_if_the_dropped_states_were_zero(name):
    """In all layers; FalconMamba has the factor of B behind its scan, so its states are divided by it."""
    model = test_normed_mixers.mask_(mamba1(name))
    cache = begun(model)
    held = HeldCache(model, cache)
    test_normed_mixers.cut(model, selective=cs.SharedIndex())
    assert states_of(held.cache)[0][0].shape[-1] == 3
    check_goes_on_as_if_small_from_the_start(model, cache)


@pytest.mark.parametrize("method", [cs.Baked(), cs.Baked(two_sided=True)], ids=str)
def test_a_projection_is_that_cache_if_all_rates_of_a_channel_are_equal(method):
    """Their averages are then the rates, and E_B h obeys the same recurrence."""
    model = mamba1(num_hidden_layers=1)
    (mixer,) = transformers_models.mixers(model)
    mixer.A_log.data[:] = mixer.A_log.data[:, :1]
    cache = begun(model)
    held = HeldCache(model, cache)
    cut(model, selective=method)
    check_goes_on_as_if_small_from_the_start(model, held.cache)


@pytest.mark.parametrize("method", [cs.Baked(), cs.Baked(fit=3), cs.SharedIndex(fit=3)], ids=str)
@pytest.mark.parametrize("name", ["Mamba", "FalconMamba", "Jamba"])
def test_any_other_cut_of_mamba1_gives_a_cache_that_is_near(name, method):
    model = mamba1(name)
    cache = begun(model)
    held = HeldCache(model, cache)
    test_normed_mixers.cut(model, cs.TargetOrder(5), selective=method)
    (found, window), (wanted, fresh) = states_of(held.cache)[0], states_of(begun(model))[0]
    assert torch.equal(window, fresh)
    assert (found - wanted).norm() < 0.3 * wanted.norm()
    assert torch.isfinite(goes_on(model, cache)).all()


@pytest.mark.parametrize(
    "make", [mamba2, *(lambda name=name: mamba1(name) for name in ("Mamba", "FalconMamba", "Jamba"))]
)
def test_zero_states_join_a_cache_and_the_text_goes_on_as_before(make):
    model, other = make(), make()
    cache, old = begun(model), begun(other)
    held = HeldCache(model, cache)
    cs.pad_orders_(model, 11)
    axis = 2 if states_of(cache)[0][0].ndim == 3 else 3
    assert states_of(held.cache)[0][0].shape[axis] == 11
    torch.testing.assert_close(states_of(cache), states_of(begun(model)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(goes_on(model, cache), goes_on(other, old), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [mamba2, mamba1])
def test_a_cut_that_fails_leaves_the_cache_alone(make, monkeypatch):
    model = make()
    cache = begun(model)
    before = [tuple(part.clone() for part in pair) for pair in states_of(cache)]
    held = HeldCache(model, cache)

    def fails(*_):
        raise RuntimeError("in the last moment")

    monkeypatch.setattr(cutting, "refuse_to_average_", fails)
    with pytest.raises(RuntimeError, match="in the last moment"):
        cut(model)
    torch.testing.assert_close(states_of(held.cache), before, rtol=0, atol=0)


def test_a_cache_that_is_not_held_stays_as_it_is():
    model = mamba2()
    cache = begun(model)
    HeldCache(model, cache)  # nobody keeps it
    before = [tuple(part.clone() for part in pair) for pair in states_of(cache)]
    cut(model, form=cs.Selected())
    torch.testing.assert_close(states_of(cache), before, rtol=0, atol=0)


def test_a_cache_of_something_else_is_refused_by_name():
    with pytest.raises(AdapterError, match="cache is a NoneType, expected the cache that the model gives"):
        HeldCache(mamba2(), None)
    with pytest.raises(AdapterError, match="a Linear has no Mamba mixer and no gated delta net of transformers"):
        HeldCache(torch.nn.Linear(2, 2), None)
