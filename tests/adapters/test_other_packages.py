"""Adapters of flash-linear-attention and mamba_ssm, on modules with the same parameters."""

import copy
import importlib

import pytest
import torch
from torch import nn

import compressm as cs
from compressm.adapters import AdapterError, adapter_for
from compressm.adapters.base import named_kinds
from compressm.compression import CompressionError
from compressm.compression.planning import Options, read_layers
from compressm.families.memory.simulation import outputs
from tests.adapters.other_packages import LAYERS, named

# Weights of models that were never trained are so small that the ε of norms counts.
pytestmark = pytest.mark.filterwarnings("ignore:.*of the norm behind them counts:UserWarning")

MEMORY = [name for name in LAYERS if name != "Mamba of mamba_ssm"]
LINEAR = ("SimpleGLA", "GLA")
X = torch.randn(24, 20, 16, generator=torch.Generator().manual_seed(0))
THREE = cs.TargetOrder(3)


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.layer = LAYERS[name]().eval()
        for parameter in self.layer.parameters():
            if parameter.ndim > 1:
                parameter.data *= 2

    def forward(self, x):
        y = self.layer(x)
        return y[0] if isinstance(y, tuple) else y


def runs(model):
    return model(X)


def cut(model, keep=THREE, **options):
    return cs.compress_(model, keep=keep, calibrate=runs, **options)


def forms(name):
    return [cs.Selected(), cs.Fitted(steps=3)] + [cs.Folded()] * (name in LINEAR)


def read_out(layer, x):
    """What the norm behind the read-out gets, with the skip taken away."""
    layer, found = copy.deepcopy(layer), {}
    if hasattr(layer, "D"):
        layer.D.data.zero_()
    norm = layer.norm if hasattr(layer, "norm") else getattr(layer, layer.NORM)
    norm.register_forward_pre_hook(lambda norm, args: found.update(y=args[0]))
    layer(x)
    return found["y"].detach().flatten(2) if found["y"].ndim > 3 else found["y"].detach()


def test_every_layer_has_the_name_of_an_adapter():
    for name in LAYERS:
        kind = type(LAYERS[name]())
        assert f"{kind.__module__}.{kind.__qualname__}" in named_kinds()


@pytest.mark.parametrize("name", MEMORY)
def test_steps_and_a_scan_are_the_layers_own_output(name):
    layer = Model(name).layer
    adapter = adapter_for(layer)
    with torch.no_grad():
        found = outputs(adapter.mapped_steps(layer, X.double(), adapter.read(layer)))
    torch.testing.assert_close(
        found.permute(0, 3, 1, 2, 4).flatten(2).float(), read_out(layer, X), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", MEMORY)
def test_all_states_reproduce_the_output_in_every_form(name):
    model = Model(name)
    for form in forms(name):
        layer = read_layers(model, Options(THREE, runs, form=form))["layer"]
        assert layer.data.error(form.reduce(layer.data, torch.arange(8))) < 1e-7
    for key, value in layer.adapter.encode(model.layer, layer.system).items():
        assert torch.equal(value, model.layer.get_parameter(key).double())


@pytest.mark.parametrize("name", MEMORY)
def test_a_selected_layer_is_the_masked_one(name):
    model = Model(name)
    layer = read_layers(model, Options(THREE, runs))["layer"]
    kept = cs.Selected().reduce(layer.data, torch.arange(3)).W.argmax(1)
    masked = copy.deepcopy(model)
    (record,) = cut(model, form=cs.Selected())
    assert (record.order, record.rank, adapter_for(model.layer).order(model.layer)) == (8, 3, 3)
    drop = torch.ones(2, 8, dtype=torch.bool).scatter(1, kept, False)
    for key, rows in layer.adapter.rows(masked.layer).items():
        for place in rows.places:
            masked.layer.get_parameter(key).data[place[drop]] = 0
    small, full = read_out(model.layer, X), read_out(masked.layer, X)
    # Queries behind an activation are divided by √3 in place of √8, which the norm cancels.
    is_free = name in LINEAR or "Mamba2" in name
    torch.testing.assert_close(small * (1 if is_free else (3 / 8) ** 0.5), full, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in MEMORY if "Mamba2" not in name])
def test_the_constructors_arguments_say_the_sizes_of_the_cut_layer(name):
    model = Model(name)
    cut(model, form=cs.Selected())
    layer = model.layer
    assert layer.head_k_dim == 3
    if hasattr(layer, "head_dim"):
        assert layer.head_dim == 3
        assert int(layer.head_dim * layer.expand_v) == layer.head_v_dim == 6
    else:
        assert round(layer.expand_k * layer.hidden_size) == layer.key_dim == 6


