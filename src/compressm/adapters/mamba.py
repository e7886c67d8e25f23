"""Our Mamba as a selective system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from jaxtyping import Bool
from torch import Tensor

from compressm.adapters.base import adapts
from compressm.adapters.selective import SelectiveAdapter
from compressm.layers import Mamba


@adapts(Mamba)
@final
class MambaAdapter(SelectiveAdapter[Mamba]):
    """Steps at and after `lengths` are padding."""

    def counted(
        self, module: Mamba, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Bool[Tensor, "batch length"] | None:
        x = args[0] if args else kwargs["x"]
        lengths = kwargs.get("lengths", args[2] if len(args) > 2 else None)
        if lengths is None:
            return None
        return torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]
