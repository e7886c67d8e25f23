"""A state dict that is refused, for any reason and in any kind of module, leaves every layer as it was."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compressm.compression import (
    CompressionError,
    Compressor,
    KeepFraction,
    SavingError,
    TargetOrder,
    compress_,
    load_checkpoint,
    save_checkpoint,
)
from compressm.layers import LRU, S4D, S5, Mamba
from compressm.models import SequenceClassifier
from tests.compression.test_optimizer_state import Wrapped


class Own(nn.Module):
    """A user's model: layers of ours, deep inside, between modules of torch."""

    def __init__(self, order):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.inside = nn.ModuleDict({"a": nn.Sequential(LRU(4, order), nn.Identity()), "b": S4D(4, order)})
        self.last = nn.BatchNorm1d(4)


def classifier(order):
    return SequenceClassifier(S5, depth=2, width=4, order=order, inputs=3, classes=2)


def compiled(order):
    return torch.compile(Own(order))


ROOTS = {
    "a layer": lambda order: LRU(3, order),
    "a layer with modules inside": lambda order: Mamba(4, order),
    "a model of ours": classifier,
    "Sequential": lambda order: nn.Sequential(LRU(3, order), S5(3, order), Mamba(3, order), nn.Linear(3, 3)),
    "a user's model": Own,
    "DataParallel": lambda order: nn.DataParallel(Own(order)),
    "torch.compile": compiled,
}


def everything(model):
    return {
        name: (id(value), value.dtype, value.requires_grad, value.tolist())
        for name, value in (*model.named_parameters(), *model.named_buffers())
    }


def without_last(state):
    del state[list(state)[-1]]


def with_another(state):
    state["of.another"] = torch.ones(1)


def with_other_shape(state):
    name = [name for name, value in state.items() if value.ndim][-1]
    state[name] = torch.ones(*state[name].shape, 2)


def with_text(state):
    state[list(state)[-1]] = "text"


