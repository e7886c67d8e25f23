import math

import pytest
import torch

from compressm.ops import Path, SequenceError, linear_recurrence, lti_bank, lti_layer
from compressm.ops.lti.forms import power_tables

LAYER_PATHS = [Path.SCAN, Path.CHUNKED, Path.CONVOLUTION]
LENGTHS = [1, 2, 31, 32, 33, 63, 100]


def poles(n, *, slowest=1e-4, seed=0, bank=()):
    """Logarithms of moduli in (0.5, 1 − slowest) and phases up to 2π."""
    draw = torch.rand(2, *bank, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.stack([-slowest * (0.5 / slowest) ** draw[0], 6.28 * draw[1]])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(n=5, p=3, q=2, batch=2, length=40):
    return [
        normal(batch, length, p),
        poles(n),
        normal(2, n, p, seed=1),
        normal(2, q, n, seed=2),
        normal(batch, 2, n, seed=3),
    ]


def bank(n=4, width=3, batch=2, length=40):
    return [
        normal(batch, length, width),
        poles(n, bank=(width,)),
        normal(2, width, n, seed=1),
        normal(2, width, n, seed=2),
        normal(batch, 2, width, n, seed=3),
    ]


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("n", [1, 5])
def test_the_recurrence_is_its_definition(length, n):
    x, state = normal(2, length, 2, n), normal(2, 2, n, seed=1)
    for given in (state, None):
        expected = linear_recurrence(x, poles(n), given, path=Path.LOOP)
        for got, wanted in zip(linear_recurrence(x, poles(n), given), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("path", LAYER_PATHS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_layer_is_its_definition_on_every_path(path, length):
    u, *rest, state = layer(length=length)
    for given in (state, None):
        expected = lti_layer(u, *rest, given, path=Path.LOOP)
        for got, wanted in zip(lti_layer(u, *rest, given, path=path), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_bank_is_its_definition(length):
    u, *rest, state = bank(length=length)
    for given in (state, None):
        expected = lti_bank(u, *rest, given, path=Path.LOOP)
        for got, wanted in zip(lti_bank(u, *rest, given), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)


def test_gradients_of_the_recurrence_are_right_for_every_input():
    inputs = [normal(2, 35, 2, 2), poles(2, slowest=0.05), normal(2, 2, 2, seed=1)]
    assert torch.autograd.gradcheck(linear_recurrence, [tensor.requires_grad_() for tensor in inputs])


@pytest.mark.parametrize("path", LAYER_PATHS)
def test_gradients_of_a_layer_are_those_of_its_definition(path):
    grads = []
    for chosen in (Path.LOOP, path):
        inputs = [tensor.clone().requires_grad_() for tensor in layer()]
        y, last = lti_layer(*inputs, path=chosen)
        ((y * normal(*y.shape, seed=5)).sum() + (last * normal(*last.shape, seed=6)).sum()).backward()
        grads.append([tensor.grad for tensor in inputs])
    for wanted, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9)


def test_gradients_of_a_bank_are_those_of_its_definition():
    grads = []
    for chosen in (Path.LOOP, Path.CONVOLUTION):
        inputs = [tensor.clone().requires_grad_() for tensor in bank()]
        y, last = lti_bank(*inputs, path=chosen)
        ((y * normal(*y.shape, seed=5)).sum() + (last * normal(*last.shape, seed=6)).sum()).backward()
        grads.append([tensor.grad for tensor in inputs])
    for wanted, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("path", [Path.LOOP, *LAYER_PATHS])
def test_the_skip_of_a_layer_adds_d_times_u_to_values_and_gradients(path):
    u, *system, state = layer(p=3, q=3)
    D, weights = normal(3, seed=7), normal(*u.shape, seed=5)
    check_skip(lambda u, **skip: lti_layer(u, *system, state, path=path, **skip)[0], u, D, weights)


@pytest.mark.parametrize("path", [Path.LOOP, Path.CONVOLUTION])
def test_the_skip_of_a_bank_adds_d_times_u_to_values_and_gradients(path):
    u, *system, state = bank()
    D, weights = normal(3, seed=7), normal(*u.shape, seed=5)
    check_skip(lambda u, **skip: lti_bank(u, *system, state, path=path, **skip)[0], u, D, weights)


def check_skip(mix, u, D, weights):
    u, D = u.requires_grad_(), D.requires_grad_()
    folded, added = mix(u, D=D), mix(u) + D * u
    torch.testing.assert_close(folded, added, rtol=1e-10, atol=1e-11)
    grads = (torch.autograd.grad((y * weights).sum(), (u, D)) for y in (folded, added))
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


def test_a_skip_needs_as_many_outputs_as_inputs():
    u, *system, state = layer(p=3, q=2)
    with pytest.raises(SequenceError, match="C has shape"):
        lti_layer(u, *system, state, D=normal(3))


@pytest.mark.parametrize("modulus", [1e-3, 0.5, 0.9])
def test_powers_of_fast_poles_never_multiply_to_subnormal_numbers(modulus):
    log_poles = torch.tensor([[math.log(modulus)], [1.0]])
    near, far = power_tables(log_poles, 4096, torch.complex64)
    products = (near[:, None] * far[None]).abs()
    assert (products[products > 0] >= torch.finfo(torch.float32).tiny).all()
    assert near[0] == far[0] == 1


def long_layer(path):
    """Slow poles over 16384 steps: float32 numbers, and the same numbers by a path in float64."""
    u, log_poles, B, C, state = (t.float() for t in layer(n=8, p=2, q=2, batch=1, length=16384))
    log_poles[0, 0] = -1e-4  # |λ| = 0.9999
    inputs = [tensor.double().requires_grad_() for tensor in (u, log_poles, B, C, state)]
    y, last = lti_layer(*inputs, path=path)
    (y * normal(*y.shape, seed=9)).sum().backward()
    return (u, log_poles, B, C, state), y.detach(), last.detach(), [tensor.grad for tensor in inputs]


# The loop itself takes 5 s; in float64 the scan is the loop to 1e-9, see above.
@pytest.mark.parametrize("truth", [pytest.param(Path.LOOP, marks=pytest.mark.slow), Path.SCAN])
def test_float32_keeps_five_digits_over_16384_steps_with_poles_at_0_9999_on_every_path(truth):
    given, y, last, grads = long_layer(truth)
    for path in LAYER_PATHS:
        inputs = [tensor.clone().requires_grad_() for tensor in given]
        got_y, got_last = lti_layer(*inputs, path=path)
        assert relative(got_y, y) < 1e-5, path
        assert relative(got_last, last) < 1e-5, path
        (got_y * normal(*y.shape, seed=9).float()).sum().backward()
        for tensor, wanted in zip(inputs, grads, strict=True):
            assert relative(tensor.grad, wanted) < 1e-4, path


@pytest.mark.parametrize("path", LAYER_PATHS)
def test_what_follows_the_length_of_a_sequence_changes_nothing(path):
    u, *rest, state = layer(batch=3, length=20)
    state, lengths = normal(3, 2, 5), torch.tensor([20, 7, 1])
    garbage = u.clone()
    for i, stop in enumerate(lengths):
        garbage[i, stop:] = 1e6
    y, last = lti_layer(garbage, *rest, state, lengths, path=path)
    for i, stop in enumerate(lengths):
        alone, end = lti_layer(u[i : i + 1, :stop], *rest, state[i : i + 1], path=Path.LOOP)
        torch.testing.assert_close(y[i, :stop], alone[0], rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(last[i], end[0], rtol=1e-9, atol=1e-10)
        assert (y[i, stop:] == 0).all()


def test_without_keeping_the_state_none_is_returned():
    u, *rest, _ = layer()
    assert lti_layer(u, *rest, keep_state=False)[1] is None
    u, *rest, _ = bank()
    assert lti_bank(u, *rest, keep_state=False)[1] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_output_has_the_precision_of_the_input(dtype):
    u, *rest, state = (tensor.float() for tensor in layer())
    y, last = lti_layer(u.to(dtype), *rest, state)
    assert y.dtype == dtype
    assert last.dtype == torch.float32
    assert relative(y, lti_layer(u, *rest, state)[0]) < 2e-2


@pytest.mark.parametrize("multiple", [1, 4, 8])
def test_idle_modes_change_neither_values_nor_gradients(multiple):
    from compressm.ops.lti.forms import padded_order, through_states

    u, log_poles, B, C, state = (tensor.requires_grad_() for tensor in layer(n=5))
    padded = padded_order(log_poles, B, C, state, multiple=multiple)
    assert padded[1].shape[1] % multiple == 0
    y, last = through_states(u, *padded)
    expected, end = lti_layer(u, log_poles, B, C, state, path=Path.LOOP)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(last[..., :5], end, rtol=1e-10, atol=1e-11)
    grads = torch.autograd.grad(y.sum() + last.sum(), (log_poles, B, C, state))
    wanted = torch.autograd.grad(expected.sum() + end.sum(), (log_poles, B, C, state))
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
