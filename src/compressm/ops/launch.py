"""How a kernel over the rows of a matrix is cut into programs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Launch(NamedTuple):
    """Rows and columns of a tile, the warps of a program, and how many programs share the tiles of a column."""

    ROWS: int
    COLS: int
    num_warps: int
    programs: int

    def workers(self, tiles: int) -> int:
        """As few programs as take the same number of tiles each."""
        return -(-tiles // -(-tiles // self.programs))

    def options(self, **more: int | str) -> dict[str, int | str]:
        """What a kernel is told besides its arguments."""
        return {"ROWS": self.ROWS, "COLS": self.COLS, "num_warps": self.num_warps, **more}


def rows_of(gradient: Tensor) -> tuple[Tensor, int]:
    """A gradient as dense rows, and for how many steps each of them stands: 0 for one row a step.

    What a mean over time sends back is the same at every step; written out it would be a pass over memory of its own.
    """
    if gradient.ndim == 3 and gradient.stride(1) == 0 and gradient.shape[1] > 1:
        return gradient[:, 0].contiguous(), gradient.shape[1]
    return gradient.contiguous(), 0
