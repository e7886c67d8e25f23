"""Modules of other packages, of which nothing is imported here: their classes are known by name once the user has them.

Of transformers `MambaMixer` is read and written, and `MambaModel` and `MambaForCausalLM` are described for files and
built again, each layer at its order. Other mixers are refused by name.
"""

from compressm.adapters.transformers.mamba import MambaMixerAdapter
from compressm.adapters.transformers.models import arguments_of, builder, kind_name, refused_in

__all__ = ["MambaMixerAdapter", "arguments_of", "builder", "kind_name", "refused_in"]
