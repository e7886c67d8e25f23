"""Ends of sequences, on a GPU or in Triton's interpreter."""

import pytest
import torch

from compressm.ops.block import pooling as dispatch
from compressm.ops.block.pooling import valid_rows
from tests.kernels import DEVICE, GPU, MARK, nan_memory, normal

__all__ = ["nan_memory"]

pytestmark = MARK


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 6, 33])
def test_what_is_padding_becomes_zero_and_so_does_its_gradient(width, dtype, monkeypatch):
    from compressm.ops.block import pooling_triton as triton

    monkeypatch.setattr("compressm.ops.dispatch._DEVICES", (DEVICE.type,))
    if not GPU:
        monkeypatch.setattr(triton, "_VALUES", 64)
    x = normal(3, 11, width).to(dtype)
    lengths = torch.tensor([0, 4, 11], device=DEVICE)
    padding = torch.arange(11, device=DEVICE) >= lengths[:, None]
    x[padding] = torch.nan
    x.requires_grad_()
    got = dispatch.ValidRows.apply(x, lengths)
    expected = x.detach().clone()
    expected[padding] = 0
    assert torch.equal(got, expected)
    dout = normal(3, 11, width, seed=1).to(dtype)
    (dx,) = torch.autograd.grad(got, x, dout)
    dout[padding] = 0
    assert torch.equal(dx, dout)


def test_plain_torch_does_the_same():
    x = normal(2, 3, 2)
    got = valid_rows(x.cpu(), torch.tensor([1, 3]))
    assert torch.equal(got[0, 1:], torch.zeros(2, 2))
    assert torch.equal(got[1], x[1].cpu())
