"""Images read pixel by pixel: digits of scikit-learn, MNIST, Fashion-MNIST and CIFAR-10.

With `time` a channel t / L comes before the others, as in the paper's sMNIST and sCIFAR.
"""

from __future__ import annotations

import gzip
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from compressm_lab.data.dataset import DataSet, Form
from compressm_lab.data.files import BROKEN, Progress, Remote, Wanted, contents, half_there, members, require_members
from compressm_lab.data.task import DataError, Split, Splits, require_counts, with_validation

TEST_SAMPLES = 360  # of 1797, drawn once


@final
@dataclass(frozen=True)
class Digits(DataSet):
    """Handwritten digits of 8 × 8 pixels in [0, 1], other sizes by bilinear interpolation; one split for all sizes."""

    side: int = 8
    time: bool = False

    name = "digits"
    of_batches = ("time",)

    def __post_init__(self) -> None:
        require_counts(side=self.side)

    @property
    def form(self) -> Form:
        return Form(length=self.side**2, classes=10, channels=1 + self.time, time=self.time)

    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        try:
            from sklearn import datasets
        except ModuleNotFoundError as error:
            raise DataError(f"digits come with the package {error.name}: pip install 'compressm[lab]'") from None
        bunch = datasets.load_digits()
        images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
        if self.side != images.shape[-1]:
            size = (self.side, self.side)
            images = nn.functional.interpolate(images, size=size, mode="bilinear", align_corners=False)
        everything = Split(images.flatten(1)[..., None], torch.tensor(bunch.target, dtype=torch.int64))
        shuffled = torch.randperm(len(everything), generator=torch.Generator().manual_seed(0))
        return with_validation(everything.select(shuffled[TEST_SAMPLES:]), everything.select(shuffled[:TEST_SAMPLES]))


MNIST_SIDE = 28
_UNSIGNED_BYTE = 0x08  # the third byte of an IDX file


@dataclass(frozen=True)
class _ImagesInIDX(DataSet):
    """Images of 28 × 28 pixels in four files: images and labels, to train and to test."""

    time: bool = False

    of_batches = ("time",)
    address: ClassVar[str]
    folders: ClassVar[tuple[str, ...]]
    checksums: ClassVar[dict[str, str]]

    @property
    def form(self) -> Form:
        return Form(length=MNIST_SIDE * MNIST_SIDE, classes=10, channels=1 + self.time, time=self.time)

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        return tuple(
            Wanted(
                tuple(f"{folder}/{stem}{end}" for folder in self.folders for end in ("", ".gz")),
                Remote(f"{self.address}/{stem}.gz", f"md5:{md5}"),
            )
            for stem, md5 in self.checksums.items()
        )

    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        train_x, train_y, test_x, test_y = paths
        return with_validation(_split(train_x, train_y), _split(test_x, test_y))


@final
@dataclass(frozen=True)
class SequentialMNIST(_ImagesInIDX):
    """sMNIST: handwritten digits, intensities in [0, 1]."""

    name = "smnist"
    address = "https://ossci-datasets.s3.amazonaws.com/mnist"
    folders = ("MNIST/raw", "mnist")
    checksums: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
    }


@final
@dataclass(frozen=True)
class FashionMNIST(_ImagesInIDX):
    """Clothes in the form of sMNIST."""

    name = "fashion"
    address = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
    folders = ("FashionMNIST/raw", "fashion-mnist", "fashion")
    checksums: ClassVar[dict[str, str]] = {
        "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
    }


def _split(images: Path, labels: Path) -> Split:
    x, y = read_idx(images, axes=3), read_idx(labels, axes=1)
    if x.shape[1:] != (MNIST_SIDE, MNIST_SIDE):
        raise DataError(f"{images} holds images of {x.shape[1:]} pixels, expected {(MNIST_SIDE, MNIST_SIDE)}")
    if len(x) != len(y):
        raise DataError(f"{images} holds {len(x)} images and {labels} {len(y)} labels, expected as many")
    if y.max(initial=0) > 9:
        raise DataError(f"{labels} holds the label {y.max()}, expected 0 to 9")
    return Split(torch.from_numpy(x.reshape(len(x), -1, 1)), torch.from_numpy(y.astype(np.int64)))


