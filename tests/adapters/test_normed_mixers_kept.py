"""FalconMamba and Jamba with unequal orders: on disk, in state dicts, and with zero states behind their norms."""

import pytest
import torch

import compressm as cs
from compressm.adapters import adapter_for
from tests.adapters.test_normed_mixers import EVERY, IDS, NAMES, cut, first, logits, make, mixers, unequal


def train(model, optimizer):
    optimizer.zero_grad()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    optimizer.step()


def orders_of(model):
    return [mixer.ssm_state_size for mixer in mixers(model).values()]


def said_orders(model, name):
    """The orders of the mixers in the config; Jamba has an attention layer between them."""
    said = model.config.per_layer_config
    return [getattr(said[mixer.layer_idx], NAMES[name]) for mixer in mixers(model).values()]


def buffers(model):
    return dict(model.named_buffers())


@EVERY
def test_the_states_of_these_models_count_in_their_outputs(name):
    """Otherwise nothing below would say anything."""
    model = make(name)
    before = logits(model)
    for mixer in mixers(model).values():
        mixer.x_proj.weight.data[3:] = 0
    assert (logits(model) - before).norm() > 0.05 * before.norm()


@EVERY
@pytest.mark.parametrize("kind", ["ForCausalLM", "Model"])
def test_our_files_and_those_of_transformers_give_the_same_model_at_unequal_orders(name, kind, tmp_path):
    model = unequal(make(name))
    if kind == "Model":
        model = model.backbone if name == "FalconMamba" else model.model
    cs.save_model(model, tmp_path / "ours")
    with pytest.warns(UserWarning, match=r"the layers have 3, 6"):
        model.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        loaded = cs.load_model(tmp_path / folder)
        assert type(loaded) is type(model)
        assert orders_of(loaded) == [3, 6]
        assert said_orders(loaded, name) == [3, 6]
        with torch.no_grad():
            assert torch.equal(loaded(IDS, use_cache=False)[0], model(IDS, use_cache=False)[0])
        torch.testing.assert_close(buffers(loaded), buffers(model), rtol=0, atol=0)
        if kind == "ForCausalLM":
            cut(loaded, keep=cs.TargetOrder(2))
            assert orders_of(loaded) == [2, 2]


def test_a_jamba_with_experts_is_saved_and_loaded(tmp_path):
    model = make("Jamba", num_experts=4, num_experts_per_tok=2)
    cut(model)
    cs.save_model(model, tmp_path)
    assert torch.equal(logits(cs.load_model(tmp_path)), logits(model))


@EVERY
def test_a_model_in_bfloat16_comes_back_and_trains(name, tmp_path):
    model = unequal(make(name).bfloat16())
    cs.save_model(model, tmp_path)
    loaded = cs.load_model(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(model))
    train(loaded.train(), torch.optim.SGD(loaded.parameters(), lr=1e-3))


@EVERY
def test_a_state_dict_of_other_orders_is_taken_by_a_model_that_accepts_them(name):
    model, other = unequal(make(name)), make(name, seed=1)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    train(other, optimizer)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(model.state_dict())
    cs.compression.accept_orders_(other, lambda: [optimizer])
    other.load_state_dict(model.state_dict())
    assert orders_of(other) == [3, 6]
    assert said_orders(other, name) == [3, 6]
    assert torch.equal(logits(other), logits(model))
    torch.testing.assert_close(buffers(other), buffers(model), rtol=0, atol=0)
    train(other, optimizer)


@EVERY
@pytest.mark.parametrize("to", [None, 24])
def test_zero_states_change_no_output_and_make_an_ordinary_model(name, to, tmp_path):
    """The norms' means are then over 24 states in place of 3 and 6."""
    model = unequal(make(name))
    before, text = logits(model), model.generate(IDS[:, :4], max_new_tokens=6, do_sample=False)
    objects = [id(parameter) for parameter in model.parameters()]
    assert cs.pad_orders_(model, to) == (to or 6)
    assert [id(parameter) for parameter in model.parameters()] == objects
    assert orders_of(model) == [to or 6] * 2
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(loaded.generate(IDS[:, :4], max_new_tokens=6, do_sample=False), text)
    assert cs.deploy.check(loaded, cs.deploy.TRANSFORMERS).fine


@EVERY
def test_zero_states_get_no_gradient_and_are_cut_again(name):
    model = make(name)
    before = logits(model)
    cs.pad_orders_(model, 12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model.train(), optimizer)
    for mixer in mixers(model).values():
        rows = mixer.x_proj.weight[3:].view(2, 12, -1)[:, 6:]
        assert not rows.any()
        assert float(mixer.x_proj.weight.grad[3:].view(2, 12, -1)[:, :6].abs().max()) > 0
    other = make(name).eval()
    cs.pad_orders_(other, 12)
    cut(other, keep=cs.TargetOrder(6), selective=cs.SharedIndex())
    assert orders_of(other) == [6, 6]
    torch.testing.assert_close(logits(other), before, rtol=1e-4, atol=1e-5)


@EVERY
def test_moments_of_the_states_go_along_with_the_factors_of_zero_states(name):
    """Gradients of the padded mixer are those of the first one through θ = θ' / c, and so are their moments."""
    model = make(name).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.5, 0.5), weight_decay=0.0)
    mixer = first(model)
    x = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def gradients():
        optimizer.zero_grad()
        mixer(x).square().sum().backward()
        return {key: p.grad.clone() for key, p in mixer.named_parameters()}

    gradients()
    optimizer.step()
    cs.pad_orders_(model, 24, optimizer=optimizer)
    found = {key: dict(optimizer.state[p]) for key, p in mixer.named_parameters()}
    for key, gradient in gradients().items():
        expected = gradient.clone()
        if key == "A_log":
            expected[:, 6:] = 0
        if key == "x_proj.weight":
            expected[3:].view(2, 24, -1)[:, 6:] = 0
        near = {"rtol": 1e-3, "atol": 1e-6 * float(gradient.abs().max())}  # norms compute in float32
        torch.testing.assert_close(found[key]["exp_avg"], 0.5 * expected, **near)
        squares, there = found[key]["exp_avg_sq"].sqrt(), expected != 0
        torch.testing.assert_close(squares[there], 0.5**0.5 * expected[there].abs(), **near)


@EVERY
def test_a_cut_with_one_order_for_all_fills_the_smaller_layer_up(name):
    model, other = unequal(make(name)), unequal(make(name))
    with pytest.warns(UserWarning, match="zero states fill up"):
        cut(model, keep=cs.TargetOrder(5), uniform=True, selective=cs.SharedIndex())
    cut(other, keep=cs.TargetOrder(5), selective=cs.SharedIndex())
    assert (orders_of(model), orders_of(other)) == ([5, 5], [3, 5])
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-4, atol=1e-5)


@EVERY
def test_what_a_layer_of_more_states_costs_is_known(name):
    adapter, mixer = adapter_for(first(make(name))), first(make(name))
    sizes = {key: value.shape for key, value in mixer.named_parameters()}
    added = sum(
        own.blocks * (mixer.get_parameter(key).numel() // sizes[key][own.axis])
        for key, own in adapter.growth(mixer).items()
    )
    assert added == adapter.state_parameters(mixer)
    assert set(cs.deploy.step_times(make(name), lambda model: logits(model, IDS[:1, :4]), (3, 9), repeats=1)) == {3, 9}
