"""Models of transformers on disk, with equal and with unequal orders, in its files and in ours."""

import json
import sys
import time

import pytest
import torch
from torch import nn

import compressm as cs
from compressm.adapters import find
from compressm.compression import SavingError, load_checkpoint, save_checkpoint
from tests.adapters.transformers_models import (
    IDS,
    MambaForCausalLM,
    cut,
    make,
    mixers,
    said_orders,
    same,
    train,
    transformers,
    unequal,
    written,
)


@pytest.mark.parametrize(
    "options", [{}, {"tie_word_embeddings": False, "use_bias": True}, {"use_conv_bias": False}], ids=str
)
def test_equal_orders_come_back_from_transformers_own_files(options, tmp_path):
    model = make(**options)
    cut(model)
    model.save_pretrained(tmp_path)
    for loaded in (transformers.AutoModelForCausalLM.from_pretrained(tmp_path), cs.load_model(tmp_path)):
        assert type(loaded) is MambaForCausalLM
        assert loaded.config.state_size == 3
        assert said_orders(loaded) == [3, 3]
        assert same(loaded, model)
        assert torch.equal(written(loaded), written(model))


@pytest.mark.parametrize("kind", [MambaForCausalLM, transformers.MambaModel])
@pytest.mark.parametrize("shard", ["1GB", "2KB"])
def test_unequal_orders_are_read_from_transformers_files_by_us_alone(kind, shard, tmp_path):
    model = unequal(make(kind), 2, 5)
    with pytest.warns(UserWarning, match="the layers have 2, 5 states"):
        model.save_pretrained(tmp_path, max_shard_size=shard)
    with pytest.raises(RuntimeError, match="'state_size' is a per-layer attribute"):
        kind.from_pretrained(tmp_path)
    loaded = cs.load_model(tmp_path)
    assert said_orders(loaded) == [2, 5]
    assert same(loaded, model)


def test_unequal_orders_are_named_when_saved_and_zero_states_make_them_an_ordinary_model(tmp_path):
    model = unequal(make(num_hidden_layers=3), 2, 5, 6)
    optimizer = torch.optim.AdamW(model.parameters())
    before, text = model(IDS).logits, written(model)
    with pytest.warns(UserWarning, match=r"2, 5, 6 states, .*compressm\.pad_orders_\(model\), which changes no output"):
        model.save_pretrained(tmp_path / "unequal")
    assert cs.pad_orders_(model, 16, optimizer=optimizer) == 16
    assert said_orders(model) == [16, 16, 16]
    assert model.config.state_size == 16
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-6, atol=1e-6)
    model.save_pretrained(tmp_path / "equal")
    loaded = MambaForCausalLM.from_pretrained(tmp_path / "equal").eval()
    assert same(loaded, model)
    assert torch.equal(written(loaded), text)
    assert cs.deploy.check(loaded, cs.deploy.LLAMA_CPP_CPU).fine
    train(model, optimizer)


@pytest.mark.parametrize("to", [16, 32])
def test_zero_states_change_no_bit_of_a_model_of_transformers(to):
    model = make(state_size=8)
    before = model(IDS).logits
    cs.pad_orders_(model, to)
    assert float((model(IDS).logits - before).detach().abs().max()) == 0.0


def test_one_order_for_all_layers_loads_in_plain_transformers(tmp_path):
    model = make()
    cut(model, keep=cs.EnergyTolerance(0.1), uniform=True)
    model.save_pretrained(tmp_path)
    assert same(MambaForCausalLM.from_pretrained(tmp_path).eval(), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_budget_counts_the_bytes_of_the_cache(dtype):
    model = make().to(dtype)
    cache = model(IDS[:1], use_cache=True).cache_params
    held = [
        state
        for layer in cache.layers
        for table in (layer.conv_states, layer.recurrent_states)
        for state in table.values()
    ]
    found = sum(adapter.state_bytes(module, adapter.order(module)) for module, adapter in find(model).values())
    assert found == sum(state.nbytes for state in held)


@pytest.mark.parametrize("kind", [MambaForCausalLM, transformers.MambaModel])
@pytest.mark.parametrize("orders", [(4, 4), (2, 5)])
def test_our_files_hold_models_of_transformers(kind, orders, tmp_path):
    model = unequal(make(kind, tie_word_embeddings=orders == (2, 5)), *orders)
    model.name_or_path = "/home/of/somebody"
    random = torch.get_rng_state()
    cs.save_model(model, tmp_path / "model")
    loaded = cs.load_model(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), random)
    assert "somebody" not in (tmp_path / "model" / "config.json").read_text()
    assert type(loaded) is kind
    assert said_orders(loaded) == list(orders)
    assert loaded.config.to_dict() == model.config.to_dict()
    assert same(loaded, model)
    cut(loaded, keep=cs.TargetOrder(1))
    assert said_orders(loaded) == [1, 1]


