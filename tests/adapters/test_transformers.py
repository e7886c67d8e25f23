"""transformers' Mamba: cut as our own layer, an ordinary model of transformers afterwards, or refused by name."""

import copy
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import compressm as cs
from compressm.adapters import AdapterError, adapter_for, check_adapter, find
from compressm.adapters.base import named_kinds
from compressm.adapters.mamba import REFUSED
from compressm.adapters.transformers.mamba import LayerConfig
from compressm.compression import CompressionError
from tests.adapters.transformers_models import (
    IDS,
    MambaConfig,
    MambaForCausalLM,
    MambaMixer,
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


def test_mixers_are_found_by_the_name_of_their_class():
    for kind, prefix in ((MambaForCausalLM, "backbone."), (transformers.MambaModel, "")):
        found = find(make(kind))
        assert list(found) == [f"{prefix}layers.0.mixer", f"{prefix}layers.1.mixer"]
        assert {str(adapter) for _, adapter in found.values()} == {"MambaMixerAdapter()"}


def test_the_adapter_keeps_its_promises():
    def mixer():
        return MambaMixer(MambaConfig(hidden_size=8, state_size=6, num_hidden_layers=1), 0)

    # Parts of it are computed in float32 whatever the parameters are.
    assert len(check_adapter(mixer, length=20, dtype=torch.float32, tolerance=1e-4)) >= 5


def test_a_mixer_is_cut_as_our_own_layer_with_the_same_parameters():
    mixer, ours = mixers(make())[0].double(), cs.layers.Mamba(8, order=6, dt_rank=2).double()
    ours.load_state_dict(mixer.state_dict())
    x = torch.randn(4, 12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (a,), (b,) = (cs.compress_(m, keep=cs.TargetOrder(3), calibrate=lambda m: m(x)) for m in (mixer, ours))
    assert a.measured_error == pytest.approx(b.measured_error)
    torch.testing.assert_close(dict(mixer.state_dict()), dict(ours.state_dict()))
    torch.testing.assert_close(mixer(x), ours(x)[0], rtol=1e-5, atol=1e-6)


def test_states_that_do_nothing_can_go_without_a_change():
    model = make()
    for mixer in mixers(model):
        mixer.x_proj.weight.data[2 + 3 : 2 + 6] = 0  # rows of B
    before = model(IDS).logits
    cut(model)
    assert said_orders(model) == [3, 3]
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("orders", [(3, 3), (2, 5)])
def test_a_cut_model_generates_with_a_cache_as_without_one(orders):
    model = unequal(make(), *orders)
    assert said_orders(model) == list(orders)
    assert torch.equal(written(model), written(model, use_cache=False))
    assert torch.equal(written(model, num_beams=2), written(model, num_beams=2, use_cache=False))


def test_training_goes_on_with_the_moments_of_adamw():
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compressor = cs.Compressor(model, optimizer, when=[3, 5], keep=cs.KeepFraction(0.75), calibrate=runs)
    objects, losses = [id(p) for p in model.parameters()], []
    for step in range(1, 9):
        loss = model(IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        compressor.step(step)
    assert model.training
    assert said_orders(model) == [3, 3]
    assert model.config.state_size == 3
    assert [id(p) for p in model.parameters()] == objects
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in model.parameters())
    assert losses[-1] < losses[2]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_seen(side):
    plain, padded = make(), make()
    short = IDS[:, :9]
    ids, mask = torch.zeros_like(IDS), torch.zeros_like(IDS)
    place = slice(7, None) if side == "left" else slice(0, 9)
    ids[:, place], mask[:, place] = short, 1
    ids[mask == 0] = 7
    (a, *_), (b, *_) = (
        cs.compress_(model, keep=cs.TargetOrder(3), calibrate=calibrate)
        for model, calibrate in ((plain, lambda m: m(short)), (padded, lambda m: m(ids, attention_mask=mask)))
    )
    assert a.measured_error == pytest.approx(b.measured_error, rel=1e-3)
    torch.testing.assert_close(plain.state_dict(), padded.state_dict(), rtol=1e-3, atol=1e-4)


def test_calibration_does_not_go_on_from_a_cache():
    model = make()
    said = r"backbone.layers.0.mixer: calibrate continues from a cache.*whole sequences"
    with pytest.raises(CompressionError, match=said):
        cs.compress_(model, keep=cs.TargetOrder(3), calibrate=written)
    assert said_orders(model) == [6, 6]
    cs.compress_(model, keep=cs.TargetOrder(3), calibrate=lambda model: model(IDS, use_cache=True))


@pytest.mark.parametrize("orders", [(3, 3), (2, 5), (6, 4)])
def test_a_cut_that_does_harm_is_undone_with_what_the_config_says(orders):
    model, scores = make(), iter([1.0, 0.5])
    overrides = {f"*layers.{k}.mixer": cs.TargetOrder(order) for k, order in enumerate(orders)}
    before = picture(model)
    compressor = cs.Compressor(
        model,
        when=[1],
        keep=cs.KeepFraction(1.0),
        overrides=overrides,
        calibrate=runs,
        gate=1.0,
        guard=cs.Rollback(lambda: next(scores), settle=0),
    )
    compressor.step(1)
    assert said_orders(model) == list(orders)
    compressor.step(2)
    check_same(model, before)


def test_a_cut_that_fails_half_way_changes_nothing(monkeypatch):
    model, calls = unequal(make(), 5, 6), []
    before, config = picture(model), model.config

    def failing(self, name, value):
        calls.append(name)
        if calls.count("config") == 2:
            raise MemoryError("no more")
        nn.Module.__setattr__(self, name, value)

    with monkeypatch.context() as patch:
        patch.setattr(MambaMixer, "__setattr__", failing, raising=False)
        with pytest.raises(MemoryError):
            cut(model)
    check_same(model, before)
    assert {id(value) for value in configs(model)} == {id(config)}


def test_an_average_follows():
    model = make()
    average = copy.deepcopy(model)
    cut(model, follow=[average])
    assert said_orders(average) == said_orders(model) == [3, 3]
    assert same(average, model)


def test_what_else_a_config_says_of_single_layers_stays():
    config = MambaConfig(num_hidden_layers=3, state_size=8)
    config.per_layer_config = {1: {"note": "kept"}, 2: {"note": "other"}, 0: {"note": "more"}}
    for layer, order in enumerate([4, 8, 4]):
        LayerConfig(config, layer, "state_size").order = order
    assert [layer.state_size for layer in config.per_layer_config] == [4, 8, 4]
    for layer in (0, 1, 2):
        LayerConfig(config, layer, "state_size").order = 2
    assert config.state_size == 2
    assert [layer.note for layer in config.per_layer_config] == ["more", "kept", "other"]


def renamed(mixer):
    mixer.order = mixer.__dict__.pop("ssm_state_size")


def without_rank(mixer):
    del mixer.time_step_rank


ODD = {
    "a norm of B": (lambda m: m.add_module("b_norm", nn.LayerNorm(6)), "has b_norm.bias, b_norm.weight, unknown to"),
    "low rank updates": (lambda m: m.x_proj.add_module("lora_A", nn.Linear(16, 2)), "has x_proj.lora_A.bias"),
    "another attribute": (renamed, "has no ssm_state_size, expected 6 there"),
    "no rank": (without_rank, "has no time_step_rank, expected 2 there"),
    "another order": (lambda m: setattr(m, "ssm_state_size", 7), "has ssm_state_size 7, but its parameters are for 6"),
    "another config": (lambda m: setattr(m, "config", MambaConfig(state_size=9)), "has config.state_size 9, .* for 6"),
    "no config": (lambda m: setattr(m, "config", None), "has no config.per_layer_config, expected .* 5.16 or later"),
    "an older config": (
        lambda m: setattr(m, "config", SimpleNamespace(state_size=6)),
        "has no config.per_layer_config, expected",
    ),
    "no place": (lambda m: setattr(m, "layer_idx", 2), "has layer_idx 2, but its config has 2 layers"),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_mixer_that_looks_different_is_refused_by_name_and_left_alone(odd):
    model = make()
    change, said = ODD[odd]
    change(mixers(model)[1])
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    with pytest.raises(CompressionError, match=rf"^backbone.layers.1.mixer: MambaMixer .*{said}"):
        cut(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.config.to_dict() == config


def test_channels_have_no_states_of_their_own():
    model = make()
    with pytest.raises(CompressionError, match=r"a MambaMixer cannot store .* expected selective=Baked\(\)"):
        cut(model, selective=cs.PerChannel())
    assert said_orders(model) == [6, 6]


def test_a_mixer_that_is_called_otherwise_is_refused_by_name():
    class OtherMixer(MambaMixer):
        def forward(self, hidden_states, state=None):
            return hidden_states

    mixer = OtherMixer(MambaConfig(hidden_size=8, num_hidden_layers=1), 0)
    with pytest.raises(AdapterError, match=r"OtherMixer .*takes hidden_states, state, expected"):
        adapter_for(mixer).read(mixer)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 20, "eos_token_id": None}
OTHERS = {
    "Zamba": (
        {**SMALL, "num_hidden_layers": 9, "num_attention_heads": 2, "n_mamba_heads": 2},
        "ZambaMambaMixer",
        "for each of its heads",
    )
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_mixers_are_refused_by_name_with_what_is_supported(other):
    options, mixer, reason = OTHERS[other]
    with torch.device("meta"):
        model = getattr(transformers, f"{other}Model")(getattr(transformers, f"{other}Config")(**options))
    for call in (cut, lambda model: cs.inspect(model, runs)):
        with pytest.raises(CompressionError, match=rf"layers.0.* {reason}.*\({mixer}\); .*MambaForCausalLM"):
            call(model)


# Parts of refused mixers, or what keeps past tokens without a recurrence.
PARTS = {"RecurrentGemmaRglru", "ZayaCCAProjection", "MiniMaxPreTrainedModel"}
PARTS |= {f"{name}ForgetGate" for name in ("KimiLinear", "BailingHybrid", "Glm5NextText")}


def recurrences():
    """The classes of transformers with a recurrence, each with its full name."""
    signs = ("self.A_log", "update_recurrent_state", "recurrent_states", "slope_rate")
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = file.read_text()
        if any(sign in text for sign in signs):
            owner = f"transformers.models.{file.parent.name}.{file.stem}"
            kinds = re.split(r"^class (?=\w+\()", text, flags=re.MULTILINE)[1:]
            bodies = {kind.partition("(")[0]: re.split(r"\n(?=[@\w])", kind)[0] for kind in kinds}
            yield from ((name, owner) for name, body in bodies.items() if any(sign in body for sign in signs))


def test_every_recurrence_of_transformers_is_cut_or_refused_with_a_reason():
    found = dict(recurrences())
    assert len(found) > 20
    cut_ones = {name for name, owner in found.items() if f"{owner}.{name}" in named_kinds()}
    assert {"MambaMixer", "Mamba2Mixer", "BambaMixer", "NemotronHMamba2Mixer"} <= cut_ones
    assert found.keys() - cut_ones - REFUSED.keys() - PARTS == set()
    assert REFUSED.keys() | PARTS <= found.keys()
    assert not REFUSED.keys() & cut_ones


@pytest.mark.parametrize("name", REFUSED)
def test_every_refused_class_of_transformers_is_refused_with_its_reason(name):
    """The class itself, from its own config."""
    module = importlib.import_module(dict(recurrences())[name])
    (config,) = (
        kind
        for key, kind in vars(module).items()
        if isinstance(kind, type)
        and re.fullmatch(rf"{name[:4]}\w*?(Text)?Config", key)
        and hasattr(kind(), "hidden_size")
        if "Vision" not in key
    )
    with torch.device("meta"):
        model = nn.ModuleDict({"mixer": getattr(module, name)(config(), 0)})
    with pytest.raises(CompressionError, match=rf": mixer {re.escape(REFUSED[name])} \({name}\); expected MambaMixer"):
        cut(model)


def test_a_mixer_of_a_name_that_is_not_known_is_refused_all_the_same():
    kind = type("NewMixer", (nn.Module,), {"__module__": "transformers.models.new.modeling_new"})
    mixer = kind()
    mixer.A_log = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(CompressionError, match=r"the model is not known \(NewMixer\); expected MambaMixer"):
        cut(mixer)


def test_a_model_that_is_refused_in_part_is_cut_with_a_warning():
    kind = type("NewMixer", (nn.Module,), {"__module__": "transformers.models.new.modeling_new"})
    other = kind()
    other.A_log = nn.Parameter(torch.zeros(2, 2))
    both = nn.ModuleDict({"known": make(), "new": other})
    options = {"keep": cs.TargetOrder(3), "calibrate": lambda both: both["known"](IDS)}
    with pytest.warns(UserWarning, match=r"not all of ModuleDict is cut: new is not known \(NewMixer\)"):
        cs.compress_(both, **options)
    assert said_orders(both["known"]) == [3, 3]
    cs.compress_(both, filter_fn=lambda module, name: name.startswith("known"), **options)  # what was asked for


def test_an_adapter_of_the_user_goes_before_ours():
    class OwnMixer(MambaMixer):
        pass

    @cs.adapters.adapts(OwnMixer)
    class Own(cs.adapters.SelectiveAdapter):
        def counted(self, module, args, kwargs):
            return None

    assert isinstance(adapter_for(OwnMixer(MambaConfig(hidden_size=8, num_hidden_layers=1), 0)), Own)
