import numpy as np
import pytest

from compressm.control import DiagonalSystem, balanced_truncation, h_infinity_norm, hankel_singular_values
from compressm_lab.bench.reduction import (
    Case,
    PlainSystem,
    lru_at_initialisation,
    lru_trained_like,
    measure_reduction,
    plain_gramians,
    plain_hankel_values,
    plain_reduction,
)


@pytest.mark.parametrize("make", [lru_at_initialisation, lru_trained_like])
def test_the_plain_formulas_compute_the_same_reduction(make):
    import torch

    system = make(24, 4)
    plain = plain_reduction(PlainSystem.of(system), 6)
    theirs = DiagonalSystem(*(torch.from_numpy(np.ascontiguousarray(a)) for a in (plain.poles, plain.B, plain.C)))
    ours = balanced_truncation(system, 6).system
    assert ours.h_infinity_error(theirs) < 1e-6 * h_infinity_norm(system)
    sigma = plain_hankel_values(*plain_gramians(PlainSystem.of(system)))
    np.testing.assert_allclose(sigma, hankel_singular_values(system).numpy(), atol=1e-6 * sigma[0])


def test_a_measurement_has_a_row_for_every_case_and_compares_on_the_cpu():
    lines = []
    result = measure_reduction([Case(4, 1), Case(8, 2, width=2, members=3)], repeats=1, progress=lines.append)
    single, bank = result.rows
    assert len(lines) == 2
    assert single["speedup"] == single["plain_reduction_s"] / single["reduction_s"]
    assert all(float(single[name]) > 0 for name in ("gramians_s", "hankel_s", "balance_s", "reduction_s"))
    assert "speedup" not in bank
    assert result.environment.threads == 1


def test_systems_repeat_for_a_seed_and_differ_between_seeds():
    for make in (lru_at_initialisation, lru_trained_like):
        one, again, other = make(8, 2, seed=1), make(8, 2, seed=1), make(8, 2, seed=2)
        assert (one.poles == again.poles).all()
        assert (one.poles != other.poles).any()
        assert make(8, 2, bank=(3, 2)).bank == (3, 2)
