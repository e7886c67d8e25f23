"""MNIST and Fashion-MNIST, pixel by pixel: 784 steps of one channel (LeCun et al. 1998, Xiao et al. 2017)."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

import numpy as np
import torch
from jaxtyping import UInt8

from compressm.data.archives import BROKEN, half_there
from compressm.data.dataset import DataSet, Form
from compressm.data.errors import DataError
from compressm.data.fetch import Progress, Remote, Wanted
from compressm.data.splitting import Splits, with_validation
from compressm.data.task import Split

SIDE = 28
_UNSIGNED_BYTE = 0x08  # the third byte of an IDX file


@dataclass(frozen=True)
class _ImagesInIDX(DataSet):
    """Four files: images and labels, to train and to test."""

    address: ClassVar[str]
    folders: ClassVar[tuple[str, ...]]
    checksums: ClassVar[dict[str, str]]

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

    @property
    def form(self) -> Form:
        return Form(length=SIDE * SIDE, classes=10, channels=1)


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

    @property
    def form(self) -> Form:
        return Form(length=SIDE * SIDE, classes=10, channels=1)


def _split(images: Path, labels: Path) -> Split:
    x, y = read_idx(images, axes=3), read_idx(labels, axes=1)
    if x.shape[1:] != (SIDE, SIDE):
        raise DataError(f"{images} holds images of {x.shape[1:]} pixels, expected {(SIDE, SIDE)}")
    if len(x) != len(y):
        raise DataError(f"{images} holds {len(x)} images and {labels} {len(y)} labels, expected as many")
    if y.max(initial=0) > 9:
        raise DataError(f"{labels} holds the label {y.max()}, expected 0 to 9")
    return Split(torch.from_numpy(x.reshape(len(x), -1, 1)), torch.from_numpy(y.astype(np.int64)))


def read_idx(path: Path, *, axes: int) -> UInt8[np.ndarray, "..."]:
    """Bytes 0, 0, type, number of axes; each axis as a big-endian int32; then the values."""
    data = _contents(path)
    magic = bytes([0, 0, _UNSIGNED_BYTE, axes])
    if data[:4] != magic:
        raise DataError(f"{path} begins with {data[:4].hex(' ')}, expected {magic.hex(' ')}: bytes with {axes} axes")
    start = 4 * (1 + axes)
    shape = tuple(np.frombuffer(data[4:start], ">i4").tolist()) if len(data) >= start else None
    if shape is None or len(data) != start + int(np.prod(shape)):
        raise DataError(f"{path} has {len(data)} bytes, its head promises {shape}; delete it and get it again")
    return np.frombuffer(bytearray(data), np.uint8, offset=start).reshape(shape)


def _contents(path: Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except BROKEN as error:
        raise half_there(path, error) from None
