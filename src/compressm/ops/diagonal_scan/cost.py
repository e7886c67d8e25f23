"""Which path is cheapest for which shapes, forward and backward on one CPU core.

Microseconds, fitted to a core that multiplies float32 matrices at 50 flop/ns; ratios matter, not the unit. The
benchmark `compressm bench scan` measures every path beside the choice.
"""

from __future__ import annotations

from enum import Enum

_FLOP = 1 / 50e3


class Path(Enum):
    """How to compute."""

    LOOP = "the definition, step by step"
    SCAN = "every state, by a scan"
    CHUNKED = "matrix products over chunks of time"
    CONVOLUTION = "the impulse response and FFTs"


def cheapest_path(batch: int, length: int, n: int, p: int, q: int, *, gpu: bool = False) -> Path:
    """The path with the smallest predicted cost.

    On a GPU scans are cheap, and the convolution wins only where many states serve few channels, as in the sMNIST model
    at n = 256 with 8 channels.
    """
    if gpu:
        return Path.CONVOLUTION if p * q <= 64 and n >= 128 else Path.SCAN
    costs = path_costs(batch, length, n, p, q)
    return min(costs, key=lambda path: costs[path])


def path_costs(batch: int, length: int, n: int, p: int, q: int) -> dict[Path, float]:
    """Predicted microseconds of a training step of the layer.

    SCAN moves every state through memory, 0.06 µs each. CHUNKED does the products of SCAN and T p q more a step.
    CONVOLUTION pays n p q once for the response, whatever the batch, and FFTs a step.
    """
    steps, chunk = batch * length, layer_chunk(length, n, p, q)
    products = 12 * n * (p + q) * _FLOP
    return {
        Path.SCAN: steps * (0.06 * n + products),
        Path.CHUNKED: steps * (products + 6 * chunk * p * q * _FLOP) + 0.02 * chunk**2 * p * q + 1500,
        Path.CONVOLUTION: steps * (0.02 * (p + q) + 24 * p * q * _FLOP) + length * p * q * (12 * n * _FLOP + 0.1),
    }


def layer_chunk(length: int, n: int, p: int, q: int) -> int:
    """Where the T p q of a chunk's own block and the n/T of carrying states cost the same; from 8 to 64 steps."""
    balance = round((0.06 * n / (6 * p * q * _FLOP)) ** 0.5)
    return max(1, min(length, max(8, min(64, balance))))


def best_chunk(length: int) -> int:
    """About √L steps, at least 8 and at most 64."""
    return max(1, min(length, max(8, min(64, round(length**0.5)))))


def fast_length(at_least: int) -> int:
    """The smallest 2ᵃ3ᵇ5ᶜ7ᵈ that is not below: sizes that FFTs handle well."""
    size = max(1, at_least)
    while _without_small_primes(size) != 1:
        size += 1
    return size


def _without_small_primes(number: int) -> int:
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            number //= prime
    return number
