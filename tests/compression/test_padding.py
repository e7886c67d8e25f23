"""Zero states up to one order: outputs, moments, streams and wrappers stay as they were."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import compressm as cs
from compressm.adapters import find
from compressm.compression import CompressionError
from compressm.compression.planning import Options, changes_of, found_layers, plan_cuts
from compressm.compression.surgery import prepare_cuts
from compressm.layers import LRU, S4, S4D, S5, ZOH, Bilinear, LinOSS, Mamba
from compressm.models import SequenceClassifier

LAYERS = [LRU, S5, S4, S4D, LinOSS, Mamba]
X = torch.randn(3, 40, 3, generator=torch.Generator().manual_seed(0))


def model_of(layer=LRU, order=8, dtype=torch.float32, **options):
    torch.manual_seed(1)
    sizes = {"depth": 2, "width": 8, "order": order, "inputs": 3, "classes": 5}
    return SequenceClassifier(layer, **{**sizes, **options}).to(dtype).eval()


def trained(model):
    """The model and its optimizer after three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(X.to(next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()


def layers_of(model):
    return [module for module, _ in find(model).values()]


def orders_of(model):
    return [layer.order for layer in layers_of(model)]


def unequal(layer=LRU):
    """A model whose layers have 6 and 8 states."""
    model = model_of(layer)
    model.blocks[0] = model_of(layer, order=6).blocks[0]
    return model


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("order", "to"), [(8, 16), (8, 32)])
def test_outputs_of_sequences_and_steps_are_the_same_bit_for_bit(layer, order, to):
    """For these orders: BLAS sums products of other lengths in other blocks, see the next two tests."""
    model = model_of(layer, order)
    (first, *_), u = layers_of(model), torch.randn(2, 8)
    _, state = first(torch.randn(2, 30, 8))
    with torch.no_grad():
        before, (y, _) = model(X), first.step(u, state)
        assert cs.pad_orders_(model, to) == to
        _, adapter = next(iter(find(model).values()))
        wider = adapter.state_growth(first).resized(state, to)
        assert float((model(X) - before).abs().max()) == 0.0
        assert float((first.step(u, wider)[0] - y).abs().max()) == 0.0
    assert orders_of(model) == [to, to]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_of_any_order_are_the_same_up_to_the_order_of_summation(layer, dtype):
    model, x = model_of(layer, 7, dtype), X.to(dtype)
    with torch.no_grad():
        before = model(x)
        cs.pad_orders_(model, 16)
        assert float((model(x) - before).abs().max()) <= 4 * torch.finfo(dtype).eps * float(before.abs().max())


@pytest.mark.parametrize("layer", LAYERS)
def test_old_states_keep_their_bits_and_new_ones_have_neither_input_nor_output(layer):
    model = model_of(layer, 7)
    before = copy.deepcopy(model)
    cs.pad_orders_(model, 16)
    for (module, adapter), old in zip(find(model).values(), layers_of(before), strict=True):
        for name, growth in adapter.growth(module).items():
            now = module.get_parameter(name).detach()
            assert torch.equal(growth.resized(now, 7), old.get_parameter(name))
        system = adapter.read(module)
        if layer is Mamba:
            assert not system.W_B[7:].any()
            assert not system.W_C[7:].any()
        elif layer is S4:
            grown = ("p_re", "p_im", "B_re", "B_im", "C_re", "C_im")
            assert not any(module.get_parameter(name)[:, 7:].any() for name in grown)
        else:
            assert not system.C[..., 7:].any()
            assert layer is S4D or not system.B[7:].any()
            assert float(system.poles.detach()[..., 7:].abs().max()) < 0.9


@pytest.mark.parametrize("rule", [ZOH(), Bilinear()], ids=str)
def test_every_rule_of_discretisation_has_zero_states(rule):
    model = model_of(S5, layer_options={"discretisation": rule})
    before = model(X)
    cs.pad_orders_(model, 16)
    assert torch.equal(model(X), before)


@pytest.mark.parametrize("layer", LAYERS)
def test_without_a_number_all_get_the_order_of_the_largest(layer):
    model = unequal(layer)
    before, objects = model(X), [id(parameter) for parameter in model.parameters()]
    assert cs.pad_orders_(model) == 8
    assert orders_of(model) == [8, 8]
    assert [id(parameter) for parameter in model.parameters()] == objects
    torch.testing.assert_close(model(X), before, rtol=1e-6, atol=1e-6)
    again = copy.deepcopy(model.state_dict())
    assert cs.pad_orders_(model) == 8
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_training_goes_on_as_without_zero_states(layer, kind):
    """All but S4D, which trains them: there the first update is not longer than that of other states."""
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    models = [model_of(layer), model_of(layer)]
    optimizers = [kind(model.parameters(), lr=1e-2, **options) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for _ in range(3):
            step(model, optimizer)
    cs.pad_orders_(models[1], 16, optimizer=optimizers[1])
    before = [module.C_re.detach().clone() for module in layers_of(models[1])] if layer is S4D else []
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer)
    if layer is S4D:
        moved = [(now.C_re.detach() - old).abs() for now, old in zip(layers_of(models[1]), before, strict=True)]
        assert all(float(one[:, 8:].max()) <= 2 * float(one[:, :8].max()) for one in moved)
    else:
        torch.testing.assert_close(models[1](X), models[0](X), rtol=1e-4, atol=1e-5)
        assert all(bool(torch.isfinite(parameter).all()) for parameter in models[1].parameters())


def test_first_moments_of_zero_states_are_zero_and_second_ones_the_mean():
    model, optimizer = trained(model_of())
    old = {name: copy.deepcopy(optimizer.state[p]) for name, p in model.named_parameters()}
    cs.pad_orders_(model, 16, optimizer=optimizer)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape
        assert state["step"] == old[name]["step"]
    first = model.blocks[0].ssm
    assert not optimizer.state[first.B_re]["exp_avg"][8:].any()
    mean = old["blocks.0.ssm.B_re"]["exp_avg_sq"].mean(0, keepdim=True).expand(8, -1)
    assert torch.equal(optimizer.state[first.B_re]["exp_avg_sq"][8:], mean)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_stream_goes_on(layer):
    model, other = model_of(layer, pooling=cs.models.EveryStep()), model_of(layer, pooling=cs.models.EveryStep())
    streams = [cs.Stream(one, batch=3) for one in (model, other)]
    for k in range(5):
        for stream in streams:
            stream(X[:, k])
    cs.pad_orders_(model, 16)
    for k in range(5, 12):
        torch.testing.assert_close(streams[0](X[:, k]), streams[1](X[:, k]), rtol=1e-5, atol=1e-6)


def test_an_average_follows_or_refuses_to_average():
    model, optimizer = trained(model_of())
    follower, forgotten = AveragedModel(model), AveragedModel(model)
    cs.pad_orders_(model, 16, optimizer=optimizer, follow=[follower])
    assert orders_of(follower) == [16, 16]
    follower.update_parameters(model)
    with pytest.raises(CompressionError, match="made before a cut"):
        forgotten.update_parameters(model)


def test_a_compressor_that_holds_the_model_is_named_if_its_optimizer_was_not_passed():
    model, optimizer = trained(model_of())
    compressor = cs.Compressor(model, optimizer, when=[1], keep=cs.TargetOrder(4))
    with pytest.warns(UserWarning, match="a Compressor with an optimizer holds this model"):
        cs.pad_orders_(model, 12)
    model, optimizer = trained(model_of())
    compressor = cs.Compressor(model, optimizer, when=[1], keep=cs.TargetOrder(4))
    cs.pad_orders_(model, 12, optimizer=optimizer)
    assert [cut.order for cut in compressor.step(1)] == [12, 12]
    step(model, optimizer)


def test_a_state_of_unknown_meaning_is_refused_and_nothing_changes():
    model, optimizer = trained(model_of())
    optimizer.state[model.blocks[1].ssm.B_re]["odd"] = torch.ones_like(model.blocks[1].ssm.B_re)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CompressionError, match="'odd'"):
        cs.pad_orders_(model, 16, optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.state[model.blocks[0].ssm.B_re]["exp_avg"].shape == (8, 8)


def test_a_layer_with_channels_of_their_own_is_refused_by_name():
    model = model_of(Mamba)
    cs.compress_(model, keep=cs.TargetOrder(3), calibrate=lambda model: model(X), selective=cs.PerChannel())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CompressionError, match=r"blocks\.0\.ssm: an earlier PerChannel cut"):
        cs.pad_orders_(model, 8)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_error_in_the_last_layer_leaves_the_first_as_it_was(monkeypatch):
    model, optimizer = trained(model_of())
    shared = model.blocks[1].ssm.C_re
    model.extra = nn.Module()
    model.extra.weight = shared
    with pytest.raises(CompressionError, match="two modules share"):
        cs.pad_orders_(model, 16, optimizer=optimizer)
    assert orders_of(model) == [8, 8]


