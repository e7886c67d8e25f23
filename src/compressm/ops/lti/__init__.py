"""The recurrence h[t] = λ ⊙ h[t−1] + x[t] with constant λ, alone and inside a layer y = Re(C h), h driven by B u.

Complex numbers are real pairs on an axis of size two, so that parameters, optimizers, half precision and export handle
only real tensors. Poles are given as logarithms (log |λ|, arg λ): powers are exponentials, never repeated products.
"""

from compressm.ops.lti.cost import Path
from compressm.ops.lti.scan import layer_dtype, linear_recurrence, lti_bank, lti_layer

__all__ = ["Path", "layer_dtype", "linear_recurrence", "lti_bank", "lti_layer"]
