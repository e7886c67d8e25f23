"""Families: everything that is special about one kind of recurrence, behind one protocol.

`base` holds the protocol and a picture of a cut; `linear`, `dense`, `selective` and `memory` implement it. `axes` helps
to write families whose parameters have an axis of states.
"""

# Importing a family registers it.
from compressm.families import dense, linear, memory, selective
from compressm.families.axes import AxisChange, AxisCut
from compressm.families.base import (
    Change,
    Family,
    Layer,
    Observer,
    PlannedCut,
    Writing,
    energy_lost,
    family_of,
    read_layer,
    reads,
)

__all__ = [
    "AxisChange",
    "AxisCut",
    "Change",
    "Family",
    "Layer",
    "Observer",
    "PlannedCut",
    "Writing",
    "dense",
    "energy_lost",
    "family_of",
    "linear",
    "memory",
    "read_layer",
    "reads",
    "selective",
]
