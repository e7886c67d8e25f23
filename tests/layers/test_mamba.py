"""Mamba is the layer of transformers in values and gradients, and streams, pads and resizes as the others do."""

import math

import pytest
import torch
from torch.nn.functional import softplus

from compressm import load_model, save_model
from compressm.layers import Mamba
from compressm.models import RMSNorm, SequenceClassifier
from compressm.ops.selective import ScanPath
from tests import unhooked

WIDTH = 20


def make(order=4, **options):
    torch.manual_seed(0)
    return Mamba(WIDTH, order, **options)


def sequence(batch=3, length=30, dtype=torch.float32):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def theirs(order, **options):
    transformers = pytest.importorskip("transformers")
    mamba = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    config = transformers.MambaConfig(hidden_size=WIDTH, state_size=order, num_hidden_layers=1, **options)
    torch.manual_seed(0)
    layer = mamba.MambaMixer(config, 0)
    with torch.no_grad():
        for parameter in (layer.A_log, layer.D, layer.dt_proj.bias):
            parameter.add_(0.5 * torch.randn_like(parameter))
    return layer


def relative(one, other):
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("order", [1, 5, 16])
@pytest.mark.parametrize("conv_bias", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_layer_of_transformers_in_values_and_gradients(order, conv_bias, bias):
    other = theirs(order, use_conv_bias=conv_bias, use_bias=bias)
    layer = make(order, conv_bias=conv_bias, bias=bias)
    layer.load_state_dict(other.state_dict())
    x, weights = sequence().requires_grad_(), torch.randn(3, 30, WIDTH)
    outputs, gradients = [], []
    for module in (layer, other):
        y = module(x)
        y = y[0] if isinstance(y, tuple) else y
        named = dict(sorted(module.named_parameters()))
        outputs.append(y.detach())
        found = torch.autograd.grad((y * weights).sum(), [*named.values(), x])
        gradients.append(dict(zip([*named, "x"], found, strict=True)))
    assert relative(*outputs) < 1e-6
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert relative(gradient, gradients[1][name]) < 1e-6, name


def test_its_steps_are_the_sequence_of_transformers():
    other = theirs(6, conv_kernel=3)
    layer, x = make(6, conv_width=3), sequence()
    layer.load_state_dict(other.state_dict())
    state, outputs = layer.initial_state(3), []
    with torch.no_grad():
        for t in range(x.shape[1]):
            y, state = layer.step(x[:, t], state)
            outputs.append(y)
        assert relative(torch.stack(outputs, dim=1), other(x)) < 1e-6


def test_it_has_the_names_and_sizes_of_transformers():
    ours = {name: tuple(value.shape) for name, value in Mamba(40).state_dict().items()}
    transformers = pytest.importorskip("transformers")
    mamba = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    other = mamba.MambaMixer(transformers.MambaConfig(hidden_size=40, num_hidden_layers=1), 0)
    assert ours == {name: tuple(value.shape) for name, value in other.state_dict().items()}


def test_it_begins_as_its_authors_do():
    layer = make(order=5, expand=40, dt_rank=4, step_min=1e-5, step_max=1e-1)
    torch.testing.assert_close(layer.A_log.exp(), torch.arange(1.0, 6).expand(layer.inner, -1))
    assert (layer.D == 1).all()
    steps = softplus(layer.dt_proj.bias)
    assert steps.min().item() == pytest.approx(1e-4, rel=1e-3)
    assert 0.05 < steps.max() <= 0.1
    assert 0.9 / 2 < layer.dt_proj.weight.abs().max() <= 1 / 2
    marked = {name for name, parameter in layer.named_parameters() if getattr(parameter, "_no_weight_decay", False)}
    assert marked == {"A_log", "D", "dt_proj.bias"}
    assert [Mamba(width).dt_rank for width in (16, 17)] == [1, 2]


@pytest.mark.parametrize("conv_width", [1, 2, 4])
def test_chunks_shorter_than_the_convolution_equal_the_whole(conv_width):
    layer, x = make(conv_width=conv_width).double(), sequence(length=9, dtype=torch.float64)
    whole, last = layer(x)
    state, parts = None, []
    for first, stop in ((0, 1), (1, 3), (3, 4), (4, 9)):
        y, state = layer(x[:, first:stop], state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    torch.testing.assert_close(state, last)


@pytest.mark.parametrize("padding", [1e6, math.nan, math.inf])
def test_padding_reaches_neither_outputs_nor_state_nor_gradients(padding):
    lengths, x = torch.tensor([8, 1, 3]), sequence(length=8, dtype=torch.float64)
    valid = torch.arange(8) < lengths[:, None]
    layers = [make(bias=True).double() for _ in range(2)]
    start = torch.randn_like(layers[0].initial_state(3))
    y, state = layers[0](torch.where(valid[..., None], x, padding), start, lengths)
    y[valid].square().sum().backward()
    for i, stop in enumerate(lengths):
        alone, end = layers[1](x[i : i + 1, :stop], start[i : i + 1])
        alone.square().sum().backward()
        torch.testing.assert_close(y[i, :stop], alone[0])
        torch.testing.assert_close(state[i], end[0])
    for (name, one), other in zip(layers[0].named_parameters(), layers[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_without_keep_state_there_is_none():
    assert make()(sequence(), keep_state=False)[1] is None


def test_under_bfloat16_states_stay_float32_and_steps_precise():
    layer, x = make(), sequence()
    exact, last = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        stepped, after = layer.step(x[:, 0].bfloat16(), layer.initial_state(3))
    assert (y.dtype, state.dtype, stepped.dtype, after.dtype) == (torch.bfloat16, torch.float32) * 2
    assert relative(y.float(), exact) < 0.01
    assert relative(state, last) < 0.01
    # Without the bias, which bfloat16 would have rounded.
    with torch.autocast("cpu", torch.bfloat16):
        assert (layer.selected(torch.zeros(1, 1, layer.inner))[0] == 0).all()


def test_a_layer_in_half_precision_streams_in_float32():
    layer, x = make().bfloat16(), sequence().bfloat16()
    y, state = layer(x)
    stepped, after = layer.step(x[:, 0], layer.initial_state(3))
    assert (y.dtype, state.dtype, stepped.dtype, after.dtype) == (torch.bfloat16, torch.float32) * 2


def test_hooks_on_the_projection_hear_what_drives_the_recurrence():
    layer, heard = make(), []
    layer.x_proj.register_forward_hook(lambda module, args, output: heard.append((args[0].shape, output.shape)))
    layer(sequence())
    layer.step(sequence()[:, 0], layer.initial_state(3))
    rows = layer.dt_rank + 2 * layer.order
    assert heard == [((3, 30, 40), (3, 30, rows)), ((3, 1, 40), (3, 1, rows))]


def test_the_projection_has_as_many_outputs_as_a_checkpoint_brings():
    layer = make(order=7)
    projection = layer.x_proj.weight
    layer.load_state_dict(make(order=3).state_dict())
    assert layer.x_proj.out_features == layer.dt_rank + 6
    assert layer.x_proj.weight is projection
    assert f"out_features={layer.dt_rank + 6}" in repr(layer)


def test_a_path_reaches_the_scan():
    x = sequence()
    torch.testing.assert_close(make(path=ScanPath.LOOP)(x)[0], make()(x)[0], rtol=1e-5, atol=1e-6)


def test_a_classifier_of_another_order_is_saved_and_comes_back(tmp_path):
    model = SequenceClassifier(Mamba, depth=2, width=6, order=8, inputs=2, classes=3, norm=RMSNorm())
    model.blocks[0].ssm.load_state_dict(Mamba(6, 3).state_dict())
    model.blocks[1].ssm.A_log.requires_grad_(False)
    save_model(model, tmp_path)
    loaded, x = load_model(tmp_path), torch.randn(2, 7, 2)
    assert [block.ssm.order for block in loaded.blocks] == [3, 8]
    assert loaded.blocks[0].ssm.dt_proj.bias._no_weight_decay
    assert not loaded.blocks[1].ssm.A_log.requires_grad
    assert torch.equal(loaded(x), model.eval()(x))


REFUSED = {
    "expand 0": ("Mamba(6, expand=0)", "expand is 0", "at least 1"),
    "half an expansion": ("Mamba(6, expand=1.5)", "expand is 1.5", "integer"),
    "no convolution": ("Mamba(6, conv_width=0)", "conv_width is 0", "at least 1"),
    "rank 0": ("Mamba(6, dt_rank=0)", "dt_rank is 0", "at least 1"),
    "steps the wrong way round": ("Mamba(6, step_min=1.0)", "step_min is 1.0", "step_min < step_max"),
    "another precision": ("Mamba(6)(torch.ones(1, 2, 6).double())", "torch.float64", "torch.float32"),
    "a path of another op": ("Mamba(6, path='loop')(torch.ones(1, 2, 6))", "'loop'", "ScanPath.LOOP"),
}


@pytest.fixture(scope="module")
def outcomes():
    table = {case: row[0] for case, row in REFUSED.items()}
    return unhooked.outcomes("import torch\nfrom compressm.layers import Mamba\n", table)


@pytest.mark.parametrize("case", REFUSED)
def test_bad_options_are_refused(case, outcomes):
    kinds, message = outcomes[case]
    assert kinds[:1] == ["SequenceError"], message
    assert all(fragment in message for fragment in REFUSED[case][1:]), message
