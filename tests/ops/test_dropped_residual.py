"""x + dropout(y) against its definition, on a GPU or in Triton's interpreter."""

import pytest
import torch

from compressm.ops.block.gated_residual import dropped_residual
from tests.kernels import GPU, MARK, nan_memory, normal, relative

__all__ = ["nan_memory"]

pytestmark = MARK


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_kept_entries_are_added(shared, dtypes, monkeypatch):
    from compressm.ops.block import gated_residual_triton as triton

    if not GPU:  # several programs, the last of them not full
        monkeypatch.setattr(triton, "_TILE", {"VALUES": 64, "num_warps": 1})
    x, y = normal(3, 7, 9).to(dtypes[0]).requires_grad_(), normal(3, 7, 9, seed=1).to(dtypes[1]).requires_grad_()
    keep = normal(1 if shared else 3, 7, 9, seed=2) > -0.5
    wanted = x.double() + torch.where(keep, y.double() / 0.9, 0)
    got = triton.DroppedResidual.apply(x, y, keep, 0.1)
    dout = normal(3, 7, 9, seed=3).to(dtypes[0])
    tolerance = 1e-6 if dtypes[0] is torch.float32 else 1e-2
    assert relative(got, wanted) < tolerance
    for one, other in zip(
        torch.autograd.grad(got, [x, y], dout), torch.autograd.grad(wanted, [x, y], dout.double()), strict=True
    ):
        assert one.dtype == other.dtype
        assert relative(one, other) < tolerance


def test_without_a_mask_everything_is_added():
    x, y = normal(1, 2, 3), normal(1, 2, 3, seed=1)
    assert torch.equal(dropped_residual(x, y, None, 0.5), x + y)
