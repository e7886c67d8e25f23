"""Gated delta nets of transformers: what their adapters promise, and cuts in the forms that they can store."""

import copy

import pytest
import torch

import compressm as cs
from compressm.adapters import adapter_for, find
from compressm.compression import CompressionError
from compressm.families.memory.forms import Fitted, Selected
from tests.adapters.test_mamba2 import IDS, MANY, THREE, cut, layers, mixers, runs, simulated
from tests.marks import later

transformers = pytest.importorskip("transformers")

SIZES = {
    **{"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 3, "eos_token_id": None, "pad_token_id": 0},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {
    **{"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
}
INDEXER = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
    **{"indexer_budget": 64, "indexer_compress_ratio": 4},
}
CONFIGS = {
    "Qwen3Next": ("Qwen3NextConfig", EXPERTS),
    "Qwen3_5": ("Qwen3_5TextConfig", {}),
    "Qwen3_5Moe": ("Qwen3_5MoeTextConfig", EXPERTS),
    "Qwen4Exp": ("Qwen4ExpTextConfig", {**EXPERTS, **INDEXER}),
}
EVERY = later(CONFIGS, "Qwen3Next", "Qwen3_5")


def make(name="Qwen3Next", seed=0):
    torch.manual_seed(seed)
    kind, more = CONFIGS[name]
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, kind)(**SIZES | more)).eval()
    for mixer, adapter in find(model).values():
        mixer.A_log.data -= 3  # memories that are long enough to matter
        for key in adapter.rows(mixer):
            mixer.get_parameter(key).data *= 8
    return model


def read_out(mixer, x, **options):
    mixer, found = copy.deepcopy(mixer), {}
    mixer.norm.register_forward_pre_hook(lambda norm, args: found.update(y=args[0]))
    mixer(x, **options)
    return found["y"].detach().view(*x.shape[:2], -1)


@pytest.mark.parametrize("name", EVERY)
def test_steps_and_a_scan_are_the_mixers_own_output(name):
    found = find(make(name))
    assert len(found) >= 2
    mask = torch.ones(3, 70, dtype=torch.long)
    mask[0, :9], mask[1, 60:] = 0, 0
    for mixer, adapter in found.values():
        x = torch.randn(3, 70, 16)
        for counted in (None, mask):
            own = simulated(mixer, adapter, x, adapter.read(mixer), None if counted is None else counted.bool())
            there = (torch.ones_like(mask) if counted is None else mask).bool()
            theirs = read_out(mixer, x, attention_mask=counted)
            torch.testing.assert_close(own[there].float(), theirs[there], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_a_selected_mixer_is_the_masked_one_and_loads_and_decodes_in_plain_transformers(name, tmp_path):
    model = make(name)
    masked = copy.deepcopy(model)
    kept = {path: Selected().reduce(layer.data, torch.arange(3)).W.argmax(1) for path, layer in layers(model).items()}
    records = cut(model, form=cs.Selected())
    assert [(one.order, one.rank) for one in records] == [(8, 3)] * len(kept)
    for path, mixer in mixers(masked).items():
        drop = torch.ones(2, 8, dtype=torch.bool).scatter(1, kept[path], False)
        for key, rows in adapter_for(mixer).rows(mixer).items():
            for place in rows.places:
                mixer.get_parameter(key).data[place[drop]] = 0
        mixer.norm.variance_epsilon *= 3 / 8  # of outputs that are √(3/8) as large
    torch.testing.assert_close(model(IDS).logits, masked(IDS).logits, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert again.config.linear_key_head_dim == 3
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    written = [one.generate(IDS[:, :4], max_new_tokens=6, do_sample=False) for one in (again, masked)]
    assert torch.equal(*written)


@pytest.mark.parametrize("form", [Selected(), Fitted(2)], ids=str)
def test_all_states_reproduce_the_output(form):
    layer = next(iter(layers(make()).values())).data
    assert layer.error(form.reduce(layer, torch.arange(8))) < 1e-7


def test_the_measured_error_is_that_of_the_mixer_up_to_the_factor_that_its_norm_removes():
    model = make()
    before, inputs = copy.deepcopy(model), {}
    watched = copy.deepcopy(model)
    for path, mixer in mixers(watched).items():
        mixer.register_forward_pre_hook(
            lambda mixer, args, given, path=path: inputs.update({path: given["hidden_states"].detach()}),
            with_kwargs=True,
        )
    watched(IDS)
    for record in cut(model, form=cs.Selected()):
        old, new = (read_out(mixers(one)[record.module], inputs[record.module]) for one in (before, model))
        expected = float((new * (3 / 8) ** 0.5 - old).norm() / old.norm())
        assert record.measured_error == pytest.approx(expected, rel=1e-4)


def test_a_fit_is_better_than_its_start():
    compared = cs.compare_forms(make(), 3, lambda model: model(MANY))
    for fitted, selected in compared.forms.values():
        assert (fitted.form, selected.form) == (Fitted(), Selected())
        assert fitted.error <= selected.error
        assert fitted.storable
        assert selected.storable


@pytest.mark.parametrize("form", [cs.Folded(), cs.Mapped()], ids=str)
def test_a_form_that_the_mixer_cannot_store_is_refused_by_name(form):
    with pytest.raises(CompressionError, match=r"a Qwen3NextGatedDeltaNet cannot store any .*expected form=Fitted"):
        cut(make(), form=form)


def test_training_goes_on():
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compressor = cs.Compressor(model, optimizer, when=[2], keep=THREE, calibrate=runs, form=cs.Selected())
    for step in range(1, 4):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        compressor.step(step)
    mixer = mixers(model)["model.layers.0.linear_attn"]
    assert optimizer.state[mixer.conv1d.weight]["exp_avg"].shape == mixer.conv1d.weight.shape == (36, 1, 4)
    assert mixer.head_k_dim == model.config.linear_key_head_dim == 3


def test_a_mixer_that_looks_different_is_refused_by_name():
    model = make()
    mixers(model)["model.layers.2.linear_attn"].head_k_dim = 7
    with pytest.raises(
        CompressionError, match=r"layers.2.linear_attn: Qwen3NextGatedDeltaNet .* has head_k_dim 7, but"
    ):
        cut(model)