BREAKING = [without_last, with_another, with_other_shape, with_text]


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("breaks", BREAKING, ids=lambda breaks: breaks.__name__)
@pytest.mark.parametrize("root", ROOTS)
def test_a_refused_state_dict_of_other_orders_changes_nothing(root, breaks, strict, assign):
    torch.manual_seed(0)
    model = ROOTS[root](6)
    state = ROOTS[root](3).state_dict()
    breaks(state)
    before = everything(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    try:
        model.load_state_dict(state, strict=strict, assign=assign)
    except RuntimeError:
        assert everything(model) == before
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    else:
        # Names that are missing or unknown are no error then: the rest is loaded.
        assert not strict
        assert breaks in (without_last, with_another)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_state_dict_that_fits_loads_with_its_orders_into_any_module(root, assign):
    model, other = ROOTS[root](6), ROOTS[root](3)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert {n: v.tolist() for n, v in model.state_dict().items()} == {
        n: v.tolist() for n, v in other.state_dict().items()
    }
    identity = [id(parameter) for parameter in model.parameters()]
    model.load_state_dict(other.state_dict())
    assert [id(parameter) for parameter in model.parameters()] == identity


class Stubborn(nn.Module):
    """A module that refuses by an error of its own, not by torch's list."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, *args):
        raise KeyboardInterrupt


def test_an_error_in_a_module_of_others_or_an_interruption_changes_no_shape():
    model, other = nn.Sequential(LRU(3, 6), Stubborn()), nn.Sequential(LRU(3, 2), Stubborn())
    before = everything(model)
    with pytest.raises(KeyboardInterrupt):
        model.load_state_dict(other.state_dict())
    assert everything(model) == before


def test_a_form_of_mamba_that_is_refused_leaves_the_earlier_form():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(Mamba(4, 6), nn.Linear(4, 4))

    model, other = make(), make()
    inner, n = other[0].inner, 3
    other[0].keep_maps_(
        torch.ones(inner, n, 6), torch.ones(inner, 6, n), torch.full((inner,), n), torch.zeros(inner, n)
    )
    state = other.state_dict()
    with_other_shape(state)
    before = everything(model)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(state)
    assert everything(model) == before
    model.load_state_dict(other.state_dict())
    assert model[0].B_map is not None


def test_a_model_trains_on_after_a_refused_state_dict():
    torch.manual_seed(0)
    model, x = classifier(6).eval(), torch.randn(2, 9, 3)
    optimizer = torch.optim.Adam(model.parameters())
    earlier = model(x).sum()
    state = classifier(3).state_dict()
    without_last(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    loss = model(x).sum()
    assert loss == earlier
    loss.backward()
    optimizer.step()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def held(order=8, **options):
    torch.manual_seed(0)
    model = classifier(order)
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, Compressor(model, optimizer, when=[5], keep=KeepFraction(0.5), **options)


def test_other_orders_are_refused_while_a_compressor_with_an_optimizer_holds_the_model():
    model, _, compressor = held()
    before = everything(model)
    with pytest.raises(CompressionError, match=r"blocks\.0\.ssm has order 8.*Compressor.*load_checkpoint\(path"):
        model.load_state_dict(classifier(4).state_dict())
    assert everything(model) == before
    with pytest.raises(CompressionError, match="load_checkpoint"):
        nn.Sequential(model).load_state_dict(nn.Sequential(classifier(4)).state_dict())
    with pytest.raises(CompressionError, match="load_checkpoint"):
        model.blocks[0].ssm.load_state_dict(S5(4, 3).state_dict())
    assert everything(model) == before
    same = classifier(8).state_dict()
    model.load_state_dict(same)
    assert torch.equal(model.blocks[0].ssm.D, same["blocks.0.ssm.D"])
    assert len(compressor.step(5)) == 2


def test_other_orders_load_without_a_compressor_or_after_it_or_without_an_optimizer():
    model, optimizer, compressor = held()
    del compressor
    gc.collect()
    model.load_state_dict(classifier(4).state_dict())
    assert model.blocks[0].ssm.order == 4
    kept = Compressor(model, when=[5], keep=KeepFraction(0.5))
    model.load_state_dict(classifier(6).state_dict())
    assert [event.rank for event in kept.step(5)] == [3, 3]
    assert optimizer.param_groups


def test_a_copy_of_a_held_model_takes_any_orders():
    model, _, compressor = held()
    twin = copy.deepcopy(model)
    twin.load_state_dict(classifier(4).state_dict())
    assert [twin.blocks[0].ssm.order, model.blocks[0].ssm.order] == [4, 8]
    assert compressor.history == []


def test_cuts_and_checkpoints_change_the_orders_of_a_held_model(tmp_path):
    model, optimizer, compressor = held()
    parts = {"model": model, "optimizer": optimizer, "compressor": compressor}
    save_checkpoint(tmp_path / "before", **parts)
    compressor.step(5)
    compress_(model, keep=TargetOrder(2), optimizer=optimizer)
    assert model.blocks[0].ssm.order == 2
    load_checkpoint(tmp_path / "before", **parts)
    assert model.blocks[0].ssm.order == 8


def test_a_checkpoint_of_other_orders_is_refused_without_the_optimizer_that_is_held(tmp_path):
    save_checkpoint(tmp_path / "small", model=(small := classifier(4)), optimizer=torch.optim.Adam(small.parameters()))
    model, optimizer, compressor = held()
    before = everything(model)
    said = r"small: blocks\.0\.ssm has order 8, the file has order 4.*a Compressor.*load_checkpoint\(path, .*optimizer="
    other = torch.optim.Adam(model.parameters())
    for given in ({}, {"optimizer": other}, {"optimizer": None}):
        with pytest.raises(SavingError, match=said):
            load_checkpoint(tmp_path / "small", model=model, **given)
        assert everything(model) == before
    save_checkpoint(tmp_path / "same", model=classifier(8))
    load_checkpoint(tmp_path / "same", model=model)
    assert compressor.history == []
    load_checkpoint(tmp_path / "small", model=model, optimizer=optimizer)
    assert model.blocks[0].ssm.order == 4


def test_a_checkpoint_loads_alone_after_the_compressor_even_if_it_was_in_a_cycle(tmp_path):
    save_checkpoint(tmp_path / "small", model=classifier(4))
    model, _, compressor = held()
    compressor.itself = compressor
    del compressor
    load_checkpoint(tmp_path / "small", model=model)
    assert model.blocks[0].ssm.order == 4


def test_the_optimizer_inside_a_wrapper_that_is_held_is_enough(tmp_path):
    save_checkpoint(tmp_path / "small", model=(small := classifier(4)), optimizer=torch.optim.Adam(small.parameters()))
    model = classifier(8)
    optimizer = torch.optim.Adam(model.parameters())
    compressor = Compressor(model, Wrapped(optimizer), when=[5], keep=KeepFraction(0.5))
    load_checkpoint(tmp_path / "small", model=model, optimizer=optimizer)
    assert len(compressor.step(5)) == 2


def test_several_held_optimizers_are_needed_together(tmp_path):
    def build(order):
        model = classifier(order)
        first = torch.optim.SGD(model.blocks.parameters())
        second = torch.optim.Adam([*model.encoder.parameters(), *model.head.parameters()])
        return model, [first, second]

    model, optimizers = build(4)
    save_checkpoint(tmp_path / "both", model=model, optimizer=optimizers)
    save_checkpoint(tmp_path / "first", model=model, optimizer=optimizers[:1])
    model, optimizers = build(8)
    compressor = Compressor(model, optimizers, when=[5], keep=KeepFraction(0.5))
    with pytest.raises(SavingError, match="a Compressor with an optimizer holds this model"):
        load_checkpoint(tmp_path / "first", model=model, optimizer=optimizers[:1])
    load_checkpoint(tmp_path / "both", model=model, optimizer=optimizers)
    assert [event.rank for event in compressor.step(5)] == [2, 2]


def test_distributed_wrappers_are_looked_through(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapper = DistributedDataParallel(classifier(6))
        state = DistributedDataParallel(classifier(3)).state_dict()
        without_last(state)
        before = everything(wrapper)
        with pytest.raises(RuntimeError, match="Missing key"):
            wrapper.load_state_dict(state)
        assert everything(wrapper) == before
        optimizer = torch.optim.SGD(wrapper.parameters())
        compressor = Compressor(wrapper, optimizer, when=[1], keep=KeepFraction(0.5))
        fresh = DistributedDataParallel(classifier(6))
        with pytest.raises(CompressionError, match=r"module\.blocks\.0\.ssm has order 6"):
            wrapper.load_state_dict(DistributedDataParallel(classifier(3)).state_dict())
        wrapper.load_state_dict(fresh.state_dict())
        assert compressor.history == []
    finally:
        torch.distributed.destroy_process_group()