def test_a_padded_model_is_saved_loaded_and_cut_again(tmp_path):
    model = unequal()
    cs.pad_orders_(model, 16)
    cs.save_model(model, tmp_path / "model")
    again = cs.load_model(tmp_path / "model")
    assert torch.equal(again(X), model(X))
    with torch.no_grad():
        before = model(X)
    cs.compress_(model, keep=cs.EnergyTolerance(1e-9))
    assert orders_of(model) == [6, 8]
    torch.testing.assert_close(model(X), before, rtol=1e-4, atol=1e-5)


def test_a_cut_that_is_filled_up_carries_the_moments_of_its_states():
    """The first states have the moments of a cut to the rank alone."""
    model, optimizer = trained(model_of())
    for layer in layers_of(model):
        layer.B_re.data[3:] = layer.B_im.data[3:] = 0
    options = Options(cs.TargetOrder(7), gate=1.0)
    plain = prepare_cuts(changes_of(plan_cuts(found_layers(model, options), options)), optimizer, cs.Transport())
    cs.compress_(model, keep=cs.TargetOrder(7), round_to=(7, 5), optimizer=optimizer)
    assert orders_of(model) == [5, 5]
    for cut, layer in zip(plain, layers_of(model), strict=True):
        found = optimizer.state[layer.B_re]["exp_avg"]
        assert torch.equal(found[:3], cut.states["B_re"]["exp_avg"])
        assert not found[3:].any()


