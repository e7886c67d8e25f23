import copy
import pickle

import pytest
import torch
from torch import nn

from compressm.layers import LRU, S5, Bilinear, SequenceError
from compressm.layers.base import arguments_of, keeps_arguments
from compressm.models import LayerNorm, SequenceClassifier


def test_arguments_are_kept_with_their_defaults():
    assert arguments_of(LRU(3, order=4, r_min=0.5)) == {
        "width": 3,
        "order": 4,
        "r_min": 0.5,
        "r_max": 0.999,
        "max_phase": 6.28,
        "path": None,
    }


def test_a_copied_or_pickled_model_keeps_them():
    options = {"discretisation": Bilinear()}
    model = SequenceClassifier(
        S5, depth=1, width=2, order=2, inputs=1, classes=2, norm=LayerNorm(), layer_options=options
    )
    options.clear()
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert arguments_of(other)["layer"] is S5
        assert arguments_of(other)["norm"] == LayerNorm()
        assert arguments_of(other)["layer_options"] == {"discretisation": Bilinear()}


def test_a_subclass_keeps_its_own():
    @keeps_arguments
    class Base(nn.Module):
        def __init__(self, a, *, b=2):
            super().__init__()

    @keeps_arguments
    class Sub(Base):
        def __init__(self, c, **rest):
            super().__init__(c, **rest)

    assert arguments_of(Base(1)) == {"a": 1, "b": 2}
    assert arguments_of(Sub(1, b=3)) == {"c": 1, "b": 3}
    assert arguments_of(nn.Linear(1, 1)) is None


def test_arguments_without_names_are_refused():
    with pytest.raises(SequenceError, match=r"Rows takes 'sizes' by position only"):

        @keeps_arguments
        class Rows(nn.Module):
            def __init__(self, *sizes):
                super().__init__()


def test_a_wrong_call_gets_the_error_of_the_constructor():
    with pytest.raises(TypeError, match=r"__init__\(\) missing 1 required positional argument: 'order'|order"):
        LRU(3)


def test_a_checkpoint_of_another_order_loads_while_an_old_loss_is_alive():
    layer = LRU(2, 4)
    held = layer(torch.ones(1, 5, 2))[0].sum()
    held.backward()
    layer.load_state_dict(LRU(2, 3).state_dict())
    layer(torch.ones(1, 5, 2))[0].sum().backward()
    assert layer.B_re.grad.shape == (3, 2)
    assert held.isfinite()
