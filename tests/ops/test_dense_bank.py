"""The bank of full matrices against its definition, step by step."""

import pytest
import torch

from compressm.ops.lti.dense import dense_bank


def inputs(batch=2, length=130, width=3, n=4, q=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(width, n, n, generator=g, dtype=torch.float64)
    A = 0.99 * A / torch.linalg.matrix_norm(A, 2)[:, None, None]
    u = torch.randn(batch, length, width, generator=g, dtype=torch.float64)
    B = torch.randn(width, n, generator=g, dtype=torch.float64)
    C = torch.randn(width, q, n, generator=g, dtype=torch.float64)
    return u, A, B, C, torch.randn(batch, width, n, generator=g, dtype=torch.float64)


def by_steps(u, A, B, C, state):
    outputs = []
    for now in u.unbind(1):
        state = torch.einsum("wij,bwj->bwi", A, state) + B * now[..., None]
        outputs.append(torch.einsum("wqn,bwn->bwq", C, state))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 130])
@pytest.mark.parametrize("started", [True, False])
def test_outputs_states_and_gradients_are_those_of_single_steps(length, started):
    u, A, B, C, state = inputs(length=length)
    state = state if started else torch.zeros_like(state)
    results = []
    for function in (dense_bank, by_steps):
        leaves = [tensor.clone().requires_grad_() for tensor in (u, A, B, C, state)]
        y, last = function(*leaves)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
        results.append([y, last, *torch.autograd.grad((y * weights).sum() + last.sum(), leaves)])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_padding_changes_nothing():
    u, A, B, C, state = inputs()
    lengths = torch.tensor([130, 70])
    noisy = u.clone()
    noisy[1, 70:] = torch.nan
    y, last = dense_bank(noisy, A, B, C, state, lengths)
    alone, end = dense_bank(u[1:, :70], A, B, C, state[1:])
    torch.testing.assert_close(y[1:, :70], alone)
    torch.testing.assert_close(last[1:], end)
    assert not y[1, 70:].any()


def test_single_precision_keeps_its_digits():
    u, A, B, C, state = inputs(length=1000)
    y, _ = dense_bank(u.float(), A, B, C, state.float())
    wanted, _ = dense_bank(u, A, B, C, state)
    assert (y - wanted).norm() < 1e-5 * wanted.norm()
