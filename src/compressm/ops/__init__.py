"""Recurrences: each op is a folder whose `reference.py` is the definition, behind one function."""

from compressm.ops.diagonal_scan import Path, linear_recurrence, lti_bank, lti_layer
from compressm.ops.errors import SequenceError

__all__ = ["Path", "SequenceError", "linear_recurrence", "lti_bank", "lti_layer"]
