import pytest
import torch

from compressm_lab.data import DataError, Split, Task, TaskKind


def signals(dtype=torch.uint8, channels=3):
    x = torch.randint(0, 256, (6, 4, channels), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Split(x if dtype == torch.uint8 else x.to(dtype) / 255, torch.arange(6))


def task(split, **fields):
    return Task(name="t", kind=TaskKind.CLASSIFY, train=split, validation=split, test=split, classes=6, **fields)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    ("shift", "scale"),
    [((0.0,), (1.0,)), ((0.5,), (2.0,)), ((0.4, 0.5, 0.6), (4.0, 3.0, 2.0)), ((0.4, 0.5, 0.6), (2.0,))],
)
def test_signals_are_shifted_and_scaled_channel_by_channel(dtype, shift, scale):
    split = signals(dtype)
    before = split.inputs.clone()
    chosen = torch.tensor([4, 0, 4])
    batch = task(split, channels=3, shift=shift, scale=scale).batch(split, chosen)
    expected = (signals().inputs[chosen].float() / 255 - torch.tensor(shift)) * torch.tensor(scale)
    assert batch.inputs.dtype == torch.float32
    torch.testing.assert_close(batch.inputs, expected)
    assert batch.targets.tolist() == [4, 0, 4]
    assert torch.equal(split.inputs, before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_tokens_and_lengths_come_out_as_int64(dtype):
    split = Split(
        torch.arange(24, dtype=dtype).reshape(3, 2, 4), torch.arange(3), torch.tensor([[4, 1], [2, 2], [3, 4]])
    )
    batch = task(split, vocabulary=24, towers=2).batch(split, torch.tensor([2, 1]))
    assert batch.inputs.dtype == batch.lengths.dtype == torch.int64
    assert batch.inputs[0, 0].tolist() == [16, 17, 18, 19]
    assert batch.lengths.tolist() == [[3, 4], [2, 2]]


def test_length_is_that_of_the_sequence():
    split = signals()
    assert task(split, channels=3).length == 4
    tokens = Split(torch.zeros(2, 2, 9, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    assert task(tokens, vocabulary=3, towers=2).length == 9


def test_a_split_counts_its_examples_and_bytes():
    split = Split(torch.zeros(5, 2, dtype=torch.int16), torch.zeros(5, dtype=torch.int64), torch.ones(5).long())
    assert (len(split), split.bytes) == (5, 5 * (2 * 2 + 8 + 8))
    assert task(split, vocabulary=2).to("cpu").train.bytes == split.bytes


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(DataError, match="5 inputs and 4 targets"):
        Split(torch.zeros(5, 2), torch.zeros(4))
    with pytest.raises(DataError, match="expected exactly one"):
        task(signals(), channels=3, vocabulary=3)
    with pytest.raises(DataError, match="2 shifts and 1 scales for 3 channels"):
        task(signals(), channels=3, shift=(0.0, 1.0))
    with pytest.raises(DataError, match="2 shifts and 1 scales for 3 channels"):
        task(signals(channels=3), channels=4, time=True, shift=(0.0, 1.0))
    with pytest.raises(DataError, match="time is a channel of signals"):
        task(signals(), vocabulary=3, time=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_time_comes_before_the_other_channels_which_stay_as_they_are_stored(dtype):
    shift, scale = (0.4, 0.5, 0.6), (4.0, 3.0, 2.0)
    plain = task(signals(dtype), channels=3, shift=shift, scale=scale)
    timed = task(signals(dtype), channels=4, shift=shift, scale=scale, time=True)
    assert timed.train.inputs.dtype == dtype
    chosen = torch.tensor([1, 3, 1])
    got, without = (one.batch(one.train, chosen).inputs for one in (timed, plain))
    assert torch.equal(got[..., 1:], without)
    length = timed.length
    assert got[..., 0].tolist() == [pytest.approx([t / length for t in range(length)])] * 3
    assert got.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("time", [False, True])
def test_a_batch_can_be_captured_in_a_graph(time):
    fields = {"channels": 3 + time, "shift": (0.4, 0.5, 0.6), "scale": (4.0, 3.0, 2.0), "time": time}
    made = task(signals(), **fields).to("cuda")
    chosen = torch.tensor([1, 2], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = made.batch(made.train, chosen)
    chosen.copy_(torch.tensor([5, 3]))
    graph.replay()
    torch.testing.assert_close(batch.inputs, made.batch(made.train, chosen).inputs)
    assert batch.targets.tolist() == [5, 3]
