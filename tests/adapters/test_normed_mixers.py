"""Mamba-1 mixers of transformers with norms of Δ, B and C: what their adapters promise, and cuts behind norms."""

import copy
import pickle

import pytest
import torch
from torch import nn

import compressm as cs
from compressm.adapters import AdapterError, adapter_for, find
from compressm.compression import CompressionError
from compressm.compression.planning import Options, read_layers
from compressm.families.fitting import halves
from compressm.families.observing import ratio_of
from compressm.families.selective.simulation import outputs, squared_change

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

IDS = torch.randint(1, 20, (8, 24), generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 20, "hidden_size": 12, "num_hidden_layers": 2, "eos_token_id": None, "pad_token_id": 0}
SIZES |= {"initializer_range": 0.15}  # with that of the configs the states would hardly count in the output
# An ε that matters: norms see vectors of about this mean square.
EPS = 0.02
MODELS = {
    "FalconMamba": {"state_size": 6, "time_step_rank": 3, "mixer_rms_eps": EPS},
    "Jamba": {
        **{"mamba_d_state": 6, "mamba_dt_rank": 3, "rms_norm_eps": EPS, "num_hidden_layers": 3},
        **{"attn_layer_offset": 1, "attn_layer_period": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16},
        **{"num_experts": 1, "num_experts_per_tok": 1, "expert_layer_offset": 1, "expert_layer_period": 2},
    },
}
NAMES = {"FalconMamba": "state_size", "Jamba": "mamba_d_state"}
KEPT, DROPPED = [1, 3, 4], [0, 2, 5]
THREE = cs.TargetOrder(3)
METHODS = [cs.Baked(), cs.Baked(two_sided=True), cs.Baked(refit=True), cs.SharedIndex(), cs.SharedIndex(refit=True)]
EVERY = pytest.mark.parametrize("name", MODELS)


def make(name, seed=0, **options):
    torch.manual_seed(seed)
    kinds = getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, f"{name}Config")
    model = kinds[0](kinds[1](**SIZES | MODELS[name] | options)).eval()
    for mixer in mixers(model).values():
        mixer.x_proj.weight.data *= 8
        mixer.A_log.data += 0.3 * torch.randn(mixer.A_log.shape)
        mixer.dt_proj.bias.data += 1
        if name == "Jamba":
            for part in ("dt", "b", "c"):
                weight = getattr(mixer, f"{part}_layernorm").weight
                weight.data = 1 + 0.4 * torch.randn(weight.shape)
    return model


def mixers(model):
    return {name: mixer for name, (mixer, _) in find(model).items()}


def first(model):
    return next(iter(mixers(model).values()))


def unequal(model, order=3):
    """The first layer gets this order."""
    cut(model, keep=cs.KeepFraction(1.0), overrides={next(iter(mixers(model))): cs.TargetOrder(order)}, gate=1.0)
    return model


def runs(model):
    return model(IDS, use_cache=False)


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def cut(model, keep=THREE, calibrate=runs, **options):
    return cs.compress_(model, keep=keep, calibrate=calibrate, **options)


def mask_(model):
    """Rows of B and C of dropped states become zero: states without effect, which still count in the norms' means."""
    for mixer in mixers(model).values():
        rows = mixer.x_proj.weight.data[3:].view(2, 6, -1)
        rows[:, DROPPED] = 0
    return model


def layers(model, method=cs.Baked(), calibrate=runs):  # noqa: B008
    return read_layers(model, Options(THREE, calibrate, selective=method))


def scanned(mixer, x, **options):
    """What the scan of the mixer gives, without its skip and before its gate."""
    mixer, found = copy.deepcopy(mixer), {}
    mixer.D.data.zero_()
    mixer.out_proj.register_forward_pre_hook(lambda part, args: found.update(y=args[0]))
    with torch.no_grad():
        mixer(x, **options)
        gate = mixer.in_proj(x).chunk(2, dim=-1)[1]
    return found["y"] / nn.functional.silu(gate)


@EVERY
def test_steps_and_a_scan_are_the_mixers_own_output(name):
    for mixer, adapter in find(make(name)).values():
        x, found = torch.randn(3, 20, 12), {}
        mask = torch.ones(3, 20, dtype=torch.long)
        mask[0, :4] = 0
        handle = mixer.x_proj.register_forward_pre_hook(lambda part, args, found=found: found.update(u=args[0]))
        for given in (None, mask):
            theirs = scanned(mixer, x, attention_mask=given)
            mixer(x, attention_mask=given)
            own = outputs(adapter.read(mixer).detach(), found["u"].detach().double())
            there = torch.ones_like(mask).bool() if given is None else mask.bool()
            torch.testing.assert_close(own[there].float(), theirs[there], rtol=1e-3, atol=1e-5)
        handle.remove()


