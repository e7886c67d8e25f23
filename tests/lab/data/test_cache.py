import os

import pytest
import torch

from compressm_lab.data import DataError, DelayedCopy, SequentialMNIST, Store
from tests.lab.data.files import write_mnist


@pytest.fixture
def store(tmp_path):
    write_mnist(tmp_path / "mnist")
    return Store(tmp_path, offline=True)


def cache_file(store):
    (path,) = store.cache.iterdir()
    return path


def test_a_parsed_set_is_read_back_without_its_files(store):
    first = SequentialMNIST().load(store)
    for path in (store.root / "mnist").iterdir():
        path.unlink()
    assert SequentialMNIST().present(store)
    second = SequentialMNIST().load(store)
    for which in ("train", "validation", "test"):
        assert torch.equal(getattr(first, which).inputs, getattr(second, which).inputs)
        assert torch.equal(getattr(first, which).targets, getattr(second, which).targets)


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "text"])
def test_a_broken_copy_is_made_again(store, damage):
    expected = SequentialMNIST().load(store).train.inputs
    path = cache_file(store)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes({"cut": data[: len(data) // 2], "bit": data, "empty": b"", "text": b"no tensors here"}[damage])
    assert torch.equal(SequentialMNIST().load(store).train.inputs, expected)
    assert cache_file(store).stat().st_size == len(data)


def test_files_that_changed_are_read_again(store):
    SequentialMNIST().load(store)
    write_mnist(store.root / "mnist", train=60)
    os.utime(store.root / "mnist" / "train-images-idx3-ubyte")
    assert len(SequentialMNIST().load(store).train) == 54


def test_other_options_are_another_file(tmp_path):
    store = Store(tmp_path)
    for delay in (1, 2):
        assert DelayedCopy(delay=delay, examples=10, held_out=5).load(store).length == 20 + delay
    assert len(list(store.cache.iterdir())) == 2


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path):
    (tmp_path / "cache").write_text("in the way")
    with pytest.warns(UserWarning, match=r"could not be written, delayed_copy is parsed every time"):
        task = DelayedCopy(examples=10, held_out=5).load(Store(tmp_path))
    assert len(task.train) == 10


def test_neither_files_nor_cache_is_an_error_with_the_place(tmp_path):
    assert not SequentialMNIST().present(Store(tmp_path))
    with pytest.raises(DataError, match=r"mnist/train-images-idx3-ubyte.gz is not in"):
        SequentialMNIST().load(Store(tmp_path, offline=True))
