"""Recurrences: each op is a folder whose `reference.py` is the definition, behind one function."""

from compressm.ops.dispatch import SequenceError
from compressm.ops.lti import Path, linear_recurrence, lti_bank, lti_layer

__all__ = ["Path", "SequenceError", "linear_recurrence", "lti_bank", "lti_layer"]