@EVERY
def test_encoding_what_was_read_gives_the_values_back(name):
    mixer, adapter = next(iter(find(make(name)).values()))
    for key, value in adapter.encode(mixer, adapter.read(mixer)).items():
        torch.testing.assert_close(value, mixer.get_parameter(key).double(), rtol=1e-12, atol=0)


@EVERY
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_all_states_reproduce_the_output(name, method):
    layer = next(iter(layers(make(name), method).values()))
    assert layer.cut([torch.arange(6)], 0.0).measured_error < 1e-6


@EVERY
def test_a_selection_is_the_masked_mixer_and_loads_and_decodes_in_plain_transformers(name, tmp_path):
    """Though the norms' means are over 3 states and not over 6, and ε is as large as they are."""
    model = mask_(make(name))
    masked = copy.deepcopy(model)
    records = cut(model, selective=cs.SharedIndex())
    assert [(one.order, one.rank) for one in records] == [(6, 3)] * 2
    assert all(one.measured_error < 1e-6 for one in records)
    torch.testing.assert_close(logits(model), logits(masked), rtol=1e-4, atol=1e-5)
    for mixer, old in zip(mixers(model).values(), mixers(masked).values(), strict=True):
        assert torch.equal(mixer.A_log, old.A_log[:, KEPT])
        assert mixer.b_layernorm.weight.shape == mixer.c_layernorm.weight.shape == (3,)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert getattr(again.config, NAMES[name]) == 3
    assert torch.equal(logits(again), logits(model))
    written = [one.generate(IDS[:, :4], max_new_tokens=6, do_sample=False) for one in (again, masked)]
    assert torch.equal(*written)


@EVERY
def test_decoding_with_a_cache_is_the_forward_pass(name):
    model = make(name)
    cut(model)
    written = model.generate(
        IDS[:, :6], max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    whole = logits(model, written.sequences[:, :-1])[:, 5:]
    torch.testing.assert_close(torch.stack(written.logits, dim=1), whole, rtol=1e-4, atol=1e-5)


@EVERY
@pytest.mark.parametrize("method", [cs.Baked(), cs.SharedIndex(), cs.Baked(fit=3)], ids=str)
def test_the_measured_error_is_that_of_the_mixer_which_is_stored(name, method):
    model = make(name)
    before, inputs = copy.deepcopy(model), {}
    for path, mixer in mixers(before).items():
        mixer.register_forward_pre_hook(
            lambda mixer, args, given, path=path: inputs.update({path: (*args, *given.values())[0].detach()}),
            with_kwargs=True,
        )
    runs(before)
    for record in cut(model, selective=method):
        x = inputs[record.module]
        x = x[[2, 7]] if method == cs.Baked(fit=3) else x  # one of four, which a fit has not seen
        old, new = (mixers(one)[record.module] for one in (before, model))
        gain = float((new.out_proj.weight / old.out_proj.weight)[0, 0].detach())
        y, after = scanned(old, x), scanned(new, x) * gain
        error = float((after - y).norm() / y.norm())
        if method != cs.Baked(fit=3):
            assert record.measured_error == pytest.approx(error, rel=1e-3)
        assert 0 < record.measured_error < 1


@EVERY
def test_projections_are_nearer_than_indices_and_fits_nearer_still_on_sequences_they_have_not_seen(name):
    many = torch.randint(1, 20, (48, 32), generator=torch.Generator().manual_seed(1))
    found = []
    for method in (cs.Baked(), cs.Baked(fit=60), cs.SharedIndex(), cs.SharedIndex(fit=60)):
        layer = next(iter(layers(make(name), method, lambda model: model(many, use_cache=False)).values()))
        new = layer.cut([torch.arange(3)], 0.0).system
        judging = halves(layer.data.observations.sample)[1]
        found.append(ratio_of(squared_change(layer.system, new, judging)))
    baked, fitted, index, fitted_index = found
    assert fitted < baked < index
    assert fitted_index < index


def test_a_fit_serves_layers_without_norms_too():
    errors = []
    for steps in (0, 60):
        torch.manual_seed(0)
        layer = cs.layers.Mamba(6, order=8)
        x = torch.randn(16, 40, 6, generator=torch.Generator().manual_seed(1))
        layer.A_log.data += 0.3 * torch.randn(layer.A_log.shape, generator=torch.Generator().manual_seed(2))
        (record,) = cs.compress_(
            layer, keep=THREE, calibrate=lambda layer, x=x: layer(x), selective=cs.Baked(fit=steps)
        )
        errors.append(record.measured_error)
    assert errors[1] < errors[0]


def test_steps_of_a_fit_are_a_number():
    with pytest.raises(CompressionError, match=r"Baked: fit is -1, expected an integer of at least 0"):
        cs.Baked(fit=-1)


def gradients(model, name):
    """Gradients of a loss, by parameter name, of the first mixer."""
    mixer = copy.deepcopy(first(model)).double()
    x = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    target = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    mixer.zero_grad()
    (mixer(x) - target).square().sum().backward()
    return {key: p.grad.clone() for key, p in mixer.named_parameters() if p.grad is not None}


@EVERY
def test_gradients_become_those_of_the_cut_mixer(name):
    """The masked mixer and its selection are one function of the rows and weights that stay."""
    model = mask_(make(name))
    layer = next(iter(layers(model, cs.SharedIndex()).values()))
    change = layer.cut([torch.arange(3)], 0.0).change()
    own = gradients(model, name)
    carried = change.gradient({key: own[key] for key in change.resized})
    cut(model, selective=cs.SharedIndex())
    expected = gradients(model, name)
    assert set(carried) == {"x_proj.weight", "A_log"} | (
        {"D", "out_proj.weight"} if name == "FalconMamba" else {"b_layernorm.weight", "c_layernorm.weight"}
    )
    for key, value in carried.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5 * float(expected[key].abs().max()))


