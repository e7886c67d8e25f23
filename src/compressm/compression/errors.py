"""What compression refuses."""


class CompressionError(ValueError):
    """A choice, a model or an optimizer that cannot be compressed as asked; it says what came and what is allowed."""


class StaleWrapperError(CompressionError, RuntimeError):
    """A DistributedDataParallel that was made before a cut, and does not know the shapes of now."""


class SavingError(ValueError):
    """A model that cannot be saved or a file that cannot be loaded; it says what was found and what is allowed."""


class NoSuchFileError(SavingError, FileNotFoundError):
    """There is nothing to load where it was looked for."""
