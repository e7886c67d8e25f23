"""Adapters: they read a module as linear systems or a selective one, and encode systems as parameter values.

`find` lists the modules of a model that have an adapter; `@adapts` registers one for your own layer, and
`check_adapter` tests it.
"""

from compressm.adapters import mamba_ssm as mamba_ssm
from compressm.adapters.base import Adapter, Basis, SSMAdapter, adapter_for, adapts, find, state_axes
from compressm.adapters.conformance import check_adapter
from compressm.adapters.dense import DenseAdapter
from compressm.adapters.linoss import LinOSSAdapter
from compressm.adapters.lru import LRUAdapter
from compressm.adapters.mamba import MambaAdapter, SelectiveAdapter
from compressm.adapters.memory import MemoryAdapter
from compressm.adapters.poles import continuous_poles
from compressm.adapters.promises import Finding
from compressm.adapters.s4 import S4Adapter
from compressm.adapters.s4d import S4DAdapter
from compressm.adapters.s5 import S5Adapter
from compressm.adapters.transformers import Mamba2MixerAdapter, MambaMixerAdapter
from compressm.adapters.writing import write
from compressm.errors import AdapterError, ConformanceError

__all__ = [
    "Adapter",
    "AdapterError",
    "Basis",
    "ConformanceError",
    "DenseAdapter",
    "Finding",
    "LRUAdapter",
    "LinOSSAdapter",
    "Mamba2MixerAdapter",
    "MambaAdapter",
    "MambaMixerAdapter",
    "MemoryAdapter",
    "S4Adapter",
    "S4DAdapter",
    "S5Adapter",
    "SSMAdapter",
    "SelectiveAdapter",
    "adapter_for",
    "adapts",
    "check_adapter",
    "continuous_poles",
    "find",
    "state_axes",
    "write",
]
