"""Projections of selective layers h ← exp(Δₖ a) h + Δₖ Bₖ uₖ, y = Cₖ h: contractive, and better than by the mean."""

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.control import (
    DefectiveSystemError,
    balanced_truncation,
    galerkin_projection,
    mean_selective_system,
    second_moment_gramians,
    shared_projection,
)


def problem(n, *bank, seed=0, rank=None):
    """Rates over two decades, and Gramians of full or of lower rank."""
    generator = torch.Generator().manual_seed(seed)
    rates = -(10 ** (2 * torch.rand(*bank, n, generator=generator, dtype=torch.float64) - 1))
    roots = torch.randn(2, *bank, n, rank or n, generator=generator, dtype=torch.float64)
    P, Q = roots @ roots.mT
    return rates, P, Q


@st.composite
def problems(draw):
    n = draw(st.integers(1, 16))
    rates, P, Q = problem(n, seed=draw(st.integers(0, 2**32 - 1)), rank=draw(st.integers(1, n)))
    return rates, P, Q, draw(st.integers(1, n))


def scaling_and_objective(P, Q):
    """s and s P s/tr + s⁻¹ Q s⁻¹/tr, as the method is defined."""
    s = (np.diag(Q) / np.diag(P)) ** 0.25
    first, second = np.outer(s, s) * P, Q / np.outer(s, s)
    return s, first / np.trace(first) + second / np.trace(second)


def simulate_selective(rates, steps, B, C, inputs):
    """One channel, one step after the other."""
    h, outputs = np.zeros(len(rates)), []
    for step, b, c, u in zip(steps, B, C, inputs, strict=True):
        h = np.exp(step * rates) * h + step * b * u
        outputs.append(c @ h)
    return np.array(outputs)


@given(problems())
def test_galerkin_projections_are_biorthogonal_with_real_negative_rates(drawn):
    rates, P, Q, order = drawn
    projection = galerkin_projection(rates, P, Q, order)
    np.testing.assert_allclose((projection.E_B @ projection.E_C).numpy(), np.eye(order), atol=1e-12)
    assert projection.rates.dtype == torch.float64
    # Eigenvalues of a compression VᵀAV lie between the extreme ones of A (Cauchy).
    assert projection.rates.min() >= rates.min() * (1 + 1e-12)
    assert projection.rates.max() <= rates.max() * (1 - 1e-12)


@given(problems())
def test_galerkin_projects_orthogonally_onto_the_leading_eigenvectors(drawn):
    rates, P, Q, order = drawn
    projection = galerkin_projection(rates, P, Q, order)
    s, objective = scaling_and_objective(P.numpy(), Q.numpy())
    V = s[:, None] * projection.E_C.numpy()
    np.testing.assert_allclose(V.T @ V, np.eye(order), atol=1e-10)
    np.testing.assert_allclose(projection.E_B.numpy(), V.T * s, rtol=1e-8, atol=1e-10 * s.max())
    best = np.linalg.eigvalsh(objective)[-order:].sum()
    assert np.trace(V.T @ objective @ V) == pytest.approx(best, rel=1e-10)


@given(problems())
def test_galerkin_rates_are_the_eigenvalues_of_the_compressed_A(drawn):
    rates, P, Q, order = drawn
    projection = galerkin_projection(rates, P, Q, order)
    s, _ = scaling_and_objective(P.numpy(), Q.numpy())
    V, _ = np.linalg.qr(s[:, None] * projection.E_C.numpy())
    expected = np.linalg.eigvalsh(V.T @ np.diag(rates.numpy()) @ V)
    np.testing.assert_allclose(np.sort(projection.rates.numpy()), expected, rtol=1e-9, atol=1e-11)


