import gzip
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from compressm_lab.data import DataError, Digits, FashionMNIST, Pathfinder, SequentialCIFAR, SequentialMNIST, Store
from compressm_lab.data import images as cifar
from tests.lab.data.files import (
    cifar_batches,
    write_archive,
    write_cifar_binary,
    write_cifar_pickles,
    write_idx,
    write_mnist,
    write_pathfinder,
)

SMALL = 20  # images a batch of CIFAR-10, here


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, offline=True)


@pytest.fixture
def small_cifar(monkeypatch):
    monkeypatch.setattr(cifar, "RECORDS", SMALL)


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize(
    ("dataset", "folder"),
    [
        (SequentialMNIST(), "mnist"),
        (SequentialMNIST(), "MNIST/raw"),
        (FashionMNIST(), "FashionMNIST/raw"),
        (FashionMNIST(), "fashion"),
    ],
)
def test_idx_files_are_read_from_both_layouts(store, dataset, folder, end):
    write_mnist(store.root / folder, end=end)
    task = dataset.load(store)
    assert (len(task.train), len(task.validation), len(task.test)) == (36, 4, 10)
    assert (task.length, task.channels, task.classes) == (784, 1, 10)
    batch = task.batch(task.test, torch.arange(10))
    assert batch.targets.tolist() == list(range(10))
    assert 0 <= batch.inputs.min() < 0.1 < 0.9 < batch.inputs.max() <= 1


@pytest.mark.parametrize("dataset", [SequentialMNIST(time=True), FashionMNIST(time=True)])
def test_with_time_the_same_bytes_are_stored_and_read(store, dataset):
    write_mnist(store.root / "mnist")
    write_mnist(store.root / "fashion")
    task, without = dataset.load(store), type(dataset)().load(store)
    assert len(list(store.cache.glob("*.safetensors"))) == 1
    assert task.test.inputs.dtype == torch.uint8
    assert torch.equal(task.test.inputs, without.test.inputs)
    inputs = task.batch(task.test, torch.arange(3)).inputs
    assert (task.channels, inputs.shape) == (2, (3, 784, 2))
    assert torch.equal(inputs[..., 1:], without.batch(without.test, torch.arange(3)).inputs)
    assert torch.equal(inputs[1, :, 0], torch.arange(784) / 784)


def test_images_in_colour_and_digits_take_time_too(store, small_cifar):
    cifar_as(store, "bin")
    for dataset, channels in ((SequentialCIFAR(time=True), 4), (SequentialCIFAR(grey=True, time=True), 2)):
        task = dataset.load(store)
        inputs, without = (
            one.batch(one.test, torch.arange(4)).inputs
            for one in (task, replace(task, time=False, channels=channels - 1))
        )
        assert (dataset.form.channels, inputs.shape) == (channels, (4, 1024, channels))
        assert torch.equal(inputs[..., 1:], without)
    task = Digits(time=True).load(store)
    assert task.batch(task.train, torch.arange(2)).inputs[:, -1, 0].tolist() == [63 / 64] * 2


def spoil_magic(path):
    path.write_bytes(b"\0\0\x0d\x03" + path.read_bytes()[4:])


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_in_head(path):
    path.write_bytes(path.read_bytes()[:6])


def other_size(path):
    write_idx(path, np.zeros((40, 27, 28)))


def fewer(path):
    write_idx(path, np.zeros((39, 28, 28)))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (spoil_magic, "begins with 00 00 0d 03, expected 00 00 08 03"),
        (cut_in_half, "its head promises"),
        (cut_in_head, "has 6 bytes"),
        (other_size, r"images of \(27, 28\) pixels"),
        (fewer, "holds 39 images"),
    ],
)
def test_a_broken_idx_file_is_refused_by_name(store, damage, said):
    write_mnist(store.root / "mnist")
    damage(store.root / "mnist" / "train-images-idx3-ubyte")
    with pytest.raises(DataError, match=f"train-images-idx3-ubyte.*{said}"):
        SequentialMNIST().load(store)
    assert not store.cache.exists()


def test_half_of_a_compressed_file_is_refused_by_name(store):
    write_mnist(store.root / "mnist", end=".gz")
    cut_in_half(store.root / "mnist" / "t10k-images-idx3-ubyte.gz")
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz is broken or only half there"):
        SequentialMNIST().load(store)


