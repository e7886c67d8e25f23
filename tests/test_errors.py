import pytest

from compressm.errors import did_you_mean


@pytest.mark.parametrize(
    ("given", "said"),
    [("mnist", "; did you mean 'smnist'?"), ("SCIFAR", "; did you mean 'scifar'?"), ("wikitext", ""), (3, "")],
)
def test_the_nearest_name_is_offered_where_one_is_near(given, said):
    assert did_you_mean(given, ["smnist", "scifar", "imdb"]) == said
