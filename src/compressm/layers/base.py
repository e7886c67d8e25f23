"""What all SSM layers share: checks, and loading of checkpoints whose order differs from the constructor's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressm.ops import SequenceError


class SSMLayer(nn.Module, ABC):
    """A linear recurrence over time between `width` input and output channels."""

    # For every parameter that grows with the order: the axis on which the states stand.
    STATE_AXES: ClassVar[Mapping[str, int]]

    def __init__(self, width: int, order: int) -> None:
        super().__init__()
        for name, value in (("width", width), ("order", order)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SequenceError(f"{name} is {value!r}, expected an integer of at least 1")
        self.width = width

    @property
    def order(self) -> int:
        """States kept: complex modes, a conjugate pair counting as one."""
        name, axis = next(iter(self.STATE_AXES.items()))
        return self.get_parameter(name).shape[axis]

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        state: Tensor | None = None,
        lengths: Int[Tensor, " batch"] | None = None,
        *,
        keep_state: bool = True,
    ) -> tuple[Float[Tensor, "batch length width"], Tensor | None]:
        """The whole sequence; steps at and after `lengths` change nothing. Without `keep_state` the state is None."""

    @abstractmethod
    def step(self, x: Float[Tensor, "batch width"], state: Tensor) -> tuple[Float[Tensor, "batch width"], Tensor]:
        """One step of the same recurrence, in real arithmetic."""

    @abstractmethod
    def initial_state(self, batch: int) -> Tensor:
        """Zeros: what a stream begins with."""

    def extra_repr(self) -> str:
        return f"width={self.width}, order={self.order}"

    def _check(self, x: Tensor, state: Tensor | None, *, axes: str) -> None:
        """`x` against its axes, and a state against this layer's order."""
        shape = (*axes.split(), "width")
        if not isinstance(x, Tensor) or x.ndim != len(shape) or x.shape[-1] != self.width:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise SequenceError(f"x is {got}, expected ({', '.join(shape)}) with width = {self.width}")
        if 0 in x.shape:
            raise SequenceError(f"x has shape {tuple(x.shape)}: batch and length must be at least 1")
        if state is not None:
            expected = tuple(self.initial_state(x.shape[0]).shape)
            if tuple(state.shape) != expected:
                got = tuple(state.shape)
                raise SequenceError(
                    f"state has shape {got}, expected {expected}: order {self.order}, batch {x.shape[0]}"
                )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take the order of the checkpoint: a model that was cut loads into the module it came from."""
        arriving = {name: state_dict.get(prefix + name) for name in self.STATE_AXES}
        for name, axis in self.STATE_AXES.items():
            parameter, value = self.get_parameter(name), arriving[name]
            if (
                isinstance(value, Tensor)
                and value.ndim == parameter.ndim
                and value.shape[axis] != parameter.shape[axis]
            ):
                resized = list(parameter.shape)
                resized[axis] = value.shape[axis]
                parameter.data = parameter.new_empty(resized)
                parameter.grad = None
        super()._load_from_state_dict(state_dict, prefix, *rest)


def require_finite_parameters(layer: nn.Module) -> None:
    """Name the first parameter that holds NaN or infinity."""
    for name, parameter in layer.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise SequenceError(f"{name} holds {int((~torch.isfinite(parameter)).sum())} entries that are not finite")
