"""The readout of a cut layer, fitted again to what the whole layer put out."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from compressm.compression.sample import Sample, sequences_at_once
from compressm.compression.selective.simulation import states, steps_at_once
from compressm.control.selective import SelectiveSystem


def refitted_readout(
    old: SelectiveSystem, new: SelectiveSystem, sample: Sample, E_C: Float[Tensor, "n r"]
) -> Float[Tensor, "n r"]:
    """F = E[h h'ᵀ] E[h' h'ᵀ]⁻¹, the best estimate F h' of the old states h from the new ones h'; E_C without a sample.

    It makes Σ E[(C h − C F h')²] over all channels smallest where C and h are independent, for then E[C Cᵀ] cancels.
    """
    if not sample.sequences:
        return E_C
    shape = (old.order, new.order)
    crossed, squares = (torch.zeros(size, new.order, dtype=torch.float64, device=old.device) for size in shape)
    for u, counts in sample.parts(sequences_at_once(sample.longest, old.rates.numel())):
        steps = steps_at_once(old, new, batch=len(u))
        for h, small, here in zip(
            states(old, u, steps), states(new, u, steps), torch.split(counts.mT, steps), strict=True
        ):
            kept = (small * here[..., None, None]).flatten(0, 2)
            crossed, squares = crossed + h.flatten(0, 2).mT @ kept, squares + kept.mT @ kept
    # What the data does not tell stays as it was.
    rest = crossed - E_C @ squares
    return E_C + rest @ torch.linalg.pinv(squares, hermitian=True, rtol=1e-10)
