"""Mamba-2 mixers with maps: the balanced projection behind convolution and activation."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch.func import functional_call

import compressm as cs
from compressm.adapters import find
from compressm.compression import CompressionError, cutting
from tests.adapters.test_mamba2 import EVERY, IDS, MANY, THREE, cut, layers, make, mixers, read_out, runs


def mapped(name="Mamba2", order=3, **options):
    model = make(name, **options)
    cut(model, keep=cs.TargetOrder(order), form=cs.Mapped())
    return model


def identity_maps(model):
    """The model as a mapped one whose maps change nothing."""
    for mixer, adapter in find(model).values():
        adapter.add_maps_(mixer, 8)
        for part in (mixer.key_map, mixer.query_map):
            part.data = torch.eye(8).expand(2, -1, -1).clone()
    return model


@pytest.mark.parametrize("name", EVERY)
def test_maps_that_change_nothing_give_the_mixers_own_output(name):
    model = make(name)
    whole = identity_maps(copy.deepcopy(model))
    mask = torch.ones(3, 30, dtype=torch.long)
    mask[0, :9], mask[1, 22:] = 0, 0
    for plain, with_maps in zip(mixers(model).values(), mixers(whole).values(), strict=True):
        x = torch.randn(3, 30, 16)
        for options in ({}, {"attention_mask": mask}):
            torch.testing.assert_close(with_maps(x, **options), plain(x, **options), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(whole(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_generation_with_a_cache_is_that_of_the_whole_model_where_maps_change_nothing(name):
    model = make(name)
    whole = identity_maps(copy.deepcopy(model))
    texts = [one.generate(IDS[:, :5], max_new_tokens=8, do_sample=False) for one in (model, whole)]
    assert torch.equal(*texts)


def test_a_norm_that_is_left_out_is_left_out_with_maps_too():
    model = make("FalconH1", mamba_rms_norm=False)
    whole = identity_maps(copy.deepcopy(model))
    torch.testing.assert_close(whole(IDS).logits, model(IDS).logits)


def test_the_state_has_as_many_rows_as_the_order_and_the_convolution_keeps_all():
    model = mapped()
    cache = model(IDS, use_cache=True).cache_params
    assert cache.layers[0].recurrent_states[0].shape[-1] == 3
    assert cache.layers[0].conv_states[0].shape[1] == 32 + 2 * 2 * 8
    mixer = mixers(model)["backbone.layers.0.mixer"]
    assert type(mixer).__name__ == "MappedMamba2Mixer"
    assert mixer.key_map.shape == mixer.query_map.shape == (2, 8, 3)
    assert mixer.in_proj.weight.shape == (100, 16)
    assert model.config.state_size == 8


def test_maps_have_the_smallest_error_and_columns_of_equal_norms():
    errors = {form: cut(make(), form=form)[0].measured_error for form in (cs.Mapped(), cs.Selected())}
    assert errors[cs.Mapped()] < errors[cs.Selected()]
    mixer = mixers(mapped())["backbone.layers.0.mixer"]
    torch.testing.assert_close(mixer.key_map.norm(dim=1), mixer.query_map.norm(dim=1))


def test_a_mapped_mixer_is_cut_again_by_its_maps():
    model = mapped(order=6)
    before = copy.deepcopy(model)
    records = cut(model)
    assert [(one.order, one.rank) for one in records] == [(6, 3)] * 3
    name = records[0].module
    x = torch.randn(8, 24, 16)
    old, twice, once = (read_out(mixers(one)[name], x) for one in (before, model, mapped()))
    assert (twice - old).norm() <= 1.5 * (once - old).norm()
    with pytest.raises(
        CompressionError, match=r"an earlier Mapped cut gave the layer maps; Fitted\(.*expected form=Map"
    ):
        cut(model, keep=cs.TargetOrder(2), form=cs.Fitted())
    cut(model, keep=cs.TargetOrder(2), form=cs.Selected())
    assert mixers(model)[name].key_map.shape == (2, 8, 2)


@pytest.mark.parametrize("way", ["save_model", "save_pretrained", "pickle", "copy"])
def test_a_mapped_model_is_saved_and_loaded(way, tmp_path):
    model = mapped()
    if way == "save_model":
        cs.save_model(model, tmp_path)
    elif way == "save_pretrained":
        model.save_pretrained(tmp_path)
    if way.startswith("save"):
        again = cs.load_model(tmp_path)
    else:
        again = pickle.loads(pickle.dumps(model)) if way == "pickle" else copy.deepcopy(model)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.config.compressm_maps == {"0": 3, "1": 3, "2": 3}
    written = [one.generate(IDS[:, :4], max_new_tokens=6, do_sample=False) for one in (again, model)]
    assert torch.equal(*written)
    cut(again, keep=cs.TargetOrder(2))
    assert again.config.compressm_maps == {"0": 2, "1": 2, "2": 2}


def test_without_this_package_a_mapped_file_is_the_model_before_the_cut(tmp_path):
    model = mapped()
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(plain(IDS).logits, make()(IDS).logits)


def test_layers_of_unequal_orders_are_saved_and_loaded(tmp_path):
    model = make()
    overrides = {"*layers.1.mixer": cs.TargetOrder(3)}
    cut(model, keep=cs.KeepFraction(1.0), overrides=overrides, form=cs.Selected(), gate=1.0)
    for name, save in {"ours": cs.save_model, "theirs": lambda model, path: model.save_pretrained(path)}.items():
        with nullcontext() if name == "ours" else pytest.warns(UserWarning, match="the layers have 8, 3, 8 states"):
            save(model, tmp_path / name)
        again = cs.load_model(tmp_path / name)
        assert [layer.state_size for layer in again.config.per_layer_config] == [8, 3, 8]
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    before = model(IDS).logits
    cs.pad_orders_(model)
    assert model.config.state_size == 8
    torch.testing.assert_close(model(IDS).logits, before)


def trained(model, optimizer):
    optimizer.zero_grad()
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()


def adamw(model, **options):
    """AdamW with a group without weight decay, which is still empty."""
    groups = [{"params": list(model.parameters())}, {"params": [], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, **options)


def group_of(optimizer, parameter):
    return next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))


def test_maps_join_a_group_without_weight_decay_and_are_trained_under_a_scheduler():
    model = make().train()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    half = cs.KeepFraction(0.5)
    compressor = cs.Compressor(model, optimizer, when=[2, 4], keep=half, calibrate=runs, form=cs.Mapped())
    for step in range(1, 6):
        trained(model, optimizer)
        scheduler.step()
        compressor.step(step)
    mixer = mixers(model)["backbone.layers.0.mixer"]
    assert [event.rank for event in compressor.history] == [4, 4, 4, 2, 2, 2]
    for part in (mixer.key_map, mixer.query_map):
        assert group_of(optimizer, part) is optimizer.param_groups[1]
        assert optimizer.state[part]["exp_avg"].shape == (2, 8, 2)
        before = part.detach().clone()
        trained(model, optimizer)
        assert not torch.equal(part, before)
    assert group_of(optimizer, mixer.in_proj.weight)["weight_decay"] > 0


def cut_with(optimizer, model):
    compressor = cs.Compressor(model, optimizer, when=[1], keep=THREE, calibrate=runs, form=cs.Mapped())
    compressor.step(1)
    return mixers(model)["backbone.layers.0.mixer"].key_map


def test_maps_join_the_group_of_norms_and_rates_whose_options_may_differ():
    model = make()
    small = [p for p in model.parameters() if p.ndim == 1]
    large = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": large, "lr": 1e-3}, {"params": small, "lr": 1e-4, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    assert group_of(optimizer, cut_with(optimizer, model)) is optimizer.param_groups[1]


def test_maps_without_a_group_for_them_decay_with_a_warning():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.warns(UserWarning, match=r"maps get the weight decay 0.01 .*a group without weight decay"):
        part = cut_with(optimizer, model)
    assert group_of(optimizer, part) is optimizer.param_groups[0]


def test_maps_are_not_trained_by_muon_which_takes_matrices_alone():
    def split(model):
        rest = [p for p in model.parameters() if p.ndim != 2]
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-3), rest

    model = make().train()
    muon, rest = split(model)
    adam = torch.optim.AdamW(rest, lr=1e-3, weight_decay=0.0)
    part = cut_with([muon, adam], model)
    assert group_of(adam, part) is adam.param_groups[0]
    model(IDS, labels=IDS).loss.backward()
    for optimizer in (muon, adam):
        optimizer.step()

    model = make()
    muon, rest = split(model)
    for p in rest:
        p.requires_grad_(False)
    with pytest.raises(CompressionError, match=r"Muon cannot train maps of shape \(2, 8, 3\): train one of"):
        cut_with(muon, model)
    assert not hasattr(mixers(model)["backbone.layers.0.mixer"], "key_map")


@pytest.mark.parametrize("form", [cs.Selected(), cs.Mapped()], ids=str)
def test_a_training_goes_on_from_a_checkpoint(form, tmp_path):
    def begun(seed=0):
        model = make(seed=seed).train()
        optimizer = adamw(model)
        return model, optimizer, cs.Compressor(model, optimizer, when=[2], keep=THREE, calibrate=runs, form=form)

    model, optimizer, compressor = begun()
    for step in range(1, 4):
        trained(model, optimizer)
        compressor.step(step)
    cs.compression.save_checkpoint(tmp_path / "file", model=model, optimizer=optimizer, compressor=compressor)
    again, other, later = begun(seed=1)
    cs.compression.load_checkpoint(tmp_path / "file", model=again, optimizer=other, compressor=later)
    for one, own in ((model, optimizer), (again, other)):
        trained(one, own)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert again.config.to_dict() == model.config.to_dict()


def test_a_checkpoint_that_fails_to_load_leaves_no_map_behind(tmp_path):
    cs.compression.save_checkpoint(tmp_path / "file", model=mapped())
    model = make(seed=1)
    before, logits = copy.deepcopy(model.state_dict()), model(IDS).logits

    def fails(*_, **__):
        raise RuntimeError("in the last moment")

    model.register_load_state_dict_post_hook(fails)
    with pytest.raises(RuntimeError, match="in the last moment"):
        cs.compression.load_checkpoint(tmp_path / "file", model=model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(model(IDS).logits, logits)
    assert layers(model)["backbone.layers.0.mixer"].order == 8


def changed(model, order):
    """A mixer with maps, a cut of them to this order, and what the cut would write."""
    layer = layers(model)["backbone.layers.0.mixer"]
    reduction = layer.form.reduce(layer.data, torch.arange(order))
    return layer.module, reduction, reduction.change(layer.module, layer.adapter, layer.system)


def test_gradients_of_maps_are_carried_as_the_vector_jacobian_product_of_the_lift():
    mixer, reduction, change = changed(mapped(order=6).double(), 3)
    small = {name: value.detach().requires_grad_() for name, value in change.values.items()}
    full = {name: small[name] @ (reduction.T if name == "key_map" else reduction.W).mT for name in small}
    x, y = torch.randn(4, 20, 16).double(), torch.randn(4, 20, 16).double()
    there = functional_call(mixer, full, (x,))
    # The lifted mixer computes what the reduced one computes.
    torch.testing.assert_close(there, functional_call(mixer, small, (x,)))
    on_full = torch.autograd.grad((there * y).sum(), list(full.values()), retain_graph=True)
    expected = torch.autograd.grad((there * y).sum(), list(small.values()))
    carried = change.gradient(dict(zip(full, on_full, strict=True)))
    for name, value in zip(small, expected, strict=True):
        assert value.any()
        torch.testing.assert_close(carried[name], value)


def test_updates_of_maps_are_carried_as_the_change_itself():
    _, reduction, change = changed(mapped(order=6), 3)
    moments = {name: torch.randn(2, 8, 6, dtype=torch.float64) for name in ("key_map", "query_map")}
    pushed = change.update(moments)
    torch.testing.assert_close(pushed["key_map"], moments["key_map"] @ reduction.W)
    torch.testing.assert_close(pushed["query_map"], moments["query_map"] @ reduction.T)
    assert change.first("key_map", moments["key_map"]).shape == (2, 8, 3)


def test_a_guard_takes_the_maps_away_again():
    model = make()
    before, logits = copy.deepcopy(model.state_dict()), model(IDS).logits
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    scores = iter([1.0, 0.0])
    guard = cs.Rollback(lambda: next(scores), drop=0.1, settle=1)
    compressor = cs.Compressor(model, optimizer, when=[1], keep=THREE, calibrate=runs, form=cs.Mapped(), guard=guard)
    compressor.step(1)
    assert model.config.compressm_maps == {"0": 3, "1": 3, "2": 3}
    compressor.step(2)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(model(IDS).logits, logits, rtol=0, atol=0)
    assert model.config.to_dict().get("compressm_maps", {}) == {}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_a_cut_that_fails_leaves_no_map_behind(monkeypatch):
    model = make()
    before, config = copy.deepcopy(model.state_dict()), model.config

    def fails(*_):
        raise RuntimeError("in the last moment")

    monkeypatch.setattr(cutting, "refuse_to_average_", fails)
    with pytest.raises(RuntimeError, match="in the last moment"):
        cut(model, form=cs.Mapped())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.config is config
    assert layers(model)["backbone.layers.0.mixer"].order == 8


def test_a_follower_gets_the_same_maps():
    model, average = make(), make(seed=1)
    cut(model, form=cs.Mapped(), follow=[average], calibrate=lambda model: model(MANY))
    for one, other in zip(mixers(model).values(), mixers(average).values(), strict=True):
        assert torch.equal(one.key_map, other.key_map)
        assert not torch.equal(one.in_proj.weight, other.in_proj.weight)
