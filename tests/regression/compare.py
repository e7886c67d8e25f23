"""Two checkouts train the same three recipes: are they the same bit for bit?

    python -m tests.regression.compare CHECKOUT_A CHECKOUT_B

Recipes and this script are those of the present checkout, only src differs. One line a recipe; exit 1 if any differs.
"""

import sys
import tempfile
from pathlib import Path

from tests.regression.trainings import RECIPES, fingerprint, leaves, train_all

_SHOWN = 5


def differences(one, other):
    """Every number or text that is not the same to the last bit, in words."""
    mine, yours = dict(leaves(one)), dict(leaves(other))
    paths = [*mine, *(path for path in yours if path not in mine)]
    said = [(path, *(_exact(values, path) for values in (mine, yours))) for path in paths]
    return [f"{path}: {a} and {b}" for path, a, b in said if a != b]


def _exact(values, path):
    if path not in values:
        return "nothing"
    value = values[path]
    return f"{value.hex()} ({value})" if isinstance(value, float) else repr(value)


def trained(checkout):
    """What every recipe came to in a checkout, with its fingerprint."""
    with tempfile.TemporaryDirectory() as folder:
        found = train_all(checkout, Path(folder))
        return {name: fingerprint(Path(folder) / name) | run for name, run in found.items()}


def main(checkouts):
    """Whether all recipes agree; says so line by line."""
    one, other = map(trained, checkouts)
    same = True
    for name in RECIPES:
        found = differences(one[name], other[name])
        same &= not found
        run = one[name]
        summary = f"{len(run['evaluated'])} evaluations, {len(run['cuts'])} cuts, weights {run['weights'][:12]}"
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        print(f"{name}: " + (f"DIFFERENT: {'; '.join(found[:_SHOWN])}{more}" if found else f"the same ({summary})"))
    return same


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tests.regression.compare CHECKOUT_A CHECKOUT_B")
    sys.exit(not main(sys.argv[1:]))
