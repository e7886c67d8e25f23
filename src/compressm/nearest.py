"""The known name that is nearest to one that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The end of a sentence that refuses `given`; empty where nothing that is known is near."""
    names = {name.lower(): name for name in known}
    near = get_close_matches(str(given).lower(), names, n=1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""