def test_files_hold_how_a_model_is_used(tmp_path):
    model = unequal(make().bfloat16(), 2, 5)
    model.generation_config.max_new_tokens, model.config.use_cache = 3, False
    model.backbone.embeddings.requires_grad_(False)
    model.gradient_checkpointing_enable()
    cs.save_model(model, tmp_path / "model.safetensors")
    loaded = cs.load_model(tmp_path / "model.safetensors")
    assert loaded.generate(IDS[:1], pad_token_id=0).shape == (1, IDS.shape[1] + 3)
    assert loaded.lm_head.weight is loaded.backbone.embeddings.weight
    assert not loaded.lm_head.weight.requires_grad
    assert loaded.dtype == torch.bfloat16
    assert not loaded.config.use_cache
    loaded.train()(IDS, labels=IDS).loss.backward()
    assert cs.load_model(tmp_path / "model.safetensors", dtype=torch.float64).dtype == torch.float64


def test_a_model_of_transformers_may_be_part_of_another(tmp_path):
    model = nn.Sequential(nn.Embedding(20, 8), unequal(make(), 2, 5))
    cs.save_model(model, tmp_path / "model")
    assert same(cs.load_model(tmp_path / "model")[1], model[1])


def test_training_goes_on_from_a_checkpoint_in_a_new_model(tmp_path):
    model, other = make(), make(seed=1)
    optimizer, another = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, other))
    train(model, optimizer)
    unequal(model, 2, 5, optimizer=optimizer)
    save_checkpoint(tmp_path / "c.pt", model=model, optimizer=optimizer, step=1)
    load_checkpoint(tmp_path / "c.pt", model=other, optimizer=another)
    assert said_orders(other) == [2, 5]
    assert same(other, model)
    train(model, optimizer)
    train(other, another)
    assert same(other, model)


def test_a_checkpoint_that_cannot_be_taken_changes_nothing(tmp_path):
    save_checkpoint(tmp_path / "c.pt", model=unequal(make(), 2, 5), step=1)
    model = make(seed=1)
    del mixers(model)[1].ssm_state_size
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(SavingError, match=r"layers.1.mixer: ssm_state_size should change with the order"):
        load_checkpoint(tmp_path / "c.pt", model=model)
    torch.testing.assert_close(list(model.state_dict().values()), before, rtol=0, atol=0)


def test_files_are_read_once_transformers_is_imported(tmp_path, monkeypatch):
    model = make()
    model.save_pretrained(tmp_path / "theirs")
    cs.save_model(model, tmp_path / "ours")
    monkeypatch.delitem(sys.modules, "transformers")
    for name in ("theirs", "ours"):
        with pytest.raises(SavingError, match=rf"{name}.*is not imported: import transformers first"):
            cs.load_model(tmp_path / name)


BAD_FOLDERS = {
    "another model": ("config.json", '{"model_type": "bamba", "architectures": ["BambaForCausalLM"]}'),
    "no architecture": ("config.json", '{"model_type": "mamba"}'),
    "not JSON": ("config.json", '{"model_type"'),
    "a list": ("config.json", '["model_type"]'),
    "a size in words": (
        "config.json",
        '{"model_type": "mamba", "architectures": ["MambaModel"], "state_size": "three"}',
    ),
    "a layer that is not there": (
        "config.json",
        '{"model_type": "mamba", "architectures": ["MambaModel"], "per_layer_config": {"99": {"state_size": 2}}}',
    ),
    "half the weights": ("model.safetensors", "half"),
    "no places": ("model.safetensors.index.json", "{}"),
    "a file that is missing": ("model.safetensors.index.json", '{"weight_map": {"D": "part-1.safetensors"}}'),
}
SAID = {
    "another model": "BambaForCausalLM is not supported, expected MambaModel, MambaForCausalLM, FalconMambaModel",
    "no architecture": "architectures None, expected one",
    "not JSON": "was not written by save_model.*; config.json beside it cannot be read",
    "a list": "was not written by save_model",
    "a size in words": "MambaConfig does not accept the saved config: .*'state_size' expected int",
    "a layer that is not there": "must be integer layer indices",
    "half the weights": "not a whole safetensors file",
    "no places": "has no weight_map",
    "a file that is missing": "part-1.safetensors does not exist",
}


@pytest.mark.parametrize("bad", BAD_FOLDERS)
def test_a_folder_that_cannot_be_read_is_refused_by_name(bad, tmp_path):
    make().save_pretrained(tmp_path)
    name, contents = BAD_FOLDERS[bad]
    (tmp_path / name).write_text(contents)
    with pytest.raises(SavingError, match=rf"(?s){SAID[bad]}"):
        cs.load_model(tmp_path)


@pytest.mark.parametrize("layers", [3000, 10**9, 10**30])
def test_a_config_with_far_more_layers_than_tensors_is_refused_at_once(layers, tmp_path):
    make().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    start = time.perf_counter()
    with pytest.raises(SavingError, match=r"too many for the|expected at most"):
        cs.load_model(tmp_path)
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("place", [5, None, [], "", "/"])
def test_an_index_that_names_no_files_is_refused(place, tmp_path):
    make().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(SavingError, match="in its weight_map, expected names of files"):
        cs.load_model(tmp_path)
