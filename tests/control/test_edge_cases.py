"""The systems of numerics 1.4 and 4 that break naive balancing: all must come out finite, stable and accurate."""

import pytest
import torch

from compressm.control import (
    DiagonalSystem,
    balanced_truncation,
    h2_norm,
    h_infinity_norm,
    hankel_nuclear_norm,
    hankel_singular_values,
    numerical_rank,
)
from tests.systems import lru_at_initialisation


def changed(**parts):
    """An LRU system of order 16 with 4 channels, some of its tensors edited."""
    system = lru_at_initialisation(16, 4)
    tensors = {"poles": system.poles.clone(), "B": system.B.clone(), "C": system.C.clone()}
    for name, edit in parts.items():
        edit(tensors[name])
    return DiagonalSystem(**tensors)


def set_to(value, *index):
    def edit(tensor):
        tensor[index] = value

    return edit


def spread(tensor):
    tensor *= torch.logspace(-8, 8, 16, dtype=torch.float64)[:, None]


def make_real():
    system = lru_at_initialisation(16, 4)
    return DiagonalSystem(system.poles.real.clamp(-0.99, 0.99), system.B.real, system.C.real)


CASES = {
    "duplicated poles": lambda: changed(poles=lambda p: p[8:].copy_(p[:8])),
    "equal poles": lambda: changed(poles=set_to(0.9, ...)),
    "zero B row": lambda: changed(B=set_to(0, 3)),
    "zero C column": lambda: changed(C=set_to(0, slice(None), 5)),
    "C = 0": lambda: changed(C=set_to(0, ...)),
    "B = 0": lambda: changed(B=set_to(0, ...)),
    "slow pole": lambda: changed(poles=set_to(1 - 1e-8, 0)),
    "slow complex pole": lambda: changed(poles=set_to((1 - 1e-8) * 1j, 0)),
    "pole 0": lambda: changed(poles=set_to(0, slice(0, 4))),
    "all poles 0": lambda: changed(poles=set_to(0, ...)),
    "all real": make_real,
    "B spread over 1e16": lambda: changed(B=spread),
    "tiny": lambda: changed(B=lambda b: b.mul_(1e-150), C=lambda c: c.mul_(1e-100)),
    "order one": lambda: DiagonalSystem(*(torch.full(s, 0.3, dtype=torch.float64) for s in ((1,), (1, 1), (1, 1)))),
}


@pytest.mark.parametrize("case", CASES)
def test_spectra_are_finite_and_non_negative(case):
    sigma = hankel_singular_values(CASES[case]())
    assert torch.isfinite(sigma).all()
    assert (sigma >= 0).all()


@pytest.mark.parametrize("case", CASES)
def test_every_order_gives_a_finite_stable_system_within_the_bound(case):
    system = CASES[case]()
    # A dense A holds its poles to ε, and so the height of a resonance to ε/(1 − |λ|).
    slack = 1e-14 / system.decay.min().item()
    rounding = (1e-9 + slack) * h_infinity_norm(system).item()
    for order in {1, min(4, system.order), system.order}:
        found = balanced_truncation(system, order)
        for truncation in (found, found.diagonalise()):
            reduced = truncation.system
            assert all(torch.isfinite(tensor).all() for tensor in (reduced.A, reduced.B, reduced.C))
            assert torch.linalg.eigvals(reduced.A).abs().max() < 1
            assert system.h_infinity_error(reduced).item() <= truncation.error_bound.item() + rounding


@pytest.mark.parametrize("case", CASES)
def test_the_nuclear_norm_has_finite_gradients(case):
    system = CASES[case]()
    poles, B, C = (tensor.clone().requires_grad_() for tensor in (system.poles, system.B, system.C))
    hankel_nuclear_norm(DiagonalSystem(poles, B, C)).backward()
    assert all(torch.isfinite(tensor.grad).all() for tensor in (poles, B, C))


def test_sixteen_equal_poles_with_four_channels_have_rank_four():
    sigma = hankel_singular_values(CASES["equal poles"]())
    assert numerical_rank(sigma) == 4
    assert balanced_truncation(CASES["equal poles"](), 16).order == 4


def test_duplicated_poles_do_not_add_rank_beyond_their_channels():
    system = CASES["duplicated poles"]()
    assert numerical_rank(hankel_singular_values(system)) == 16  # eight poles, four channels each could hold 32
    narrow = DiagonalSystem(system.poles, system.B[:, :1], system.C[:1])
    assert numerical_rank(hankel_singular_values(narrow)) == 8


def test_a_system_without_output_keeps_one_idle_state():
    truncation = balanced_truncation(CASES["C = 0"](), 7)
    assert truncation.order == 1
    assert truncation.error_bound == 0
    assert truncation.system.C.abs().max() == 0


def test_scaling_b_and_c_scales_the_spectrum_and_nothing_else():
    system = lru_at_initialisation(32, 4)
    small = DiagonalSystem(system.poles, system.B * 1e-5, system.C * 1e-4)
    torch.testing.assert_close(hankel_singular_values(small), 1e-9 * hankel_singular_values(system), rtol=1e-11, atol=0)
    one, other = balanced_truncation(system, 9).system, balanced_truncation(small, 9).system
    torch.testing.assert_close(
        torch.linalg.eigvals(one.A).abs().sort()[0], torch.linalg.eigvals(other.A).abs().sort()[0]
    )


@pytest.mark.parametrize(("b", "c"), [(1e-90, 1e-90), (1e-170, 1.0), (1e90, 1e90), (1e170, 1e-170), (1e-200, 1e150)])
def test_sizes_far_from_one_change_nothing_but_the_scale(b, c):
    """P holds squares of B: without scaling they leave the range of float64 at 1e-154."""
    system = lru_at_initialisation(12, 3)
    scaled = DiagonalSystem(system.poles, system.B * b, system.C * c)
    torch.testing.assert_close(hankel_singular_values(scaled) / (b * c), hankel_singular_values(system))
    torch.testing.assert_close(h_infinity_norm(scaled) / (b * c), h_infinity_norm(system), rtol=1e-9, atol=0)
    torch.testing.assert_close(h2_norm(scaled) / (b * c), h2_norm(system))
    one, other = balanced_truncation(system, 5), balanced_truncation(scaled, 5)
    torch.testing.assert_close(other.error_bound / (b * c), one.error_bound)
    expected = one.system.frequency_response(torch.tensor([0.3], dtype=torch.float64))
    torch.testing.assert_close(
        other.system.frequency_response(torch.tensor([0.3], dtype=torch.float64)) / (b * c), expected
    )
