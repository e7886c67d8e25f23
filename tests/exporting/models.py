"""Small models for tests of exports, before and after a cut."""

import torch

import compressm as cs
from compressm import layers
from compressm.models import LanguageModel, SequenceClassifier

LAYERS = ("LRU", "S5", "S4", "S4D", "LinOSS", "Mamba")
MODELS = ("classifier", "language")
VOCABULARY, INPUTS = 11, 2


def inputs(model, batch=3, length=20):
    if isinstance(model, LanguageModel):
        return torch.randint(VOCABULARY, (batch, length))
    return torch.randn(batch, length, INPUTS)


def build(layer, model, *, cut=None, **options):
    """A model with running averages and a skip of its own; `cut` is the method of a cut to unequal orders."""
    torch.manual_seed(0)
    sizes = {"depth": 2, "width": 6, "order": 5} | options
    kind = getattr(layers, layer)
    if model == "language":
        built = LanguageModel(kind, vocabulary=VOCABULARY, **sizes)
    else:
        built = SequenceClassifier(kind, inputs=INPUTS, classes=3, **sizes)
        built(inputs(built))
    if cut is not None:
        fewer = {"blocks.0.ssm": cs.TargetOrder(2)}
        given = inputs(built.eval())
        cs.compress_(built, keep=cs.TargetOrder(3), overrides=fewer, calibrate=lambda one: one(given), selective=cut)
        orders = [block.ssm.order for block in built.blocks]
        assert orders == [2, 3] or isinstance(cut, cs.PerChannel)
    return built.train()
