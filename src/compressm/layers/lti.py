"""What LRU, S5 and S4D share: linear systems that stay the same over time, with a skip D·x beside them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressm.layers.base import SSMLayer
from compressm.ops.link import Link


class LTILayer(SSMLayer):
    """A linear recurrence over time between `width` input and output channels."""

    # For every parameter that grows with the order: the axis on which the states stand.
    STATE_AXES: ClassVar[Mapping[str, int]]
    D: nn.Parameter

    @property
    def order(self) -> int:
        """States kept: complex modes, a conjugate pair counting as one."""
        name, axis = next(iter(self.STATE_AXES.items()))
        return getattr(self, name).shape[axis]  # a plain tensor inside `functional_call`

    def shape_at(self, name: str, order: int) -> tuple[int, ...]:
        shape, axis = tuple(attrgetter(name)(self).shape), self.STATE_AXES.get(name)
        return shape if axis is None else (*shape[:axis], order, *shape[axis + 1 :])

    def dynamics(self) -> Iterator[nn.Parameter]:
        """Poles, step sizes, normalisation and B: not the readout C, nor the skip D."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.split("_")[0] not in ("C", "D"):
                yield parameter

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        state: Tensor | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        *,
        keep_state: bool = True,
        skip: bool = True,
        drive: Link | None = None,
    ) -> tuple[Float[Tensor, "batch length width"], Tensor | None]:
        """The whole sequence; steps at and after `lengths` change nothing.

        Without `keep_state` the state is None; without `skip` D·x is left to the caller. A norm that gave x takes its
        gradient through `drive`.
        """
        # Off a GPU D is added to the first response, which costs nothing; in padding D·x stays as it was.
        inside = skip and lengths is None and isinstance(x, Tensor) and not x.is_cuda
        # A hook may have changed x: then its gradient goes the common way.
        drive = drive if drive is not None and drive.u is x else None
        y, state = self._mix(x, state, lengths, keep_state, self.D if inside else None, drive)
        return torch.addcmul(y, self.D.to(x.dtype), x) if skip and not inside else y, state

    @abstractmethod
    def _mix(
        self,
        x: Tensor,
        state: Tensor | None,
        lengths: Tensor | None,
        keep_state: bool,
        D: Tensor | None,
        drive: Link | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The recurrence, with the skip D·x where D is given.

        Everything whose shape holds the order is in here, behind `torch.compiler.disable`: what is compiled around it
        is never compiled again after a cut.
        """
