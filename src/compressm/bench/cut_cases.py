"""What a cut is measured on: one of the paper's models, the order it falls to, and how."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from compressm.bench.step_cases import StepCase, paper_case

# The orders that the paper's runs pass through (tab:smnist, tab:scifar); elsewhere a quarter.
RANKS = {"smnist": 28, "scifar": 161}
GRAMIANS = ("white noise", "measured")
MOMENTS = ("Transport", "Restart")
# The default of a compressor without data, the same without moments to carry, and the default with data.
VARIANTS = (("white noise", "Transport"), ("white noise", "Restart"), ("measured", "Transport"))


@dataclass(frozen=True, kw_only=True)
class CutCase:
    """A model with its batch, cut to `rank` states in every layer, or to one less in each than in the one before.

    Layers that fall to the same order go through one batched call, others side by side.
    """

    model: StepCase
    rank: int
    gramian: str = "white noise"
    moments: str = "Transport"
    unequal: bool = False

    @property
    def ranks(self) -> list[int]:
        """Of all layers."""
        return [max(1, self.rank - k) if self.unequal else self.rank for k in range(self.model.depth)]


def cut_cases(models: Iterable[StepCase], rank: int | None = None) -> tuple[CutCase, ...]:
    """Every model in every variant, and one of several layers to unequal orders."""
    cases = []
    for model in models:
        one = CutCase(model=model, rank=rank or default_rank(model))
        cases += [replace(one, gramian=gramian, moments=moments) for gramian, moments in VARIANTS]
        cases += [replace(one, unequal=True)] if model.depth > 1 else []
    return tuple(cases)


def default_rank(model: StepCase) -> int:
    """That of the paper where it has one."""
    return min(RANKS.get(model.task, max(1, model.order // 4)), model.order)


def default_models(device: str) -> tuple[StepCase, ...]:
    """The sMNIST model on a CPU; on a GPU also that of sCIFAR, six layers, in bfloat16."""
    small = paper_case("smnist")
    return (small,) if device == "cpu" else (paper_case("scifar", precision="bfloat16"), small)
