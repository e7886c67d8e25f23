"""The house stays open: few files, each a concept, and a call that enters few of them."""

import importlib.util
from pathlib import Path

import pytest

from tests import unhooked

_SPEC = importlib.util.spec_from_file_location("house", Path(__file__).parents[2] / "benchmarks" / "house.py")
house = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(house)


def test_files_are_few_and_long_enough_to_be_a_concept():
    found = house.figures()
    assert found["compressm, files"] <= 180
    assert found["compressm_lab, files"] <= 95
    assert found["median file, lines"] >= 110
    assert found["files under 60 lines, %"] <= 20


@pytest.mark.parametrize(
    ("what", "most"), [("compress_ of an LRU classifier", 33), ("compress_ of a Mamba with calibrate", 45)]
)
def test_a_call_enters_few_files(what, most):
    printed = unhooked.run(house.traced(house._SCRIPTS[what]), loaded=False)
    assert 15 < len(house.files_in(printed)) <= most


@pytest.mark.slow
def test_a_training_enters_few_files():
    assert 40 < len(house.entered(house._SCRIPTS["compressm train digits with two cuts"])) <= 96
