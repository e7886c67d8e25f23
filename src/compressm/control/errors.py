"""Named errors: each message holds the offending value and what is allowed."""


class ControlError(ValueError):
    """Anything `compressm.control` refuses."""


class ShapeError(ControlError):
    """Axes are missing, empty or disagree."""


class PrecisionError(ControlError):
    """A dtype that is not floating point, or several precisions in one system."""


class DeviceError(ControlError):
    """Tensors of one system live on different devices."""


class NonFiniteError(ControlError):
    """NaN or infinity among the entries."""


class UnstableSystemError(ControlError):
    """A pole on or outside the unit circle: Gramians do not exist."""


class OrderError(ControlError):
    """An order, or an index of a state, outside the system."""


class IndefiniteGramianError(ControlError):
    """A Gramian that is not Hermitian positive semi-definite."""


class DefectiveSystemError(ControlError):
    """No usable basis of eigenvectors: the system cannot be written with a diagonal A."""


class OrderChangedError(ControlError):
    """Two snapshots of different order: δH is undefined across a cut."""
