"""Methods to compare compression in training with: penalties on a model's systems, and teachers (app:other)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from compressm.adapters import AdapterError, find
from compressm.adapters.base import linear_adapter
from compressm.control import ControlError, DiagonalSystem, fold, hankel_nuclear_norm, hankel_nuclear_norm_majoriser
from compressm.control.linear_algebra import modulus


class Regulariser(ABC):
    """A differentiable penalty of a model: the sum over its linear layers, those of one shape as one bank."""

    def __call__(self, model: nn.Module) -> Float[Tensor, ""]:
        """Compute the penalty, in float64 whatever the parameters are."""
        return torch.stack([self.of(system).sum() for system in _banks(model)]).sum()

    @abstractmethod
    def of(self, system: DiagonalSystem) -> Float[Tensor, "*bank"]:
        """Compute the penalty of each member of a bank."""


@final
@dataclass(frozen=True)
class HankelNuclearNorm(Regulariser):
    """Σσ (app:hnn_det), by a closed-form gradient that needs none of the paper's three stabilisations.

    Gramians are not shifted, as X with X Q X = P is found without an inverse; eigenvalues are not clamped, as σ are
    singular values; denominators are not clipped, as they keep all digits. Instead σ below `floor`·σ₁ count for less,
    because there the Gramians say nothing. `fold` penalises what a folded cut goes by; the paper does not fold. `mean`
    divides the sum of a layer by its order.
    """

    floor: float = 1e-4
    fold: bool = True
    mean: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.floor, int | float) and not isinstance(self.floor, bool)
        if not (number and 0 <= self.floor < 1):
            raise ControlError(f"HankelNuclearNorm: floor is {self.floor!r}, expected a number from 0 to below 1")
        for name in ("fold", "mean"):
            if not isinstance(getattr(self, name), bool):
                raise ControlError(f"HankelNuclearNorm: {name} is {getattr(self, name)!r}, expected True or False")

    def of(self, system: DiagonalSystem) -> Float[Tensor, "*bank"]:
        total = hankel_nuclear_norm(fold(system) if self.fold else system, floor=self.floor)
        return total / system.order if self.mean else total


@final
@dataclass(frozen=True)
class HankelMajoriser(Regulariser):
    """Σ ‖bᵢ‖ ‖cᵢ‖ / (1 − |λᵢ|²) ≥ Σσ: no Gramian, next to no time, and 1 to 30 % above Σσ on LRU layers."""

    def of(self, system: DiagonalSystem) -> Float[Tensor, "*bank"]:
        return hankel_nuclear_norm_majoriser(system)


@final
@dataclass(frozen=True)
class ModalL1(Regulariser):
    """Σ|λᵢ| (Forgione et al. 2024): fast modes become faster, until they can be dropped."""

    def of(self, system: DiagonalSystem) -> Float[Tensor, "*bank"]:
        # By the logarithm where it is known: |λ| that is rounded to 0 has a gradient of 0/0.
        known = system.log_poles
        return (modulus(system.poles) if known is None else known.real.exp()).sum(-1)


def _banks(model: nn.Module) -> Iterator[DiagonalSystem]:
    """Read the systems of all layers, as one bank for every shape."""
    groups: dict[object, list[DiagonalSystem]] = {}
    for name, (module, adapter) in find(model).items():
        try:
            system = linear_adapter(module, adapter).read(module)
        except AdapterError as error:
            raise AdapterError(f"{name or 'the model'}: {error}, and a penalty needs one") from error
        except ControlError as error:
            raise type(error)(f"{name or 'the model'}: {error}") from error
        kind = (system.B.shape, system.C.shape, system.dtype, system.device, system.log_poles is None)
        groups.setdefault(kind, []).append(system)
    if not groups:
        raise AdapterError(f"{type(model).__name__} has no SSM layer that an adapter reads; see compressm.adapters")
    for systems in groups.values():
        logarithms = [system.log_poles for system in systems if system.log_poles is not None]
        yield DiagonalSystem._unchecked(
            _stacked([system.poles for system in systems]),
            _stacked(logarithms) if logarithms else None,
            _stacked([system.B for system in systems]),
            _stacked([system.C for system in systems]),
        )


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Stack tensors on a new first axis; a single one is not copied."""
    return torch.stack(tensors) if len(tensors) > 1 else tensors[0][None]


TEMPERATURE, ALPHA = 2.0, 0.5


class DistillationError(ValueError):
    """A teacher's answers that a student cannot learn from."""


def distillation_loss(
    logits: Float[Tensor, "m classes"],
    teacher: Float[Tensor, "m classes"],
    targets: Int64[Tensor, " m"],
    *,
    temperature: float = TEMPERATURE,
    alpha: float = ALPHA,
    ignored: int = -100,
) -> Float[Tensor, ""]:
    """(1 − α) H(y, softmax z) + α T² KL(softmax z_t/T ‖ softmax z/T), the mean over targets that are not `ignored`."""
    # Torch would broadcast one row of answers, or one class, over all.
    if logits.ndim != 2 or teacher.shape != logits.shape or targets.shape != logits.shape[:1]:
        raise DistillationError(
            f"logits, teacher and targets are of shapes {tuple(logits.shape)}, {tuple(teacher.shape)} and"
            f" {tuple(targets.shape)}, expected (m, classes), (m, classes) and (m,): flatten steps into the first"
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise DistillationError(f"temperature is {temperature}, expected a number above 0")
    if not 0 <= alpha <= 1:
        raise DistillationError(f"alpha is {alpha}, expected a number at least 0 and at most 1")
    wanted, given = (functional.log_softmax(z.float() / temperature, dim=-1) for z in (teacher, logits))
    # A class that the teacher rules out has no part in the divergence.
    distance = torch.where(wanted.isneginf(), 0, wanted.exp() * (wanted - given)).sum(-1)
    asked = targets != ignored
    divergence = torch.where(asked, distance, 0).sum() / asked.sum()
    truth = functional.cross_entropy(logits.float(), targets, ignore_index=ignored)
    return (1 - alpha) * truth + alpha * temperature**2 * divergence


class Teacher:
    """A frozen model in evaluation mode; its logits can be kept by example.

    The mode is set again at every call. Keep logits only of data that are not augmented: an example is known by its
    number alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        self._kept: Float[Tensor, "examples ..."] | None = None

    @torch.no_grad()
    def __call__(self, *inputs: Tensor | None) -> Float[Tensor, "..."]:
        """Compute the logits, without gradients."""
        answer = self.model.eval()(*inputs)
        if not isinstance(answer, Tensor):
            raise DistillationError(f"the teacher answers with a {type(answer).__name__}, expected logits alone")
        return answer.float()

    @torch.no_grad()
    def keep(self, batches: Iterable[tuple[Tensor | None, ...]]) -> None:
        """Keep the logits of all examples, in their order."""
        self._kept = torch.cat([self(*inputs) for inputs in batches])

    @property
    def keeps(self) -> bool:
        return self._kept is not None

    def recall(self, examples: Int64[Tensor, " m"]) -> Float[Tensor, "m ..."]:
        """The kept logits of these examples."""
        if self._kept is None:
            raise DistillationError("the teacher was not asked yet: call keep before recall")
        return self._kept.index_select(0, examples)