def read_idx(path: Path, *, axes: int) -> UInt8[np.ndarray, "..."]:
    """Read an IDX file: 0, 0, type, number of axes; each axis as a big-endian int32; then the values."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except BROKEN as error:
            raise half_there(path, error) from None
    magic = bytes([0, 0, _UNSIGNED_BYTE, axes])
    if data[:4] != magic:
        raise DataError(f"{path} begins with {data[:4].hex(' ')}, expected {magic.hex(' ')}: bytes with {axes} axes")
    start = 4 * (1 + axes)
    shape = tuple(np.frombuffer(data[4:start], ">i4").tolist()) if len(data) >= start else None
    if shape is None or len(data) != start + int(np.prod(shape)):
        raise DataError(f"{path} has {len(data)} bytes, its head promises {shape}; delete it and get it again")
    return np.frombuffer(bytearray(data), np.uint8, offset=start).reshape(shape)


CIFAR_SIDE, COLOURS = 32, 3
PIXELS = COLOURS * CIFAR_SIDE * CIFAR_SIDE
RECORDS = 10_000  # a file
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")

# Of the 50 000 training images, in [0, 1].
MEAN, DEVIATION = (0.49140, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159)
GREY_MEAN, GREY_DEVIATION = 0.48091, 0.23919
LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow and torchvision turn colours to grey


@final
@dataclass(frozen=True)
class SequentialCIFAR(DataSet):
    """sCIFAR: images of CIFAR-10, mean 0 and variance 1 a channel."""

    grey: bool = False
    time: bool = False

    name = "scifar"
    of_batches = ("time",)

    @property
    def form(self) -> Form:
        shift, deviation = ((GREY_MEAN,), (GREY_DEVIATION,)) if self.grey else (MEAN, DEVIATION)
        scale = tuple(1 / value for value in deviation)
        found = Form(length=CIFAR_SIDE * CIFAR_SIDE, classes=10, channels=len(shift), shift=shift, scale=scale)
        return replace(found, channels=len(shift) + 1, time=True) if self.time else found

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        kinds = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
        places = tuple(f"{folder}{kind}" for kind in kinds for folder in ("", "cifar10/"))
        url = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
        return (Wanted(places, Remote(url, "md5:c58f30108f718f92721af3b95e74349a")),)

    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        (path,) = paths
        read: dict[str, tuple[UInt8[np.ndarray, "images pixels"], list[int]]] = {}
        for name, where, stream in members(path, rf"(^|/)({'|'.join(BATCHES)})(\.bin)?$"):
            parse = _records if name.endswith(".bin") else _pickled
            read[Path(name).name.removesuffix(".bin")] = parse(contents(stream, where), where)
            progress("reading CIFAR-10", len(read), len(BATCHES))
        require_members(path, set(read), set(BATCHES))
        return with_validation(self._split(read, BATCHES[:-1]), self._split(read, BATCHES[-1:]))

    def _split(self, read: dict[str, Any], names: Sequence[str]) -> Split:
        pixels = np.concatenate([read[name][0] for name in names])
        x = torch.from_numpy(pixels).unflatten(1, (COLOURS, -1)).transpose(1, 2).contiguous()
        y = torch.tensor([label for name in names for label in read[name][1]])
        return Split(greyed(x) if self.grey else x, y)


def greyed(x: UInt8[Tensor, "images length 3"]) -> UInt8[Tensor, "images length 1"]:
    """The luminance of an image, rounded."""
    weights: Float[Tensor, " 3"] = torch.tensor(LUMINANCE)
    parts = [(part.float() @ weights).round().to(torch.uint8) for part in x.split(10_000)]
    return torch.cat(parts)[..., None]


def _records(data: bytes, where: str) -> tuple[UInt8[np.ndarray, "images pixels"], list[int]]:
    """Read the binary version: a byte of label and 3072 of pixels a record."""
    if len(data) != RECORDS * (1 + PIXELS):
        raise DataError(f"{where} has {len(data)} bytes, expected {RECORDS * (1 + PIXELS)}; get it again")
    records = np.frombuffer(bytearray(data), np.uint8).reshape(RECORDS, 1 + PIXELS)
    return records[:, 1:], _labels(records[:, 0].tolist(), where)


def _pickled(data: bytes, where: str) -> tuple[UInt8[np.ndarray, "images pixels"], list[int]]:
    """Read the Python version: a dictionary with `data` and `labels`."""
    try:
        stored = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    # A damaged pickle can fail in any of these ways, inside NumPy's own reconstruction too.
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise DataError(f"{where} is broken or no batch of CIFAR-10 ({error}); get it again") from None
    if not isinstance(stored, dict) or not {b"data", b"labels"} <= stored.keys():
        found = sorted(map(str, stored)) if isinstance(stored, dict) else type(stored).__name__
        raise DataError(f"{where} holds {found}, expected a dictionary with b'data' and b'labels'")
    pixels, labels = stored[b"data"], stored[b"labels"]
    shape, expected = getattr(pixels, "shape", None), (RECORDS, PIXELS)
    if shape != expected or pixels.dtype != np.uint8 or len(labels) != RECORDS:
        raise DataError(f"{where} holds data {shape} and {len(labels)} labels, expected bytes {expected}")
    return pixels, _labels(list(labels), where)


def _labels(labels: list[int], where: str) -> list[int]:
    if strange := [label for label in labels if label not in range(10)]:
        raise DataError(f"{where} holds the label {strange[0]!r}, expected 0 to 9")
    return labels


@final
class _ArraysOnly(pickle.Unpickler):
    """Unpickle NumPy arrays in plain containers; whatever else a pickle may name is never called."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in an old protocol
            return lambda text, encoding: text.encode("latin1")
        raise pickle.UnpicklingError(f"it names {module}.{name}, expected arrays of NumPy alone")
