"""The errors of adapters, compression and saving, warnings, and suggestions for names that are not known."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches

# Code of these packages is not the line that a warning is about.
_PASSED_OVER = ("compressm", "torch")


def warn_caller(message: str) -> None:
    """Warn at the line of the caller's own code, however deep inside the library this is."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _PASSED_OVER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The ending "; did you mean ...?" of an error that refuses `given`; empty if no known name is close."""
    names = {name.lower(): name for name in known}
    near = get_close_matches(str(given).lower(), names, n=1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""


class AdapterError(ValueError):
    """A class, a module or parameter values cannot be adapted; the message says what came and what is allowed."""


class ConformanceError(AssertionError):
    """An adapter breaks a promise that every adapter makes; the message says which one, and by how much."""


class CaptureError(RuntimeError):
    """A step cannot be recorded as a CUDA graph; the message names the line or the object, and the cure."""


class CompressionError(ValueError):
    """A choice, a model or an optimizer does not allow the cut; the message says what came and what is allowed."""


class StaleWrapperError(CompressionError, RuntimeError):
    """A DistributedDataParallel was made before a cut and does not know the present shapes."""


class LostProcessError(CompressionError, RuntimeError):
    """A process of a distributed training ended or stalled while others waited for it; the message says which one."""


class ExportError(ValueError):
    """A model cannot be exported, or the exported file computes something else; the message says why."""


class SavingError(ValueError):
    """A model cannot be saved or a file cannot be loaded; the message says what was found and what is allowed."""


class NoSuchFileError(SavingError, FileNotFoundError):
    """The file to load does not exist."""


class UnwritableFileError(SavingError, OSError):
    """A file cannot be written: the disk is full, the folder is read-only; the message has path and bytes."""


def unmerged(parameters: Iterable[str]) -> str:
    """The cure for parameters that PEFT has wrapped, such as LoRA's, as the end of a message; empty without them."""
    if not any(".base_layer." in name or ".lora_" in name for name in parameters):
        return ""
    return "; merge the adapters first (merge_and_unload), or leave the layer out by filter_fn"