@pytest.mark.parametrize("keys", range(1, 130))
def test_a_constructor_takes_the_size_of_values_whatever_the_order(keys):
    layer = LAYERS["GatedDeltaNet"]()
    for layer.head_v_dim in (64, 100, 128, 129):
        sizes = adapter_for(layer).sizes(layer, keys)
        assert int(sizes["head_dim"] * sizes["expand_v"]) == layer.head_v_dim


def test_folding_has_the_smallest_error_and_that_of_the_layer():
    before = Model("SimpleGLA")
    errors = {form: cut(copy.deepcopy(before), form=form)[0].measured_error for form in forms("SimpleGLA")}
    assert errors[cs.Folded()] < min(errors[cs.Selected()], errors[cs.Fitted(steps=3)])
    model = copy.deepcopy(before)
    (record,) = cut(model)  # the default
    old, new = read_out(before.layer, X), read_out(model.layer, X)
    assert record.measured_error == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-4)
    assert record.measured_error == errors[cs.Folded()]
    with pytest.raises(CompressionError, match=r"cannot store any two-sided .*expected form=Fitted\(\) or Selected"):
        cut(Model("SimpleGLA, convolved"), form=cs.Folded())


def test_averaged_gates_and_a_fit_of_them_are_nearer_than_a_selection():
    compared = cs.compare_forms(Model("GLA"), 3, runs).forms["layer"]
    errors = {repr(one.form): one.error for one in compared}
    assert errors["Fitted(steps=80)"] < min(errors["Folded()"], errors["Selected(read_out=False)"])
    assert errors["Folded()"] < errors["Selected(read_out=False)"]
    assert all(one.estimate is None and one.storable for one in compared)
    model, default = Model("GLA"), Model("GLA")
    assert cut(default)[0].measured_error == pytest.approx(errors["Fitted(steps=80)"])
    (record,) = cut(model, form=cs.Folded())
    old, new = read_out(Model("GLA").layer, X), read_out(model.layer, X)
    assert record.measured_error == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-4)


def test_moments_of_gates_are_averaged_as_gates_are():
    model = Model("GLA").double()
    layer = read_layers(model, Options(THREE, lambda model: model(X.double()), form=cs.Folded()))["layer"]
    reduction = cs.Folded().reduce(layer.data, torch.arange(3))
    torch.testing.assert_close(reduction.mixing.sum(-1), torch.ones(2, 3, dtype=torch.float64))
    change = reduction.change(model.layer, layer.adapter, layer.system)
    name, moment = "gk_proj.1.weight", torch.randn(16, 4, dtype=torch.float64)
    expected = (reduction.mixing @ moment.view(2, 8, 4)).flatten(0, 1)
    torch.testing.assert_close(change.gradient({name: moment})[name], expected)
    torch.testing.assert_close(change.update({name: moment})[name], expected)
    squared = (reduction.mixing.square() @ moment.view(2, 8, 4)).flatten(0, 1)
    torch.testing.assert_close(change.gradient_squares({name: moment})[name], squared)
    torch.testing.assert_close(change.first(name, moment), moment.view(2, 8, 4)[:, :3].flatten(0, 1))


def test_moments_are_carried_with_the_factor_that_queries_get():
    model = Model("SimpleGLA").double()
    layer = read_layers(model, Options(THREE, lambda model: model(X.double())))["layer"]
    reduction = cs.Folded().reduce(layer.data, torch.arange(3))
    change = reduction.change(model.layer, layer.adapter, layer.system)
    gain = (3 / 8) ** 0.5
    moment = torch.randn(16, 16, dtype=torch.float64)
    by_head = moment.view(2, 8, 16)
    found = change.gradient({"q_proj.weight": moment, "k_proj.weight": moment})
    torch.testing.assert_close(found["q_proj.weight"].view(2, 3, 16), reduction.W.mT @ by_head / gain)
    torch.testing.assert_close(found["k_proj.weight"].view(2, 3, 16), reduction.T.mT @ by_head)
    pushed = change.update({"q_proj.weight": moment})["q_proj.weight"]
    torch.testing.assert_close(pushed.view(2, 3, 16), gain * reduction.T.mT @ by_head)