@EVERY
def test_an_update_moves_the_cut_mixer_as_it_would_have_moved_the_other(name):
    model = mask_(make(name))
    layer = next(iter(layers(model, cs.SharedIndex()).values()))
    reduced = layer.cut([torch.arange(3)], 0.0)
    change = reduced.change()
    g = torch.Generator().manual_seed(5)
    step = {key: torch.randn(layer.module.get_parameter(key).shape, generator=g).double() for key in change.resized}
    size, moved = 1e-4, []
    for sign in (1, -1):
        other = copy.deepcopy(layer.module).double()
        for key, value in step.items():
            other.get_parameter(key).data += sign * size * value
        adapter = adapter_for(other)
        moved.append(reduced.following(other, adapter).values)
    for key, value in change.update(step).items():
        expected = (moved[0][key] - moved[1][key]) / (2 * size)
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@EVERY
def test_squares_are_those_of_moments_that_vary_independently(name):
    layer = next(iter(layers(make(name)).values()))
    change = layer.cut([torch.arange(3)], 0.0).change()
    g = torch.Generator().manual_seed(4)
    sizes = {key: torch.rand(layer.module.get_parameter(key).shape, generator=g).double() for key in change.resized}
    for carry, carry_squares in ((change.gradient, change.gradient_squares), (change.update, change.update_squares)):
        total = dict.fromkeys(sizes, 0)
        for _ in range(1000):
            noise = {key: size * torch.randn(size.shape, generator=g).double() for key, size in sizes.items()}
            total = {key: total[key] + value**2 for key, value in carry(noise).items()}
        for key, found in carry_squares({key: size**2 for key, size in sizes.items()}).items():
            assert found.shape == change.values[key].shape
            torch.testing.assert_close(total[key] / 1000, found, rtol=0.3, atol=1e-12)


