"""What every SSM layer promises, run over all of them."""

import copy

import pytest
import torch

from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba
from tests import unhooked

WIDTH, ORDER = 6, 5
LAYERS = {"LRU": LRU, "S5": S5, "S4": S4, "S4D": S4D, "LinOSS": LinOSS, "Mamba": Mamba}
# One product a parameter: what makes a layer cheap enough for finite differences.
TINY = {Mamba: {"expand": 1, "conv_width": 2}}


@pytest.fixture(params=LAYERS)
def make(request):
    def build(order=ORDER, **options):
        torch.manual_seed(0)
        return build.kind(WIDTH, order=order, **options)

    build.kind = LAYERS[request.param]
    return build


def sequence(batch=3, length=40, dtype=torch.float32):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def random_state(layer, batch=3):
    return torch.randn_like(layer.initial_state(batch))


def test_forward_equals_repeated_steps(make):
    layer, x = make().double(), sequence(dtype=torch.float64)
    state = random_state(layer)
    y, last = layer(x, state)
    for t in range(x.shape[1]):
        stepped, state = layer.step(x[:, t], state)
        torch.testing.assert_close(stepped, y[:, t], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state, last, rtol=1e-9, atol=1e-10)


def test_without_a_state_a_sequence_starts_from_the_initial_one(make):
    layer, x = make(), sequence()
    for one, other in zip(layer(x), layer(x, layer.initial_state(3)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("cut", [1, 17, 39])
def test_a_sequence_in_chunks_equals_the_whole(make, cut):
    layer, x = make().double(), sequence(dtype=torch.float64)
    whole, last = layer(x)
    first, state = layer(x[:, :cut])
    second, end = layer(x[:, cut:], state)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(end, last, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_layer_in_half_precision_steps_with_states_in_float32_as_forward_does(make, dtype):
    layer, x = make().to(dtype), sequence(length=200, dtype=dtype)
    whole, last = layer(x)
    state, stepped = layer.initial_state(3), []
    for t in range(200):
        y, state = layer.step(x[:, t], state)
        stepped.append(y)
    assert (state.dtype, y.dtype) == (torch.float32, dtype)
    assert layer.initial_state(3).dtype == last.dtype == torch.float32
    # Outputs differ by a rounding or two; states in half precision would lose much more.
    rounding = torch.finfo(dtype).eps * whole.float().abs().max().item()
    torch.testing.assert_close(torch.stack(stepped, 1).float(), whole.float(), rtol=0, atol=2 * rounding)
    torch.testing.assert_close(state, last, rtol=1e-2, atol=1e-3)
    after, _ = layer.step(x[:, 0], last)
    assert torch.isfinite(after).all()


def test_a_step_takes_a_state_in_another_precision(make):
    layer, x = make(), sequence()
    _, state = layer(x)
    expected, _ = layer.step(x[:, 0], state)
    y, _ = layer.step(x[:, 0], state.double())
    torch.testing.assert_close(y, expected)


def test_padding_after_lengths_changes_nothing(make):
    layer, x = make().double(), sequence(dtype=torch.float64)
    lengths = torch.tensor([40, 11, 1])
    noisy = x.clone()
    for i, stop in enumerate(lengths):
        noisy[i, stop:] = 1e3
    y, state = layer(noisy, lengths=lengths)
    for i, stop in enumerate(lengths):
        alone, end = layer(x[i : i + 1, :stop])
        torch.testing.assert_close(y[i, :stop], alone[0], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(state[i], end[0], rtol=1e-9, atol=1e-10)


def test_gradients_agree_with_finite_differences(make):
    layer = make(order=2, **TINY.get(make.kind, {})).double()
    names = [name for name, _ in layer.named_parameters()]
    x = sequence(2, 5, torch.float64)

    def output(*parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))[0]

    inputs = [parameter.detach().clone().requires_grad_() for parameter in layer.parameters()]
    assert torch.autograd.gradcheck(output, inputs)


def test_every_parameter_gets_a_gradient_and_moves(make):
    layer = make()
    before = copy.deepcopy(layer.state_dict())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    layer(sequence())[0].square().mean().backward()
    optimizer.step()
    assert all((parameter != before[name]).any() for name, parameter in layer.named_parameters())


def test_training_under_bfloat16_autocast_lowers_the_loss(make):
    layer, x = make(), sequence()
    target = torch.roll(x, 1, dims=1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (layer(x)[0].float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in layer.parameters())


def test_a_state_dict_of_another_order_loads_and_resizes(make):
    small, large = make(order=3), make(order=ORDER)
    large.load_state_dict(small.state_dict())
    assert large.order == 3
    torch.testing.assert_close(large(sequence())[0], small(sequence())[0])
    outer = torch.nn.Sequential(make(order=7))
    outer.load_state_dict({f"0.{name}": value for name, value in small.state_dict().items()})
    assert outer[0].order == 3


def test_a_state_dict_of_another_width_is_refused(make):
    other = type(make())(WIDTH + 1, order=ORDER)
    with pytest.raises(RuntimeError, match="size mismatch"):
        make().load_state_dict(other.state_dict())


def test_all_parameters_and_buffers_are_real(make):
    layer = make()
    tensors = [*layer.parameters(), *layer.buffers(), layer.initial_state(2)]
    assert not any(tensor.is_complex() for tensor in tensors)


def test_the_printed_form_names_width_and_order(make):
    assert f"width={WIDTH}, order={ORDER}" in repr(make())


def test_a_checkpoint_whose_orders_disagree_is_refused_and_changes_nothing(make):
    layer, other = make(order=5), make(order=3)
    before = copy.deepcopy(layer.state_dict())
    name = next(name for name, _ in layer.named_parameters() if layer.grows(name))
    mixed = {**layer.state_dict(), name: other.state_dict()[name]}
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(mixed)
    assert layer.order == 5
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


# The shape checks of tests cannot be traced.
TRACED = """
import warnings
import torch
from compressm.errors import ExportError
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba

warnings.simplefilter("ignore")
x = torch.randn(2, 40, 6)
for kind in (LRU, S5, S4, S4D, LinOSS, Mamba):
    layer = kind(6, order=5).eval()
    try:
        with torch.no_grad():
            traced = torch.jit.trace(layer, (x,))
            print(kind.__name__, "works" if torch.equal(traced(x)[0], layer(x)[0]) else "differs")
    except ExportError as error:
        print(kind.__name__, "refused" if "expected torch.export.export" in str(error) else error)
"""


def test_a_layer_that_torch_jit_cannot_trace_names_torch_export():
    found = dict(line.split() for line in unhooked.run(TRACED).splitlines())
    refused = {"S4D": "refused", "Mamba": "refused"}
    assert found == dict.fromkeys(LAYERS, "works") | refused
