"""What trainings would fail by is said once, before any of them begins."""

import subprocess

import pytest
import torch

import results
from compressm_lab.data import Store
from compressm_lab.data.task import DataError
from compressm_lab.experiments.engine import Campaign, require_ready
from compressm_lab.experiments.executors import LocalExecutor
from compressm_lab.experiments.recipes import Arm
from compressm_lab.training.config import ConfigError
from tests.lab.experiments.tiny import Inline, arms, plan


def wanted(folder, *recipes, seeds=2):
    return Campaign(tuple(Arm("", name, "", name, name) for name in recipes), range(seeds), folder / "runs").trainings()


def refused(trainings, data, executor=None):
    with pytest.raises(ConfigError) as error:
        require_ready(trainings, executor or Inline(), data)
    return str(error.value).splitlines()


def test_every_data_set_that_is_missing_is_named_once_with_where_and_what_to_do(tmp_path):
    first, images, lists = refused(wanted(tmp_path, "scifar", "scifar-mamba", "digits", "listops"), tmp_path)
    assert first == "2 data sets of 8 trainings cannot be had, nothing was trained"
    assert images.startswith(f"scifar: cifar10/cifar-10-python.tar.gz is not in {tmp_path} (nor as ")
    assert f"put https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz at {tmp_path}/" in images
    assert f"`compressm data scifar --data {tmp_path}` fetches it" in images
    assert lists.startswith(f"listops: lra_release.gz is not in {tmp_path} (nor as ")
    assert "so it is not fetched" in lists
    assert "compressm data" not in lists


def test_what_can_be_made_or_is_done_is_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(Store, "get", lambda *_: pytest.fail("asked for"))
    require_ready(wanted(tmp_path, "digits", "delayed-copy"), Inline(), tmp_path)
    generated = Arm("", "lists", "", "listops", "lists", ("task.generated=true",))
    require_ready(Campaign((generated,), range(1), tmp_path).trainings(), Inline(), tmp_path)
    trainings = wanted(tmp_path, "scifar", seeds=1)
    for training in trainings:
        training.run.begin({})
        training.run.model.mkdir()
        (training.run.model / "model.safetensors").touch()
        (training.folder / "status.json").write_text('{"state": "finished", "step": 1, "steps": 1, "message": ""}')
    assert all(training.finished for training in trainings)
    require_ready(trainings, Inline(), tmp_path)


def test_arms_whose_order_is_not_known_yet_are_looked_at_too(tmp_path):
    compressed, beside, _ = arms()
    moved = Arm(*("", "b", "", "smnist", "n-ORDER"), ("model.order=ORDER",), beside=compressed)
    require_ready(plan(tmp_path, chosen=(compressed, beside)).trainings(), Inline(), tmp_path)
    assert "smnist: " in refused(plan(tmp_path, chosen=(compressed, moved)).trainings(), tmp_path)[1]


def test_files_are_fetched_once_where_that_is_allowed(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPRESSM_DATA", str(tmp_path / "data"))
    asked, said = [], []

    def get(store, file):
        asked.append((store.offline, file.place))
        if "cifar" in file.place:
            raise DataError("no network here")

    monkeypatch.setattr(Store, "get", get)
    with pytest.raises(
        ConfigError, match="1 data set of 4 trainings cannot be had, nothing was trained\nscifar: no net"
    ):
        require_ready(wanted(tmp_path, "smnist", "scifar"), Inline(), None, said.append)
    assert len(asked) == 5  # four files of MNIST, one of CIFAR-10
    assert not any(offline for offline, _ in asked)
    assert said == [f"{name}: not in {tmp_path / 'data'}, to be fetched" for name in ("smnist", "scifar")]


def test_a_gpu_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ended = subprocess.CompletedProcess([], 1, "", "RuntimeError: all CUDA-capable devices are busy\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    (said,) = refused(wanted(tmp_path, "digits"), tmp_path, LocalExecutor(1))
    assert "the GPU of this machine cannot be used: RuntimeError: all CUDA-capable devices are busy" in said
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_ready(wanted(tmp_path, "digits"), LocalExecutor(1), tmp_path)


def test_results_without_their_data_begin_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(LocalExecutor, "submit", lambda *_: pytest.fail("trained"))
    with pytest.raises(SystemExit) as end:
        results.main(["scifar", "smnist", "--out", str(tmp_path / "out"), "--data", str(tmp_path)])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "2 data sets of 63 trainings cannot be had" in said
    assert "`compressm data smnist --data" in said
    assert not (tmp_path / "out").exists()
