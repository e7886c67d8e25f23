"""The recurrence over pairs on the CPU, step by step and in spans, against its definition."""

import functools
import math

import pytest
import torch

from compressm.ops import Path, linear_recurrence, lti_layer
from compressm.ops.lti import recurrence as module
from compressm.ops.lti import recurrence as walk
from compressm.ops.lti.cost import walks_pairs
from compressm.ops.lti.recurrence import pair_recurrence
from compressm.ops.lti.scan import recurrence_loop
from tests.ops.test_diagonal_scan import normal, poles, relative

LENGTHS = [1, 2, 31, 32, 33, 64, 65, 131]


@pytest.fixture(params=["step by step", "spans"])
def way(request, monkeypatch):
    """One of the two ways, in stretches as short as they get: 5 steps, or 2 spans."""
    monkeypatch.setattr(module, "WIDE", 0 if request.param == "step by step" else math.inf)
    monkeypatch.setattr(walk, "_STRETCH", 5 * 2 * 2 * 5)
    monkeypatch.setattr(walk, "_STEP", 2 * 2 * 2 * 5)
    return request.param


def values_and_gradients(function, inputs, *, use=(True, True)):
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    outputs = [output for output, used in zip(function(*inputs), use, strict=True) if used]
    loss = sum((output * normal(*output.shape, seed=7).to(output)).sum() for output in outputs)
    return [output.detach() for output in outputs], torch.autograd.grad(loss, inputs)


def gradients(function, inputs, *, use=(True, True)):
    return values_and_gradients(function, inputs, use=use)[1]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("n", [1, 5])
def test_every_h_and_the_last_are_those_of_the_definition(length, n):
    x, state = normal(2, length, 2, n), normal(2, 2, n, seed=1)
    for given in (state, None):
        for got, wanted in zip(pair_recurrence(x, poles(n), given), recurrence_loop(x, poles(n), given), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("use", [(True, True), (True, False), (False, True)], ids=["both", "every", "last"])
def test_gradients_are_those_of_the_definition_whichever_output_is_used(length, use):
    inputs = [normal(2, length, 2, 3), poles(3), normal(2, 2, 3, seed=1)]
    wanted = gradients(recurrence_loop, inputs, use=use)
    for got, expected in zip(gradients(pair_recurrence, inputs, use=use), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("way")
def test_gradients_are_right_by_finite_differences():
    inputs = [normal(2, 35, 2, 2), poles(2, slowest=0.05), normal(2, 2, 2, seed=1)]
    assert torch.autograd.gradcheck(pair_recurrence, [tensor.requires_grad_() for tensor in inputs], fast_mode=True)


@pytest.mark.usefixtures("way")
def test_inputs_and_gradients_need_not_lie_in_order():
    x = normal(2, 3, 2, 70).permute(0, 3, 2, 1).requires_grad_()
    h, _ = pair_recurrence(x, poles(3))
    wanted, _ = recurrence_loop(x, poles(3))
    torch.testing.assert_close(h, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad(h.sum(), x), torch.autograd.grad(wanted.sum(), x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@functools.cache
def long_truth(constant):
    """Numbers in float32 over 16384 steps; states and gradients of the same numbers in float64."""
    x = torch.ones(1, 16384, 2, 3, dtype=torch.float64) if constant else normal(1, 16384, 2, 3)
    log_poles = torch.tensor([[-1e-4, -1e-4, -1e-2], [0.0, 3.0, 6.0]], dtype=torch.float64)
    inputs = [tensor.float() for tensor in (x, log_poles, normal(1, 2, 3, seed=1))]
    exact = [tensor.double() for tensor in inputs]
    # In float64 the scan is the loop to 1e-10 and takes a hundredth of its 3 s; the loop is the truth in the slow case.
    definition = functools.partial(linear_recurrence, path=Path.SCAN) if constant else recurrence_loop
    return inputs, *values_and_gradients(definition, exact)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("constant", [pytest.param(False, marks=pytest.mark.slow), True], ids=["random", "constant"])
def test_float32_keeps_five_digits_over_16384_steps_with_poles_at_0_9999(constant):
    """A constant input is the hard one: in float32 the state itself would stop 5e-4 short of its limit."""
    inputs, exact_values, exact_gradients = long_truth(constant)
    values, grads = values_and_gradients(pair_recurrence, inputs)
    for got, wanted in zip(values, exact_values, strict=True):
        for mode in range(3):
            assert relative(got[..., mode], wanted[..., mode]) < 1e-5
    for got, wanted in zip(grads, exact_gradients, strict=True):
        assert relative(got, wanted) < 1e-4


@pytest.mark.parametrize(("batch", "n"), [(64, 128), (4, 1024), (2, 64)])
def test_long_rows_go_over_pairs_through_the_public_functions(batch, n):
    length = -(-(2**18) // (batch * n))
    assert walks_pairs(batch, length, n, driven=False)
    inputs = [tensor.float() for tensor in (normal(batch, length, 2, n), poles(n), normal(batch, 2, n, seed=1))]
    expected = linear_recurrence(*(tensor.double() for tensor in inputs), path=Path.LOOP)
    for got, wanted in zip(linear_recurrence(*inputs), expected, strict=True):
        assert relative(got, wanted) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_goes_over_pairs_under_autocast_as_without(dtype, monkeypatch):
    from compressm.ops.lti import forms as layer_forms

    arguments = [normal(2, 40, 3), poles(4), normal(2, 4, 3, seed=1), normal(2, 2, 4, seed=2), normal(2, 2, 4, seed=3)]
    u, *rest = (tensor.float() for tensor in arguments)
    expected, end = lti_layer(u.to(dtype), *rest, path=Path.SCAN)
    monkeypatch.setattr(layer_forms, "walks_pairs", lambda *shape, driven: True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y, last = lti_layer(u.to(dtype), *rest, path=Path.SCAN)
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    torch.testing.assert_close(last, end, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_layer_over_pairs_are_those_of_its_definition(monkeypatch):
    from compressm.ops.lti import forms as layer_forms

    monkeypatch.setattr(layer_forms, "walks_pairs", lambda *shape, driven: True)
    inputs = [normal(2, 40, 3), poles(4), normal(2, 4, 3, seed=1), normal(2, 2, 4, seed=2), normal(2, 2, 4, seed=3)]
    wanted = gradients(lambda *given: lti_layer(*given, path=Path.LOOP), inputs)
    got = gradients(lambda *given: lti_layer(*given, path=Path.SCAN), inputs)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
