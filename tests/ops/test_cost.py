import pytest

from compressm.ops import Path
from compressm.ops.diagonal_scan.cost import best_chunk, cheapest_path, fast_length, path_costs


@pytest.mark.parametrize(
    ("shape", "path"),
    [
        ((50, 784, 256, 8, 8), Path.CONVOLUTION),
        ((50, 784, 28, 8, 8), Path.CHUNKED),
        ((50, 784, 13, 8, 8), Path.CHUNKED),
        ((4, 1024, 128, 128, 128), Path.SCAN),
        ((8, 256, 16, 64, 64), Path.SCAN),
    ],
)
def test_the_rule_picks_what_was_measured_to_be_fastest_on_one_core(shape, path):
    assert cheapest_path(*shape) is path
    costs = path_costs(*shape)
    assert costs[path] == min(costs.values())


def test_a_gpu_scans_unless_many_states_serve_few_channels():
    assert cheapest_path(50, 1024, 384, 512, 512, gpu=True) is Path.SCAN
    assert cheapest_path(50, 784, 13, 8, 8, gpu=True) is Path.SCAN
    assert cheapest_path(50, 784, 256, 8, 8, gpu=True) is Path.CONVOLUTION


@pytest.mark.parametrize("length", [1, 2, 7, 63, 784, 16384])
def test_a_chunk_is_never_longer_than_the_sequence(length):
    assert 1 <= best_chunk(length) <= min(length, 64)


def test_fast_lengths_have_small_factors_only_and_are_not_below():
    assert [fast_length(n) for n in (1, 11, 13, 1567, 2041)] == [1, 12, 14, 1568, 2048]
