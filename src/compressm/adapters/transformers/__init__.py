"""Support for Mamba models of transformers; the package is not imported here, its classes are known by name.

`MambaMixer` is read and written. `MambaModel` and `MambaForCausalLM` can be saved and built again, each layer at its
order. `compressm.adapters.mamba` refuses other mixers by name.
"""

from compressm.adapters.transformers.mamba import MambaMixerAdapter
from compressm.adapters.transformers.models import arguments_of, builder, kind_name

__all__ = ["MambaMixerAdapter", "arguments_of", "builder", "kind_name"]
