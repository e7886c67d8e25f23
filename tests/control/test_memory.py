"""Reduction of matrix states S ← α S + k vᵀ, o = Sᵀ q: theorems, against simulation step by step and brute force."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressm.control.memory import (
    MemoryBasis,
    balanced,
    delta_values,
    error_estimates,
    galerkin,
    mean_square_error,
    memory_values,
    orthogonal,
    selected,
    state_moment,
)
from tests import unhooked


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def walked(keys, values, decay):
    """All states of one head, one step after the other; a decay is a number, or one for every key dimension."""
    S, states = np.zeros((keys.shape[1], values.shape[1])), []
    for k, v, a in zip(keys, values, decay.reshape(len(keys), -1, 1), strict=True):
        S = a * S + np.outer(k, v)
        states.append(S)
    return np.array(states)


@st.composite
def samples(draw, most=8):
    """Queries (samples, n) and states (samples, n, p) whose moments may be singular and of any size."""
    n, p, seed = draw(st.integers(1, most)), draw(st.integers(1, 3)), draw(st.integers(0, 2**32 - 1))
    ranks = [draw(st.integers(1, n)) for _ in range(2)]
    sizes = 10 ** (3 * numbers(seed, 2, n))
    q = numbers(seed + 1, 12, ranks[0]) @ numbers(seed + 2, ranks[0], n) * sizes[0]
    S = np.einsum("nr,srp->snp", numbers(seed + 3, n, ranks[1]), numbers(seed + 4, 10, ranks[1], p)) * sizes[1][:, None]
    return q, S, draw(st.integers(1, n))


def moments(q, S):
    P, Q = np.einsum("snp,smp->nm", S, S) / len(S), q.T @ q / len(q)
    return torch.tensor(P), torch.tensor(Q)


def errors(q, S, basis):
    """The read-out errors of every query at every state: all pairs together have q ⊥ S."""
    lost = np.eye(q.shape[1]) - basis.T.numpy() @ basis.W.numpy().T
    return np.einsum("an,bnp->abp", q @ lost, S)


def outputs(q, S):
    return np.einsum("an,bnp->abp", q, S)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 9))
def test_a_scalar_decay_commutes_with_every_projection(seed, n, length):
    keys, values = numbers(seed, length, n), numbers(seed + 1, length, 2)
    decay, W = 1 / (1 + np.exp(numbers(seed + 2, length))), numbers(seed + 3, n, max(1, n // 2))
    full, small = walked(keys, values, decay), walked(keys @ W, values, decay)
    np.testing.assert_allclose(W.T @ full, small, rtol=1e-9, atol=1e-12)


@given(samples())
def test_the_balanced_error_is_the_tail_of_the_squared_values_if_queries_and_states_are_uncorrelated(drawn):
    q, S, order = drawn
    P, Q = moments(q, S)
    basis = balanced(P, Q, order)
    measured, whole = ((part**2).sum(-1).mean() for part in (errors(q, S, basis), outputs(q, S)))
    sigma = basis.sigma.numpy()
    np.testing.assert_allclose((sigma**2).sum(), whole, rtol=1e-9)
    np.testing.assert_allclose(measured, (sigma[order:] ** 2).sum(), rtol=1e-6, atol=1e-13 * whole)
    np.testing.assert_allclose(error_estimates(basis.sigma)[order] ** 2, measured, rtol=1e-6, atol=1e-13 * whole)
    np.testing.assert_allclose(mean_square_error(P, Q, basis), measured, rtol=1e-6, atol=1e-13 * whole)


@given(samples())
def test_the_values_are_the_roots_of_the_eigenvalues_of_the_product(drawn):
    q, S, _ = drawn
    P, Q = moments(q, S)
    # The singular values of all q and S together, without moments: q S / √(samples).
    direct = np.linalg.svd(q @ np.concatenate(list(S), axis=1) / np.sqrt(len(q) * len(S)), compute_uv=False)
    expected = np.zeros(len(P))
    expected[: min(len(P), len(direct))] = direct[: len(P)]
    np.testing.assert_allclose(memory_values(P, Q).numpy(), expected, rtol=1e-6, atol=1e-9 * expected[0])


@given(samples(), st.integers(0, 2**32 - 1))
def test_no_other_map_of_the_same_rank_has_a_smaller_error(drawn, seed):
    q, S, order = drawn
    P, Q = moments(q, S)
    best = balanced(P, Q, order)
    least, whole = float(mean_square_error(P, Q, best)), float(memory_values(P, Q).square().sum())
    near = MemoryBasis(best.W, best.T * (1 + 0.1 * torch.tensor(numbers(seed, *best.T.shape))), best.sigma)
    others = [
        near,
        selected(P, Q, order),
        selected(P, Q, order, read_out=True),
        galerkin(P, Q, torch.ones(len(P)), order),
    ]
    assert all(float(mean_square_error(P, Q, other)) >= least - 1e-12 * whole for other in others)


METHODS = {
    "balanced": balanced,
    "galerkin": lambda P, Q, r: galerkin(P, Q, torch.linspace(0.1, 0.9, P.shape[-1]).expand(P.shape[:-1]), r),
    "score": selected,
    "greedy": lambda P, Q, r: selected(P, Q, r, read_out=True),
}


@pytest.mark.parametrize("method", METHODS)
@given(drawn=samples())
def test_all_states_reproduce_the_output(method, drawn):
    q, S, _ = drawn
    P, Q = moments(q, S)
    basis = METHODS[method](P, Q, len(P))
    assert np.abs(errors(q, S, basis)).max() <= 1e-6 * np.abs(outputs(q, S)).max()


@pytest.mark.parametrize("method", METHODS)
def test_projections_are_biorthogonal_and_members_of_a_bank_are_independent(method):
    q, S = numbers(0, 3, 40, 6), numbers(1, 3, 40, 6, 2)
    P, Q = (torch.stack(part) for part in zip(*(moments(*one) for one in zip(q, S, strict=True)), strict=True))
    bank = METHODS[method](P, Q, 4)
    torch.testing.assert_close(
        bank.W.mT @ bank.T, torch.eye(4, dtype=torch.float64).expand(3, 4, 4), atol=1e-12, rtol=0
    )
    for k in range(3):
        alone = METHODS[method](P[k], Q[k], 4)
        maps = [one.T @ one.W.mT for one in (MemoryBasis(bank.W[k], bank.T[k], bank.sigma[k]), alone)]
        torch.testing.assert_close(*maps)
        torch.testing.assert_close(bank.sigma[k], alone.sigma)


@given(samples(most=6))
def test_a_score_keeps_the_largest_products_and_slices(drawn):
    q, S, order = drawn
    P, Q = moments(q, S)
    basis = selected(P, Q, order)
    score = (q**2).mean(0) * (S**2).sum(-1).mean(0)
    np.testing.assert_array_equal(np.sort(score[basis.states.numpy()]), np.sort(score)[-order:])
    assert basis.states.tolist() == sorted(basis.states.tolist())
    assert torch.equal(basis.W, torch.eye(len(P), dtype=torch.float64)[:, basis.states])
    assert torch.equal(basis.T, basis.W)


def test_the_read_out_is_the_regression_of_the_states_on_the_kept_ones():
    q, S = numbers(0, 30, 6), np.einsum("nr,srp->snp", numbers(1, 6, 9), numbers(2, 50, 9, 2))
    basis = selected(*moments(q, S), 3, read_out=True)
    rows = np.concatenate(list(S), axis=1).T
    expected = np.linalg.lstsq(rows[:, basis.states], rows, rcond=None)[0].T
    np.testing.assert_allclose(basis.T.numpy(), expected, atol=1e-12)


def test_the_first_greedy_state_is_the_best_single_state():
    q, S = numbers(3, 30, 6), np.einsum("nr,srp->snp", numbers(4, 6, 9), numbers(5, 50, 9, 2))
    P, Q = moments(q, S)
    rows = np.concatenate(list(S), axis=1).T

    def error(state):
        fit = np.linalg.lstsq(rows[:, [state]], rows, rcond=None)[0]
        rest = rows - rows[:, [state]] @ fit
        return np.trace(Q.numpy() @ (rest.T @ rest))

    assert selected(P, Q, 1, read_out=True).states.tolist() == [int(np.argmin([error(k) for k in range(6)]))]


@given(samples())
def test_greedy_states_with_a_read_out_are_distinct_and_their_error_falls_to_zero(drawn):
    q, S, _ = drawn
    P, Q = moments(q, S)
    bases = [selected(P, Q, order, read_out=True) for order in range(1, len(P) + 1)]
    assert all(len(set(basis.states.tolist())) == order for order, basis in enumerate(bases, start=1))
    lost = [float(mean_square_error(P, Q, basis)) for basis in bases]
    whole = float(memory_values(P, Q).square().sum())
    assert all(after <= before + 1e-9 * whole for before, after in itertools.pairwise(lost))
    assert lost[-1] <= 1e-12 * whole


@given(samples(), st.integers(0, 2**32 - 1))
def test_averaged_gates_are_convex_combinations_and_the_mean_is_diagonal(drawn, seed):
    q, S, order = drawn
    P, Q = moments(q, S)
    gates = torch.tensor(np.random.default_rng(seed).random(len(P)))
    basis = galerkin(P, Q, gates, order)
    assert float(basis.mixing.min()) >= 0
    np.testing.assert_allclose(basis.mixing.sum(-1), 1, rtol=1e-12)
    reduced = basis.W.mT @ (gates[:, None] * basis.T)
    np.testing.assert_allclose(reduced.numpy(), np.diag(basis.mixing @ gates), atol=1e-12)


def test_the_galerkin_subspace_is_the_one_of_its_definition():
    P, Q = moments(numbers(6, 40, 5), numbers(7, 40, 5, 2))
    s = (np.diag(Q) / np.diag(P)) ** 0.25
    first, second = np.outer(s, s) * P.numpy(), Q.numpy() / np.outer(s, s)
    _, vectors = np.linalg.eigh(first / np.trace(first) + second / np.trace(second))
    V = vectors[:, -2:]
    basis = galerkin(P, Q, torch.full((5,), 0.5), 2)
    expected = (V / s[:, None]) @ (V * s[:, None]).T
    np.testing.assert_allclose((basis.T @ basis.W.mT).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("length", [1, 5, 64, 65, 150])
def test_the_moment_of_states_is_that_of_a_simulation(length):
    keys, values = numbers(0, 2, length, 4), numbers(1, 2, 3, length, 2)
    logs = -np.abs(numbers(2, 2, 3, length)) * 0.1
    total, scale = state_moment(*map(torch.tensor, (keys, values, logs)))
    for k, own in enumerate(total):
        heads = [walked(keys[k], values[k, head], np.exp(logs[k, head])) for head in range(3)]
        expected = sum(np.einsum("tnp,tmp->nm", S, S) for S in heads)
        np.testing.assert_allclose(own.numpy(), expected, rtol=1e-10, atol=1e-10)
    assert scale.tolist() == [1, 1]


@given(st.integers(0, 2**32 - 1), st.sampled_from(["left", "right"]), st.integers(1, 70))
def test_padding_counts_for_nothing(seed, side, padded):
    length, ends = 80, slice(0, padded) if side == "left" else slice(80 - padded, None)
    keys, values = torch.tensor(numbers(seed, length, 3)), torch.tensor(numbers(seed + 1, 2, length, 2))
    logs = -torch.tensor(numbers(seed + 2, 2, length)).abs()
    counted = torch.ones(length, dtype=torch.bool)
    counted[ends] = False
    alone, _ = state_moment(keys[counted], values[:, counted], logs[:, counted])
    keys[ends], values[:, ends], logs[:, ends] = torch.nan, torch.inf, 7.0  # padding may hold anything
    torch.testing.assert_close(state_moment(keys, values, logs, counted)[0], alone)


@pytest.mark.parametrize("length", [1, 5, 64, 130])
def test_what_a_delta_rule_writes_makes_it_a_scalar_decay(length):
    keys, values = numbers(0, length, 4), numbers(1, 2, length, 3)
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    logs, strength = -np.abs(numbers(2, 2, length)) * 0.1, 1 / (1 + np.exp(numbers(3, 2, length)))
    written = delta_values(*map(torch.tensor, (keys, values, logs, strength))).numpy()
    for head in range(2):
        S, states = np.zeros((4, 3)), []
        for k, v, log, beta in zip(keys, values[head], logs[head], strength[head], strict=True):
            S = np.exp(log) * (S - beta * np.outer(k, k @ S)) + beta * np.outer(k, v)
            states.append(S)
        np.testing.assert_allclose(walked(keys, written[head], np.exp(logs[head])), np.array(states), atol=1e-12)


@pytest.mark.parametrize("length", [1, 5, 16, 40])
def test_the_moment_of_gated_states_is_that_of_a_simulation(length):
    keys, values = numbers(0, length, 4), numbers(1, 2, length, 3)
    logs, gates = -np.abs(numbers(2, 2, length)), -np.abs(numbers(3, length, 4))
    states = [walked(keys, v, np.exp(scalar[:, None] + gates)) for v, scalar in zip(values, logs, strict=True)]
    expected = sum(np.einsum("tnp,tmp->nm", S, S) for S in states)
    given = [torch.tensor(part) for part in (keys, values, logs)]
    counted = torch.ones(length, dtype=torch.bool)
    total, scale = state_moment(*given, counted, torch.tensor(gates))
    np.testing.assert_allclose((total * scale**2).numpy(), expected, rtol=1e-10)
    # Steps before the first counted one, and after the last, count for nothing.
    padded = [torch.cat([torch.full_like(part[..., :1, :], 7.0), part], dim=-2) for part in (given[0], given[1])]
    logs, gates = torch.cat([given[2][..., :1], given[2]], -1), torch.tensor(np.vstack([gates[:1], gates]))
    mask = torch.cat([torch.zeros(1, dtype=torch.bool), counted])
    again, scale = state_moment(*padded, logs, mask, gates)
    np.testing.assert_allclose((again * scale**2).numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("length", [1, 16, 37])
def test_what_a_gated_delta_rule_writes_makes_it_a_decay(length):
    keys, values = numbers(0, length, 4) / 2, numbers(1, 1, length, 3)
    logs, gates = -np.abs(numbers(2, 1, length)), -np.abs(numbers(3, length, 4))
    strength = np.abs(numbers(4, 1, length)) / 2
    written = delta_values(*map(torch.tensor, (keys, values, logs, strength, gates))).numpy()
    S, decay = np.zeros((4, 3)), np.exp(logs[0][:, None] + gates)
    for t, state in enumerate(walked(keys, written[0], decay)):
        S = decay[t][:, None] * S
        S = S + strength[0, t] * np.outer(keys[t], values[0, t] - S.T @ keys[t])
        np.testing.assert_allclose(state, S, rtol=1e-9, atol=1e-12)


def test_a_gate_that_closes_forgets_everything_before_it():
    keys, values = torch.tensor(numbers(0, 20, 3)), torch.tensor(numbers(1, 1, 20, 2))
    logs = torch.zeros(1, 20, dtype=torch.float64)
    logs[:, 10] = -torch.inf
    whole = state_moment(keys, values, logs)[0]
    parts = [state_moment(keys[part], values[:, part], logs[:, part])[0] for part in (slice(10), slice(10, 20))]
    torch.testing.assert_close(whole, sum(parts))


@pytest.mark.parametrize("exponent", [-1000, -600, 600, 1000])
@pytest.mark.parametrize("method", METHODS)
def test_moments_of_any_size_give_the_same_map(method, exponent):
    P, Q = moments(numbers(0, 40, 6), numbers(1, 40, 6, 2))
    near, far = METHODS[method](P, Q, 3), METHODS[method](torch.ldexp(P, torch.tensor(exponent)), Q, 3)
    torch.testing.assert_close(far.T @ far.W.mT, near.T @ near.W.mT, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(far.sigma, near.sigma * 2.0 ** (exponent // 2), rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1e-170, 1e170])
def test_the_moment_of_huge_and_tiny_states_keeps_its_digits(size):
    keys, values, logs = torch.tensor(numbers(0, 20, 3)), torch.tensor(numbers(1, 2, 20, 2)), -torch.ones(2, 20)
    near, _ = state_moment(keys, values, logs)
    far, scale = state_moment(keys * size, values, logs)
    torch.testing.assert_close(far * (scale / size) ** 2, near, rtol=1e-12, atol=0)


def test_zeros_have_no_directions():
    P, Q = torch.zeros(4, 4), torch.eye(4)
    assert not balanced(P, Q, 2).T.any()
    assert not memory_values(P, Q).any()
    assert selected(P, Q, 2).states.tolist() == [0, 1]
    assert float(mean_square_error(P, Q, selected(P, Q, 2, read_out=True))) == 0


PREAMBLE = """
from torch import eye, ones, zeros
from compressm.control.memory import *
import torch