@given(problems(), st.floats(1e-4, 1e3))
def test_galerkin_dynamics_contract_for_every_step(drawn, step):
    rates, P, Q, order = drawn
    projection = galerkin_projection(rates, P, Q, order)
    s, _ = scaling_and_objective(P.numpy(), Q.numpy())
    V = s[:, None] * projection.E_C.numpy()
    propagator = scipy.linalg.expm(step * V.T @ np.diag(rates.numpy()) @ V)
    assert np.linalg.norm(propagator, 2) <= np.exp(step * rates.max().item()) + 1e-9
    np.testing.assert_allclose(propagator, np.diag(np.exp(step * projection.rates.numpy())), atol=1e-8)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_at_full_order_a_selective_channel_is_unchanged(n):
    rates, P, Q = problem(n, seed=n)
    projection = galerkin_projection(rates, P, Q, n)
    E_B, E_C = projection.E_B.numpy(), projection.E_C.numpy()
    generator = np.random.default_rng(n)
    steps, inputs = generator.uniform(1e-3, 1, 200), generator.standard_normal(200)
    B, C = generator.standard_normal((2, 200, n))
    expected = simulate_selective(rates.numpy(), steps, B, C, inputs)
    found = simulate_selective(projection.rates.numpy(), steps, B @ E_B.T, C @ E_C, inputs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


def test_a_bank_of_galerkin_projections_is_a_loop_over_its_members():
    rates, P, Q = problem(6, 2, 3)
    together = galerkin_projection(rates, P, Q, 4)
    for i in range(2):
        for j in range(3):
            alone = galerkin_projection(rates[i, j], P[i, j], Q[i, j], 4)
            torch.testing.assert_close(together.rates[i, j], alone.rates)
            torch.testing.assert_close(
                together.E_C[i, j] @ together.E_B[i, j], alone.E_C @ alone.E_B, rtol=1e-9, atol=1e-10
            )


def test_states_that_are_never_driven_or_never_read_leave_no_nan():
    rates, P, Q = problem(5)
    P[2], P[:, 2], Q[4], Q[:, 4] = 0, 0, 0, 0
    projection = galerkin_projection(rates, P, Q, 3)
    assert torch.isfinite(projection.E_B).all()
    np.testing.assert_allclose((projection.E_B @ projection.E_C).numpy(), np.eye(3), atol=1e-12)


def off_diagonal_of_the_mean(shared, rates):
    """The largest entry off the diagonal of E_B diag(a) E_C, a the geometric mean of the channels' rates, over |a|."""
    mean = -np.exp(np.log(-rates.numpy()).mean(0))
    matrix = shared.E_B.numpy() @ np.diag(mean) @ shared.E_C.numpy()
    return np.abs(matrix - np.diag(np.diag(matrix))).max() / np.abs(mean).max()


def test_the_shared_projection_decouples_the_geometric_mean_of_the_channels():
    rates, P, Q = problem(8, 5)
    assert off_diagonal_of_the_mean(shared_projection(rates, P, Q, 4), rates) < 1e-12


@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 2**32 - 1), st.data())
def test_shared_rates_are_convex_combinations_of_each_channels_own(channels, n, seed, data):
    rates, P, Q = problem(n, channels, seed=seed)
    order = data.draw(st.integers(1, n))
    shared = shared_projection(rates, P, Q, order)
    E_B, E_C = shared.E_B.numpy(), shared.E_C.numpy()
    np.testing.assert_allclose(E_B @ E_C, np.eye(order), atol=1e-11)
    weights = E_B * E_C.T
    assert weights.min() >= -1e-12
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-11)
    for i in range(channels):
        expected = [sum(weights[j, m] * rates[i, m].item() for m in range(n)) for j in range(order)]
        np.testing.assert_allclose(shared.rates[i].numpy(), expected, rtol=1e-10)
        assert rates[i].min() * (1 + 1e-11) <= shared.rates[i].min()
        assert shared.rates[i].max() <= rates[i].max() * (1 - 1e-11) < 0


