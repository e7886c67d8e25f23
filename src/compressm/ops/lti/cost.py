"""The cheapest path for given shapes, from predicted costs of forward and backward on one CPU core.

Costs are microseconds, fitted to 23 shapes on a core that multiplies float32 matrices at 140 flop/ns; only their
ratios matter. The benchmark `compressm bench scan` measures every path beside the chosen one.
"""

from __future__ import annotations

from enum import Enum
from functools import cache

_FLOP = 1 / 140e3
_SHORTEST_CHUNK, _LONGEST_CHUNK = 4, 64
_COLUMNS = 16  # columns that a product computes at a time: fewer take as long
WIDE = 6144  # states in a step from which the CPU walks step by step; with fewer, it walks spans side by side
_LONG_ROW = 64  # states side by side from which loops over pairs waste no more than loops over complex numbers
NARROW = 16  # channels up to which GPU kernels form B u and C h themselves
# Those walk from tile to tile of chunks: up to so many steps always, and through longer sequences if there are so many
# states, of all sequences, side by side.
_LONG, _BESIDE = 8192, 128


class Path(Enum):
    """Ways to compute a recurrence or a layer."""

    LOOP = "the definition, step by step"
    SCAN = "every state, by a scan"
    CHUNKED = "matrix products over chunks of time"
    CONVOLUTION = "the impulse response and FFTs"


def cheapest_path(batch: int, length: int, n: int, p: int, q: int, *, gpu: bool = False) -> Path:
    """The path with the smallest predicted cost.

    On a GPU, few channels take CHUNKED, whose kernels store neither B u nor h; many channels take SCAN, and so do few
    states of a single long sequence.
    """
    if gpu:
        return Path.CHUNKED if max(p, q) <= NARROW and walks_chunks(batch, length, n) else Path.SCAN
    costs = path_costs(batch, length, n, p, q)
    return min(costs, key=lambda path: costs[path])


def walks_chunks(batch: int, length: int, n: int) -> bool:
    """True if GPU kernels for few channels should walk over chunks; a scan splits long sequences, but writes all h."""
    return length <= _LONG or batch * n >= _BESIDE


def walks_pairs(batch: int, length: int, n: int, *, driven: bool) -> bool:
    """True if a CPU recurrence should walk over pairs as they lie in memory, not over complex numbers in two levels.

    Complex numbers win for small sizes, but are copies of pairs; an x `driven` by a product comes in either form.
    """
    return n >= _LONG_ROW and batch * length * n >= (2**21 if driven else 2**18)


def path_costs(batch: int, length: int, n: int, p: int, q: int) -> dict[Path, float]:
    """The predicted microseconds of a training step of the layer, for each path.

    SCAN moves every state through memory. CHUNKED does the products of SCAN and those of its chunks. CONVOLUTION pays
    for the response once, whatever the batch, and for FFTs at every step.
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
    """The cheapest T from 4 to 64: a long chunk needs large blocks, short chunks carry many states."""
    candidates = range(min(length, _SHORTEST_CHUNK), min(length, _LONGEST_CHUNK) + 1)
    return min(candidates, key=lambda chunk: _chunk_cost(chunk, batch, length, n, p, q))


def _chunk_cost(chunk: int, batch: int, length: int, n: int, p: int, q: int) -> float:
    """The cost that depends on T: T² p q for tables and blocks, n for each carried state, a copy unless T divides L."""
    blocks = batch * -(-length // chunk)
    columns = -(-chunk * q // _COLUMNS) * _COLUMNS
    tables = 0.006 * chunk**2 * p * q + 0.016 * chunk * n * (p + q)
    rest = 0.0015 * batch * length * (p + q) if length % chunk else 0.0
    return blocks * (6 * chunk * p * columns * _FLOP + 0.012 * n) + tables + rest


def best_chunk(length: int) -> int:
    """A chunk of about √L steps, at least 8 and at most 64."""
    return max(1, min(length, max(8, min(64, round(length**0.5)))))


def fast_length(at_least: int) -> int:
    """The smallest multiple of 16 from `at_least` on that is 2ᵃ3ᵇ5ᶜ7ᵈ: other FFTs take two to four times as long."""
    size = max(16, -(-at_least // 16) * 16)
    while _without_small_primes(size) != 1:
        size += 16
    return size


def _without_small_primes(number: int) -> int:
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            number //= prime
    return number
