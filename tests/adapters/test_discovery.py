import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from compressm.adapters import (
    AdapterError,
    LRUAdapter,
    S4DAdapter,
    S5Adapter,
    SSMAdapter,
    adapter_for,
    adapts,
    base,
    find,
)
from compressm.layers import LRU, S4D, S5
from compressm.models import SequenceClassifier
from tests import unhooked


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(base, "_ADAPTERS", dict(base._ADAPTERS))


def mixed():
    return nn.Sequential(LRU(2, 4), nn.Linear(2, 2), nn.ModuleDict({"a": S5(2, 4), "b": S4D(2, 4)}))


class Layer(nn.Module):
    """Somebody else's."""


class Special(Layer):
    """A subclass of it."""


class Dummy(SSMAdapter):
    def read(self, module):
        raise NotImplementedError

    def encode(self, module, system):
        raise NotImplementedError


def test_our_layers_have_their_adapters():
    for kind, adapter in ((LRU, LRUAdapter), (S5, S5Adapter), (S4D, S4DAdapter)):
        assert type(adapter_for(kind(2, 4))) is adapter
    assert adapter_for(nn.Linear(2, 2)) is None


def test_a_model_that_mixes_layers_is_walked_in_the_order_of_its_modules():
    model = mixed()
    found = find(model)
    assert list(found) == ["0", "2.a", "2.b"]
    assert [module for module, _ in found.values()] == [model[0], model[2]["a"], model[2]["b"]]
    assert [type(adapter) for _, adapter in found.values()] == [LRUAdapter, S5Adapter, S4DAdapter]


def test_the_layers_of_a_classifier_are_found_by_their_names():
    model = SequenceClassifier(S5, depth=2, width=4, order=4, inputs=3, classes=2)
    assert list(find(model)) == [name for name, module in model.named_modules() if isinstance(module, S5)]
    assert len(find(model)) == 2


def test_a_layer_alone_is_a_model_without_a_name():
    assert list(find(LRU(2, 4))) == [""]


def test_a_model_without_such_layers_has_none():
    assert find(nn.Linear(2, 2)) == {}


def test_a_shared_layer_is_found_once():
    layer = LRU(2, 4)
    assert list(find(nn.ModuleDict({"first": layer, "second": nn.Sequential(layer)}))) == ["first"]


def test_the_filter_sees_modules_and_names():
    assert list(find(mixed(), lambda module, name: name.startswith("2"))) == ["2.a", "2.b"]
    assert list(find(mixed(), lambda module, name: isinstance(module, LRU))) == ["0"]
    assert list(find(mixed(), lambda module, name: np.array(["0"])[0] == name)) == ["0"]  # a bool of NumPy


@pytest.mark.parametrize("answer", ["yes", "", 1, 0, None, torch.tensor(True), [True]])
def test_a_filter_must_answer_with_true_or_false(answer):
    with pytest.raises(AdapterError, match=r"filter_fn returned .* for '0', expected True or False"):
        find(mixed(), lambda module, name: answer)


def test_names_are_those_of_the_model_inside_its_wrappers():
    model = mixed()
    wrapped = [torch.compile(model), nn.DataParallel(model), torch.optim.swa_utils.AveragedModel(model)]
    wrapped += [nn.DataParallel(torch.compile(model)), torch.compile(nn.DataParallel(model))]
    for wrapper in wrapped:
        assert list(find(wrapper)) == ["0", "2.a", "2.b"]
    assert find(wrapped[0])["2.a"][0] is model[2]["a"]


def test_a_compiled_part_keeps_the_name_it_has_in_the_model():
    model = nn.Sequential(torch.compile(nn.Sequential(LRU(2, 4))), torch.compile(LRU(2, 4)))
    assert list(find(model)) == ["0.0", "1"]


def test_names_under_distributed_data_parallel_are_clean(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(mixed())
        assert list(find(wrapped)) == ["0", "2.a", "2.b"]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"])
def test_a_child_with_a_name_that_wrappers_use_keeps_it(name):
    model = nn.ModuleDict({name: nn.ModuleDict({"a": LRU(2, 4), name: LRU(2, 4)}), "b": LRU(2, 4)})
    names = [f"{name}.a", f"{name}.{name}", "b"]
    for wrapped in (model, torch.compile(model), nn.DataParallel(torch.compile(model)), checkpoint_wrapper(model)):
        assert list(find(wrapped)) == names
    inside = nn.ModuleDict({name: torch.compile(model), "c": checkpoint_wrapper(LRU(2, 4))})
    assert list(find(inside)) == [*(f"{name}.{one}" for one in names), "c"]


def test_subclasses_inherit_the_adapter_until_they_have_their_own():
    adapts(Layer)(Dummy)
    assert type(adapter_for(Special())) is Dummy

    @adapts(Special)
    class Own(Dummy):
        pass

    assert type(adapter_for(Special())) is Own
    assert type(adapter_for(Layer())) is Dummy


def test_the_last_registration_holds():
    class Later(Dummy):
        pass

    adapts(Layer)(Dummy)
    assert adapts(Layer)(Later) is Later
    assert type(adapter_for(Layer())) is Later


def test_what_stands_inside_an_adapted_module_belongs_to_it():
    adapts(Layer)(Dummy)
    outer = Layer()
    outer.inner, outer.beside = LRU(2, 4), nn.Identity()
    model = nn.ModuleDict({"outer": outer, "outer2": LRU(2, 4)})
    assert list(find(model)) == ["outer", "outer2"]
    assert list(find(model, lambda module, name: not isinstance(module, Layer))) == ["outer.inner", "outer2"]
    assert list(find(outer)) == [""]


PREAMBLE = """
import torch
from torch import nn
from compressm.adapters import *
from compressm.layers import LRU

class Half(SSMAdapter):
    def read(self, module):
        pass
"""
CASES = {
    "a name": ("adapts('LRU')", "nn.Module", "'LRU'"),
    "an object": ("adapts(LRU(2, 4))", "class of nn.Module", "LRU"),
    "a class of something else": ("adapts(dict)", "nn.Module", "dict"),
    "a decorated function": ("adapts(LRU)(print)", "subclass of Adapter", "print"),
    "a decorated class of something else": ("adapts(LRU)(dict)", "subclass of Adapter", "dict"),
    "half an adapter": ("adapts(LRU)(Half)", "Half", "no encode"),
    "no module": ("adapter_for(3)", "nn.Module", "int"),
    "no model": ("find([LRU(2, 4)])", "nn.Module", "list"),
    "a filter that cannot be called": ("find(LRU(2, 4), 'blocks.*')", "'blocks.*'", "function"),
    "a value that is no tensor": ("write(LRU(1, 4), {'D': [1.0]})", "D is a list", "tensor"),
    "axes of a module without adapter": ("state_axes(nn.Linear(2, 2))", "Linear", "@adapts(Linear)"),
    "checking a module without adapter": ("check_adapter(lambda: nn.Linear(2, 2))", "Linear", "@adapts(Linear)"),
    "checking what is not a module": ("check_adapter(lambda: 3)", "int", "nn.Module"),
    "checking too small a module": ("check_adapter(lambda: LRU(2, 3))", "order 3", "at least 4"),
}


@pytest.fixture(scope="module")
def outcomes():
    return unhooked.outcomes(PREAMBLE, {case: row[0] for case, row in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_misuse_is_refused_with_what_came_and_what_was_expected(case, outcomes):
    kinds, message = outcomes[case]
    assert kinds[:1] == ["AdapterError"], message
    assert all(fragment in message for fragment in CASES[case][1:]), message
