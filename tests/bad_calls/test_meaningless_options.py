"""An option that no layer of the model uses is named in a warning; one that a single layer uses is not."""

import warnings

import pytest
import torch
from torch import nn

import compressm as cs
from compressm.layers import LRU, Mamba

KEEP = {"keep": cs.TargetOrder(2)}
LINEAR, SELECTIVE = {"fold": False}, {"selective": cs.PerChannel()}


def run(model):
    for layer in model:
        layer(torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0)))


def models(*kinds):
    torch.manual_seed(0)
    return nn.ModuleList([kind(4, 4) for kind in kinds])


CALLS = {
    "compress_": lambda model, **options: cs.compress_(model, calibrate=run, **KEEP, **options),
    "Compressor": lambda model, **options: cs.Compressor(model, when=[1], calibrate=run, **KEEP, **options),
    "inspect": lambda model, **options: cs.inspect(model, run, **options),
    "HankelTracker": lambda model, **options: cs.HankelTracker(model, every=1, calibrate=run, **options),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (Mamba, LINEAR, r"without effect: fold=False; ModuleList has only selective layers"),
        (LRU, SELECTIVE, r"without effect: selective=PerChannel\(.*\); ModuleList has only linear layers"),
    ],
)
def test_an_option_that_no_layer_uses_is_named(call, kind, options, said):
    with pytest.warns(UserWarning, match=said) as caught:
        CALLS[call](models(kind), **options)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        ((LRU, Mamba), {**LINEAR, **SELECTIVE}),
        ((LRU,), LINEAR),
        ((Mamba,), SELECTIVE),
        ((Mamba,), {"gramian": cs.WhiteNoise()}),
    ],
)
def test_an_option_that_a_layer_uses_is_taken_without_a_word(call, kinds, options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CALLS[call](models(*kinds), **options)
    assert [str(warning.message) for warning in caught] == []


def test_the_papers_options_for_selective_layers_only_are_named():
    model = models(Mamba)
    with pytest.warns(UserWarning, match=r"fold=False.* leave it out"):
        cs.compress_(model, calibrate=run, **KEEP, **cs.PAPER)
    assert model[0].order == 2


def test_one_message_says_what_layers_of_both_kinds_need_for_a_bound():
    said = r"0: ErrorBound\(.*expected gramian=WhiteNoise\(\).*; 1: .*selective layers never have; expected another"
    with pytest.raises(cs.compression.CompressionError, match=said):
        cs.compress_(models(LRU, Mamba), keep=cs.ErrorBound(0.1), calibrate=run)
    said = r"selective layers never have; expected another policy.*, and calibrate=lambda model"
    with pytest.raises(cs.compression.CompressionError, match=said):
        cs.compress_(models(Mamba), keep=cs.ErrorBound(0.1))
