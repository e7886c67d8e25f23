"""Norms of rows against their definition, on a GPU or in Triton's interpreter."""

import pytest
import torch

from compressm.ops.rms_norm.reference import plain_rms_norm
from tests.kernels import GPU, MARK, nan_memory, normal, relative

__all__ = ["nan_memory"]

pytestmark = MARK


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 19, 6), (1, 1, 128), (3, 7, 33)])
@pytest.mark.parametrize("weighted", [True, False])
def test_it_is_the_norm_with_its_gradients(shape, weighted, dtype, monkeypatch):
    from compressm.ops.rms_norm import triton

    if not GPU:  # several tiles and several turns of each program
        monkeypatch.setattr(triton, "_VALUES", 128)
        monkeypatch.setattr(triton, "_PROGRAMS", 2)
    x = (3 * normal(*shape)).to(dtype).requires_grad_()
    weight = (1 + normal(shape[-1], seed=1)).requires_grad_() if weighted else None
    leaves = [leaf for leaf in (x, weight) if leaf is not None]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got = triton.RMSNormRows.apply(x, weight, 1e-5)
    wanted = plain_rms_norm(exact[0], exact[1] if weighted else None, 1e-5)
    dout = normal(*shape, seed=2).to(dtype)
    pairs = [(got, wanted)]
    pairs += zip(torch.autograd.grad(got, leaves, dout), torch.autograd.grad(wanted, exact, dout.double()), strict=True)
    for one, other in pairs:
        assert one.shape == other.shape
        assert relative(one, other) < (2e-6 if dtype is torch.float32 else 2e-2)
