"""Decompositions come out whole where the first solver that is asked does not converge."""

import pytest
import torch

from compressm.control import linear_algebra as side_by_side

A = torch.randn(3, 5, 5, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["eigh", "eigvalsh", "svd", "svdvals"])
def test_a_solver_that_does_not_converge_is_followed_by_another(monkeypatch, name):
    """As the one of a GPU did; which matrices make it do so is not known."""
    matrix = A + A.mH if name.startswith("eig") else A
    solve, solved = getattr(torch.linalg, name), side_by_side._solved
    calls = []

    def fails_at_first(part, **options):
        calls.append(part.shape)
        if len(calls) == 1:
            raise torch.linalg.LinAlgError("linalg: The algorithm failed to converge")
        return solve(part, **options)

    monkeypatch.setattr(torch.linalg, name, fails_at_first)
    monkeypatch.setattr(side_by_side, "_solved", lambda function, bank, here: solved(function, bank, here=True))
    found = getattr(side_by_side, name)(matrix)
    expected = solve(matrix, full_matrices=False) if name == "svd" else solve(matrix)
    assert calls[0] == A.shape
    assert len(calls) > 1
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for one, other in pairs:
        torch.testing.assert_close(one.abs(), other.abs())


def test_what_no_solver_can_do_is_an_error():
    with pytest.raises(torch.linalg.LinAlgError):
        side_by_side.eigh(torch.full((2, 3, 3), torch.nan, dtype=torch.float64))
