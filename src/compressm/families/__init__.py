"""Families of recurrences: what the pipeline of a cut asks of a layer, and one answer for each kind of recurrence.

`base` has the protocol and a picture of how a cut flows; `linear` and `selective` are its instances.
"""

# Registered where they are defined.
from compressm.families import linear, selective
from compressm.families.base import (
    AxisChange,
    Change,
    Family,
    Layer,
    Observer,
    PlannedCut,
    Writing,
    axis_values,
    energy_lost,
    family_of,
    read_layer,
    reads,
)

__all__ = [
    "AxisChange",
    "Change",
    "Family",
    "Layer",
    "Observer",
    "PlannedCut",
    "Writing",
    "axis_values",
    "energy_lost",
    "family_of",
    "linear",
    "read_layer",
    "reads",
    "selective",
]
