"""Norms of rows against their definition, on a GPU or in Triton's interpreter."""

import pytest
import torch

from compressm.ops.block.norm import plain_rms_norm
from tests.kernels import GPU, MARK, nan_memory, normal, relative

__all__ = ["nan_memory"]

pytestmark = MARK


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 19, 6), (1, 1, 128), (3, 7, 33)])
@pytest.mark.parametrize(("weighted", "beside"), [(True, True), (True, False), (False, True)])
def test_it_is_the_norm_with_its_gradients(shape, weighted, beside, dtype, monkeypatch):
    from compressm.ops.block import norm_triton as triton

    if not GPU:  # several tiles and several turns of each program
        monkeypatch.setattr(triton, "_VALUES", 128)
        monkeypatch.setattr(triton, "_PROGRAMS", 2)
    x = (3 * normal(*shape)).to(dtype).requires_grad_()
    weight = (1 + normal(shape[-1], seed=1)).requires_grad_() if weighted else None
    leaves = [leaf for leaf in (x, weight) if leaf is not None]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got, again = triton.RMSNormRows.apply(x, weight, 1e-5)
    wanted = plain_rms_norm(exact[0], exact[1] if weighted else None, 1e-5)
    dout, more = (normal(*shape, seed=seed).to(dtype) for seed in (2, 3))
    given = (got, again) if beside else (got,)
    found = torch.autograd.grad(given, leaves, (dout, more)[: len(given)])
    expected = torch.autograd.grad(
        (wanted, exact[0])[: len(given)], exact, (dout.double(), more.double())[: len(given)]
    )
    for one, other in [(got, wanted), *zip(found, expected, strict=True)]:
        assert one.shape == other.shape
        assert relative(one, other) < (2e-6 if dtype is torch.float32 else 2e-2)


def test_a_gradient_that_goes_past_the_norm_alone_stays_as_it_is():
    from compressm.ops.block import norm_triton as triton

    x = normal(2, 3, 4).requires_grad_()
    dout = normal(2, 3, 4, seed=1)
    (found,) = torch.autograd.grad(triton.RMSNormRows.apply(x, None, 1e-5)[1], x, dout)
    assert torch.equal(found, dout)
