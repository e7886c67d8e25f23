"""The Mamba-2 mixers of transformers: what their adapters promise, and cuts in every form that they can store."""

import copy

import pytest
import torch
from torch import nn

import compressm as cs
from compressm.adapters import AdapterError, adapter_for, find
from compressm.compression import CompressionError
from compressm.compression.planning import Options, read_layers
from compressm.families.fitting import halves
from compressm.families.memory.forms import Fitted, Folded, Mapped, Selected
from compressm.families.memory.simulation import outputs
from tests.marks import later

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

IDS = torch.randint(1, 20, (8, 24), generator=torch.Generator().manual_seed(0))
MANY = torch.randint(1, 20, (24, 24), generator=torch.Generator().manual_seed(1))
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 3, "eos_token_id": None, "pad_token_id": 0}
MAMBA = {
    **{"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2},
    "mamba_chunk_size": 8,
}
MODELS = {
    "Mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 8, "use_bias": True},
    "Bamba": {**HEADS, **MAMBA, "attn_layer_indices": [1]},
    "GraniteMoeHybrid": {
        **HEADS,
        **MAMBA,
        "layer_types": ["mamba", "attention", "mamba"],
        **{"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 16},
    },
    "FalconH1": {
        **HEADS,
        **MAMBA,
        **{"head_dim": 8, "mamba_d_ssm": 32, "mamba_rms_norm": True, "ssm_in_multiplier": 1.3},
        "ssm_multipliers": [1.5, 0.7, 2.0, 0.6, 1.2],
    },
    "Zamba2": {
        **HEADS,
        **{"n_mamba_heads": 4, "mamba_headdim": 8, "mamba_ngroups": 2, "mamba_d_state": 8, "mamba_expand": 2},
        **{"chunk_size": 8, "layers_block_type": ["mamba", "hybrid", "mamba"], "num_mem_blocks": 1},
        **{"attention_hidden_size": 32, "attention_head_dim": 16, "hybrid_layer_ids": [1], "adapter_rank": 4},
    },
    "NemotronH": {
        **HEADS,
        **{"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8},
        **{"head_dim": 8, "layers_block_type": ["mamba", "attention", "mamba"]},
    },
}
NAMES = dict.fromkeys(MODELS, "mamba_d_state") | {"Mamba2": "state_size", "NemotronH": "ssm_state_size"}
EVERY = later(MODELS, "Mamba2", "FalconH1", "NemotronH")
THREE = cs.TargetOrder(3)


def make(name="Mamba2", seed=0, **options):
    torch.manual_seed(seed)
    kinds = getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, f"{name}Config")
    model = kinds[0](kinds[1](**SIZES | MODELS[name] | options)).eval()
    for mixer, _ in find(model).values():
        mixer.dt_bias.data += 1  # memories that are long enough to matter
        nn.init.normal_(mixer.conv1d.bias, std=0.1)
    return model


def runs(model):
    return model(IDS)


def cut(model, keep=THREE, calibrate=runs, **options):
    return cs.compress_(model, keep=keep, calibrate=calibrate, **options)


def mixers(model):
    return {name: mixer for name, (mixer, _) in find(model).items()}


def layers(model, calibrate=runs, **options):
    return read_layers(model, Options(THREE, calibrate, **options))


def read_out(mixer, x, **options):
    """The output of the mixer's own scan, without its skip, which is what its norm gets."""
    mixer, found = copy.deepcopy(mixer), {}
    mixer.D.data.zero_()
    mixer.norm.register_forward_pre_hook(lambda norm, args: found.update(y=args[0]))
    mixer(x, **options)
    return found["y"].detach()


def simulated(mixer, adapter, x, memory, counted=None):
    with torch.no_grad():
        return outputs(adapter.mapped_steps(mixer, x.double(), memory, counted)).permute(0, 3, 1, 2, 4).flatten(2)


def cache_bytes(model):
    """The bytes that the cache of one sequence has for the mixers."""
    cache = model(IDS[:1], use_cache=True)
    cache = getattr(cache, "cache_params", None) or cache.past_key_values
    states = [getattr(layer, kind, {}) for layer in cache.layers for kind in ("conv_states", "recurrent_states")]
    return sum(state.nbytes for own in states for state in own.values() if state is not None)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("form", [Selected(), Mapped()], ids=str)
@pytest.mark.filterwarnings("ignore:the orders of the layers differ")
def test_a_budget_of_bytes_is_that_of_the_cache_with_the_convolution(name, form):
    model = make(name)
    found = list(find(model).values())
    assert sum(adapter.state_bytes(mixer, 8) for mixer, adapter in found) == cache_bytes(model)
    limit = int(0.8 * cache_bytes(model))
    cut(model, cs.Budget(state_bytes=limit), uniform=True, form=form, gate=1.0)
    used = cache_bytes(model)
    assert used == sum(adapter.state_bytes(mixer, adapter.order(mixer)) for mixer, adapter in found)
    # Another state in every layer would not fit.
    width = 4 * 32 if isinstance(form, Mapped) else 4 * 32 + 4 * 2 * 2 * 4
    assert limit - len(found) * width < used <= limit


def test_a_budget_of_parameters_refuses_maps_which_add_some():
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CompressionError, match=r"Budget\(parameters=\.\.\.\) needs a form .* Mapped\(\) keeps all"):
        cut(model, cs.Budget(parameters=5340), form=Mapped())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    limit = sum(value.numel() for value in model.parameters()) - 200
    cut(model, cs.Budget(parameters=limit), form=Selected())
    assert limit - 200 < sum(value.numel() for value in model.parameters()) <= limit


@pytest.mark.parametrize("name", EVERY)
def test_steps_and_a_scan_are_the_mixers_own_output(name):
    model = make(name)
    found = find(model)
    assert len(found) >= 2
    for mixer, adapter in found.values():
        x = torch.randn(3, 70, 16)
        mask = torch.ones(3, 70, dtype=torch.long)
        mask[0, :9], mask[1, 60:] = 0, 0
        for counted in (None, mask):
            own = simulated(mixer, adapter, x, adapter.read(mixer), None if counted is None else counted.bool())
            theirs = read_out(mixer, x, attention_mask=counted)
            there = mask.bool() if counted is not None else torch.ones_like(mask).bool()
            torch.testing.assert_close(own[there].float(), theirs[there], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EVERY)
def test_encoding_what_was_read_gives_the_values_back(name):
    mixer, adapter = next(iter(find(make(name)).values()))
    for key, value in adapter.encode(mixer, adapter.read(mixer)).items():
        assert torch.equal(value, mixer.get_parameter(key).double())


@pytest.mark.parametrize("form", [Folded(), Mapped(), Selected(), Selected(read_out=True), Fitted(2)])
def test_all_states_reproduce_the_output_in_every_form(form):
    layer = next(iter(layers(make()).values())).data
    reduction = form.reduce(layer, torch.arange(8))
    # Rows cannot be mixed behind an activation: a projection is tried as a map.
    assert layer.error(reduction if reduction.fitted else type(reduction)(reduction.W, reduction.T, mapped=True)) < 1e-7


@pytest.mark.parametrize("name", EVERY)
def test_a_selected_mixer_is_the_masked_one_and_loads_and_decodes_in_plain_transformers(name, tmp_path):
    model = make(name)
    masked, kept = copy.deepcopy(model), {}
    for path, layer in layers(model).items():
        kept[path] = Selected().reduce(layer.data, torch.arange(3)).W.argmax(1)  # (groups, 3)
    records = cut(model, form=cs.Selected())
    assert [(one.order, one.rank) for one in records] == [(8, 3)] * len(kept)
    for path, mixer in mixers(masked).items():
        drop = torch.ones(2, 8, dtype=torch.bool).scatter(1, kept[path], False)
        for key, rows in adapter_for(mixer).rows(mixer).items():
            for place in rows.places:
                mixer.get_parameter(key).data[place[drop]] = 0
    torch.testing.assert_close(model(IDS).logits, masked(IDS).logits, rtol=1e-5, atol=1e-6)

    assert getattr(model.config, NAMES[name]) == 3
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert getattr(again.config, NAMES[name]) == 3
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    written = [one.generate(IDS[:, :4], max_new_tokens=6, do_sample=False) for one in (again, masked)]
    assert torch.equal(*written)


@pytest.mark.parametrize("form", [cs.Selected(), cs.Fitted(steps=3), cs.Mapped()])
def test_decoding_with_a_cache_is_the_forward_pass(form):
    model = make()
    cut(model, form=form)
    whole, cache, found = model(IDS).logits, None, []
    for t in range(IDS.shape[1]):
        step = model(IDS[:, t : t + 1], cache_params=cache, use_cache=True)
        cache = step.cache_params
        found.append(step.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", [cs.Selected(), cs.Fitted(steps=20), cs.Mapped()])
def test_the_measured_error_is_that_of_the_mixer_which_is_stored(form):
    def calibrate(model):
        model(MANY)

    model = make()
    before, inputs = copy.deepcopy(model), {}
    judging = {
        path: sorted(halves(layer.observations.sample)[1].sequences) for path, layer in layers(model, calibrate).items()
    }
    for path, mixer in mixers(before).items():
        mixer.register_forward_pre_hook(lambda mixer, args, path=path: inputs.update({path: args[0].detach()}))
    calibrate(before)
    for record in cut(model, calibrate=calibrate, form=form):
        x = inputs[record.module]
        x = x[judging[record.module]] if isinstance(form, cs.Fitted) else x  # a fit has not seen these
        old, new = (read_out(mixers(one)[record.module], x) for one in (before, model))
        assert record.measured_error == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-4)
        assert 0 < record.measured_error < 1


def test_forms_are_compared_in_a_table_and_nothing_changes():
    model = make()
    before = copy.deepcopy(model.state_dict())
    compared = cs.compare_forms(model, 3, lambda model: model(MANY))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    layer = layers(model, lambda model: model(MANY))["backbone.layers.0.mixer"].data
    mapped, fitted, selected = compared.forms["backbone.layers.0.mixer"]
    assert [one.form for one in (mapped, fitted, selected)] == [Mapped(), Fitted(), Selected()]
    assert mapped.error < fitted.error < selected.error
    assert mapped.error == pytest.approx(mapped.estimate, rel=0.3)
    assert fitted.error == layer.error(Fitted().reduce(layer, torch.arange(3)))
    assert [one.storable for one in (mapped, fitted, selected)] == [True, True, True]
    lines = str(compared).splitlines()
    assert lines[0].split() == ["module", "form", "error", "estimate", "stored"]
    assert lines[2].split() == [
        "backbone.layers.0.mixer",
        "Mapped()",
        f"{mapped.error:.3g}",
        f"{mapped.estimate:.3g}",
        "yes",
    ]


def test_forms_of_layers_without_a_choice_cannot_be_compared():
    for model, order in ((make(), 8), (cs.layers.LRU(4, 8), 3)):
        run = runs if order == 8 else lambda model: model(torch.randn(2, 9, 4))
        with pytest.raises(CompressionError, match=f"has a choice of forms and more than {order} states"):
            cs.compare_forms(model, order, run)


def test_a_fit_has_a_smaller_error_than_its_start_on_what_it_was_fitted_to_and_is_the_default():
    found = layers(make(), lambda model: model(MANY))
    layer = found["backbone.layers.0.mixer"].data
    fitting, judging = halves(layer.observations.sample)
    start, fitted = (form.reduce(layer, torch.arange(3)) for form in (Selected(), Fitted()))
    assert fitted.fitted is not None
    assert layer.error(fitted, fitting) < 0.9 * layer.error(start, fitting)
    assert layer.error(fitted) == layer.error(fitted, judging) < layer.error(start, judging)
    assert found["backbone.layers.0.mixer"].form == Fitted()


@pytest.mark.parametrize("form", [cs.Folded(), cs.Selected(read_out=True)])
def test_a_form_that_the_mixer_cannot_store_is_refused_by_name(form):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        CompressionError, match=r"layers.0.mixer: a Mamba2Mixer cannot store any .*expected form=Mapped\(\) or Fitted"
    ):
        cut(model, form=form)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


