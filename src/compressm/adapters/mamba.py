"""Our Mamba as a selective system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool
from torch import Tensor

from compressm.adapters.base import adapts
from compressm.adapters.selective import SelectiveAdapter
from compressm.control.selective import ChannelMaps, SelectiveSystem
from compressm.layers import Mamba
from compressm.layers.channel_maps import OF_MAPS


@adapts(Mamba)
@final
class MambaAdapter(SelectiveAdapter[Mamba]):
    """Steps at and after `lengths` are padding. Channels may have states of their own, with complex rates."""

    KNOWN: ClassVar[frozenset[str]] = frozenset(OF_MAPS)
    keeps_maps: ClassVar[bool] = True

    def attributes(self, module: Mamba, order: int) -> dict[str, Any]:
        return {}

    def maps(self, module: Mamba) -> ChannelMaps | None:
        if module.B_map is None or module.C_map is None or module.orders is None:
            return None
        B, C = module.B_map.double(), module.C_map.double()
        if B.ndim == 4:
            B, C = torch.complex(B[:, 0], B[:, 1]), torch.complex(C[:, 0], C[:, 1])
        return ChannelMaps(B, C, module.orders)

    def buffers(self, module: Mamba, system: SelectiveSystem) -> dict[str, Tensor]:
        if system.maps is None:
            return {}
        B, C = system.maps.B, system.maps.C
        if system.rates.is_complex():
            B, C = torch.stack([B.real, B.imag], dim=1), torch.stack([C.real, C.imag], dim=1)
        wide = torch.promote_types(module.A_log.dtype, torch.float32)
        # As a file gives them back: products of another layout round otherwise, and a run that is resumed would differ.
        B, C = (part.to(wide).contiguous() for part in (B, C))
        return {"B_map": B, "C_map": C, "orders": system.maps.orders}

    def counted(
        self, module: Mamba, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Bool[Tensor, "batch length"] | None:
        x = args[0] if args else kwargs["x"]
        lengths = kwargs.get("lengths", args[2] if len(args) > 2 else None)
        if lengths is None:
            return None
        return torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]
