"""Where hand-written kernels take over from torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compressm.ops.availability import has_triton

_DEVICES = ("cuda",)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def kernels_serve(x: Tensor) -> bool:
    """On a GPU, up to float32, where Triton is; a compiler that traces fuses plain torch by itself."""
    return not torch.compiler.is_compiling() and x.device.type in _DEVICES and x.dtype in _DTYPES and has_triton()


def is_watched(module: nn.Module) -> bool:
    """Whether a hook sees what goes through the module: then it is called, whatever could take its place."""
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)