torch.set_default_dtype(torch.float64)
I = eye(3)
"""
BAD = {
    "an indefinite moment": ("balanced(-I, I, 2)", "IndefiniteGramianError", "P has the eigenvalue -1"),
    "an indefinite Q": ("selected(I, -I, 2)", "IndefiniteGramianError", "Q has the eigenvalue -1"),
    "another shape": ("balanced(I, eye(2), 2)", "ShapeError", "Q has shape (2, 2), expected (3, 3)"),
    "no tensor": ("balanced(None, I, 2)", "ShapeError", "P is a NoneType, expected a tensor (*bank, n, n)"),
    "NaN": ("memory_values(I * float('nan'), I)", "NonFiniteError", "P[0, 0] is nan"),
    "too many states": ("balanced(I, I, 4)", "OrderError", "order 4 is outside 1..3"),
    "no state": ("selected(I, I, 0)", "OrderError", "order 0 is outside 1..3"),
    "complex moments": ("balanced(I + 0j, I, 2)", "PrecisionError", "P has dtype torch.complex128"),
    "a growing gate": ("galerkin(I, I, 2 * I[0], 2)", "UnstableSystemError", "gates are from 0 to 2, expected"),
    "gates of another shape": ("galerkin(I, I, ones(2), 2)", "ShapeError", "gates have shape (2,), expected (3,)"),
    "neither": ("selected(I, I, 2, read_out='yes')", "ControlError", "read_out is 'yes', expected True or False"),
    "a growing state": ("state_moment(I, I[None], ones(1, 3))", "UnstableSystemError", "largest log_decay is 1,"),
    "growing gates": (
        "state_moment(I, I[None], zeros(1, 3), None, I)",
        "UnstableSystemError",
        "largest log_gates is 1,",
    ),
    "gates that differ": (
        "state_moment(I, I[None], zeros(1, 3), None, I[:2])",
        "ShapeError",
        "log_gates have shape (2, 3)",
    ),
    "steps that differ": ("state_moment(I, I[None, :2], zeros(1, 3))", "ShapeError", "values (1, 2, 3)"),
    "a key that is not finite": ("state_moment(I / 0, I[None], zeros(1, 3))", "NonFiniteError", "keys[0, 0] is inf"),
    "a mask of another shape": (
        "state_moment(I, I[None], zeros(1, 3), ones(2) > 0)",
        "ShapeError",
        "counted is torch.bool (2,), expected bool (3,)",
    ),
}


def test_bad_moments_are_refused_by_name():
    found = unhooked.outcomes(PREAMBLE, {case: expression for case, (expression, _, _) in BAD.items()})
    expected = {case: ("ControlError" in kinds, kinds[:1], text) for case, (kinds, text) in found.items()}
    assert expected == {
        case: (True, [kind], next((text for text in [found[case][1]] if said in text), said))
        for case, (_, kind, said) in BAD.items()
    }


@given(samples())
def test_an_orthogonal_basis_is_a_contraction_and_whole_at_full_order(drawn):
    q, S, order = drawn
    P, Q = moments(q, S)
    basis = orthogonal(P, Q, order)
    unit = torch.eye(order, dtype=torch.float64)
    torch.testing.assert_close(basis.W.mT @ basis.W, unit)
    torch.testing.assert_close(basis.W, basis.T)
    keys = torch.from_numpy(numbers(3, 5, len(P)))
    assert ((keys @ basis.W).norm(dim=-1) <= keys.norm(dim=-1) * (1 + 1e-12)).all()
    whole = orthogonal(P, Q, len(P))
    size = torch.trace(P) * torch.trace(Q)
    assert mean_square_error(P, Q, whole) <= 1e-20 * size
    assert mean_square_error(P, Q, basis) >= error_estimates(basis.sigma)[order] ** 2 * (1 - 1e-6) - 1e-12 * size


def test_an_orthogonal_basis_keeps_the_axes_that_matter_to_states_and_queries():
    P, Q = torch.diag(torch.tensor([1.0, 9.0, 4.0])), torch.diag(torch.tensor([1.0, 4.0, 9.0]))
    basis = orthogonal(P, Q, 2)
    torch.testing.assert_close(basis.W @ basis.W.mT, torch.diag(torch.tensor([0.0, 1.0, 1.0])).double())
