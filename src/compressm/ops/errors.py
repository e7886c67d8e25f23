"""What the ops and layers refuse."""


class SequenceError(ValueError):
    """A sequence, state or parameter of the wrong shape, dtype, device or length; it says what is allowed."""
