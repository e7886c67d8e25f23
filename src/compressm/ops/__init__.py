"""Differentiable ops: the recurrences `lti` and `selective`, and `block`, the norms, gates and encoders around them."""

from compressm.ops.dispatch import SequenceError
from compressm.ops.lti import Path, linear_recurrence, lti_bank, lti_layer

__all__ = ["Path", "SequenceError", "linear_recurrence", "lti_bank", "lti_layer"]
