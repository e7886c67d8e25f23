"""What an inspection says, in print, in a notebook and as data."""

import html.parser
import json

import pytest
import torch
from hypothesis import given

from compressm.compression import CompressionError, EnergyTolerance, Inspection
from tests.compression.spectra import bound_of, spectra_of_a_model

SPECTRA = {
    "blocks.0.ssm": torch.tensor([8.0, 4, 2, 1, 1]).double(),
    "blocks.1.ssm": torch.tensor([[4.0, 2, 0], [4, 3, 1]]).double(),
}


@given(spectra_of_a_model())
def test_recommended_orders_are_those_of_the_tolerance_and_bounds_those_of_the_orders(spectra):
    found = Inspection.of(spectra, taus=(0.5, 0.25, 0.0))
    assert found.taus == (0.5, 0.25, 0.0)
    assert found.orders == {name: sigma.shape[-1] for name, sigma in spectra.items()}
    for tau in found.taus:
        assert found.recommended[tau] == EnergyTolerance(tau)(spectra)
        for name, r in found.recommended[tau].items():
            assert found.bounds[tau][name] == bound_of(spectra[name], r)


def test_it_prints_as_a_table():
    assert repr(Inspection.of(SPECTRA, taus=(0.25, 0.0))) == (
        "module        states  largest σ        τ = 0.25           τ = 0\n"
        "------------  ------  ---------  --------------  --------------\n"
        "blocks.0.ssm       5          8  2 (error <= 8)  5 (error <= 0)\n"
        "blocks.1.ssm       3          4  2 (error <= 2)  3 (error <= 0)\n"
        "together           8                          4               8\n"
        "\n"
        "States that keep 1 - τ of the Hankel energy (error <= bound on the layer's H∞ error)."
    )


def test_a_layer_without_a_bound_shows_none():
    found = Inspection.of(SPECTRA, taus=(0.25,), without_bound=["blocks.1.ssm"])
    assert found.bounds == {0.25: {"blocks.0.ssm": 8.0, "blocks.1.ssm": None}}
    assert repr(found).splitlines()[3].split() == ["blocks.1.ssm", "3", "4", "2"]
    measured = Inspection.of(SPECTRA, without_bound=list(SPECTRA))
    assert "error" not in repr(measured)


def test_one_layer_has_no_total():
    assert "together" not in repr(Inspection.of({"": torch.ones(3).double()}))
    assert "the model" in repr(Inspection.of({"": torch.ones(3).double()}))


def test_a_notebook_gets_a_table_with_the_same_cells():
    found = Inspection.of({"<script>": torch.ones(3).double(), **SPECTRA}, taus=(0.25,))
    cells = []
    parser = html.parser.HTMLParser()
    parser.handle_data = cells.append
    parser.feed(found._repr_html_())
    assert "<script>" in cells
    assert "<script>" not in found._repr_html_()
    assert "2 (error <= 8)" in cells
    assert found._repr_html_().count("<tr>") == 1 + 3 + 1


def test_as_data_it_is_json():
    found = json.loads(json.dumps(Inspection.of(SPECTRA, taus=(0.25, 0.0)).to_dict(), allow_nan=False))
    assert found["taus"] == [0.25, 0.0]
    assert found["modules"]["blocks.1.ssm"] == {
        "order": 3,
        "sigma": [[4.0, 2.0, 0.0], [4.0, 3.0, 1.0]],
        "recommended": [2, 3],
        "bounds": [2.0, 0.0],
    }


def test_it_refuses_an_unknown_module_and_an_empty_list_of_tolerances():
    with pytest.raises(CompressionError, match=r"names head; there are blocks\.0\.ssm, blocks\.1\.ssm"):
        Inspection.of(SPECTRA, without_bound=["head"])
    with pytest.raises(CompressionError, match="taus are empty"):
        Inspection.of(SPECTRA, taus=())
