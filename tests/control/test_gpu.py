"""The same numbers on the GPU, and results that stay there."""

import subprocess
import sys

import pytest
import torch

from compressm.control import (
    DenseSystem,
    DiagonalSystem,
    balanced_truncation,
    controllability_gramian,
    error_bounds,
    fold,
    h2_norm,
    h_infinity_norm,
    hankel_change,
    hankel_nuclear_norm,
    hankel_singular_values,
    real_balanced_truncation,
)
from tests.systems import lru_at_initialisation, lru_trained_like

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[(24, 3, ()), (64, 1, ()), (32, 4, (5,)), (200, 8, (2,))], ids=str)
def pair(request):
    n, width, bank = request.param
    system = lru_trained_like(n, width, bank=bank)
    return system, system.to("cuda")


def test_spectra_on_the_gpu_are_those_on_the_cpu(pair):
    here, there = pair
    sigma = hankel_singular_values(here)
    on_gpu = hankel_singular_values(there)
    assert on_gpu.is_cuda
    assert (on_gpu.cpu() - sigma).abs().max() < 1e-13 * sigma.max()


def test_truncations_on_the_gpu_are_those_on_the_cpu(pair):
    here, there = pair
    for order in (1, 7, here.order):
        on_gpu = balanced_truncation(there, order).diagonalise()
        assert on_gpu.system.B.is_cuda
        expected = balanced_truncation(here, order)
        error = expected.system.h_infinity_error(on_gpu.system.to("cpu"))
        assert (error <= 1e-9 * h_infinity_norm(here)).all()
        # The part of a bound that is rounding knows the condition of eigenvectors, which the solvers share only about.
        tail = error_bounds(hankel_singular_values(here))[..., expected.system.order]
        rounding = expected.error_bound - tail
        assert ((on_gpu.error_bound.cpu() - expected.error_bound).abs() <= 1e-9 * tail + rounding).all()
        assert (rounding < 1e-6 * h_infinity_norm(here)).all()


def test_norms_gramians_and_gradients_on_the_gpu_are_those_on_the_cpu():
    here = lru_at_initialisation(40, 3)
    there = here.to("cuda")
    torch.testing.assert_close(controllability_gramian(there).cpu(), controllability_gramian(here))
    dense = DenseSystem(there.A, there.B, there.C)
    torch.testing.assert_close(
        controllability_gramian(dense).cpu(), controllability_gramian(here), rtol=1e-9, atol=1e-10
    )
    for norm in (h2_norm, h_infinity_norm):
        torch.testing.assert_close(norm(there).cpu(), norm(here), rtol=1e-8, atol=0)
    leaf, leaf_there = (system.B.clone().requires_grad_() for system in (here, there))
    hankel_nuclear_norm(type(here)(here.poles, leaf, here.C)).backward()
    hankel_nuclear_norm(type(here)(there.poles, leaf_there, there.C)).backward()
    torch.testing.assert_close(leaf_there.grad.cpu(), leaf.grad, rtol=1e-8, atol=1e-10)


def test_folding_tracking_and_real_balancing_run_on_the_gpu():
    there = lru_at_initialisation(16, 2, bank=(3,)).to("cuda")
    assert fold(there).poles.is_cuda
    assert real_balanced_truncation(there, 5).system.poles.is_cuda
    change = hankel_change(there, type(there)(there.poles * 0.99, there.B, there.C))
    assert (change.largest_shift <= change.weyl_bound).all()


def test_solvers_may_first_be_called_by_several_threads():
    script = """
import torch
from compressm.control.linear_algebra import each
torch.set_num_threads(4)
matrices = [(k + 1.0) * torch.eye(40, dtype=torch.float64, device="cuda") for k in range(8)]
factors = each(lambda matrix: torch.linalg.cholesky_ex(matrix).L, matrices)
assert all(abs(factor[0, 0].item() ** 2 - k - 1) < 1e-12 for k, factor in enumerate(factors))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_nuclear_norm_by_products_is_that_of_the_cpu():
    found = {}
    for device in ("cpu", "cuda"):
        system = lru_at_initialisation(96, 8, bank=(3,)).to(device)
        parts = [part.clone().requires_grad_() for part in (system.poles, system.B, system.C)]
        norm = hankel_nuclear_norm(DiagonalSystem(*parts), floor=1e-6)
        norm.sum().backward()
        found[device] = [norm.detach().cpu(), *(part.grad.cpu() for part in parts)]
    for mine, its in zip(found["cuda"], found["cpu"], strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6 * float(its.abs().max()))
