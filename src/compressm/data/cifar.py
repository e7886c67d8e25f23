"""CIFAR-10, pixel by pixel: 1024 steps of three channels, or of one in grey (Krizhevsky 2009)."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from compressm.data.archives import contents, members, place, require_members
from compressm.data.dataset import DataSet, Form
from compressm.data.errors import DataError
from compressm.data.fetch import Progress, Remote, Wanted
from compressm.data.splitting import Splits, with_validation
from compressm.data.task import Split

SIDE, COLOURS = 32, 3
PIXELS = COLOURS * SIDE * SIDE
RECORDS = 10_000  # a file
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")

# Of the 50 000 training images, in [0, 1].
MEAN, DEVIATION = (0.49140, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159)
GREY_MEAN, GREY_DEVIATION = 0.48091, 0.23919
LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow and torchvision turn colours to grey


@final
@dataclass(frozen=True)
class SequentialCIFAR(DataSet):
    """sCIFAR: mean 0 and variance 1 a channel."""

    grey: bool = False

    name = "scifar"

    @property
    def form(self) -> Form:
        shift, deviation = ((GREY_MEAN,), (GREY_DEVIATION,)) if self.grey else (MEAN, DEVIATION)
        scale = tuple(1 / value for value in deviation)
        return Form(length=SIDE * SIDE, classes=10, channels=len(shift), shift=shift, scale=scale)

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        kinds = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
        places = tuple(f"{folder}{kind}" for kind in kinds for folder in ("", "cifar10/"))
        url = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
        return (Wanted(places, Remote(url, "md5:c58f30108f718f92721af3b95e74349a")),)

    def parse(self, paths: Sequence[Path], progress: Progress) -> Splits:
        (path,) = paths
        read: dict[str, tuple[UInt8[np.ndarray, "images pixels"], list[int]]] = {}
        for name, stream in members(path, rf"(^|/)({'|'.join(BATCHES)})(\.bin)?$"):
            batch = re.split(r"[/.]", name)[-2 if name.endswith(".bin") else -1]
            where, parse = place(path, name), _records if name.endswith(".bin") else _pickled
            read[batch] = parse(contents(stream, where), where)
            progress("reading CIFAR-10", len(read), len(BATCHES))
        require_members(path, set(read), set(BATCHES))
        return with_validation(self._split(read, BATCHES[:-1]), self._split(read, BATCHES[-1:]))

    def _split(self, read: dict[str, Any], names: Sequence[str]) -> Split:
        pixels = np.concatenate([read[name][0] for name in names])
        x = torch.from_numpy(pixels).unflatten(1, (COLOURS, -1)).transpose(1, 2).contiguous()
        y = torch.tensor([label for name in names for label in read[name][1]])
        return Split(greyed(x) if self.grey else x, y)


def greyed(x: UInt8[Tensor, "images length 3"]) -> UInt8[Tensor, "images length 1"]:
    """The luminance, rounded."""
    weights: Float[Tensor, " 3"] = torch.tensor(LUMINANCE)
    parts = [(part.float() @ weights).round().to(torch.uint8) for part in x.split(10_000)]
    return torch.cat(parts)[..., None]


def _records(data: bytes, where: str) -> tuple[UInt8[np.ndarray, "images pixels"], list[int]]:
    """The binary version: a byte of label and 3072 of pixels a record."""
    if len(data) != RECORDS * (1 + PIXELS):
        raise DataError(f"{where} has {len(data)} bytes, expected {RECORDS * (1 + PIXELS)}; get it again")
    records = np.frombuffer(bytearray(data), np.uint8).reshape(RECORDS, 1 + PIXELS)
    return records[:, 1:], _labels(records[:, 0].tolist(), where)


def _pickled(data: bytes, where: str) -> tuple[UInt8[np.ndarray, "images pixels"], list[int]]:
    """The Python version: a dictionary with `data` and `labels`."""
    try:
        stored = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
    # A damaged pickle can fail in any of these ways, inside NumPy's own reconstruction too.
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise DataError(f"{where} is broken or no batch of CIFAR-10 ({error}); get it again") from None
    if not isinstance(stored, dict) or not {b"data", b"labels"} <= stored.keys():
        found = sorted(map(str, stored)) if isinstance(stored, dict) else type(stored).__name__
        raise DataError(f"{where} holds {found}, expected a dictionary with b'data' and b'labels'")
    pixels, labels = stored[b"data"], stored[b"labels"]
    expected = (RECORDS, PIXELS)
    if getattr(pixels, "shape", None) != expected or pixels.dtype != np.uint8 or len(labels) != RECORDS:
        shape = getattr(pixels, "shape", None)
        raise DataError(f"{where} holds data {shape} and {len(labels)} labels, expected bytes {expected}")
    return pixels, _labels(list(labels), where)


def _labels(labels: list[int], where: str) -> list[int]:
    if strange := [label for label in labels if label not in range(10)]:
        raise DataError(f"{where} holds the label {strange[0]!r}, expected 0 to 9")
    return labels


@final
class _ArraysOnly(pickle.Unpickler):
    """Unpickles NumPy arrays in plain containers; whatever else a pickle may name is never called."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in an old protocol
            return _latin1
        raise pickle.UnpicklingError(f"it names {module}.{name}, expected arrays of NumPy alone")


def _latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin1")
