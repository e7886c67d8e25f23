"""Messages of the library in the words of the command line: options and keys of recipes, not classes of Python."""

from __future__ import annotations

import re
import sys
import warnings
from typing import TextIO

# Policies and choices by the keys and values that stand for them in recipes.
_POLICIES = {
    "EnergyTolerance": "tau",
    "KeepFraction": "rho",
    "TargetOrder": "order",
    "ErrorBound": "bound",
    "Budget": "total_states",
    "FewerStates": "fewer",
}
_CHOICES = {
    "WhiteNoise": "white_noise",
    "Measured": "measured",
    "Modal": "modal",
    "Baked": "baked",
    "PerChannel": "per-channel",
    "SharedIndex": "shared-index",
}
_POLICY = re.compile(rf"(?:keep(=| is ))?\b({'|'.join(_POLICIES)})\((?:\w+=)?([^,()]*)[^()]*\)")
_FIELD = re.compile(rf"\b({'|'.join(_POLICIES)}): \w+ is ")
_CHOICE = re.compile(rf"\b({'|'.join(_CHOICES)})\([^()]*\)|\b(PerChannel)\b")


def in_words(message: object, *, options: bool = False) -> str:
    """The message with `rho 0.5` in the place of `KeepFraction(rho=0.5)`; with `options`, `--rho 0.5`."""

    def named(policy: str) -> str:
        key = _POLICIES[policy]
        return f"--{key.replace('_', '-')}" if options else key

    text = _POLICY.sub(lambda found: f"{named(found[2])}{found[1] or ' '}{found[3]}", str(message))
    text = _FIELD.sub(lambda found: f"{named(found[1])} is ", text)
    return _CHOICE.sub(lambda found: _CHOICES[found[1] or found[2]], text)


def show_warnings_plainly() -> None:
    """Show every warning as one line, without the line of Python that gave it."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        print(f"warning: {' '.join(in_words(message).split())}", file=file or sys.stderr)

    warnings.showwarning = show