@pytest.mark.parametrize("layer", [LRU, S4D, Mamba])
def test_a_stream_goes_on_through_a_cut_that_fills_layers_up(layer):
    model, other = (model_of(layer, pooling=cs.models.EveryStep()) for _ in range(2))
    other.blocks[0], model.blocks[0] = (model_of(layer, 4).blocks[0] for _ in range(2))
    streams = [cs.Stream(one, batch=3) for one in (model, other)]
    for k in range(5):
        for stream in streams:
            stream(X[:, k])
    options = {"calibrate": lambda model: model(X)} if layer is Mamba else {}
    with pytest.warns(UserWarning, match="zero states fill up blocks.0.ssm to 6 states"):
        cs.compress_(model, keep=cs.TargetOrder(6), uniform=True, **options)
    cs.compress_(other, keep=cs.TargetOrder(6), **options)
    assert (orders_of(model), orders_of(other)) == ([6, 6], [4, 6])
    for k in range(5, 12):
        torch.testing.assert_close(streams[0](X[:, k]), streams[1](X[:, k]), rtol=1e-4, atol=1e-5)


def test_a_guard_restores_what_was_before_the_cut_even_if_zero_states_were_added_since():
    model, optimizer = trained(model_of())
    scores = iter([1.0, 0.0])
    guard = cs.Rollback(lambda: next(scores), drop=0.1, settle=2)
    compressor = cs.Compressor(model, optimizer, when=[1], keep=cs.TargetOrder(4), guard=guard)
    compressor.step(1)
    cs.pad_orders_(model, 6, optimizer=optimizer)
    assert orders_of(model) == [6, 6]
    (event,) = compressor.step(3)
    assert isinstance(event, cs.Restored)
    assert orders_of(model) == [8, 8]
    step(model, optimizer)


def test_a_checkpoint_of_a_padded_model_loads_without_a_word_and_of_an_uncut_one_with_a_warning():
    model, optimizer = trained(model_of())
    compressor = cs.Compressor(model, optimizer, when=[1], keep=cs.TargetOrder(3))
    compressor.step(1)
    cs.pad_orders_(model, 5, optimizer=optimizer)
    state = compressor.state_dict()
    compressor.load_state_dict(state)
    assert (orders_of(model), [cut.rank for cut in compressor.history]) == ([5, 5], [3, 3])
    other, its = trained(model_of())
    with pytest.warns(UserWarning, match="has 8, cut to 3"):
        cs.Compressor(other, its, when=[1], keep=cs.TargetOrder(3)).load_state_dict(state)


def test_a_checkpoint_of_a_model_padded_to_its_old_order_loads_without_a_word(tmp_path):
    model, optimizer = trained(model_of())
    compressor = cs.Compressor(model, optimizer, when=[1, 5], keep=cs.TargetOrder(3))
    compressor.step(1)
    cs.pad_orders_(model, 8, optimizer=optimizer)
    parts = {"model": model, "optimizer": optimizer, "compressor": compressor}
    cs.compression.save_checkpoint(tmp_path / "c.pt", **parts)
    cs.compression.load_checkpoint(tmp_path / "c.pt", **parts)
    assert (orders_of(model), [cut.rank for cut in compressor.history]) == ([8, 8], [3, 3])
    cs.pad_orders_(model, 9, optimizer=optimizer)
    with pytest.warns(UserWarning, match="has 9, cut to 3"):
        compressor.load_state_dict(compressor.state_dict() | {"orders": {"blocks.0.ssm": 8, "blocks.1.ssm": 8}})


def test_an_order_that_no_memory_holds_is_refused():
    with pytest.raises(cs.compression.CompressionError, match="to is 1000000000, expected an integer from 1 to 65536"):
        cs.pad_orders_(model_of(), 10**9)
