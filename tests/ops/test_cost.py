import pytest

from compressm.ops import Path
from compressm.ops.lti.cost import best_chunk, cheapest_path, fast_length, layer_chunk, path_costs


@pytest.mark.parametrize(
    ("shape", "path"),
    [
        ((50, 784, 256, 8, 8), Path.CONVOLUTION),
        ((50, 784, 28, 8, 8), Path.CHUNKED),
        ((50, 784, 13, 8, 8), Path.CHUNKED),
        ((4, 1024, 128, 128, 128), Path.SCAN),
        ((8, 256, 16, 64, 64), Path.SCAN),
        ((32, 64, 64, 64, 64), Path.SCAN),
        ((32, 64, 64, 16, 16), Path.CHUNKED),
        ((8, 4096, 32, 8, 8), Path.CHUNKED),
        ((8, 1024, 512, 8, 8), Path.CONVOLUTION),
    ],
)
def test_the_rule_picks_what_was_measured_to_be_fastest_on_one_core(shape, path):
    assert cheapest_path(*shape) is path
    costs = path_costs(*shape)
    assert costs[path] == min(costs.values())


def test_a_gpu_takes_chunks_for_few_channels_and_scans_for_many():
    assert cheapest_path(50, 1024, 384, 512, 512, gpu=True) is Path.SCAN
    assert cheapest_path(50, 784, 13, 8, 8, gpu=True) is Path.CHUNKED
    assert cheapest_path(50, 784, 256, 8, 8, gpu=True) is Path.CHUNKED


@pytest.mark.parametrize(
    ("batch", "length", "n", "path"),
    [
        (1, 784, 1, Path.CHUNKED),
        (1, 2**20, 13, Path.SCAN),
        (1, 2**20, 256, Path.CHUNKED),
        (50, 2**20, 13, Path.CHUNKED),
    ],
)
def test_a_gpu_scans_a_single_long_sequence_of_few_states(batch, length, n, path):
    assert cheapest_path(batch, length, n, 8, 8, gpu=True) is path


@pytest.mark.parametrize("length", [1, 2, 7, 63, 784, 16384])
def test_a_chunk_is_never_longer_than_the_sequence(length):
    assert 1 <= best_chunk(length) <= min(length, 64)
    assert 1 <= layer_chunk(2, length, 16, 4, 4) <= min(length, 64)


def test_a_chunk_divides_the_length_where_that_costs_little():
    assert 784 % layer_chunk(50, 784, 28, 8, 8) == 0


def test_fast_lengths_are_multiples_of_sixteen_with_small_factors_only_and_not_below():
    assert [fast_length(n) for n in (1, 16, 17, 199, 1567, 1569, 2041)] == [16, 16, 32, 224, 1568, 1600, 2048]