def test_equal_channels_share_what_each_alone_would_have():
    rates, P, Q = problem(8)
    alone = galerkin_projection(rates, P, Q, 3)
    shared = shared_projection(rates.expand(5, 8), P.expand(5, 8, 8), Q.expand(5, 8, 8), 3)
    torch.testing.assert_close(shared.rates, alone.rates.expand(5, 3), rtol=1e-10, atol=0)
    torch.testing.assert_close(shared.E_C @ shared.E_B, alone.E_C @ alone.E_B, rtol=1e-9, atol=1e-11)


def test_a_loud_channel_does_not_drown_the_others():
    rates, P, Q = problem(8, 4)
    loud = torch.tensor([1.0, 1e9, 1.0, 1e-9], dtype=torch.float64)[:, None, None]
    expected, found = shared_projection(rates, P, Q, 3), shared_projection(rates, loud * P, Q / loud, 3)
    torch.testing.assert_close(found.rates, expected.rates, rtol=1e-9, atol=0)


def two_sided_or_none(rates, P, Q, order):
    try:
        return shared_projection(rates, P, Q, order, two_sided=True)
    except DefectiveSystemError:
        return None


def test_the_two_sided_option_is_valid_or_refused():
    drawn = [problem(6, 3, seed=seed) for seed in range(20)]
    results = [two_sided_or_none(*each, 3) for each in drawn]
    assert 0 < results.count(None) < 20
    for (rates, _, _), shared in zip(drawn, results, strict=True):
        if shared is not None:
            E_B, E_C = shared.E_B.numpy(), shared.E_C.numpy()
            np.testing.assert_allclose(E_B @ E_C, np.eye(3), atol=1e-9)
            assert off_diagonal_of_the_mean(shared, rates) < 1e-9
            expected = np.stack([np.diag(E_B @ np.diag(a) @ E_C) for a in rates.numpy()])
            np.testing.assert_allclose(shared.rates.numpy(), expected, rtol=1e-9)
            assert expected.max() < 0


def test_complex_rates_of_two_sided_balancing_are_refused_and_shown():
    with pytest.raises(DefectiveSystemError, match=r"-\d\.\d+j"):
        shared_projection(*problem(6, 3, seed=16), 3, two_sided=True)


def test_two_sided_and_symmetric_projections_agree_where_the_system_is_symmetric():
    rates, P, _ = problem(7)
    both = [shared_projection(rates[None], P[None], P[None], 3, two_sided=flag) for flag in (False, True)]
    torch.testing.assert_close(both[1].rates.sort().values, both[0].rates.sort().values, rtol=1e-8, atol=0)
    products = [shared.E_C @ shared.E_B for shared in both]
    torch.testing.assert_close(products[1], products[0], rtol=1e-7, atol=1e-9)


class SelectiveLayer:
    """A synthetic S6 layer: SiLU inputs, B and C linear in them around a mean, softplus steps, rates −(1 … n)."""

    def __init__(self, channels=16, n=16, seed=0):
        self.generator = generator = np.random.default_rng(seed)
        self.rates = -np.arange(1, n + 1) * np.exp(0.2 * generator.standard_normal((channels, n)))
        self.W_B, self.W_C = generator.standard_normal((2, n, channels)) / np.sqrt(channels)
        self.mean_B, self.mean_C = 0.5 * generator.standard_normal((2, n))
        self.W_step = generator.standard_normal((channels, channels)) / np.sqrt(channels)
        self.step_bias = np.log(np.expm1(10 ** generator.uniform(-3, -1, channels)))

    def sample(self, sequences=8, length=256):
        """Inputs (s, k, channels), B and C (s, k, n), steps (s, k, channels)."""
        channels = len(self.rates)
        z, inputs = self.generator.standard_normal((sequences, channels)), []
        for _ in range(length):
            z = 0.9 * z + np.sqrt(1 - 0.9**2) * self.generator.standard_normal((sequences, channels))
            inputs.append(z / (1 + np.exp(-z)))
        x = np.stack(inputs, axis=1)
        steps = np.log1p(np.exp(x @ self.W_step.T + self.step_bias))
        return x, x @ self.W_B.T + self.mean_B, x @ self.W_C.T + self.mean_C, steps