def test_a_label_that_is_no_digit_is_refused(store):
    write_mnist(store.root / "mnist")
    (store.root / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    data = bytes([0, 0, 8, 1, 0, 0, 0, 10]) + bytes(range(1, 11))
    (store.root / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(data))
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz holds the label 10"):
        SequentialMNIST().load(store)


def cifar_as(store, form):
    if form == "bin":
        write_cifar_binary(store.root / "cifar10" / "cifar-10-batches-bin", SMALL)
    else:
        write_cifar_pickles(store.root / "cifar-10-batches-py", SMALL)
    if form == "tar":
        write_archive(store.root / "cifar-10-python.tar.gz", store.root / "cifar-10-batches-py", "cifar-10-batches-py")
        for path in (store.root / "cifar-10-batches-py").iterdir():
            path.unlink()
        (store.root / "cifar-10-batches-py").rmdir()


@pytest.mark.parametrize("form", ["bin", "pickles", "tar"])
def test_all_forms_of_cifar_hold_the_same_pixels_in_reading_order(store, small_cifar, form):
    cifar_as(store, form)
    task = SequentialCIFAR().load(store)
    *_, (_, pixels, labels) = cifar_batches(SMALL)
    expected = pixels.reshape(SMALL, 3, 32, 32).transpose(0, 2, 3, 1).reshape(SMALL, 1024, 3)
    assert np.array_equal(task.test.inputs.numpy(), expected)
    assert task.test.targets.tolist() == labels
    assert (len(task.train), len(task.validation)) == (90, 10)
    assert SequentialCIFAR().present(store)


def test_grey_is_the_luminance(store, small_cifar):
    cifar_as(store, "bin")
    colour, grey = SequentialCIFAR().load(store), SequentialCIFAR(grey=True).load(store)
    assert (grey.length, grey.channels) == (1024, 1)
    luminance = colour.test.inputs.double() @ torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
    assert (grey.test.inputs[..., 0] - luminance).abs().max() < 0.51
    assert torch.equal(colour.validation.targets, grey.validation.targets)


class Evil:
    def __reduce__(self):
        return (eval, ("1 / 0",))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps(Evil()), r"it names builtins\.eval"),
        (pickle.dumps({b"data": 1}), r"holds \[\"b'data'\"\]"),
        (pickle.dumps([1]), "holds list"),
        (pickle.dumps({b"data": np.zeros((3, 4), np.uint8), b"labels": [1, 2, 3]}), r"holds data \(3, 4\)"),
        (pickle.dumps({b"data": np.zeros((SMALL, 3072), np.uint8), b"labels": [11] * SMALL}), "the label 11"),
        (pickle.dumps({b"data": np.zeros((SMALL, 3072), np.uint8), b"labels": [1] * SMALL})[:5000], "broken"),
        (b"", "broken"),
    ],
)
def test_a_batch_that_is_not_arrays_is_refused_and_never_run(store, small_cifar, content, said):
    cifar_as(store, "pickles")
    (store.root / "cifar-10-batches-py" / "data_batch_3").write_bytes(content)
    with pytest.raises(DataError, match=f"data_batch_3.*{said}"):
        SequentialCIFAR().load(store)


def test_broken_and_missing_files_of_cifar_are_refused_by_name(store, small_cifar):
    cifar_as(store, "bin")
    folder = store.root / "cifar10" / "cifar-10-batches-bin"
    whole = (folder / "data_batch_2.bin").read_bytes()
    (folder / "data_batch_2.bin").write_bytes(whole[:-3073])
    with pytest.raises(DataError, match=r"data_batch_2\.bin has .* bytes, expected"):
        SequentialCIFAR().load(store)
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match="has no data_batch_2; expected"):
        SequentialCIFAR().load(store)


def test_half_an_archive_is_refused_by_name(store, small_cifar):
    cifar_as(store, "tar")
    cut_in_half(store.root / "cifar-10-python.tar.gz")
    with pytest.raises(DataError, match=r"cifar-10-python\.tar\.gz is broken or only half there"):
        SequentialCIFAR().load(store)


LEVEL = "curv_contour_length_14"


@pytest.mark.parametrize("form", ["folder", "release", "archive"])
def test_pathfinder_is_read_from_folders_and_from_the_archive(store, form):
    where = {"folder": "pathfinder32", "release": "lra_release/pathfinder32", "archive": "elsewhere/pathfinder32"}
    write_pathfinder(store.root / where[form] / LEVEL)
    if form == "archive":
        write_archive(store.root / "lra_release.gz", store.root / "elsewhere", "lra_release/lra_release")
    task = Pathfinder().load(store)
    assert (len(task.train), len(task.validation), len(task.test)) == (16, 2, 2)
    assert (task.length, task.channels, task.classes) == (1024, 1, 2)
    assert task.train.targets.bincount().tolist() == [8, 8]
    batch = task.batch(task.train, torch.arange(16))
    assert -1 <= batch.inputs.min() < -0.9 < 0.9 < batch.inputs.max() <= 1


def test_broken_and_missing_images_are_refused_by_name(store):
    folder = store.root / "pathfinder32" / LEVEL
    write_pathfinder(folder)
    image = folder / "imgs" / "1" / "sample_3.png"
    cut_in_half(image)
    with pytest.raises(DataError, match=r"imgs/1/sample_3\.png is broken"):
        Pathfinder().load(store)
    image.unlink()
    with pytest.raises(DataError, match=r"1 images are missing, the first is .*imgs/1/sample_3\.png"):
        Pathfinder().load(store)
    (folder / "metadata" / "0.npy").write_text("imgs/0 sample_0.png 0\n")
    with pytest.raises(DataError, match=r"metadata/0\.npy, line 1"):
        Pathfinder().load(store)


def test_the_image_that_was_published_empty_is_left_out(store):
    folder = store.root / "pathfinder32" / "curv_baseline"
    write_pathfinder(folder)
    (folder / "imgs" / "0" / "sample_172.png").touch()
    with (folder / "metadata" / "0.npy").open("a") as file:
        file.write("imgs/0 sample_172.png 172 1\n")
    task = Pathfinder(contour_length=6).load(store)
    assert sum(map(len, (task.train, task.validation, task.test))) == 20
