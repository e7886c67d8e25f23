"""Parameters that torch.compile sees as dynamic: all that is done with parameters goes on as before."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.optimizer import _foreach_supported_types

from compressm.compression.compressor import Compressor
from compressm.compression.policies import KeepFraction
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba
from compressm.layers.parameters import StateColumns, StateParameter, StateRows, is_plain, replace_data
from compressm.models import SequenceClassifier
from compressm.saving import load_checkpoint, load_model, save_checkpoint, save_model
from tests.marks import later

LAYERS = (LRU, S5, S4, S4D, LinOSS, Mamba)
X = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0))


def marked(kind, order=6):
    """A layer as torch.compile leaves it."""
    torch.manual_seed(0)
    layer = kind(4, order=order)
    layer.mark_states_()
    return layer


def growing(layer):
    return {name for name, value in layer.tensors().items() if isinstance(value, StateParameter)}


@pytest.mark.parametrize("kind", LAYERS)
def test_exactly_what_grows_with_the_order_is_marked(kind):
    layer = marked(kind)
    assert growing(layer) == {name for name in layer.tensors() if layer.grows(name)}
    for name, value in layer.tensors().items():
        if name in growing(layer):
            (axis,) = value._dynamo_weak_dynamic_indices
            assert layer.shape_at(name, 7)[axis] - layer.shape_at(name, 6)[axis] in (1, 2)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_that_was_never_compiled_has_plain_parameters(kind):
    assert all(type(parameter) is nn.Parameter for parameter in kind(4, order=6).parameters())


def test_maps_are_marked_too():
    layer = Mamba(4, order=6)
    inner, maps = layer.inner, {"B_map": (2, 3, 6), "C_map": (2, 6, 3)}
    layer.keep_maps_(
        **{name: torch.randn(inner, *shape) for name, shape in maps.items()},
        orders=torch.full((inner,), 3),
        A_log=torch.zeros(inner, 3),
        A_imag=torch.ones(inner, 3),
    )
    layer.mark_states_()
    assert (layer.B_map._dynamo_weak_dynamic_indices, layer.C_map._dynamo_weak_dynamic_indices) == ({2}, {3})
    assert isinstance(layer.A_imag, StateColumns)


@pytest.mark.parametrize("kind", LAYERS)
def test_marks_change_no_parameter_else(kind):
    layer = kind(4, order=6)
    before = {name: (id(value), dict(vars(value)), value.detach().clone()) for name, value in layer.named_parameters()}
    wanted = layer(X)[0]
    layer.mark_states_()
    for name, value in layer.named_parameters():
        number, attributes, old = before[name]
        assert (id(value), dict(vars(value))) == (number, attributes)
        assert torch.equal(value, old)
        assert is_plain(value)
    assert torch.equal(layer(X)[0], wanted)


@pytest.mark.parametrize("kind", LAYERS)
def test_copies_pickles_and_casts_compute_the_same(kind):
    layer = marked(kind)
    wanted = layer(X)[0]
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(X)[0], wanted)
    torch.testing.assert_close(copy.deepcopy(layer).double()(X.double())[0].float(), wanted)


@pytest.mark.parametrize("keep_vars", [False, True])
def test_stored_parameters_are_loaded_as_weights_only(keep_vars):
    layer, file = marked(LRU), io.BytesIO()
    torch.save(layer.state_dict(keep_vars=keep_vars), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(value) in (torch.Tensor, nn.Parameter) for value in loaded.values())
    other = LRU(4, order=3)
    other.load_state_dict(loaded)
    assert torch.equal(other(X)[0], layer(X)[0])


def test_a_state_dict_may_be_assigned():
    layer = marked(LRU)
    layer.load_state_dict(LRU(4, order=6).state_dict(), assign=True)
    layer.mark_states_()
    assert len(growing(layer)) == 7


def test_optimizers_of_torch_take_them_at_once():
    """Else a foreach optimizer, the default on a GPU, would update all parameters of the model one by one."""
    assert {StateRows, StateColumns} <= set(_foreach_supported_types)


@pytest.mark.parametrize("kind", later(LAYERS, LRU, Mamba))
def test_functional_calls_read_what_they_are_given(kind):
    layer, other = marked(kind), kind(4, order=3)
    found = torch.func.functional_call(layer, dict(other.named_parameters()), (X,))[0]
    torch.testing.assert_close(found, other(X)[0])


def test_parametrised_and_pruned_parameters_are_read():
    plain, layer = LRU(4, order=6), marked(LRU)
    layer.load_state_dict(plain.state_dict())
    parametrizations.weight_norm(plain, "B_re")
    torch.testing.assert_close(plain(X)[0], layer(X)[0])
    prune.l1_unstructured(layer, "C_re", amount=0.5)
    assert (layer.C_re == 0).sum() == 12
    assert not torch.equal(layer(X)[0], plain(X)[0])


def test_cuts_saving_and_checkpoints_take_a_marked_model(tmp_path):
    torch.manual_seed(0)
    model = SequenceClassifier(LRU, inputs=4, classes=3, depth=1, width=4, order=8)
    model.blocks[0].ssm.mark_states_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compressor = Compressor(model, optimizer, when=[1], keep=KeepFraction(0.5))
    model(X).sum().backward()
    optimizer.step()
    compressor.step(1)
    assert growing(model.blocks[0].ssm) == set(LRU.STATE_AXES)
    save_model(model, tmp_path / "model")
    save_checkpoint(tmp_path / "point", model=model, optimizer=optimizer, compressor=compressor, step=1)
    model.eval()
    assert torch.equal(load_model(tmp_path / "model").eval()(X), model(X))
    load_checkpoint(tmp_path / "point", model=model, optimizer=optimizer, compressor=compressor)
    assert growing(model.blocks[0].ssm) == set(LRU.STATE_AXES)


def test_compiled_code_of_any_module_notices_that_a_parameter_has_another_size():
    """Not so in torch 2.11 if data are just replaced; our own layers have dynamic sizes and need nothing."""
    module, x = nn.Linear(3, 5, bias=False), torch.randn(2, 3)
    run = torch.compile(lambda x: module(x) * module.weight.shape[0], backend="eager", fullgraph=True)
    for rows in (5, 4, 7):
        replace_data(module.weight, torch.randn(rows, 3))
        torch.testing.assert_close(run(x), rows * (x @ module.weight.mT))
