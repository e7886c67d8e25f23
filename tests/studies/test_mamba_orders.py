"""Orders of Mamba channels by readings of the paper's rule."""

import numpy as np
import pytest
import scipy.linalg

from compressm.compression import EnergyTolerance, PerChannel, compress_
from compressm_lab.reports.measurements import grids
from mamba_orders import TAU, Choices, MeanSystems, choices_of, measure_mamba_orders, orders, ways
from selective_cuts import QUICK, load


@pytest.fixture(scope="module")
def learner():
    return QUICK[0].learner(load(QUICK[0].data), 0)


def test_the_first_way_is_what_the_library_keeps(learner):
    inputs = learner.task.train.inputs[:50]
    (choices,) = choices_of(learner.model, inputs, None)
    cut = compress_(
        learner.model, keep=EnergyTolerance(TAU), selective=PerChannel("mean"), calibrate=lambda model: model(inputs)
    )
    kept = learner.model.blocks[0].ssm.orders
    assert cut
    assert np.array_equal(np.asarray(kept), ways(choices)["double precision"])


def test_hankel_values_of_a_mean_system_are_those_of_the_lyapunov_equations():
    draws = np.random.default_rng(0)
    system = MeanSystems(draws.uniform(0.1, 0.9, (3, 4)), draws.normal(size=(3, 4)), draws.normal(size=(3, 4)))
    single = system.in_single_precision(lambda PQ: np.linalg.eigvals(PQ).real)
    for poles, B, C, sigma, coarse in zip(
        system.poles, system.B, system.C, system.hankel_values(), single, strict=True
    ):
        P, Q = (scipy.linalg.solve_discrete_lyapunov(np.diag(poles), np.outer(v, v)) for v in (B, C))
        expected = np.sort(np.sqrt(np.maximum(np.linalg.eigvals(P @ Q).real, 0)))[::-1]
        np.testing.assert_allclose(sigma, expected, atol=1e-8 * expected[0])
        # Squares lose half of the seven digits.
        np.testing.assert_allclose(np.sort(coarse)[::-1], expected, atol=3e-3 * expected[0])


def test_orders_keep_the_share_of_the_sum():
    assert orders(np.array([[1.0, 8.0, 1.0], [1.0, 0.0, 0.0]]), 0.1).tolist() == [2, 1]


def test_rounding_in_single_precision_looks_like_states():
    """128 rates 1 … 128, as at the start: σ falls tenfold a state, its rounding does not."""
    draws = np.random.default_rng(0)
    step, B, C = (draws.normal(size=(40, size)) for size in (2, 128, 128))
    choices = Choices(step, np.exp(step - 4), B, C, -np.arange(1.0, 129) * np.ones((2, 1)))
    found = ways(choices)
    assert found["double precision"].max() < 10
    assert found["single precision, eigenvalues"].min() > 1.5 * found["double precision"].max()
    assert found["numerical rank, double precision"].max() < 30


def test_a_quick_study_has_every_way_at_every_step():
    measured = measure_mamba_orders(seeds=1, quick=True)
    assert {(row["steps"], row["layer"]) for row in measured.rows} == {(0, 0), (6, 0)}
    assert all(1 <= row["least"] <= row["mean"] <= row["most"] <= row["states"] for row in measured.rows)
    (table,) = grids(measured)
    assert table.heads == ("Hankel values", "at the start", "after 6 steps")
    assert table.rows[0][0] == "double precision"
