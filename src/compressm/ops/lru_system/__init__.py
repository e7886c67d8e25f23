"""The parameters of a linear recurrent unit as the system they stand for."""

from compressm.ops.lru_system.dispatch import lru_system
from compressm.ops.lru_system.reference import plain_system

__all__ = ["lru_system", "plain_system"]
