"""Support for Mamba models of transformers; the package is not imported here, its classes are known by name.

`MambaMixer` is read and written. `MambaModel` and `MambaForCausalLM` can be saved and built again, each layer at its
order. Other mixers are refused by name.
"""

from compressm.adapters.transformers.mamba import MambaMixerAdapter
from compressm.adapters.transformers.models import arguments_of, builder, kind_name, refused_in

__all__ = ["MambaMixerAdapter", "arguments_of", "builder", "kind_name", "refused_in"]
