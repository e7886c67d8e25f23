"""What adapters refuse, and what their checks find."""


class AdapterError(ValueError):
    """A class, module or set of parameter values that cannot be adapted; it says what came and what is allowed."""


class ConformanceError(AssertionError):
    """An adapter does not do what every adapter promises; the message says which promise, and by how much."""
