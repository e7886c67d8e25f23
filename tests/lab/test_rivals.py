"""Rivals choose what their papers say, and are cut by the library like its own forms."""

import itertools

import pytest
import torch

import compressm as cs
from compressm_lab.rivals import GHOST, StatePCA, StrongRRQR, rivals, strong_rrqr

pytest.importorskip("transformers")
from transformers import Mamba2Config, Mamba2ForCausalLM

IDS = torch.randint(1, 20, (24, 32), generator=torch.Generator().manual_seed(0))


def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 2, "num_hidden_layers": 1}
    config = Mamba2Config(
        vocab_size=20, bos_token_id=None, eos_token_id=None, pad_token_id=None, chunk_size=16, **sizes
    )
    return Mamba2ForCausalLM(config).eval()


def cut(order=3, **options):
    small = model()
    (found,) = cs.compress_(
        small, keep=cs.TargetOrder(order), calibrate=lambda one: one(IDS, use_cache=False), **options
    )
    return small, found


def volume(gram, chosen):
    return torch.linalg.det(gram[chosen][:, chosen])


def test_no_swap_makes_the_volume_of_the_kept_columns_much_larger():
    for seed in range(5):
        M = torch.randn(30, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) @ torch.randn(
            7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(100 + seed)
        )
        gram = M.mT @ M
        kept = strong_rrqr(gram, 3, factor=1.2, swaps=100)
        best = volume(gram, kept)
        others = [k for k in range(7) if k not in kept.tolist()]
        for place, other in itertools.product(range(3), others):
            swapped = kept.clone()
            swapped[place] = other
            # A volume of columns is the root of the determinant of their products.
            assert volume(gram, swapped) <= 1.2**2 * best * (1 + 1e-9)


def test_swaps_leave_the_pivots_where_these_are_misled():
    # Kahan's matrix, whose columns a pivoted QR takes in their order though the last one is nearly dependent.
    n, c = 12, 0.3
    s = (1 - c**2) ** 0.5
    upper = torch.eye(n, dtype=torch.float64) - c * torch.ones(n, n, dtype=torch.float64).triu(1)
    kahan = torch.diag(s ** torch.arange(n, dtype=torch.float64)) @ upper
    kahan = kahan * (1 - 1e-6) ** torch.arange(n)  # breaks ties in favour of the first
    gram = kahan.mT @ kahan
    pivots, swapped = strong_rrqr(gram, n - 1, factor=1e6), strong_rrqr(gram, n - 1, factor=1.5)
    assert pivots.tolist() == list(range(n - 1))
    assert volume(gram, swapped) > 1.5**2 * volume(gram, pivots)


def test_columns_that_repeat_others_are_dropped():
    M = torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gram = torch.cat([M, M], dim=1).mT @ torch.cat([M, M], dim=1)
    assert sorted(k % 4 for k in strong_rrqr(gram, 4).tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", rivals())
def test_every_rival_cuts_a_layer_with_a_larger_error_than_the_balanced_map(name):
    small, found = cut(**rivals()[name])
    _, best = cut(form=cs.compression.Mapped())
    assert found.rank == 3
    assert best.measured_error < found.measured_error < 2
    assert torch.isfinite(small(IDS, use_cache=False).logits).all()


@pytest.mark.parametrize("form", [StrongRRQR(), StatePCA(), GHOST], ids=str)
def test_with_all_states_nothing_changes(form):
    same, _ = cut(order=7, form=form)
    assert not torch.allclose(same(IDS, use_cache=False).logits, model()(IDS, use_cache=False).logits, atol=1e-6)
    same = model()
    cs.compress_(same, keep=cs.TargetOrder(8), calibrate=lambda one: one(IDS, use_cache=False), form=form)
    torch.testing.assert_close(same(IDS, use_cache=False).logits, model()(IDS, use_cache=False).logits)


def test_a_form_that_chooses_states_itself_goes_with_no_other_choice():
    with pytest.raises(cs.compression.CompressionError, match="expected select=Largest"):
        cut(form=StrongRRQR(), select=cs.compression.Random(0))


@pytest.mark.parametrize("options", [{"factor": 0.5}, {"factor": float("nan")}, {"swaps": 0}])
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(ValueError, match="StrongRRQR"):
        StrongRRQR(**options)
