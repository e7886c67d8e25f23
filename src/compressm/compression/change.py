"""What a cut writes to a module, and what it does to everything that an optimizer has learned about its parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from torch import Tensor, nn

Values: TypeAlias = Mapping[str, Tensor]


@final
@dataclass(frozen=True)
class Writing:
    """New values of parameters, by name; new buffers; and attributes by path, as {"config.state_size": 8}.

    `added` names parameters that the module does not have yet, each with the one that it joins: in the optimizer's
    groups, and in all that is said of a parameter.
    """

    values: Values
    buffers: Values = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    added: Mapping[str, str] = field(default_factory=dict)


class Change(ABC):
    """A module as it still is, what will be written to it, and how moments of its parameters go along.

    Moments come by parameter name, in float64, as those of old values and leave as those of new ones; a name left out
    counts as zeros.
    """

    module: nn.Module
    writing: Writing

    @property
    def values(self) -> Values:
        """Of the parameters, afterwards."""
        return self.writing.values

    @property
    @abstractmethod
    def resized(self) -> Sequence[str]:
        """The parameters with an axis of states: their moments have to follow."""

    @abstractmethod
    def gradient(self, moments: Values) -> dict[str, Tensor]:
        """Means of gradients."""

    @abstractmethod
    def gradient_squares(self, squares: Values) -> dict[str, Tensor]:
        """Means of their squares, if no two parameters vary together."""

    @abstractmethod
    def update(self, moments: Values) -> dict[str, Tensor]:
        """Steps in the new parameters from steps in the old ones."""

    @abstractmethod
    def update_squares(self, squares: Values) -> dict[str, Tensor]:
        """Squares of those."""

    @abstractmethod
    def first(self, name: str, moment: Tensor) -> Tensor:
        """The entries of the first states, as many as stay, whatever became of those."""
