"""Suggestions for unknown names, and where warnings point."""

import inspect

import pytest

from compressm.errors import did_you_mean, warn_caller


@pytest.mark.parametrize(
    ("given", "said"),
    [("mnist", "; did you mean 'smnist'?"), ("SCIFAR", "; did you mean 'scifar'?"), ("wikitext", ""), (3, "")],
)
def test_the_nearest_name_is_offered_where_one_is_near(given, said):
    assert did_you_mean(given, ["smnist", "scifar", "imdb"]) == said


def test_a_warning_is_about_the_line_that_called_the_library():
    inside = {"__name__": "compressm.somewhere", "warn": inspect.unwrap(warn_caller)}
    exec("def deep(): warn('it')\ndef public(): deep()", inside)
    with pytest.warns(UserWarning, match="it") as found:
        inside["public"]()
    assert found[0].filename == __file__
