"""What the library refuses: its errors, and the known name nearest to one that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The end of a sentence that refuses `given`; empty where nothing that is known is near."""
    names = {name.lower(): name for name in known}
    near = get_close_matches(str(given).lower(), names, n=1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""


class AdapterError(ValueError):
    """A class, module or set of parameter values that cannot be adapted; it says what came and what is allowed."""


class ConformanceError(AssertionError):
    """An adapter does not do what every adapter promises; the message says which promise, and by how much."""


class CompressionError(ValueError):
    """A choice, a model or an optimizer that cannot be compressed as asked; it says what came and what is allowed."""


class StaleWrapperError(CompressionError, RuntimeError):
    """A DistributedDataParallel that was made before a cut, and does not know the shapes of now."""


class SavingError(ValueError):
    """A model that cannot be saved or a file that cannot be loaded; it says what was found and what is allowed."""


class NoSuchFileError(SavingError, FileNotFoundError):
    """There is nothing to load where it was looked for."""
