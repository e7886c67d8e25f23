"""SSM layers: final `nn.Module`s that know nothing of compression.

Each maps (batch, length, width) to the same shape: `forward(x, state, lengths) -> (y, state)` for sequences,
`step(x, state) -> (y, state)` for streams; `.order` is the number of states.
"""

from compressm.layers.base import SSMLayer
from compressm.layers.lru import LRU

__all__ = ["LRU", "SSMLayer"]
