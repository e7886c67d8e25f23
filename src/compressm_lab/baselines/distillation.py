"""Knowledge distillation (app:kd, Hinton et al. 2015): a small model learns from the answers of a large one."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

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