@EVERY
@pytest.mark.parametrize("moments", [cs.Transport(), cs.Slice()], ids=str)
def test_training_goes_on_with_an_average_and_one_more_cut(name, moments):
    model = make(name).train()
    optimizer, average = torch.optim.AdamW(model.parameters(), lr=1e-3), copy.deepcopy(model)
    compressor = cs.Compressor(
        model, optimizer, when=[2, 3], keep=cs.KeepFraction(0.6), calibrate=runs, follow=[average], moments=moments
    )
    before = {key: id(parameter) for key, parameter in model.named_parameters()}
    for step in range(1, 6):
        optimizer.zero_grad()
        model(IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
        compressor.step(step)
    assert {key: id(parameter) for key, parameter in model.named_parameters()} == before
    assert [event.rank for event in compressor.history] == [3, 3, 1, 1]
    for parameter in model.parameters():
        if parameter.grad is not None:
            assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    assert [mixer.ssm_state_size for mixer in mixers(average).values()] == [1, 1]
    assert torch.isfinite(logits(average)).all()
    assert average.config is not model.config or getattr(average.config, NAMES[name]) == 1


@EVERY
def test_a_copy_that_follows_keeps_the_coordinates(name):
    """A copy with the same weights becomes the same model."""
    model = make(name)
    average = copy.deepcopy(model)
    compressor = cs.Compressor(
        model, torch.optim.SGD(model.parameters(), lr=0.0), when=[1], keep=THREE, calibrate=runs, follow=[average]
    )
    compressor.step(1)
    torch.testing.assert_close(logits(average), logits(model), rtol=0, atol=0)


@EVERY
def test_a_guard_restores_the_model_and_its_config(name):
    model = make(name)
    before, buffers = copy.deepcopy(model.state_dict()), {key: b.clone() for key, b in model.named_buffers()}
    scores = iter([1.0, 0.0])
    guard = cs.Rollback(lambda: next(scores), drop=0.1, settle=1)
    compressor = cs.Compressor(
        model, torch.optim.SGD(model.parameters(), lr=0.0), when=[1], keep=THREE, calibrate=runs, guard=guard
    )
    compressor.step(1)
    assert getattr(model.config, NAMES[name]) == 3
    compressor.step(2)
    assert getattr(model.config, NAMES[name]) == 6
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(dict(model.named_buffers()), buffers, rtol=0, atol=0)
    assert torch.isfinite(logits(model)).all()


@EVERY
@pytest.mark.parametrize("order", [1, 5])
def test_half_precision_frozen_layers_and_odd_orders(name, order):
    model = make(name).to(torch.bfloat16)
    for parameter in first(model).parameters():
        parameter.requires_grad_(False)
    model.gradient_checkpointing_enable()
    records = cut(model, cs.TargetOrder(order))
    assert [one.rank for one in records] == [order] * 2
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    model.train()(IDS, labels=IDS, use_cache=False).loss.backward()
    assert torch.isfinite(logits(model)).all()


@EVERY
def test_padding_counts_for_nothing(name):
    model, short, found = make(name), IDS[:, :14], []
    for side in ("none", "left", "right"):
        ids, mask, empty = short, torch.ones_like(short), torch.zeros(8, 6, dtype=torch.long)
        if side != "none":
            ids, mask = (
                torch.cat(pair if side == "left" else pair[::-1], dim=1) for pair in ((empty, ids), (empty, mask))
            )
        read = layers(model, calibrate=lambda m, ids=ids, mask=mask: m(ids, attention_mask=mask, use_cache=False))
        averages = next(iter(read.values())).data.observations.averages
        found.append((averages.mean("BB"), averages.mean("CC")))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-6)


@EVERY
def test_a_budget_of_parameters_is_kept(name):
    model = make(name)
    whole = sum(parameter.numel() for parameter in model.parameters())
    state = adapter_for(first(model)).state_parameters(first(model))
    assert state == 72 + (2 if name == "Jamba" else 0)
    cut(model, cs.Budget(parameters=whole - 4 * state), uniform=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == whole - 4 * state


@EVERY
def test_a_model_of_another_order_takes_the_orders_of_a_checkpoint(name, tmp_path):
    """With the ones that kernels of FalconMamba take as weights, which no file has."""
    model, again, whole = make(name), make(name, seed=1), make(name, seed=2)
    cs.compression.save_checkpoint(tmp_path / "whole", model=whole)
    cut(model)
    cs.compression.save_checkpoint(tmp_path / "cut", model=model)
    for file, expected in (("cut", model), ("whole", whole)):
        cs.compression.load_checkpoint(tmp_path / file, model=again)
        assert torch.equal(logits(again), logits(expected))
        torch.testing.assert_close(dict(again.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=0)


@EVERY
def test_norms_that_differ_in_their_epsilon_are_refused_by_name(name):
    model = make(name)
    setattr(first(model).b_layernorm, "eps" if name == "FalconMamba" else "variance_epsilon", 0.5)
    with pytest.raises(AdapterError, match=r"MambaMixer .*norms of Δ, B and C with ε 0.02, 0.5, 0.02, expected one"):
        adapter_for(first(model)).read(first(model))


@EVERY
@pytest.mark.parametrize("method", [cs.Baked(), cs.SharedIndex(fit=3)], ids=str)
def test_a_cut_that_another_process_receives_is_the_same(name, method):
    layer = next(iter(layers(make(name), method).values()))
    own = layer.cut([torch.arange(3)], 0.1)
    received = layer.received(pickle.loads(pickle.dumps(own.sent())))
    assert received.energy_lost == 0.1
    torch.testing.assert_close(dict(received.change().values), dict(own.change().values), rtol=0, atol=0)
