"""Averages not given as `follow` say so at their first update after a cut; alone they are cut like any model."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from compressm.compression import (
    CompressionError,
    Compressor,
    KeepFraction,
    Rollback,
    TargetOrder,
    compress_,
    load_checkpoint,
    save_checkpoint,
)
from compressm.layers import LRU, Mamba, parameters
from compressm.models import SequenceClassifier
from tests.compression.trained import Spirals

X, Y = torch.randn(4, 20, 3, generator=torch.Generator().manual_seed(1)), torch.arange(4)


def make(kind=LRU, order=12):
    torch.manual_seed(0)
    return SequenceClassifier(kind, depth=2, width=4, order=order, inputs=3, classes=5)


class ModelEma(nn.Module):
    """As timm averages: a copy as `module`, and a method `update`."""

    def __init__(self, model):
        super().__init__()
        self.module = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model):
        for own, new in zip(self.module.parameters(), model.parameters(), strict=True):
            own.lerp_(new, 0.1)


AVERAGES = {
    "torch": (AveragedModel, "update_parameters"),
    "torch, many at once": (
        lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        "update_parameters",
    ),
    "timm": (ModelEma, "update"),
}
SAID = r"blocks\.0\.ssm\.\w+ has the shape \(.*12.*\) in it and \(.*5.*\) in the model.*follow=\[average\]"


@pytest.mark.parametrize("kind", [LRU, Mamba])
@pytest.mark.parametrize("case", AVERAGES)
def test_an_average_that_did_not_follow_names_the_layer_both_shapes_and_the_cure(case, kind):
    build, name = AVERAGES[case]
    model = make(kind)
    average = build(model)
    getattr(average, name)(model)
    compress_(model, keep=TargetOrder(5), calibrate=lambda model: model(X))
    before = copy.deepcopy(average.state_dict())
    for _ in range(2):
        with pytest.raises(CompressionError, match=f"this {type(average).__name__} was made before a cut.*{SAID}"):
            getattr(average, name)(model)
    assert all(torch.equal(value, before[key]) for key, value in average.state_dict().items())
    assert average(X).isfinite().all() if case != "timm" else True
    getattr(build(model), name)(model)  # the cure


def test_averages_that_follow_and_others_are_left_alone():
    model, other = make(), make(order=8)
    following, strange = AveragedModel(model), AveragedModel(other)
    compress_(model, keep=TargetOrder(5), follow=[following])
    following.update_parameters(model)
    strange.update_parameters(other)
    assert "update_parameters" not in vars(following)
    assert "update_parameters" not in vars(strange)  # it made way


def test_after_a_rollback_the_average_goes_on():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = iter([1.0, 0.0])
    compressor = Compressor(
        model, optimizer, when=[1], keep=TargetOrder(5), guard=Rollback(lambda: next(values), settle=1)
    )
    average = AveragedModel(model)
    compressor.step(1)
    with pytest.raises(CompressionError, match=SAID):
        average.update_parameters(model)
    compressor.step(2)
    assert model.blocks[0].ssm.order == 12
    average.update_parameters(model)
    assert int(average.n_averaged) == 1
    assert "update_parameters" not in vars(average)


def test_an_average_made_between_a_cut_and_its_rollback_is_named_too():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = iter([1.0, 0.0])
    compressor = Compressor(
        model, optimizer, when=[1], keep=TargetOrder(5), guard=Rollback(lambda: next(values), settle=1)
    )
    compressor.step(1)
    average = AveragedModel(model)
    compressor.step(2)
    with pytest.raises(CompressionError, match=r"has the shape \(5,\) in it and \(12,\) in the model"):
        average.update_parameters(model)


def test_a_checkpoint_of_other_orders_is_named_and_an_average_loaded_anew_goes_on(tmp_path):
    small = make()
    compress_(small, keep=TargetOrder(5))
    save_checkpoint(tmp_path / "small.pt", model=small)
    model = make()
    average = AveragedModel(model)
    load_checkpoint(tmp_path / "small.pt", model=model)
    with pytest.raises(CompressionError, match=SAID):
        average.update_parameters(model)
    average.load_state_dict(AveragedModel(small).state_dict())
    average.update_parameters(model)


def test_an_average_that_refuses_is_copied_pickled_and_saved_as_ever():
    model = make()
    average = AveragedModel(model)
    compress_(model, keep=TargetOrder(5))
    for twin in (copy.deepcopy(average), pickle.loads(pickle.dumps(average))):
        assert twin.update_parameters.average is twin
        assert twin.state_dict().keys() == average.state_dict().keys()
        with pytest.raises(CompressionError, match=SAID):
            twin.update_parameters(model)
        # Its own copy of the old shapes still suits it.
        twin.update_parameters(make())
        assert int(average.n_averaged) == 0


def test_the_living_are_searched_only_while_a_copy_of_other_shapes_lives(monkeypatch):
    """A search takes 70 ms for 300 000 objects."""
    searched = []
    living = parameters._living
    monkeypatch.setattr(parameters, "_living", lambda kinds: searched.append(AveragedModel in kinds) or living(kinds))
    gc.collect()
    model = make(order=24)
    following = copy.deepcopy(model)
    compress_(model, keep=KeepFraction(0.9), follow=[following])
    assert searched == [False]
    average = AveragedModel(model)
    compress_(model, keep=KeepFraction(0.9), follow=[following])
    assert searched == [False, True]
    assert "update_parameters" in vars(average)
    del average
    gc.collect()
    compress_(model, keep=KeepFraction(0.9), follow=[following])
    assert searched == [False, True, False]


def test_averages_of_layers_that_do_not_remember_their_copies_are_found():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Spirals(3, 8)

    model = Model()
    average = AveragedModel(model)
    compress_(model, keep=TargetOrder(5))
    with pytest.raises(CompressionError, match=r"layer.shrink has the shape \(8,\) in it and \(5,\) in the model"):
        average.update_parameters(model)


def test_a_module_whose_constructor_failed_does_not_disturb_a_cut():
    class Broken(AveragedModel):
        def __init__(self):
            pass

    broken = Broken()
    model = make()
    compress_(model, keep=TargetOrder(5))
    assert model.blocks[0].ssm.order == 5
    assert vars(broken) == {}


@pytest.mark.parametrize("kind", [LRU, Mamba])
def test_an_average_alone_is_cut_like_any_model(kind):
    average = AveragedModel(make(kind))
    average.update_parameters(make(kind))
    alone = copy.deepcopy(average.module)
    options = {"keep": TargetOrder(5), "calibrate": lambda model: model(X)}
    cuts = compress_(average, **options)
    expected = compress_(alone, **options)
    assert [(cut.module, cut.order, cut.rank) for cut in cuts] == [(cut.module, 12, 5) for cut in expected]
    assert all(torch.equal(value, alone.state_dict()[name]) for name, value in average.module.state_dict().items())
    assert int(average.n_averaged) == 1
    assert torch.equal(average.eval()(X), alone.eval()(X))


def test_a_compressor_trains_cuts_and_restores_an_average(tmp_path):
    def build():
        average = AveragedModel(make())
        optimizer = torch.optim.AdamW(average.parameters(), lr=1e-2)
        guard = Rollback(lambda: average.module.blocks[0].ssm.order / 12, settle=1)
        return average, optimizer, Compressor(average, optimizer, when=[1], keep=TargetOrder(5), guard=guard)

    average, optimizer, compressor = build()
    average(X).sum().backward()
    optimizer.step()
    before = copy.deepcopy(average.state_dict())
    assert [event.module for event in compressor.step(1)] == ["blocks.0.ssm", "blocks.1.ssm"]
    average.n_averaged += 3
    save_checkpoint(tmp_path / "cut", model=average, optimizer=optimizer, compressor=compressor)
    average, optimizer, compressor = build()
    load_checkpoint(tmp_path / "cut", model=average, optimizer=optimizer, compressor=compressor)
    assert (average.module.blocks[0].ssm.order, int(average.n_averaged)) == (5, 3)
    compressor.step(2)
    assert all(torch.equal(value, before[name]) for name, value in average.state_dict().items())
    average.update_parameters(make())
    assert int(average.n_averaged) == 1


class Both(nn.Module):
    """As trainers hold them: the model and its average side by side."""

    def __init__(self):
        super().__init__()
        self.net = make()
        self.ema = AveragedModel(self.net)


def test_an_average_beside_its_model_is_refused_with_what_to_write():
    both = Both()
    before = copy.deepcopy(both.state_dict())
    for call in (compress_, lambda model, **options: Compressor(model, when=[1], **options)):
        with pytest.raises(CompressionError, match=r"ema is an AveragedModel inside the model.*follow=\[model\.ema\]"):
            call(both, keep=TargetOrder(5))
    assert all(torch.equal(value, before[name]) for name, value in both.state_dict().items())
    compress_(both.net, keep=TargetOrder(5), follow=[both.ema])  # the cure
    both.ema.update_parameters(both.net)
    compress_(both, keep=TargetOrder(3), filter_fn=lambda module, name: name.startswith("ema"))
    assert (both.net.blocks[0].ssm.order, both.ema.module.blocks[0].ssm.order) == (5, 3)


class WithCopy(Both):
    """The average is a plain copy, which nothing marks."""

    def __init__(self):
        super().__init__()
        self.ema = copy.deepcopy(self.net).requires_grad_(False)


def test_a_frozen_copy_beside_its_model_is_refused_and_frozen_layers_are_not():
    """Cut apart, the average of two models had states of two coordinates, and nothing said so."""
    both = WithCopy()
    with torch.no_grad():
        for own, average in zip(both.net.parameters(), both.ema.parameters(), strict=True):
            own += 0.2 * own.std() * torch.randn(own.shape) if own.numel() > 1 else 0
            average.lerp_(own, 0.1)
    adamw = torch.optim.AdamW(both.net.parameters())
    with pytest.raises(CompressionError, match=r"ema\.blocks\.0\.ssm is frozen.*copy of net\..*follow=\[model\.ema\]"):
        Compressor(both, adamw, when=[1], keep=TargetOrder(5))
    Compressor(both.net, adamw, when=[1], keep=TargetOrder(5), follow=[both.ema]).step(1)  # the cures
    adamw = torch.optim.AdamW(both.net.parameters())
    compress_(both, optimizer=adamw, keep=TargetOrder(4), filter_fn=lambda module, name: name.startswith("net."))
    assert (both.net.blocks[0].ssm.order, both.ema.blocks[0].ssm.order) == (4, 5)
    model = make()
    model.blocks[0].ssm.requires_grad_(False)
    compress_(model, optimizer=torch.optim.AdamW(model.parameters()), keep=TargetOrder(5))
    assert [block.ssm.order for block in model.blocks] == [5, 5]


@pytest.mark.parametrize("case", AVERAGES)
def test_an_average_that_was_cut_alone_does_not_average_a_model_of_other_coordinates(case):
    build, name = AVERAGES[case]
    model = make()
    average = build(model)
    whole = copy.deepcopy(average.state_dict())
    compress_(model, keep=TargetOrder(5))
    compress_(average, keep=TargetOrder(5))
    for twin in (average, copy.deepcopy(average), pickle.loads(pickle.dumps(average)) if case == "torch" else average):
        with pytest.raises(CompressionError, match=r"was cut alone, so its states are not.*follow=\[average\]"):
            getattr(twin, name)(model)
    getattr(build(average.module), name)(average.module)
    average.load_state_dict(whole)
    getattr(average, name)(make())


def test_a_cut_of_an_average_that_fails_leaves_it_averaging(monkeypatch):
    model = make()
    average = AveragedModel(model)

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("compressm.compression.cutting.renew_wrappers_", fail)
        with pytest.raises(KeyboardInterrupt):
            compress_(average, keep=TargetOrder(5))
    assert "update_parameters" not in vars(average)
    assert average.module.blocks[0].ssm.order == 12
    average.update_parameters(model)


def test_a_container_with_a_method_of_that_name_is_no_average():
    container = nn.ModuleDict({"module": make()})
    compress_(container, keep=TargetOrder(5))
    container.update(nn.ModuleDict({"other": make()}))
    assert list(container) == ["module", "other"]
