"""A number as dropout is the rate of `PerElement`, in every constructor, in files and in copies."""

import copy

import pytest
import torch

import compressm as cs
from compressm.layers import LRU, Mamba
from compressm.models import Block, LanguageModel, MixerBlock, PerElement, SequenceClassifier

SIZES = {"depth": 1, "width": 4, "order": 6}
MODELS = {
    "classifier": lambda dropout: SequenceClassifier(LRU, **SIZES, inputs=3, classes=5, dropout=dropout),
    "Mamba classifier": lambda dropout: SequenceClassifier(Mamba, **SIZES, inputs=3, classes=5, dropout=dropout),
    "language model": lambda dropout: LanguageModel(LRU, **SIZES, vocabulary=7, dropout=dropout),
    "block": lambda dropout: Block(LRU(4, 6), dropout=dropout),
    "mixer block": lambda dropout: MixerBlock(Mamba(4, 6), dropout=dropout),
}


def rates(model):
    return [module.rate for module in model.modules() if hasattr(module, "rate")]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("rate", [0.25, 0.0])
def test_a_number_builds_the_model_of_per_element(make, rate):
    torch.manual_seed(0)
    model = make(rate)
    torch.manual_seed(0)
    spelled = make(PerElement(rate))
    assert rates(model) == rates(spelled) == [rate] * len(rates(model)) != []
    assert str(model) == str(spelled)
    torch.testing.assert_close(dict(model.state_dict()), dict(spelled.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_model_with_a_number_comes_back_from_a_file(make, tmp_path):
    model = copy.deepcopy(make(0.25))
    cs.save_model(model, tmp_path / "model")
    again = cs.load_model(tmp_path / "model")
    assert rates(again) == rates(model)
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