def layer_output(x, B, C, steps, propagate, states):
    """y (s, k, channels); B and C have shape (s, k, 1 or channels, states)."""
    h, outputs = np.zeros((x.shape[0], x.shape[2], states)), []
    for k in range(x.shape[1]):
        drive = (steps[:, k] * x[:, k])[..., None] * B[:, k]
        h = propagate(steps[:, k], h) + drive
        outputs.append((C[:, k] * h).sum(-1))
    return np.stack(outputs, axis=1)


def diagonal_propagator(rates):
    return lambda step, h: np.exp(step[..., None] * rates) * h


def with_shared_projection(layer, calibration, test, order):
    _, B, C, _ = calibration
    moments = [torch.from_numpy(np.einsum("ski,skj->ij", M, M) / (M.shape[0] * M.shape[1])) for M in (B, C)]
    rates = torch.from_numpy(layer.rates)
    P, Q = second_moment_gramians(rates, *(moment.expand(len(rates), -1, -1) for moment in moments))
    shared = shared_projection(rates, P, Q, order)
    x, B, C, steps = test
    B_r, C_r = B @ shared.E_B.numpy().T, C @ shared.E_C.numpy()
    propagate = diagonal_propagator(shared.rates.numpy())
    return layer_output(x, B_r[:, :, None], C_r[:, :, None], steps, propagate, order)


def with_random_states(layer, test, order, seed):
    x, B, C, steps = test
    kept = np.random.default_rng(seed).permutation(layer.rates.shape[1])[:order]
    propagate = diagonal_propagator(layer.rates[:, kept])
    return layer_output(x, B[:, :, None, kept], C[:, :, None, kept], steps, propagate, order)


def with_mean_surrogate(layer, calibration, test, order):
    """The paper's: balance each channel's mean system, apply its T and W to the fresh B, C and exp(Δa)."""
    _, B, C, steps = calibration
    channels, n = layer.rates.shape
    means = [torch.from_numpy(np.broadcast_to(M.mean((0, 1)), (channels, n)).copy()) for M in (B, C)]
    surrogate = mean_selective_system(torch.from_numpy(layer.rates), torch.from_numpy(steps.mean((0, 1))), *means)
    truncation = balanced_truncation(surrogate, order)
    W, T = truncation.left.numpy(), truncation.right.numpy()

    def propagate(step, h):
        full = np.exp(step[..., None] * layer.rates) * np.einsum("cnr,scr->scn", T, h)
        return np.einsum("cnr,scn->scr", W, full)

    x, B, C, steps = test
    B_r, C_r = np.einsum("cnr,skn->skcr", W, B), np.einsum("cnr,skn->skcr", T, C)
    return layer_output(x, B_r, C_r, steps, propagate, truncation.order)


def median_relative_error(found, expected):
    square = ((found - expected) ** 2).mean((0, 1)) / (expected**2).mean((0, 1))
    return float(np.median(np.sqrt(square)))


@pytest.mark.parametrize("order", [4, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_second_moments_beat_random_states_and_the_mean_surrogate_on_a_selective_layer(order, seed):
    layer = SelectiveLayer(seed=seed)
    calibration, test = layer.sample(), layer.sample()
    x, B, C, steps = test
    exact = layer_output(x, B[:, :, None], C[:, :, None], steps, diagonal_propagator(layer.rates), 16)
    ours = median_relative_error(with_shared_projection(layer, calibration, test, order), exact)
    mean = median_relative_error(with_mean_surrogate(layer, calibration, test, order), exact)
    random = [median_relative_error(with_random_states(layer, test, order, draw), exact) for draw in range(5)]
    assert ours < 0.8 * min(random)
    assert ours < 0.8 * mean
