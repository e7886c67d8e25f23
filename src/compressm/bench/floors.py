"""The least time a training step could take: flops and bytes of an ideal step over what this device was measured to do.

Counted, with M = sequences · length tokens, H channels, n modes, P parameters and e bytes an activation:

- *flops*: every matrix product, once forward and twice backward (of its input and of its weight). A block has B u and
  C h on pairs, 4 M H n each, and the gate, 4 M H²; the encoder of real inputs has no gradient of its input.
- *activations*: 15 passes over (M, H) a block, as of five kernels that keep all else on the chip. Forward the SSM
  reads x and writes y; GELU, gate, dropout and residual read y and x and write the next x and its statistics for the
  next norm. Backward the gate reads dx' and y and writes dy, the SSM reads dy and x and writes dz, the norm reads dz, x
  and dx' and writes dx. Gate values and masks are made again, at no cost here. The encoder writes x and reads dx,
  pooling reads x; the gradient that comes back from it is one row a sequence, so the last block reads no dx'.
- *states*, in the cheapest of three forms. `kept`: every h written once forward, read once backward, 4 n M e bytes in
  all. `recomputed`: no bytes, and B u once more. `convolution`: no h at all; the response Re(C Λᵗ B), 4 L H² n, its
  transform and those of inputs and outputs, 5 L log₂ 2L each, the products at L frequencies, 8 M H², and the response
  through memory.
- *parameters*: 10 passes of float32: read forward and backward, gradient written, and by AdamW parameter, gradient and
  both moments read, parameter and moments written.

Elementwise arithmetic is not counted, nor are launches. An ideal device does both at once: the floor is the longer of
the two times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from compressm.bench.ceilings import Ceilings
from compressm.bench.step_cases import StepCase
from compressm.training.precision import DTYPES

_ACTIVATION_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_BLOCK_PASSES, _PARAMETER_PASSES = 15, 10


@dataclass(frozen=True)
class Work:
    """Of one training step."""

    flops: int
    bytes: int

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def seconds(self, ceilings: Ceilings) -> float:
        """On a device that multiplies while it moves."""
        return max(self.flops / ceilings.flops, self.bytes / ceilings.bytes)


@dataclass(frozen=True)
class Floor:
    """The cheapest form of the states, its work and its time."""

    form: str
    work: Work
    seconds: float


def floor(case: StepCase, parameters: int, ceilings: Ceilings) -> Floor:
    """Of a step of `case`, whose model has so many parameters."""
    around = around_work(case, parameters)
    forms = {name: around + states for name, states in states_work(case).items()}
    best = min(forms, key=lambda name: forms[name].seconds(ceilings))
    return Floor(best, forms[best], forms[best].seconds(ceilings))


def states_work(case: StepCase) -> dict[str, Work]:
    """All SSM layers in each form, without the passes over their inputs and outputs."""
    tokens, width, n, element = _tokens(case), case.width, case.order, _ACTIVATION_BYTES[case.precision]
    drive = 4 * tokens * width * n
    transforms = round(5 * case.length * math.log2(2 * case.length)) * (2 * case.sequences * width + width**2)
    response = case.length * width**2
    filtering = 4 * response * n + 8 * tokens * width**2 + transforms
    one_layer = {
        "kept": Work(6 * drive, 4 * n * tokens * element),
        "recomputed": Work(7 * drive, 0),
        "convolution": Work(3 * filtering, 4 * 4 * response),
    }
    return {name: Work(case.depth * work.flops, case.depth * work.bytes) for name, work in one_layer.items()}


def around_work(case: StepCase, parameters: int) -> Work:
    """Everything but the states."""
    tokens, width, element = _tokens(case), case.width, _ACTIVATION_BYTES[case.precision]
    gates = 3 * case.depth * 4 * tokens * width**2
    encoder = 2 * 2 * tokens * (case.inputs or 0) * width
    compared = 4 * width * width if case.towers == 2 else 0
    head = 3 * 2 * case.batch * (compared + width * case.classes)
    passes = _BLOCK_PASSES * case.depth + 1  # encoder 2 and pooling 1 more, the last block 2 fewer
    read = 2 * tokens * (8 if case.inputs is None else 4 * case.inputs)
    moved = passes * tokens * width * element + read + _PARAMETER_PASSES * 4 * parameters
    return Work(gates + encoder + head, moved)


def _tokens(case: StepCase) -> int:
    return case.sequences * case.length
