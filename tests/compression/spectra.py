"""Spectra of whole numbers for hypothesis, so that sums are exact: ties, zeros, single systems and banks."""

import torch
from hypothesis import strategies as st

WHOLE = st.integers(0, 9)
SCALES = st.sampled_from([1, 7, 64])


@st.composite
def falling(draw, size):
    scale = draw(SCALES)
    return [scale * value for value in sorted(draw(st.lists(WHOLE, min_size=size, max_size=size)), reverse=True)]


@st.composite
def spectra_of_a_layer(draw, max_order=12, max_channels=4):
    n = draw(st.integers(1, max_order))
    channels = draw(st.none() | st.integers(1, max_channels))
    rows = draw(falling(n) if channels is None else st.lists(falling(n), min_size=channels, max_size=channels))
    return torch.tensor(rows, dtype=torch.float64)


@st.composite
def spectra_of_a_model(draw, max_layers=3, **sizes):
    layers = draw(st.lists(spectra_of_a_layer(**sizes), min_size=1, max_size=max_layers))
    return {f"blocks.{k}.ssm": sigma for k, sigma in enumerate(layers)}


def rows_of(sigma):
    """The channels as lists of Python numbers."""
    return sigma.reshape(-1, sigma.shape[-1]).tolist()


def bound_of(sigma, r):
    """2 Σ_{i>r} σᵢ, of the worst channel."""
    return max(2 * sum(row[r:]) for row in rows_of(sigma))
