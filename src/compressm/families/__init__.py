"""Families of recurrences: what the pipeline of a cut asks of a layer, and one answer for each kind of recurrence.

`base` has the protocol and a picture of how a cut flows; `linear` and `selective` are its instances, `axes` is for
families whose states are an axis of their parameters.
"""

# Registered where they are defined.
from compressm.families import linear, selective
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
    "energy_lost",
    "family_of",
    "linear",
    "read_layer",
    "reads",
    "selective",
]
