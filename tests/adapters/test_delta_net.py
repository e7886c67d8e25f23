"""Gated delta nets of transformers: what their adapters promise, and cuts in the forms that they can store."""

import copy
import pickle
import re
import warnings

import pytest
import torch

import compressm as cs
from compressm.adapters import adapter_for, find
from compressm.compression import CompressionError
from compressm.families.memory.forms import Fitted, Selected
from compressm.families.memory.simulation import outputs
from tests.adapters.test_mamba2 import IDS, MANY, THREE, cut, layers, mixers, runs, simulated
from tests.marks import later

transformers = pytest.importorskip("transformers")

# Weights of models that were never trained are so small that the ε of norms counts.
pytestmark = pytest.mark.filterwarnings("ignore:.*of the norm behind them counts:UserWarning")

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
    "OlmoHybrid": ("OlmoHybridConfig", {}),
}
EVERY = later(CONFIGS, "Qwen3Next", "Qwen3_5", "OlmoHybrid")


def make(name="Qwen3Next", seed=0):
    torch.manual_seed(seed)
    kind, more = CONFIGS[name]
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, kind)(**SIZES | more)).eval()
    for mixer, adapter in find(model).values():
        mixer.A_log.data -= 3  # memories that are long enough to matter
        for key in adapter.rows(mixer):
            mixer.get_parameter(key).data *= 8
    return model


def norm_of(mixer):
    return getattr(mixer, adapter_for(mixer).NORM)


def read_out(mixer, x, **options):
    mixer, found = copy.deepcopy(mixer), {}
    norm_of(mixer).register_forward_pre_hook(lambda norm, args: found.update(y=args[0]))
    mixer(x, **options)
    return found["y"].detach().view(*x.shape[:2], -1)


