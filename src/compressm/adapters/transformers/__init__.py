"""Support for Mamba models of transformers; the package is not imported here, its classes are known by name.

`MambaMixer` and `Mamba2Mixer` are read and written. Their models can be saved and built again, each layer at its order.
`compressm.adapters.mamba` refuses other mixers by name.
"""

from compressm.adapters.transformers import delta_net
from compressm.adapters.transformers.cache import HeldCache
from compressm.adapters.transformers.config import PACKAGE
from compressm.adapters.transformers.mamba import MambaMixerAdapter
from compressm.adapters.transformers.mamba2 import Mamba2MixerAdapter
from compressm.adapters.transformers.models import arguments_of, builder, kind_name

__all__ = [
    "PACKAGE",
    "HeldCache",
    "Mamba2MixerAdapter",
    "MambaMixerAdapter",
    "arguments_of",
    "builder",
    "delta_net",
    "kind_name",
]
