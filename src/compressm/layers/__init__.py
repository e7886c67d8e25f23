"""SSM layers: final `nn.Module`s that know nothing about compression.

Each maps (batch, length, width) to the same shape: `forward(x, state, lengths) -> (y, state)` for sequences,
`step(x, state) -> (y, state)` for streams. `.order` is the number of states.
"""

from compressm.layers.base import LTILayer, SSMLayer, check_finite
from compressm.layers.discretisation import ZOH, Bilinear, Discretisation
from compressm.layers.initialisation import Initialisation, Inv, Legs, Lin
from compressm.layers.linoss import IM, IMEX, DampedIMEX, LinOSS, Scheme
from compressm.layers.lru import LRU
from compressm.layers.mamba import Mamba
from compressm.layers.s4 import S4
from compressm.layers.s4d import S4D
from compressm.layers.s5 import S5
from compressm.ops import SequenceError

__all__ = [
    "IM",
    "IMEX",
    "LRU",
    "S4",
    "S4D",
    "S5",
    "ZOH",
    "Bilinear",
    "DampedIMEX",
    "Discretisation",
    "Initialisation",
    "Inv",
    "LTILayer",
    "Legs",
    "Lin",
    "LinOSS",
    "Mamba",
    "SSMLayer",
    "Scheme",
    "SequenceError",
    "check_finite",
]
