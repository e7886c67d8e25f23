"""The Triton kernels against the definition, values and all gradients, at odd sizes."""

import pytest
import torch

from compressm.ops import Path, linear_recurrence, lti_layer
from tests.ops.test_diagonal_scan import layer, normal, poles, relative

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def recurrence_with_gradients(x, log_poles, state, weights, **options):
    inputs = [tensor.clone().requires_grad_() for tensor in (x, log_poles, state)]
    h, last = linear_recurrence(*inputs, **options)
    ((h * weights[0].to(h)).sum() + (last * weights[1].to(last)).sum()).backward()
    return [h.detach(), last.detach(), *(tensor.grad for tensor in inputs)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("n", [1, 31, 32, 100])
def test_the_kernel_is_the_definition_in_values_and_gradients(dtype, length, n):
    x, state = normal(3, length, 2, n).cuda().to(dtype), normal(3, 2, n, seed=1).cuda().float()
    weights = normal(3, length, 2, n, seed=2).cuda().to(dtype), normal(3, 2, n, seed=3).cuda().float()
    logs = poles(n, slowest=1e-3).cuda().float()
    got = recurrence_with_gradients(x, logs, state, weights)
    wanted = recurrence_with_gradients(x.double(), logs.double(), state.double(), weights, path=Path.LOOP)
    for one, other in zip(got, wanted, strict=True):
        assert relative(one, other) < TOLERANCE[dtype]


def test_float32_keeps_five_digits_over_16384_steps_with_poles_at_0_9999():
    x, state = normal(2, 16384, 2, 40).float().cuda(), normal(2, 2, 40, seed=1).float().cuda()
    logs = poles(40, slowest=1e-4).float().cuda()
    weights = normal(2, 16384, 2, 40, seed=2).cuda().float(), normal(2, 2, 40, seed=3).cuda().float()
    got = recurrence_with_gradients(x, logs, state, weights)
    wanted = recurrence_with_gradients(x.double(), logs.double(), state.double(), weights, path=Path.SCAN)
    for one, other in zip(got[:2], wanted[:2], strict=True):
        assert relative(one, other) < 1e-5
    for one, other in zip(got[2:], wanted[2:], strict=True):
        assert relative(one, other) < 1e-4


@pytest.mark.parametrize("path", [Path.SCAN, Path.CHUNKED, Path.CONVOLUTION])
def test_a_layer_on_the_gpu_is_the_definition_on_every_path(path):
    inputs = [tensor.float().cuda() for tensor in layer(n=9, length=300)]
    lengths = torch.tensor([300, 41], device="cuda")
    y, last = lti_layer(*inputs, lengths, path=path)
    expected, end = lti_layer(*(tensor.double() for tensor in inputs), lengths, path=Path.LOOP)
    assert relative(y, expected) < 1e-5
    assert relative(last, end) < 1e-5


def test_every_element_of_the_outputs_is_written():
    """Memory is filled with NaN first: what a kernel leaves out would show."""
    x, logs = normal(2, 77, 2, 33).float().cuda(), poles(33).float().cuda()
    for _ in range(3):
        poison = [torch.full((2, 77, 2, 33), torch.nan, device="cuda") for _ in range(8)]
        del poison
        x.requires_grad_()
        h, last = linear_recurrence(x, logs)
        (h.sum() + last.sum()).backward()
        assert torch.isfinite(h).all()
        assert torch.isfinite(last).all()
        assert torch.isfinite(x.grad).all()


def test_a_new_order_compiles_no_new_kernel():
    from compressm.ops.lti import scan_triton as kernels

    def compiled():
        return sum(len(cache[0]) for cache in kernels._forward.kernel.device_caches.values())

    linear_recurrence(normal(50, 8, 2, 384).float().cuda(), poles(384).float().cuda())
    before = compiled()
    for n in (383, 100, 33, 16, 1):  # from many programs through some to few
        linear_recurrence(normal(50, 8, 2, n).float().cuda(), poles(n).float().cuda())
    assert compiled() == before


@pytest.mark.parametrize("n", [13, 200])
def test_a_layer_of_few_channels_takes_the_fast_kernels_and_is_the_definition(n):
    u, logs, B, C, state = (tensor.float().cuda() for tensor in layer(n=n, length=500))
    y, last = lti_layer(u, logs, B, C, state)
    expected, end = lti_layer(*(tensor.double() for tensor in (u, logs, B, C, state)), path=Path.LOOP)
    assert relative(y, expected) < 1e-5
    assert relative(last, end) < 1e-5


def test_half_precision_stays_half_and_autocast_casts():
    u, logs, B, C, _ = (tensor.float().cuda() for tensor in layer())
    y, last = lti_layer(u.bfloat16(), logs, B, C, path=Path.SCAN)
    assert y.dtype == torch.bfloat16
    assert last.dtype == torch.float32
    with torch.autocast("cuda", torch.bfloat16):
        cast, _ = lti_layer(u, logs, B, C, path=Path.SCAN)
    assert cast.dtype == torch.float32
    assert relative(cast, lti_layer(u, logs, B, C, path=Path.LOOP)[0]) < 2e-2
