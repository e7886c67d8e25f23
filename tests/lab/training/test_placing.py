"""Data that a GPU has no room for stays where it is, and is learned from all the same."""

import pytest
import torch

from compressm_lab.runs.records import Evaluation
from compressm_lab.training import building as placing
from compressm_lab.training import train
from compressm_lab.training.building import batch_on, fits, placed
from tests.lab.training.tiny import digits as task
from tests.lab.training.tiny import recipe


def test_half_of_what_is_free_is_for_data():
    found = task()
    needed = sum(split.bytes for split in (found.train, found.validation, found.test))
    assert fits(found, 2 * needed)
    assert not fits(found, 2 * needed - 1)


def test_on_a_cpu_everything_fits():
    found = task()
    assert placed(found, torch.device("cpu")).train.inputs.data_ptr() == found.train.inputs.data_ptr()


def test_a_batch_that_is_there_is_the_task_s_own():
    found, rows = task(), torch.tensor([2, 0])
    batch = batch_on(torch.device("cpu"), found, found.train, rows)
    assert torch.equal(batch.inputs, found.batch(found.train, rows).inputs)
    assert torch.equal(batch.targets, found.train.targets[rows])


@pytest.mark.gpu
def test_a_task_without_room_on_the_gpu_learns_the_same(tmp_path, monkeypatch):
    wanted, losses = recipe(), []
    for share in (0.5, 0.0):
        monkeypatch.setattr(placing, "_SHARE", share)
        assert placed(task(), torch.device("cuda")).train.inputs.is_cuda == (share > 0)
        run = train(wanted, task(), tmp_path / str(share), device="cuda")
        losses.append([found.loss for found in run.records(Evaluation)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
