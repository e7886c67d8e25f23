"""What is made here: checked against slow and separate readings of the rules."""

import statistics

import numpy as np
import pytest
import torch

from compressm_lab.data import DataError, ListOps, Pathfinder, Store
from compressm_lab.data.listops import SYMBOLS
from compressm_lab.data.pathfinder import GEOMETRIES, NOWHERE, drawn, scenes

OPERATIONS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}


def evaluate(symbols):
    """Value, depth and largest number of arguments, by a stack."""
    stack, deepest, most = [[]], 1, 0
    for symbol in symbols:
        if symbol in OPERATIONS:
            stack.append([symbol])
            deepest = max(deepest, len(stack))
        elif symbol == "]":
            operator, *values = stack.pop()
            stack[-1].append(OPERATIONS[operator](values))
            most = max(most, len(values))
            assert len(values) >= 2
        else:
            stack[-1].append(int(symbol))
    ((value,),) = stack
    return value, deepest, most


def symbols_of(split, row):
    return [SYMBOLS[token - 1] for token in split.inputs[row, : split.lengths[row]].tolist()]


@pytest.fixture(scope="module")
def listops(tmp_path_factory):
    made = ListOps(generated=True, examples=300, held_out=50)
    return made.load(Store(tmp_path_factory.mktemp("listops"), offline=True))


def test_every_expression_comes_to_its_target(listops):
    found = [evaluate(symbols_of(listops.train, row)) for row in range(len(listops.train))]
    values, depths, arguments = zip(*found, strict=True)
    assert list(values) == listops.train.targets.tolist()
    assert max(depths) <= 10
    assert max(arguments) == 10


def test_lengths_and_classes_are_those_of_the_task(listops):
    for split in (listops.train, listops.validation, listops.test):
        assert split.lengths.min() >= 500
        assert split.lengths.max() <= 2000
        beyond = torch.arange(listops.length) >= split.lengths[:, None]
        assert torch.equal(split.inputs == 0, beyond)
    assert set(listops.train.targets.tolist()) == set(range(10))


def test_no_expression_is_in_two_splits(listops):
    rows = [bytes(row.tolist()) for split in (listops.train, listops.validation, listops.test) for row in split.inputs]
    assert len(set(rows)) == len(rows) == 400


