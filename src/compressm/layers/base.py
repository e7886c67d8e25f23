"""What all SSM layers share: checks, and loading of checkpoints whose order differs from the constructor's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressm.layers.replacing import replace_data
from compressm.layers.wrappers import refuse_to_train_
from compressm.ops import SequenceError
from compressm.ops.link import Link


class SSMLayer(nn.Module, ABC):
    """A linear recurrence over time between `width` input and output channels."""

    # For every parameter that grows with the order: the axis on which the states stand.
    STATE_AXES: ClassVar[Mapping[str, int]]
    D: nn.Parameter

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
        return getattr(self, name).shape[axis]  # a plain tensor inside `functional_call`

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
            self._check_state(state, x.shape[0])
        reference = next(self.parameters())
        if not reference.is_cuda:  # on a GPU it would wait for the device, which a captured graph cannot
            require_finite_parameters(self)

    def _check_state(self, state: object, batch: int) -> None:
        expected = tuple(self.initial_state(batch).shape)
        if not isinstance(state, Tensor) or tuple(state.shape) != expected:
            got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
            raise SequenceError(f"state is {got}, expected {expected}: order {self.order}, batch {batch}")

    def _check_step(self, x: Tensor, state: object) -> None:
        """A step needs a state, and its input where and as precise as the parameters are."""
        self._check(x, None, axes="batch")
        self._check_state(state, x.shape[0])
        reference = next(self.parameters())
        half = x.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(x.device.type)
        if (x.dtype != reference.dtype and not half) or x.device != reference.device:
            raise SequenceError(f"x is {x.dtype} on {x.device}, expected {reference.dtype} on {reference.device}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Take the order of the checkpoint: a model that was cut loads into the module it came from."""
        arriving = {name: state_dict.get(prefix + name) for name in self.STATE_AXES}
        orders = {
            value.shape[self.STATE_AXES[name]]
            for name, value in arriving.items()
            if isinstance(value, Tensor) and value.ndim == self.get_parameter(name).ndim
        }
        # Only a whole checkpoint of one order; anything else is for torch's own error, with nothing changed.
        if len(orders) == 1 and all(self._fits(name, value) for name, value in arriving.items()):
            self._resize_({name: value.shape for name, value in arriving.items() if isinstance(value, Tensor)})
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _resize_(self, shapes: Mapping[str, torch.Size]) -> None:
        resized = {name: shape for name, shape in shapes.items() if self.get_parameter(name).shape != shape}
        for name, shape in resized.items():
            parameter = self.get_parameter(name)
            replace_data(parameter, parameter.new_empty(shape))
        if resized:
            refuse_to_train_([self])

    def _fits(self, name: str, value: object) -> bool:
        """The same shape but for the axis of the states."""
        here, axis = list(self.get_parameter(name).shape), self.STATE_AXES[name]
        if not isinstance(value, Tensor) or value.ndim != len(here):
            return False
        there = list(value.shape)
        del here[axis], there[axis]
        return here == there


def require_finite_parameters(layer: nn.Module) -> None:
    """Name the first parameter that holds NaN or infinity."""
    with torch.no_grad():
        # Both stay in a sum: one over everything takes a third of the time of a look at each parameter.
        if torch.cat([parameter.flatten() for parameter in layer.parameters()]).sum().isfinite():
            return
    for name, parameter in layer.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise SequenceError(f"{name} holds {int((~torch.isfinite(parameter)).sum())} entries that are not finite")
