"""Mixers of transformers that no adapter reads, each with the reason."""

from __future__ import annotations

from torch import nn

from compressm.adapters.base import adapter_for

_NORMS = "normalises B and C over the states, which no change of basis keeps"
_HEADS = "has a projection and rates for each of its heads"
_MAMBA_2 = "is the recurrence of Mamba-2, with one rate a head"
_REASONS = {
    "FalconMambaMixer": _NORMS,
    "JambaMambaMixer": _NORMS,
    "ZambaMambaMixer": _HEADS,
    "Mamba2Mixer": _MAMBA_2,
    "Zamba2MambaMixer": _MAMBA_2,
    "BambaMixer": _MAMBA_2,
    "FalconH1Mixer": _MAMBA_2,
    "GraniteMoeHybridMambaLayer": _MAMBA_2,
    "NemotronHMamba2Mixer": _MAMBA_2,
}
_SUPPORTED = "of transformers MambaMixer is supported, the mixer of MambaModel and MambaForCausalLM"


def refused_in(model: nn.Module) -> str:
    """What is to be said of such mixers in the model, beginning with a colon; nothing if it has none."""
    names: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        kind = type(module)
        # What all of them have, under whatever names transformers will have next.
        mixes = kind.__module__.startswith("transformers") and "A_log" in module._parameters
        if mixes and adapter_for(module) is None:
            names.setdefault(kind.__name__, []).append(name or "the model")
    said = [f"{_listed(places)} {_REASONS.get(kind, 'is not known')} ({kind})" for kind, places in names.items()]
    return f": {', '.join(said)}; {_SUPPORTED}" if said else ""


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