@pytest.mark.parametrize("name", LAYERS)
def test_training_goes_on(name):
    model = Model(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {} if name not in MEMORY else {"form": cs.Selected()}
    compressor = cs.Compressor(model, optimizer, when=[2], keep=THREE, calibrate=runs, **options)
    for step in range(1, 4):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        compressor.step(step)
    assert [event.rank for event in compressor.history] == [3]
    assert all(optimizer.state[parameter]["exp_avg"].shape == parameter.shape for parameter in model.parameters())


def cut_in_training(model, form):
    """The record of a cut with inputs and moments that bfloat16 can hold; the moments behind it."""
    kind, generator = next(model.parameters()).dtype, torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for state in optimizer.state.values():
        size = state["exp_avg"].shape
        state["exp_avg"] = torch.randn(size, generator=generator).bfloat16().to(kind)
        state["exp_avg_sq"] = torch.rand(size, generator=generator).bfloat16().to(kind)
    x = X.bfloat16().to(kind)
    (event,) = cs.Compressor(model, optimizer, when=[1], keep=THREE, form=form, calibrate=lambda m: m(x)).step(1)
    return event, [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("name", MEMORY)
def test_a_layer_in_bfloat16_is_measured_and_cut_in_float64_and_then_rounded(name):
    for form in forms(name):
        narrow = Model(name).bfloat16()
        wide = copy.deepcopy(narrow).double()
        (found, moments), (expected, wide_moments) = (cut_in_training(model, form) for model in (narrow, wide))
        assert (found.rank, found.measured_error) == (3, expected.measured_error)
        pairs = [*zip(narrow.parameters(), wide.parameters(), strict=True), *zip(moments, wide_moments, strict=True)]
        for one, other in pairs:
            assert one.dtype == torch.bfloat16
            assert torch.equal(one, other.bfloat16())


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", MEMORY)
def test_a_cut_inside_of_autocast_is_the_same_cut(name):
    for form in forms(name):
        inside, outside = Model(name), Model(name)
        cut(outside, form=form)
        with torch.autocast("cpu", torch.bfloat16):
            cut(inside, form=form)
        for one, other in zip(inside.parameters(), outside.parameters(), strict=True):
            assert torch.equal(one, other)


def test_mamba_of_mamba_ssm_is_observed_at_its_own_input_and_cut():
    model, seen = Model("Mamba of mamba_ssm"), {}
    model.layer.x_proj.register_forward_pre_hook(lambda part, args: seen.update(u=args[0]))
    model(X)
    adapter = adapter_for(model.layer)
    torch.testing.assert_close(adapter.inputs(model.layer, (X,), {}), seen["u"], rtol=1e-4, atol=1e-5)
    before = model(X)
    (record,) = cut(model, keep=cs.TargetOrder(6))
    assert (record.order, record.rank, model.layer.d_state) == (8, 6, 6)
    assert record.measured_error < 0.5
    assert (model(X) - before).norm() < 0.5 * before.norm()


class Config:
    def __init__(self, **sizes):
        vars(self).update(sizes)


CONFIGS = {
    "GatedDeltaNet": ("fla.models.gated", {"head_dim": 8, "expand_v": 0.75}, {"head_dim": 3, "expand_v": 2.0}),
    "SimpleGLA": ("fla.models.simple", {"expand_k": 1.0}, {"expand_k": 0.375}),
    "KDA": ("fla.models.kda", {"head_dim": 8, "expand_v": 0.75}, {"head_dim": 3, "expand_v": 2.0}),
    "GLA": ("fla.models.gla", {"expand_k": 1.0}, {"expand_k": 0.375}),
    "Mamba2 of fla": ("fla.models.mamba2", {"state_size": 8}, {"state_size": 3}),
    "Mamba2 of mamba_ssm": ("mamba_ssm.models", {"ssm_cfg": {"a": 1}}, {"ssm_cfg": {"a": 1, "d_state": 3}}),
    "Mamba of mamba_ssm": ("mamba_ssm.models", {"ssm_cfg": {}}, {"ssm_cfg": {"d_state": 3}}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gets_the_order_of_all_layers(name):
    owner, sizes, new = CONFIGS[name]
    model = Model(name)
    old = model.config = named(f"{owner}.Config", Config)(**sizes)
    cut(model)
    assert vars(model.config) == new
    assert vars(old) == sizes


REFUSED = {
    "fla.layers.multiscale_retention.MultiScaleRetention": "rotates queries and keys",
    "fla.layers.rwkv7.RWKV7Attention": "has as many keys as channels",
    "fla.layers.mamba3.Mamba3": "rotates B and C by the input",
    "fla.layers.hgrn2.HGRN2Attention": "has as many gates as channels",
    "fla.layers.gdn2.GatedDeltaNet2": "has a gate for every key dimension",
    "mamba_ssm.modules.mamba3.Mamba3": "rotates B and C by the input",
}


@pytest.mark.parametrize("path", REFUSED)
def test_other_layers_are_refused_by_name(path):
    model = nn.Sequential(named(path, nn.Linear)(2, 2))
    with pytest.raises(CompressionError, match=rf": 0 {REFUSED[path]}.*\({path.rpartition('.')[2]}\); expected"):
        cut(model)


ODD = {
    "heads of keys": ("SimpleGLA", {"num_kv_heads": 1}, "has 1 heads of keys for 2 of queries"),
    "a feature map": ("SimpleGLA", {"feature_map_fn": torch.relu}, "has a feature map, expected feature_map=None"),
    "other heads of values": ("KDA", {"num_v_heads": 4}, "has 4 heads of values for 2 of keys"),
    "another norm": ("DeltaNet", {"qk_norm": "sum"}, "has qk_norm 'sum', expected 'l2'"),
    "a wrong size": ("DeltaNet", {"head_k_dim": 7}, "has head_k_dim 7, but its parameters are for 2 heads of 8"),
    "another activation": ("Mamba2 of fla", {"activation": "gelu"}, "has the activation 'gelu', expected 'silu'"),
    "half of the channels": ("Mamba2 of mamba_ssm", {"d_ssm": 16}, "has d_ssm 16 of 32 channels"),
}


@pytest.mark.parametrize("case", ODD)
def test_a_layer_that_looks_different_is_refused_by_name(case):
    name, attributes, said = ODD[case]
    model = Model(name)
    for key, value in attributes.items():
        setattr(model.layer, key, value)
    with pytest.raises(CompressionError, match=rf"layer: a \w+ (of mamba_ssm )?{said}"):
        cut(model)


def test_calls_that_continue_or_pack_sequences_are_refused():
    layer = LAYERS["GatedDeltaNet"]()
    for options, said in (
        ({"past_key_values": [object()]}, "continues from a cache"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "packs several sequences"),
    ):
        with pytest.raises(AdapterError, match=said):
            adapter_for(layer).observed(layer, (X,), options)
    mask = torch.ones(24, 20)
    mask[0, :4] = 0
    assert torch.equal(adapter_for(layer).observed(layer, (X, mask), {})[1], mask.bool())


class ReadOutError(Exception):
    """What the norm behind the read-out gets; no GPU is there for the norm."""


def as_defined(layer, x):
    """The read-out of a layer of flash-linear-attention, by the package's own definition of its recurrence."""
    gla, kda = (importlib.import_module(f"fla.layers.{name}") for name in ("gla", "kda"))
    recurrent_gla = importlib.import_module("fla.ops.gla.naive").naive_recurrent_gla
    recurrent_kda = importlib.import_module("fla.ops.kda.naive").naive_recurrent_kda
    gate_of = importlib.import_module("fla.ops.kda.gate")

    def run_gla(q, k, v, gk, **_):
        return recurrent_gla(q, k, v, gk)

    def run_kda(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, lower_bound, **_):
        named = {} if lower_bound is None else {"lower_bound": lower_bound}
        gate = gate_of.naive_kda_gate if lower_bound is None else gate_of.naive_kda_lowerbound_gate
        q, k = (torch.nn.functional.normalize(part, dim=-1) for part in (q, k))
        strength = (2 if allow_neg_eigval else 1) * beta.sigmoid()
        return recurrent_kda(q, k, v, gate(g, A_log, dt_bias, **named), strength)

    def leave(norm, args):
        raise ReadOutError(args[0].detach())

    norm = next(part for key, part in layer.named_children() if "norm" in key)
    handle = norm.register_forward_pre_hook(leave)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(gla, "fused_recurrent_gla", run_gla)
        patch.setattr(kda, "fused_recurrent_kda", run_kda)
        with pytest.raises(ReadOutError) as found:
            layer(x)
    handle.remove()
    return found.value.args[0].flatten(2)


F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.filterwarnings("ignore:Triton is not supported")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("fla.layers.gla.GatedLinearAttention", {"num_heads": 2}),
        ("fla.layers.gla.GatedLinearAttention", {"num_heads": 2, "clamp_min": -0.05}),
        ("fla.layers.kda.KimiDeltaAttention", {"num_heads": 2, "head_dim": 16, "use_short_conv": False}),
        (
            "fla.layers.kda.KimiDeltaAttention",
            {"num_heads": 2, "head_dim": 16, "use_short_conv": False, "lower_bound": -5.0, "allow_neg_eigval": True},
        ),
    ],
)
def test_the_layers_of_flash_linear_attention_are_read_as_it_defines_them_and_built_at_their_new_sizes(
    path, options, dtype
):
    pytest.importorskip("fla")
    owner, _, name = path.rpartition(".")
    torch.manual_seed(0)
    kind = getattr(importlib.import_module(owner), name)
    layer = kind(**{"hidden_size": 32, "layer_idx": 0} | options).eval().to(dtype)
    x, adapter = torch.randn(6, 40, 32).to(dtype), adapter_for(layer)
    order, system = adapter.order(layer), adapter.read(layer)
    own = outputs(adapter.mapped_steps(layer, x.double(), system)).permute(0, 3, 1, 2, 4).flatten(2)
    theirs = as_defined(layer, x).double()
    assert (own - theirs).norm() < (1e-5 if dtype is F32 else 0.02) * theirs.norm()

    def calibrate(model):
        as_defined(layer, x)

    (record,) = cs.compress_(nn.Sequential(layer), keep=cs.TargetOrder(order // 2), calibrate=calibrate)
    assert record.measured_error < 1
    again = kind(**{"hidden_size": 32, "layer_idx": 0} | options | adapter.sizes(layer, order // 2)).eval().to(dtype)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(as_defined(again, x), as_defined(layer, x))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("path", "options", "dtype"),
    [
        ("fla.layers.simple_gla.SimpleGatedLinearAttention", {"use_short_conv": False}, F32),
        ("fla.layers.simple_gla.SimpleGatedLinearAttention", {"num_heads": 2}, F32),
        ("fla.layers.gla.GatedLinearAttention", {"num_heads": 2}, F32),
        ("fla.layers.gla.GatedLinearAttention", {"num_heads": 2, "use_short_conv": True}, F32),
        # Its kernel takes no float32.
        ("fla.layers.delta_net.DeltaNet", {"num_heads": 2}, BF16),
        ("fla.layers.gated_deltanet.GatedDeltaNet", {"num_heads": 2, "head_dim": 32}, F32),
        ("fla.layers.gated_deltanet.GatedDeltaNet", {"num_heads": 2, "head_dim": 32}, BF16),
        ("fla.layers.kda.KimiDeltaAttention", {"num_heads": 2, "head_dim": 32}, F32),
        ("fla.layers.mamba2.Mamba2", {"state_size": 32, "head_dim": 32, "hidden_size": 64}, F32),
    ],
)
def test_the_layers_of_flash_linear_attention_themselves_are_cut(path, options, dtype):
    owner, _, name = path.rpartition(".")
    pytest.importorskip("fla")
    torch.manual_seed(0)
    kind = getattr(importlib.import_module(owner), name)

    def made(**sizes):
        return kind(**{"hidden_size": 64, "layer_idx": 0} | options | sizes).cuda().to(dtype).eval()

    layer = made()
    x, adapter = torch.randn(8, 96, 64, device="cuda", dtype=dtype), adapter_for(layer)
    norm = next(part for key, part in layer.named_children() if "norm" in key)
    order = adapter.order(layer)

    def seen(layer):
        found = {}
        handle = norm.register_forward_pre_hook(lambda norm, args: found.update(y=args[0]))
        with torch.no_grad():
            layer(x)
        handle.remove()
        return found["y"].flatten(2).float()

    if hasattr(layer, "D"):
        layer.D.data.zero_()
    own = outputs(adapter.mapped_steps(layer, x.double(), adapter.read(layer))).permute(0, 3, 1, 2, 4).flatten(2)
    theirs = seen(layer)
    # Products in TF32. In bfloat16 roundings between projection, convolution, norm and chunks add up to 0.007: a
    # simulation of DeltaNet's kernel, chunk by chunk, with 8 bits.
    assert (own - theirs).norm() < 0.02 * theirs.norm()
    model = nn.Sequential(layer)
    cs.compress_(model, keep=cs.TargetOrder(order // 2), calibrate=lambda model: layer(x))
    assert adapter.order(layer) == order // 2
    assert {parameter.dtype for parameter in layer.parameters()} == {dtype}
    is_mamba = name == "Mamba2"
    again = made(**({"state_size": layer.ssm_state_size} if is_mamba else adapter.sizes(layer, order // 2)))
    again.load_state_dict(layer.state_dict())
    within = 1e-3 if dtype is F32 else 1e-2
    torch.testing.assert_close(again(x)[0], layer(x)[0], rtol=within, atol=within)
