import torch

from compressm_lab.data import Split
from compressm_lab.data.task import hold_out, in_three, with_validation


def test_every_class_gives_the_same_share():
    targets = torch.arange(1000) % 3
    kept, held = hold_out(targets)
    assert len(held) == 100
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(1000))
    assert (targets[held].bincount() - 100 / 3).abs().max() < 1


def test_splits_do_not_depend_on_the_seed_of_training():
    targets = torch.arange(100) % 7
    torch.manual_seed(1)
    first = hold_out(targets)
    torch.manual_seed(2)
    second = hold_out(targets)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_three_splits_hold_every_example_once():
    split = Split(torch.arange(500)[:, None], torch.arange(500) % 2)
    parts = in_three(split)
    assert [len(part) for part in parts] == [400, 50, 50]
    assert torch.cat([part.inputs for part in parts]).sort(0).values.equal(split.inputs)
    train, validation, test = with_validation(split, split)
    assert (len(train), len(validation), len(test)) == (450, 50, 500)
