import torch

from compressm.control.gramians import gramians
from tests.systems import lru_at_initialisation, lru_trained_like


def error_of_the_squared_route(P, Q):
    """max |σ − σ_svd| / σ₁ over σ > 1e-4 σ₁, σ from the eigenvalues of Lcᴴ Q Lc; None where Cholesky fails."""
    (Lc, failed), (Lo, failed_too) = torch.linalg.cholesky_ex(P), torch.linalg.cholesky_ex(Q)
    if failed or failed_too:
        return None
    exact = torch.linalg.svdvals(Lo.mH @ Lc)
    squared = torch.linalg.eigvalsh(Lc.mH @ Q @ Lc).clamp_min(0).sqrt().flip(-1)
    large = exact > 1e-4 * exact[0]
    return ((squared - exact).abs()[large].max() / exact[0]).item()


def test_sorting_the_states_first_keeps_the_digits_of_the_fast_route():
    unsorted, graded = [], []
    for make in (lru_at_initialisation, lru_trained_like):
        for n in (32, 64, 128):
            for width in (1, 2, 8, 16):
                for seed in range(3):
                    P, Q = gramians(make(n, width, seed=seed))
                    order = (P.diagonal().real * Q.diagonal().real).argsort(descending=True)
                    pairs = ((unsorted, (P, Q)), (graded, (P[order][:, order], Q[order][:, order])))
                    for errors, (p, q) in pairs:
                        errors.append(error_of_the_squared_route(p, q))
    graded, unsorted = ([error for error in errors if error is not None] for errors in (graded, unsorted))
    assert len(graded) > 50
    assert max(graded) < 1e-14
    assert max(unsorted) > 4 * max(graded)
