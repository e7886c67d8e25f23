"""Complex functions by real parts are torch's own, in values and derivatives."""

import math

import pytest
import torch

from compressm.control import linear_algebra as parts
from compressm.control.validation import is_finite

PAIRS = {
    "modulus": (parts.modulus, torch.abs),
    "square": (parts.square_modulus, lambda z: z.abs() ** 2),
    "exponential": (parts.exponential, torch.exp),
    "logarithm": (lambda z: torch.complex(*parts.logarithm(z)), torch.log),
    "rows": (parts.row_norms, lambda z: torch.linalg.vector_norm(z, dim=-1)),
    "columns": (parts.column_norms, lambda z: torch.linalg.vector_norm(z, dim=-2)),
}


def numbers(**options):
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), **options)


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_are_those_of_torch(name):
    ours, theirs = PAIRS[name]
    z = numbers(dtype=torch.complex128)
    gradients = []
    for function in (ours, theirs):
        leaf = z.clone().requires_grad_()
        value = function(leaf)
        (gradient,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
        gradients.append((value.detach(), gradient))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ours(z.conj()), theirs(z.conj().resolve_conj()))


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "logarithm"])
def test_real_numbers_stay_real(name):
    ours, theirs = PAIRS[name]
    x = numbers(dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))


def test_the_largest_part_is_within_the_root_of_two_of_the_largest_modulus():
    z = numbers(dtype=torch.complex128)
    largest = z.abs().amax((-2, -1))
    assert (parts.largest_part(z) <= largest).all()
    assert (parts.largest_part(z) >= largest / math.sqrt(2)).all()
    assert torch.equal(parts.largest_part(z.real), z.real.abs().amax((-2, -1)))


def test_a_log_pole_of_minus_infinity_is_the_pole_zero():
    assert parts.exponential(torch.complex(torch.tensor(-torch.inf), torch.tensor(2.0))) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex128])
def test_finite_means_every_entry_and_not_their_sum(dtype):
    z = numbers().to(dtype)
    assert is_finite(z)
    assert is_finite(torch.full((9,), torch.finfo(dtype).max, dtype=dtype))
    for bad in (math.nan, math.inf, -math.inf):
        z[1, 2, 3] = bad
        assert not is_finite(z)
    z[0, 0, 0] = math.inf  # beside one of the other sign
    assert not is_finite(z)
