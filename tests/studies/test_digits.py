"""The digits task: what it holds, and that a seed says everything."""

import itertools

import torch

from digits import TEST_SAMPLES, DigitsSetting, evaluate, load_digits, trained

TINY = DigitsSetting("tiny", side=8, depth=1, width=4, order=6, steps=4, learning_rate=1e-2)


def test_every_image_is_a_sequence_and_in_one_half_of_the_split():
    data = load_digits()
    assert data.length == 64
    assert len(data.test_y) == TEST_SAMPLES
    assert len(data.train_y) + len(data.test_y) == 1797
    assert float(data.train_x.min()) == 0
    assert float(data.train_x.max()) == 1
    assert not (data.train_x.flatten(1)[:, None] == data.test_x.flatten(1)[None, :20]).all(-1).any()


def test_a_larger_side_shows_the_same_images_in_the_same_order():
    small, large = load_digits(8), load_digits(16)
    assert large.length == 256
    assert torch.equal(small.train_y, large.train_y)
    shrunk = torch.nn.functional.avg_pool2d(large.test_x.reshape(-1, 1, 16, 16), 2).flatten(1)
    assert torch.corrcoef(torch.stack([shrunk.flatten(), small.test_x.flatten()]))[0, 1] > 0.95


def test_batches_show_every_sample_once_an_epoch_and_follow_their_seed():
    data = load_digits()
    epoch = list(itertools.islice(data.batches(479, seed=1), 3))  # 3 · 479 = 1437
    assert sum(float(x.sum()) for x, _ in epoch) == float(data.train_x.sum())
    again, other = next(data.batches(479, seed=1)), next(data.batches(479, seed=2))
    assert torch.equal(again[0], epoch[0][0])
    assert not torch.equal(other[0], epoch[0][0])


def test_training_follows_its_seed_and_disturbs_no_other_random_numbers():
    data = load_digits()
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    one, same, other = (trained(TINY, data, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head.weight, other.head.weight)
    accuracy, loss = evaluate(one, data.test_x, data.test_y)
    assert 0 <= accuracy <= 1
    assert loss > 0
