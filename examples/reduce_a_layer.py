"""Reduce an LRU layer at initialisation and one with a trained spectrum; draw spectrum, bound and true error.

python examples/reduce_a_layer.py --out out/demo
"""

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from compressm.cli.options import PathError, require_picture
from compressm.control import (
    DiagonalSystem,
    balanced_truncation,
    error_bounds,
    fold,
    h_infinity_norm,
    hankel_singular_values,
)
from compressm_lab.bench.reduction import lru_at_initialisation, lru_trained_like
from compressm_lab.reports.measurements import ReductionCurve, draw_reduction_error

ORDER, WIDTH = 256, 8
SHOWN = (32, 64, 128, 192)
console = Console()


def curve(title: str, system: DiagonalSystem, points: int = 24) -> ReductionCurve:
    """Truncate to orders spread over 1 … n and measure each error on an adaptive frequency grid."""
    norm = h_infinity_norm(system).item()
    sigma = hankel_singular_values(system)
    bounds = error_bounds(sigma)
    spread = {max(1, round(ORDER * (k / points) ** 1.5)) for k in range(1, points)}
    orders = sorted(spread | set(SHOWN))
    errors = [
        system.h_infinity_error(balanced_truncation(system, order).system).item() / norm
        for order in track(orders, description=f"{title:<20}", console=console)
    ]
    return ReductionCurve(title, (sigma / norm).tolist(), orders, [bounds[r].item() / norm for r in orders], errors)


def states_needed(system: DiagonalSystem, tau: float) -> int:
    """The smallest order that keeps the share 1 − τ of Σσ, as in the paper."""
    held = hankel_singular_values(system).cumsum(0)
    return int((held < (1 - tau) * held[-1]).sum()) + 1


def main() -> None:
    """Reduce two systems, print a table and draw a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the picture (default: out/demo)")
    parser.add_argument("--picture", type=Path, help="where to write the picture instead")
    arguments = parser.parse_args()
    try:
        picture = require_picture(arguments.picture or arguments.out / "reduction.png")
    except PathError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    start = time.perf_counter()
    systems = {"LRU, initial": lru_at_initialisation(ORDER, WIDTH), "LRU, trained-like": lru_trained_like(ORDER, WIDTH)}
    curves = [curve(title, system) for title, system in systems.items()]
    draw_reduction_error(curves, picture)
    console.print(summary(curves))
    for title, system in systems.items():
        plain, folded = states_needed(system, 0.05), states_needed(fold(system), 0.05)
        console.print(f"{title}: {plain} of {ORDER} states hold 95 % of the Hankel energy, {folded} after folding.")
    console.print("The price of a cut is bounded before it is made: no true error exceeds 2·Σ of the σ it drops.")
    # Without line breaks, so that the path can be copied.
    console.print(f"{time.perf_counter() - start:.0f} s. Picture: {picture.resolve()}", soft_wrap=True)


def summary(curves: list[ReductionCurve]) -> Table:
    """A table of bounds and true errors at a few orders."""
    table = Table(title=f"Order {ORDER}, {WIDTH} channels: errors relative to the largest gain")
    for name in ("system", "states kept", "bound", "true error"):
        table.add_column(name, justify="right" if name != "system" else "left")
    for item in curves:
        for r in SHOWN:
            k = item.orders.index(r)
            table.add_row(item.title, str(r), f"{item.bounds[k]:.3f}", f"{item.errors[k]:.4f}")
    return table


if __name__ == "__main__":
    main()
