"""Caches of transformers that go through a cut while a text is being written."""

import pytest
import torch

import compressm as cs
from compressm.adapters import AdapterError
from compressm.adapters.transformers import HeldCache
from compressm.compression import cutting
from tests.adapters import test_delta_net, test_mamba2
from tests.adapters.test_mamba2 import IDS, cut

# Weights of models that were never trained are so small that the ε of norms counts.
pytestmark = pytest.mark.filterwarnings("ignore:.*of the norm behind them counts:UserWarning")


def mamba2(**options):
    return test_mamba2.make(num_hidden_layers=1, **options)


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


def test_a_cut_that_fails_leaves_the_cache_alone(monkeypatch):
    model = mamba2()
    cache = begun(model)
    before = [tuple(part.clone() for part in pair) for pair in states_of(cache)]
    held = HeldCache(model, cache)

    def fails(*_):
        raise RuntimeError("in the last moment")

    monkeypatch.setattr(cutting, "refuse_to_average_", fails)
    with pytest.raises(RuntimeError, match="in the last moment"):
        cut(model, form=cs.Selected())
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
    with pytest.raises(AdapterError, match="a Linear has no Mamba-2 mixer and no gated delta net"):
        HeldCache(torch.nn.Linear(2, 2), None)