def inputs_of(model):
    """What every mixer gets, by name."""
    watched, found = copy.deepcopy(model), {}
    for path, mixer in mixers(watched).items():
        mixer.register_forward_pre_hook(
            lambda mixer, args, given, path=path: found.update({path: (*args, *given.values())[0].detach()}),
            with_kwargs=True,
        )
    watched(IDS)
    return found


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
        norm_of(mixer).variance_epsilon *= 3 / 8  # of outputs that are √(3/8) as large
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
    before, inputs = copy.deepcopy(model), inputs_of(model)
    for record in cut(model, form=cs.Selected()):
        old, new = (read_out(mixers(one)[record.module], inputs[record.module]) for one in (before, model))
        expected = float((new * (3 / 8) ** 0.5 - old).norm() / old.norm())
        assert record.measured_error == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("form", [cs.Selected(), cs.Mapped()], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_a_cut_warns_by_how_much_the_epsilon_of_the_norm_changes_its_output(name, form):
    """The mixer's own read-out, through its norm with its ε, and with that by which the norm did not change."""
    model = make(name)
    for mixer in mixers(model).values():
        norm_of(mixer).variance_epsilon = 1e-4
    calls = inputs_of(model)
    with pytest.warns(UserWarning, match="so small that the ε 0.0001 of the norm behind them counts") as caught:
        cut(model, form=form)
    (said,) = (str(one.message) for one in caught if "counts" in str(one.message))
    assert said.startswith("model.layers.")
    assert "(and 1 more)" in said
    changes = []
    model.requires_grad_(False)
    for path, mixer in mixers(model).items():
        y = read_out(mixer, calls[path]).view(*calls[path].shape[:2], 4, 6)
        mean, gain = y.square().mean(-1), torch.full((8, 24, 4), 8 / 3)
        if form == cs.Mapped():
            adapter = adapter_for(mixer)
            q = adapter.mapped_steps(mixer, calls[path].double(), adapter.read(mixer)).queries
            gain = (1 / (3 * q.square().sum(-1))).transpose(1, 2).repeat_interleave(2, dim=2).float()
        found, wanted = (mean.sqrt() / torch.sqrt(mean + eps) for eps in (1e-4, 1e-4 * gain))
        changes.append(float((found - wanted).norm() / wanted.norm()))
    assert float(re.search(r"changes by ([\d.e+-]+) %", said)[1]) == pytest.approx(100 * max(changes), rel=0.06)


def test_a_cut_does_not_warn_of_an_epsilon_that_does_not_count():
    model = make()
    for mixer in mixers(model).values():
        norm_of(mixer).variance_epsilon = 1e-12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [one.rank for one in cut(model, form=cs.Selected())] == [3, 3]


def test_a_fit_is_better_than_its_start():
    compared = cs.compare_forms(make(), 3, lambda model: model(MANY))
    for _, fitted, selected in compared.forms.values():
        assert (fitted.form, selected.form) == (Fitted(), Selected())
        assert fitted.error <= selected.error
        assert fitted.storable
        assert selected.storable


def test_a_form_that_the_mixer_cannot_store_is_refused_by_name():
    with pytest.raises(CompressionError, match=r"a Qwen3NextGatedDeltaNet cannot store any .*expected form=Mapped\(\)"):
        cut(make(), form=cs.Folded())


def mapped(name="Qwen3Next", order=3):
    model = make(name)
    cut(model, keep=cs.TargetOrder(order), form=cs.Mapped())
    return model


def rotated(model):
    """The model as a mapped one whose maps are rotations, which change nothing."""
    for mixer, adapter in find(model).values():
        adapter.add_maps_(mixer, 8)
        Q, _ = torch.linalg.qr(torch.randn(2, 8, 8))
        mixer.key_map.data, mixer.query_map.data = Q, Q.clone()
    return model


@pytest.mark.parametrize("name", EVERY)
def test_rotations_of_keys_and_queries_change_nothing(name):
    model = make(name)
    whole = rotated(copy.deepcopy(model))
    mask = torch.ones(8, 24, dtype=torch.long)
    mask[0, :9], mask[1, 18:] = 0, 0
    for options in ({}, {"attention_mask": mask}):
        there = options.get("attention_mask", torch.ones_like(mask)).bool()
        found = [one(IDS, **options).logits[there] for one in (whole, model)]
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    texts = [one.generate(IDS[:, :5], max_new_tokens=8, do_sample=False) for one in (model, whole)]
    assert torch.equal(*texts)


@torch.no_grad()
@pytest.mark.parametrize("name", EVERY)
def test_a_mapped_mixer_computes_what_was_measured_and_decodes_with_a_small_state(name):
    model = make(name)
    before, calls = copy.deepcopy(model), inputs_of(model)
    for record in cut(model, form=cs.Mapped()):
        mixer = mixers(model)[record.module]
        # Its own output has queries of length 1, which the norm behind it cancels: compared after that norm.
        x = calls[record.module]
        adapter = adapter_for(mixer)
        steps = adapter.mapped_steps(mixer, x.double(), adapter.read(mixer))
        norm = steps.queries.norm(dim=-1, keepdim=True) * 3**0.5  # of n̂ᵀ T, with the division by √3 in place of √8
        own = outputs(steps) / norm[:, :, None]
        own = own.permute(0, 3, 1, 2, 4).flatten(2)
        theirs = read_out(mixer, x)
        assert (own - theirs).norm() < 1e-3 * theirs.norm()  # the ε of the norms is that of other lengths
        full = mixers(before)[record.module]
        ratio = (outputs(steps) - outputs(adapter.steps(full, x.double(), adapter.read(full)))).norm()
        expected = ratio / outputs(adapter.steps(full, x.double(), adapter.read(full))).norm()
        assert record.measured_error == pytest.approx(float(expected), rel=1e-4)
        cache = model(IDS, use_cache=True).past_key_values
        assert cache.get_recurrent_state(mixer.layer_idx, state_idx=0).shape == (8, 4, 3, 6)
    whole, cache, found = model(IDS).logits, None, []
    for t in range(IDS.shape[1]):
        step = model(IDS[:, t : t + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        found.append(step.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=1e-3, atol=1e-4)


def test_maps_have_the_smallest_error_and_are_orthonormal():
    compared = cs.compare_forms(make(), 3, lambda model: model(MANY))
    for best, *others in compared.forms.values():
        assert best.form == cs.Mapped()
        assert best.estimate is None
        assert all(best.error < other.error for other in others)
    mixer = mixers(mapped())["model.layers.0.linear_attn"]
    torch.testing.assert_close(mixer.key_map.mT @ mixer.key_map, torch.eye(3).expand(2, 3, 3))


@pytest.mark.parametrize("name", EVERY)
def test_a_mapped_delta_net_is_loaded_from_a_checkpoint(name, tmp_path):
    model, again = mapped(name), make(name, seed=1)
    cs.compression.save_checkpoint(tmp_path / "file", model=model)
    cs.compression.load_checkpoint(tmp_path / "file", model=again)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.config.to_dict() == model.config.to_dict()
    written = [one.generate(IDS[:, :4], max_new_tokens=6, do_sample=False) for one in (again, model)]
    assert torch.equal(*written)


def test_a_model_that_files_cannot_name_is_refused_with_what_works(tmp_path):
    model = make()
    with pytest.raises(cs.compression.SavingError, match=r"save_pretrained\(.*, or save_checkpoint\(path"):
        cs.save_model(model, tmp_path / "model")

    @cs.compression.savable
    class Own(type(model)):
        pass

    with pytest.raises(cs.compression.SavingError, match=r"Config is no class .*: call .*save_pretrained"):
        cs.save_model(Own(copy.deepcopy(model.config)), tmp_path / "own")
    cut(model, form=cs.Selected())
    model.save_pretrained(tmp_path / "theirs")
    again = type(model).from_pretrained(tmp_path / "theirs")
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_a_mapped_delta_net_is_copied_pickled_and_trained_on():
    model = mapped()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()(IDS, labels=IDS).loss.backward()
    assert all(mixer.key_map.grad.any() and mixer.query_map.grad.any() for mixer in mixers(model).values())
    optimizer.step()
    cut(model, keep=cs.TargetOrder(2))
    assert model.config.compressm_maps == {"0": 2, "2": 2}


@pytest.mark.parametrize("form", [cs.Selected(), cs.Mapped()], ids=str)
def test_the_bytes_of_a_state_are_those_of_the_cache(form):
    model = make()
    cut(model, form=form)
    cache = model(IDS[:1], use_cache=True).past_key_values
    states = [getattr(layer, kind, {}) for layer in cache.layers for kind in ("conv_states", "recurrent_states")]
    used = sum(state.nbytes for own in states for state in own.values() if state is not None)
    assert used == sum(adapter.state_bytes(mixer, 3) for mixer, adapter in find(model).values())


def test_strengths_of_olmo_go_up_to_two():
    mixer, adapter = next(iter(find(make("OlmoHybrid")).values()))
    mixer.b_proj.weight.data.fill_(50.0)
    x = torch.ones(1, 3, 16)
    assert adapter.steps(mixer, x, adapter.read(mixer)).strength.max() == 2
    mixer.allow_neg_eigval = False
    assert adapter.steps(mixer, x, adapter.read(mixer)).strength.max() == 1


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