def test_small_rules_repeat_no_expression(tmp_path):
    made = ListOps(
        generated=True, examples=150, held_out=20, depth=2, arguments=3, shortest=4, longest=5, length=5, seed=1
    )
    task = made.load(Store(tmp_path))
    rows = [bytes(row.tolist()) for split in (task.train, task.validation, task.test) for row in split.inputs]
    assert len(set(rows)) == 190
    assert all(evaluate(symbols_of(task.test, row))[0] == task.test.targets[row] for row in range(20))


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: ListOps(generated=True, examples=20, held_out=5, seed=seed),
        lambda seed: Pathfinder(generated=True, examples=20, held_out=5, contour_length=6, seed=seed),
    ],
)
def test_the_same_seed_makes_the_same_data_and_another_seed_other_data(tmp_path, monkeypatch, make):
    monkeypatch.setattr("compressm_lab.data.pathfinder._SCENES", 400)
    torch.manual_seed(0)
    first = make(0).load(Store(tmp_path / "a")).train
    torch.manual_seed(1)
    again, other = make(0).load(Store(tmp_path / "b")).train, make(1).load(Store(tmp_path / "c")).train
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, other.inputs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shortest": 600, "longest": 500}, "expected ascending"),
        ({"depth": 2}, "at most 12 tokens"),
        ({"examples": 0}, "examples is 0"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(options, said):
    with pytest.raises(DataError, match=said):
        ListOps(generated=True, **options)


@pytest.fixture(scope="module", params=[(32, 6), (32, 14), (64, 9), (128, 14)], ids=str)
def pictured(request):
    side, contour_length = request.param
    geometry = GEOMETRIES[side]
    return scenes(300, geometry, contour_length, torch.Generator().manual_seed(0)), geometry


def connected(scene, geometry):
    """Whether dashes that follow one another lead from dot to dot, by nearness of ends alone."""
    dashes = scene.dashes[scene.paths != NOWHERE].numpy()
    ends = dashes.reshape(-1, 2)
    near = np.linalg.norm(ends[:, None] - ends[None], axis=-1) < geometry.gap * 1.01
    links = near.reshape(len(dashes), 2, len(dashes), 2).any(axis=(1, 3))
    first, last = (np.linalg.norm(ends - dot.numpy(), axis=-1).argmin() // 2 for dot in scene.dots)
    reached = np.zeros(len(dashes), bool)
    reached[first] = True
    while (grown := reached | links[reached].any(axis=0)).sum() > reached.sum():
        reached = grown
    return bool(reached[last])


def scene_at(batch, row):
    return type(batch)(*(part[row] for part in batch))


def test_the_dots_are_on_one_path_exactly_where_the_label_says_so(pictured):
    batch, geometry = pictured
    assert len(batch.labels) >= 6
    found = [connected(scene_at(batch, row), geometry) for row in range(len(batch.labels))]
    assert found == batch.labels.bool().tolist()


def test_labels_are_balanced_and_distance_does_not_tell_them(pictured):
    batch, geometry = pictured
    assert batch.labels.tolist() == [1, 0] * (len(batch.labels) // 2)
    distance = (batch.dots[:, 0] - batch.dots[:, 1]).norm(dim=1).unflatten(0, (-1, 2))
    assert (distance[:, 0] - distance[:, 1]).abs().max() <= geometry.side / 16
    assert distance.min() > 4 * geometry.dot


def test_paths_stay_inside_and_apart(pictured):
    batch, geometry = pictured
    for row in range(min(20, len(batch.labels))):
        paths, dashes = batch.paths[row], batch.dashes[row]
        there = paths != NOWHERE
        assert ((dashes[there] > 0) & (dashes[there] < geometry.side)).all()
        points, owner = dashes[there].flatten(0, 1), paths[there].repeat_interleave(2)
        distance = torch.cdist(points, points)[owner[:, None] != owner]
        assert distance.min() > geometry.gap


def test_a_picture_is_white_on_the_shapes_and_black_away_from_them(pictured):
    batch, geometry = pictured
    images = drawn(batch, geometry)
    assert images.shape == (len(batch.labels), geometry.side, geometry.side)
    dots = batch.dots.floor().long()
    row = torch.arange(len(images))[:, None]
    assert (images[row, dots[..., 1], dots[..., 0]] == 255).all()
    centre = torch.cartesian_prod(*[torch.arange(geometry.side) + 0.5] * 2).flip(-1)
    shapes = torch.cat([batch.dashes[0][batch.paths[0] != NOWHERE].flatten(0, 1), batch.dots[0]])
    away = torch.cdist(centre, shapes).min(dim=1).values > geometry.dash / 2 + geometry.dot + 1
    assert (images[0].flatten()[away] == 0).all()
    assert 0.02 < (images > 64).float().mean() < 0.4


def test_pathfinder_is_made_with_the_asked_sizes(tmp_path):
    task = Pathfinder(side=64, generated=True, contour_length=6, distractors=0, examples=20, held_out=6).load(
        Store(tmp_path)
    )
    assert task.train.inputs.shape == (20, 4096, 1)
    assert [split.targets.bincount().tolist() for split in (task.train, task.validation, task.test)] == [
        [10, 10],
        [3, 3],
        [3, 3],
    ]
    everything = torch.cat([task.train.inputs, task.validation.inputs, task.test.inputs])
    assert len(everything.unique(dim=0)) == 32


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"side": 48}, "side is 48, expected one of 32, 64, 128"),
        ({"contour_length": 7}, "the files have 6, 9, 14"),
        ({"generated": True, "distractors": -1}, "distractors is -1"),
    ],
)
def test_pictures_that_do_not_exist_are_refused(options, said):
    with pytest.raises(DataError, match=said):
        Pathfinder(**options)


def test_paths_without_room_end_in_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("compressm_lab.data.pathfinder._SCENES", 4)
    with pytest.raises(DataError, match="paths of 40 dashes find no room on 32 px"):
        Pathfinder(generated=True, contour_length=40, examples=4, held_out=2).load(Store(tmp_path))
