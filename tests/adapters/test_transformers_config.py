"""A model of transformers has one config, its own: a cut changes it everywhere in the model and nowhere else."""

import copy

import pytest
import torch
from torch import nn

import compressm as cs
from compressm.compression import load_checkpoint, save_checkpoint
from tests.adapters.transformers_models import (
    MambaConfig,
    MambaForCausalLM,
    check_same,
    configs,
    cut,
    make,
    mixers,
    picture,
    runs,
    said_orders,
    same,
    transformers,
    unequal,
    written,
)

SIZES = {"vocab_size": 20, "hidden_size": 8, "state_size": 6, "time_step_rank": 2, "eos_token_id": None}


def a_config(**options):
    return MambaConfig(**{**SIZES, "num_hidden_layers": 2, **options})


def one_config(model):
    """The config that all parts of the model hold."""
    held = configs(model)
    assert len(held) >= 1 + 2 * len(mixers(model))
    assert all(config is held[0] for config in held)
    return held[0]


def without_layers(count, kept):
    """A model of `count` layers from which all but the first `kept` were removed."""
    model = make(num_hidden_layers=count)
    model.backbone.layers = model.backbone.layers[:kept]
    return model


@pytest.mark.parametrize("kind", [MambaForCausalLM, transformers.MambaModel])
@pytest.mark.parametrize("orders", [(3, 3), (2, 5)])
def test_the_users_config_stays_and_the_models_changes(kind, orders):
    config = a_config()
    before = config.to_dict()
    model = unequal(kind(config).eval(), *orders)
    assert config.to_dict() == before
    assert one_config(model) is model.config is not config
    assert said_orders(model) == list(orders)
    assert config.num_hidden_layers == model.config.num_hidden_layers


def test_each_cut_leaves_the_config_that_was_there_before_it():
    model = make()
    cut(model, keep=cs.TargetOrder(4))
    between = model.config
    cut(model, keep=cs.TargetOrder(2))
    assert (between.state_size, model.config.state_size) == (4, 2)


def test_a_cut_without_effect_keeps_the_config():
    model = make()
    config = model.config
    assert cut(model, keep=cs.TargetOrder(6)) == []
    assert one_config(model) is config


@pytest.mark.parametrize("nested", [False, True])
def test_models_made_from_one_config_are_cut_apart(nested):
    config = a_config()
    one, other = (MambaForCausalLM(config).eval() for _ in range(2))
    if nested:
        both = nn.ModuleDict({"one": one, "other": other})
        first = {"filter_fn": lambda module, name: name.startswith("one"), "calibrate": lambda both: runs(both["one"])}
        cs.compress_(both, keep=cs.TargetOrder(3), **first)
    else:
        cut(one)
    assert (one_config(one).state_size, one_config(other).state_size, config.state_size) == (3, 6, 6)
    assert one_config(other) is config
    cut(other, keep=cs.TargetOrder(2))
    assert (said_orders(one), said_orders(other)) == ([3, 3], [2, 2])


def test_a_follower_with_the_same_config_gets_its_own():
    config = a_config()
    model, average = (MambaForCausalLM(config).eval() for _ in range(2))
    cut(model, follow=[average])
    assert one_config(model) is not one_config(average)
    assert said_orders(model) == said_orders(average) == [3, 3]
    assert config.state_size == 6


@pytest.mark.parametrize("orders", [(3, 3), (2, 5)])
def test_a_model_with_fewer_layers_than_its_config_keeps_one_config(orders):
    model = without_layers(4, 2)
    unequal(model, *orders)
    config = one_config(model)
    assert [layer.state_size for layer in config.per_layer_config] == [*orders, max(orders), max(orders)]
    assert config.num_hidden_layers == 4
    if orders == (3, 3):
        assert config.state_size == 3
        assert not config.to_dict().get("per_layer_config")


def test_a_model_with_fewer_layers_comes_back_from_transformers_own_files(tmp_path):
    model = without_layers(4, 2)
    cut(model)
    model.config.num_hidden_layers = 2
    model.save_pretrained(tmp_path)
    loaded = MambaForCausalLM.from_pretrained(tmp_path).eval()
    assert said_orders(loaded) == [3, 3]
    assert same(loaded, model)


@pytest.mark.parametrize(
    "part", ["backbone", "backbone.layers", "backbone.layers.0", "backbone.layers.0.mixer"], ids=str
)
def test_a_cut_of_a_part_reaches_the_config_of_the_whole(part):
    model = make()
    config, inner = model.config, model.get_submodule(part)
    cs.compress_(inner, keep=cs.TargetOrder(3), calibrate=lambda part: runs(model))
    assert one_config(model) is not config
    assert config.state_size == 6
    assert said_orders(model) == ([3, 6] if ".0" in part else [3, 3])
    assert torch.equal(written(model), written(model, use_cache=False))


def test_layers_without_a_model_share_one_config():
    config = MambaConfig(hidden_size=8, state_size=6, num_hidden_layers=2, time_step_rank=2)
    stack = nn.ModuleList([type(mixers(make())[0])(config, k) for k in range(2)])
    x = torch.randn(3, 12, 8)
    cs.compress_(stack, keep=cs.TargetOrder(3), calibrate=lambda stack: [layer(x) for layer in stack])
    assert stack[0].config is stack[1].config is not config
    assert (stack[0].config.state_size, config.state_size) == (3, 6)


@pytest.mark.parametrize("kept", [2, 4])
def test_a_rollback_restores_what_the_config_said(kept):
    model, scores = without_layers(4, kept), iter([1.0, 0.5])
    guard = cs.Rollback(lambda: next(scores), settle=0)
    before, config = str(model.config.to_dict()), model.config
    compressor = cs.Compressor(model, when=[1], keep=cs.TargetOrder(3), calibrate=runs, gate=1.0, guard=guard)
    compressor.step(1)
    assert one_config(model).state_size == 3
    compressor.step(2)
    assert str(one_config(model).to_dict()) == str(config.to_dict()) == before
    assert [mixer.ssm_state_size for mixer in mixers(model)] == [6] * kept


def test_a_checkpoint_changes_only_the_config_of_the_model_that_takes_it(tmp_path):
    save_checkpoint(tmp_path / "c.pt", model=unequal(make(), 2, 5), step=1)
    config = a_config()
    model, other = (MambaForCausalLM(config).eval() for _ in range(2))
    before = picture(other)
    load_checkpoint(tmp_path / "c.pt", model=model)
    assert one_config(model) is not config
    assert said_orders(model) == [2, 5]
    check_same(other, before)


def test_a_deep_copy_of_a_cut_model_is_cut_alone():
    model = make()
    cut(model, keep=cs.TargetOrder(4))
    twin = copy.deepcopy(model)
    cut(twin, keep=cs.TargetOrder(2))
    assert (one_config(model).state_size, one_config(twin).state_size) == (4, 2)
    assert (said_orders(model), said_orders(twin)) == ([4, 4], [2, 2])


def test_the_generation_config_is_left_alone():
    model = make()
    generation, said = model.generation_config, str(model.generation_config)
    cut(model)
    assert model.generation_config is generation
    assert str(generation) == said
