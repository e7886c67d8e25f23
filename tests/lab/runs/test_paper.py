"""The paper's numbers are there by label, and are those of its tables."""

import pytest

from compressm_lab.runs.paper import paper_labels, read_paper
from compressm_lab.runs.records import RunError

TABLES = ("results", "combined", "results-max", "pragmatic", "hnn_vs_compressm", "knowledge-distillation")
FIGURES = (
    *("hankel_analysis", "speedup", "sanity", "num_red", "red_window", "red-perf-all", "sanity_hankel"),
    *("num_red_hankel", "red_window_hankel", "timer", "reduction-complexity", "hank_mnist", "hank_imdb"),
    *("hank_cifar", "hank_listops", "mamba-cifar", "mamba-imdb", "mamba-speedup"),
)


@pytest.mark.parametrize("label", [*TABLES, *FIGURES])
def test_every_label_has_its_origin_and_what_the_paper_says(label):
    found = read_paper(label)
    assert found.origin == f"{'tab' if label in TABLES else 'fig'}:{label}"
    assert found.kind == ("table" if label in TABLES else "figure")
    assert found.title
    assert found.says
    assert label not in TABLES or found.values


def test_there_are_no_other_labels():
    assert set(paper_labels()) == {*TABLES, *FIGURES}


def test_numbers_stand_where_the_paper_has_them():
    results, best = read_paper("results"), read_paper("results-max")
    order = results.value("sMNIST", "CompreSSM", "τ = 0.04", "order")
    assert (order.centre, order.spread) == (12.7, 3.0)
    assert results.value("CIFAR10", "baseline", "τ = 0.15", "accuracy").centre == 78.2
    assert results.value("CIFAR10", "CompreSSM", "τ = 0", "accuracy") is None
    assert best.value("ListOps", "CompreSSM", "τ = 0.1", "best").centre == 53.0
    assert read_paper("combined").value("CIFAR10", "distillation", "τ = 0.02", "speed-up").centre == 0.45


def test_tables_that_repeat_numbers_agree():
    known = read_paper("results").values
    for label in ("combined", "hnn_vs_compressm", "knowledge-distillation", "red-perf-all", "speedup", "results-max"):
        shared = {key: value for key, value in read_paper(label).values.items() if key in known}
        assert shared
        assert all(value.centre == known[key].centre for key, value in shared.items())


def test_an_unknown_label_says_what_may_have_been_meant():
    with pytest.raises(RunError, match="did you mean 'results'"):
        read_paper("result")
