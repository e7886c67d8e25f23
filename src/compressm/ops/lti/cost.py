"""Which path is cheapest for which shapes, forward and backward on one CPU core.

Microseconds, fitted to 23 shapes on a core that multiplies float32 matrices at 140 flop/ns; ratios matter, not the
unit. The benchmark `compressm bench scan` measures every path beside the choice.
"""

from __future__ import annotations

from enum import Enum
from functools import cache

_FLOP = 1 / 140e3
_SHORTEST_CHUNK, _LONGEST_CHUNK = 4, 64
_COLUMNS = 16  # of a product at a time: fewer take as long
WIDE = 6144  # states of a step from which the CPU walks step by step; of fewer, spans of steps side by side
_LONG_ROW = 64  # states side by side from which loops over pairs waste no more than complex ones
NARROW = 16  # channels up to which a GPU has kernels that form B u and C h on the way
FEW_STATES = 64  # up to which those write every state; beyond, one a chunk


class Path(Enum):
    """How to compute."""

    LOOP = "the definition, step by step"
    SCAN = "every state, by a scan"
    CHUNKED = "matrix products over chunks of time"
    CONVOLUTION = "the impulse response and FFTs"


def cheapest_path(batch: int, length: int, n: int, p: int, q: int, *, gpu: bool = False) -> Path:
    """The path with the smallest predicted cost.

    On a GPU few channels go in chunks, whose states never reach memory, and all else through a scan.
    """
    if gpu:
        return Path.CHUNKED if max(p, q) <= NARROW else Path.SCAN
    costs = path_costs(batch, length, n, p, q)
    return min(costs, key=lambda path: costs[path])


def walks_pairs(batch: int, length: int, n: int, *, driven: bool) -> bool:
    """Whether a recurrence on the CPU goes over pairs as they lie in memory, or over complex numbers in two levels.

    Complex numbers win where there are few, but are copies of pairs; those `driven` by a product come as either.
    """
    return n >= _LONG_ROW and batch * length * n >= (2**21 if driven else 2**18)


def path_costs(batch: int, length: int, n: int, p: int, q: int) -> dict[Path, float]:
    """Predicted microseconds of a training step of the layer.

    SCAN moves every state through memory. CHUNKED does the products of SCAN and those of its chunks. CONVOLUTION pays
    for the response once, whatever the batch, and FFTs a step.
    """
    steps = batch * length
    products = steps * 12 * n * (p + q) * _FLOP
    chunks = _chunk_cost(layer_chunk(batch, length, n, p, q), batch, length, n, p, q)
    response = 0.03 * length * p * q + 0.03 * length**0.5 * n * (p + q)
    return {
        Path.SCAN: steps * 0.015 * n + products + 1100,
        Path.CHUNKED: chunks + products + 1300,
        Path.CONVOLUTION: steps * 0.013 * (p + q) + response + 1100,
    }


@cache
def layer_chunk(batch: int, length: int, n: int, p: int, q: int) -> int:
    """T from 4 to 64: long chunks have large blocks of their own, short ones carry many states."""
    candidates = range(min(length, _SHORTEST_CHUNK), min(length, _LONGEST_CHUNK) + 1)
    return min(candidates, key=lambda chunk: _chunk_cost(chunk, batch, length, n, p, q))


def _chunk_cost(chunk: int, batch: int, length: int, n: int, p: int, q: int) -> float:
    """What depends on T: T² p q in and for each block, n for each state carried, and a copy where T leaves a rest."""
    blocks = batch * -(-length // chunk)
    columns = -(-chunk * q // _COLUMNS) * _COLUMNS
    tables = 0.006 * chunk**2 * p * q + 0.016 * chunk * n * (p + q)
    rest = 0.0015 * batch * length * (p + q) if length % chunk else 0.0
    return blocks * (6 * chunk * p * columns * _FLOP + 0.012 * n) + tables + rest


def best_chunk(length: int) -> int:
    """About √L steps, at least 8 and at most 64."""
    return max(1, min(length, max(8, min(64, round(length**0.5)))))


def fast_length(at_least: int) -> int:
    """The smallest multiple of 16 that is 2ᵃ3ᵇ5ᶜ7ᵈ and not below: FFTs of odd sizes take two to four times as long."""
    size = max(16, -(-at_least // 16) * 16)
    while _without_small_primes(size) != 1:
        size += 16
    return size


def _without_small_primes(number: int) -> int:
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            number //= prime
    return number
