"""One learned vector a token, and the gradient of their table."""

from compressm.ops.token_features.dispatch import token_features

__all__ = ["token_features"]
