"""Knowledge distillation (app:kd, Hinton et al. 2015): a small model learns from the answers of a large one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional


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
    wanted, given = (functional.log_softmax(z.float() / temperature, dim=-1) for z in (teacher, logits))
    distance = (wanted.exp() * (wanted - given)).sum(-1)
    asked = targets != ignored
    divergence = torch.where(asked, distance, 0).sum() / asked.sum()
    truth = functional.cross_entropy(logits.float(), targets, ignore_index=ignored)
    return (1 - alpha) * truth + alpha * temperature**2 * divergence


class Teacher:
    """A model that answers without gradients and without dropout; what it said of every example can be kept.

    Keeping is for data that are not augmented: an example is known by its number alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        self._kept: Float[Tensor, "examples ..."] | None = None

    @torch.no_grad()
    def __call__(self, *inputs: Tensor | None) -> Float[Tensor, "..."]:
        """Its logits, by asking it."""
        return self.model(*inputs).float()

    @torch.no_grad()
    def keep(self, batches: Iterable[tuple[Tensor | None, ...]], ask: Callable[..., Tensor] | None = None) -> None:
        """Ask about all examples, in their order, and keep what it says; `ask` in place of itself."""
        self._kept = torch.cat([(ask or self)(*inputs) for inputs in batches])

    @property
    def keeps(self) -> bool:
        return self._kept is not None

    def recall(self, examples: Int64[Tensor, " m"]) -> Float[Tensor, "m ..."]:
        """What it said of these."""
        assert self._kept is not None
        return self._kept.index_select(0, examples)
