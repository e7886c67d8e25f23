"""Knowledge distillation (app:kd, Hinton et al. 2015): a small model learns from the answers of a large one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional


class DistillationError(ValueError):
    """A teacher's answers that a student cannot learn from."""


def distillation_loss(
    logits: Float[Tensor, "m classes"],
    teacher: Float[Tensor, "m classes"],
    targets: Int64[Tensor, " m"],
    *,
    temperature: float = 2.0,
    alpha: float = 0.5,
    ignored: int = -100,
) -> Float[Tensor, ""]:
    """(1 − α) H(y, softmax z) + α T² KL(softmax z_t/T ‖ softmax z/T), the mean over targets that are not `ignored`."""
    _require_shapes(logits, teacher, targets)
    _require_weights(temperature, alpha)
    wanted, given = (functional.log_softmax(z.float() / temperature, dim=-1) for z in (teacher, logits))
    # A class that the teacher rules out has no part in the divergence.
    distance = torch.where(wanted.isneginf(), 0, wanted.exp() * (wanted - given)).sum(-1)
    asked = targets != ignored
    divergence = torch.where(asked, distance, 0).sum() / asked.sum()
    truth = functional.cross_entropy(logits.float(), targets, ignore_index=ignored)
    return (1 - alpha) * truth + alpha * temperature**2 * divergence


class Teacher:
    """A model that answers without gradients and without dropout; what it said of every example can be kept.

    The model itself is frozen and put in evaluation mode, at every question anew. Keeping is for data that are not
    augmented: an example is known by its number alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        self._kept: Float[Tensor, "examples ..."] | None = None

    @torch.no_grad()
    def __call__(self, *inputs: Tensor | None) -> Float[Tensor, "..."]:
        """Its logits, by asking it."""
        answer = self.model.eval()(*inputs)
        if not isinstance(answer, Tensor):
            raise DistillationError(f"the teacher answers with a {type(answer).__name__}, expected logits alone")
        return answer.float()

    @torch.no_grad()
    def keep(self, batches: Iterable[tuple[Tensor | None, ...]], ask: Callable[..., Tensor] | None = None) -> None:
        """Ask about all examples, in their order, and keep what it says; `ask` in place of itself."""
        self._kept = torch.cat([(ask or self)(*inputs) for inputs in batches])

    @property
    def keeps(self) -> bool:
        return self._kept is not None

    def recall(self, examples: Int64[Tensor, " m"]) -> Float[Tensor, "m ..."]:
        """What it said of these."""
        if self._kept is None:
            raise DistillationError("the teacher was not asked yet: call keep before recall")
        return self._kept.index_select(0, examples)


def _require_shapes(logits: Tensor, teacher: Tensor, targets: Tensor) -> None:
    """Torch would spread one row of answers, or one class, over all."""
    if logits.ndim != 2 or teacher.shape != logits.shape or targets.shape != logits.shape[:1]:
        raise DistillationError(
            f"logits, teacher and targets are of shapes {tuple(logits.shape)}, {tuple(teacher.shape)} and"
            f" {tuple(targets.shape)}, expected (m, classes), (m, classes) and (m,): flatten steps into the first"
        )


def _require_weights(temperature: float, alpha: float) -> None:
    if not (math.isfinite(temperature) and temperature > 0):
        raise DistillationError(f"temperature is {temperature}, expected a number above 0")
    if not 0 <= alpha <= 1:
        raise DistillationError(f"alpha is {alpha}, expected a number at least 0 and at most 1")
