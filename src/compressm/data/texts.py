"""Texts as bytes: token b + 1 for byte b, 0 for padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

VOCABULARY = 257  # 256 bytes and padding


def as_bytes(text: bytes, length: int) -> bytes:
    """At most `length` bytes of UTF-8; what is not UTF-8 becomes U+FFFD."""
    return text.decode("utf-8", "replace").encode()[:length]


def padded(texts: Sequence[bytes], length: int) -> tuple[UInt8[Tensor, "texts {length}"], Int64[Tensor, " texts"]]:
    """Tokens and lengths of texts that `as_bytes` has cut."""
    # One byte a token is enough: UTF-8 has no byte above 0xF4, so no token above 0xF5.
    tokens = np.zeros((len(texts), length), np.uint8)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
        row[: len(text)] += 1
    # An empty text is one step of padding: a mean over steps needs one.
    lengths = [max(len(text), 1) for text in texts]
    return torch.from_numpy(tokens), torch.tensor(lengths, dtype=torch.int64)