REFUSED = {
    "the paper's means": ({**cs.PAPER}, "the paper's surrogate, give a system of rank one whatever the order is"),
    "modes": ({"gramian": cs.Modal()}, "needs fixed poles, which layers with a matrix state do not have"),
    "no data": ({"calibrate": None}, "layers with a matrix state can only be inspected and cut with data"),
    "a bound": ({"keep": cs.ErrorBound(0.1)}, "which layers with a matrix state never have"),
    "too little data": ({"calibrate": lambda model: model(IDS[:1, :5])}, "ran 5 steps through a layer of 8 states"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_for_a_matrix_state_is_refused_by_name(case):
    options, said = REFUSED[case]
    with pytest.raises(CompressionError, match=said):
        cut(make(), **options)


def test_a_form_without_effect_is_said():
    model = cs.layers.LRU(4, 8)
    with pytest.warns(UserWarning, match=r"without effect: form=Selected\(.*linear layers"):
        cs.compress_(model, keep=THREE, form=cs.Selected())
    assert model.order == 3


def test_padding_on_either_side_counts_for_nothing():
    model = make(pad_token_id=0)
    short = IDS[:, :14]
    found = []
    for side in ("none", "left", "right"):
        ids, mask = short, torch.ones_like(short)
        empty = torch.zeros(8, 6, dtype=torch.long)
        if side != "none":
            ids, mask = (
                torch.cat(pair if side == "left" else pair[::-1], dim=1) for pair in ((empty, ids), (empty, mask))
            )

        def calibrate(model, ids=ids, mask=mask):
            return model(ids, attention_mask=mask)

        # The first layer alone: later ones get what padding leaves of earlier ones.
        found.append(next(iter(layers(model, calibrate).values())).data.moments)
    for P, Q in found[1:]:
        torch.testing.assert_close(Q, found[0][1], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(P, found[0][0], rtol=1e-4, atol=1e-6)


def test_a_cache_that_continues_is_refused():
    def calibrate(model):
        cache = model(IDS, use_cache=True).cache_params
        model(IDS[:, :1], cache_params=cache, use_cache=True)

    with pytest.raises(CompressionError, match="calibrate continues from a cache"):
        cut(make(), calibrate=calibrate)


def test_layers_may_have_orders_of_their_own_until_they_are_equal_again():
    model = make()
    cut(
        model, keep=cs.KeepFraction(1.0), overrides={"*layers.1.mixer": cs.TargetOrder(3)}, form=cs.Selected(), gate=1.0
    )
    assert [layer.state_size for layer in model.config.per_layer_config] == [8, 3, 8]
    assert torch.isfinite(model(IDS).logits).all()
    cut(model, form=cs.Selected())
    assert model.config.state_size == 3


def test_training_goes_on_and_parameters_stay_the_same_objects():
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = copy.deepcopy(model)
    compressor = cs.Compressor(
        model, optimizer, when=[2], keep=THREE, calibrate=runs, form=cs.Selected(), follow=[average]
    )
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    for step in range(1, 5):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
        events = compressor.step(step)
        if events:
            name = "backbone.layers.0.mixer.in_proj.weight"
            mixer = mixers(model)["backbone.layers.0.mixer"]
            new, old = optimizer.state[mixer.in_proj.weight]["exp_avg"], moments[name]
            assert new.shape == mixer.in_proj.weight.shape == (80, 16)
            assert all(any(torch.equal(row, other) for other in old) for row in new)  # moments are sliced
            assert mixers(average)["backbone.layers.0.mixer"].in_proj.weight.shape == (80, 16)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert [event.rank for event in compressor.history] == [3, 3, 3]


@pytest.mark.parametrize("name", EVERY)
def test_a_model_of_another_order_takes_the_orders_of_a_checkpoint(name, tmp_path):
    """Buffers that no file has, as FalconH1's mup_vector, are made anew: larger and smaller."""
    model, again = make(name), make(name, seed=1)
    whole = make(name, seed=2)
    cs.compression.save_checkpoint(tmp_path / "whole", model=whole)
    cut(model, form=cs.Selected())
    cs.compression.save_checkpoint(tmp_path / "cut", model=model)
    for file, expected in (("cut", model), ("whole", whole), ("cut", model)):
        cs.compression.load_checkpoint(tmp_path / file, model=again)
        torch.testing.assert_close(again(IDS).logits, expected(IDS).logits, rtol=0, atol=0)
        torch.testing.assert_close(dict(again.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY)
def test_zero_states_give_all_layers_one_order_and_change_no_output(name):
    model = make(name)
    some = next(iter(mixers(model)))
    cut(model, keep=cs.KeepFraction(1.0), overrides={some: THREE}, form=cs.Selected(), gate=1.0)
    before = model(IDS).logits
    cs.pad_orders_(model)
    assert {adapter.order(mixer) for mixer, adapter in find(model).values()} == {8}
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-5, atol=1e-6)


def test_a_guard_restores_the_model_and_its_config():
    model = make()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scores = iter([1.0, 0.0])
    guard = cs.Rollback(lambda: next(scores), drop=0.1, settle=1)
    compressor = cs.Compressor(model, optimizer, when=[1], keep=THREE, calibrate=runs, form=cs.Selected(), guard=guard)
    compressor.step(1)
    assert model.config.state_size == 3
    compressor.step(2)
    assert model.config.state_size == 8
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.isfinite(model(IDS).logits).all()


def odd_parameter(mixer):
    mixer.extra = nn.Parameter(torch.ones(1))


ODD = {
    "another parameter": (odd_parameter, "differs in extra from a Mamba-2 mixer"),
    "a wrong size": (
        lambda mixer: setattr(mixer, "ssm_state_size", 7),
        "has ssm_state_size 7, but its parameters are for 8",
    ),
    "odd groups": (lambda mixer: setattr(mixer, "n_groups", 3), "has 100 rows in in_proj, expected"),
}


@pytest.mark.parametrize("case", ODD)
def test_a_mixer_that_looks_different_is_refused_by_name(case):
    change, said = ODD[case]
    model = make()
    mixer = mixers(model)["backbone.layers.1.mixer"]
    change(mixer)
    with pytest.raises(CompressionError, match=rf"layers.1.mixer: Mamba2Mixer .*{said}"):
        cut(model)


def test_a_mixer_that_is_called_otherwise_is_refused_by_name():
    class Other(type(mixers(make())["backbone.layers.0.mixer"])):
        def forward(self, hidden_states, state=None):
            return hidden_states

    mixer = Other(make().config, 0)
    with pytest.raises(AdapterError, match=r"Other .*takes self, hidden_states, state, expected cache_params and"):
        adapter_for(mixer).read(mixer)
