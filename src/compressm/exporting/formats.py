"""The formats of exported files: how each is written, and how its own runtime loads and runs it."""

from __future__ import annotations

import importlib
import json
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, final

import torch
from torch import Tensor
from torch.export import ExportedProgram

from compressm.errors import ExportError, did_you_mean
from compressm.exporting.recurrences import LONGEST
from compressm.layers.base import require_sizes

_KEY = "compressm"  # under which metadata are stored
_LARGEST = 2**31  # bytes of a protocol buffer


def _require_input(name: str, value: Tensor, shape: Sequence[int | str], dtype: str) -> None:
    fits = all(isinstance(size, str) or size == found for size, found in zip(shape, value.shape, strict=False))
    if value.ndim != len(shape) or not fits or value.dtype != getattr(torch, dtype) or value.device.type != "cpu":
        raise ExportError(
            f"{name} is {value.dtype} of shape {tuple(value.shape)} on {value.device}, expected torch.{dtype} of shape"
            f" ({', '.join(map(str, shape))}{',' * (len(shape) == 1)}) on the CPU"
        )


def _require_values(name: str, values: Tensor, least: int, most: int) -> None:
    low, high = (int(value) for value in torch.aminmax(values))
    if low < least or high > most:
        raise ExportError(f"{name} run from {low} to {high}, expected {least} to {most}")


@dataclass(frozen=True)
class Loaded:
    """An exported file in its runtime: a call takes the inputs and gives the outputs, as tensors."""

    run: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    metadata: Mapping[str, Any]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        self._require(inputs)
        # Compiled code takes the memory of its inputs as contiguous, whatever they are.
        return tuple(self.run([value.detach().contiguous() for value in inputs]))

    def _require(self, inputs: Sequence[object]) -> None:
        """Refuse what runtimes misread.

        onnxruntime broadcasts other batches, takes token −1 as the last one and reads on after a length of 0; compiled
        code reads other memory.
        """
        names = self.metadata["inputs"]
        if len(inputs) != len(names) or not all(isinstance(value, Tensor) for value in inputs):
            got = ", ".join(type(value).__name__ for value in inputs)
            raise ExportError(f"the inputs are ({got}), expected the tensors {' and '.join(names)}")
        x, other = cast(tuple[Tensor, Tensor], inputs)
        batch, pairs = "batch" if not x.ndim else x.shape[0], "state_size" not in self.metadata
        numbers, channels = self.metadata["state_dtype"], self.metadata.get("channels")
        inner: tuple[int, ...] = () if channels is None else (channels,)
        axes: tuple[int | str, ...]
        size: tuple[int | str, ...]
        if names[1] == "state":
            axes, size, kind = (batch,), (batch, self.metadata["state_size"]), numbers
        else:
            axes = (batch, *((2,) if pairs else ()), "length")
            size, kind = axes[:-1], "int64"
        _require_input("x", x, (*axes, *inner), "int64" if channels is None else numbers)
        _require_input(names[1], other, size, kind)
        if 0 in x.shape:
            raise ExportError(f"x has shape {tuple(x.shape)}, expected one sequence and one step at least")
        most = self.metadata.get("largest_batch")
        if most is not None and len(x) > most:
            raise ExportError(
                f"x has {len(x)} sequences, expected at most {most}: export with ExecuTorch(batch={len(x)})"
            )
        if channels is None:
            _require_values("the tokens in x", x, 0, self.metadata["vocabulary"] - 1)
        if names[1] == "lengths":
            length = x.shape[len(axes) - 1]
            if length > LONGEST:
                raise ExportError(f"x has {length} steps, expected at most {LONGEST}: step through longer sequences")
            _require_values("lengths", other, 1, length)


class Format(ABC):
    """A kind of exported file."""

    SUFFIX: ClassVar[str]
    EXTRA: ClassVar[str | None] = None  # of this package, for the runtime
    PACKAGES: ClassVar[tuple[str, ...]] = ()
    takes: ClassVar[tuple[str, ...]] = ("step", "forward")

    @property
    def runtime(self) -> str:
        """The runtime with its version, for messages."""
        return f"torch {torch.__version__}"

    @property
    def most(self) -> int | None:
        """The largest batch that a file of this format takes; None if there is no limit."""
        return None

    @abstractmethod
    def write(self, program: ExportedProgram, names: tuple[list[str], list[str]], path: Path, metadata: str) -> None:
        """Write the program; `names` are those of inputs and outputs."""

    def load(self, path: Path | str) -> Loaded:
        """Load a file that `write` wrote, in its runtime, on one thread of the CPU where the runtime lets us say."""
        if not isinstance(path, str | os.PathLike) or not Path(path).is_file():
            raise ExportError(f"{str(path)!r:.200} is not a file, expected one that cs.export wrote ({self.SUFFIX})")
        try:
            with quietly():
                return self.loaded(Path(path))
        except ModuleNotFoundError:
            self.require()
            raise
        except Exception as error:  # runtimes have their own classes of errors
            raise ExportError(
                f"{path} does not load in {self.runtime}: expected a whole file that cs.export wrote with"
                f" {type(self).__name__}(); {reason_of(error)}"
            ) from error

    @abstractmethod
    def loaded(self, path: Path) -> Loaded:
        """Load the file as `load` does; errors are those of the runtime."""

    def require(self) -> None:
        """Refuse to go on without the packages of the runtime."""
        for package in self.PACKAGES:
            try:
                importlib.import_module(package)
            except ModuleNotFoundError as error:
                if error.name is None or error.name.partition(".")[0] != package.partition(".")[0]:
                    raise
                raise ExportError(
                    f"{type(self).__name__} needs the package {package}: pip install 'compressm[{self.EXTRA}]'"
                ) from None


@final
@dataclass(frozen=True)
class TorchExport(Format):
    """torch.export: a `.pt2` file that `torch.export.load` reads."""

    SUFFIX = ".pt2"

    def write(self, program: ExportedProgram, names: tuple[list[str], list[str]], path: Path, metadata: str) -> None:
        # Into memory first: torch ends the process if it cannot write a file to its end.
        torch.export.save(program, buffer := BytesIO(), extra_files={f"{_KEY}.json": metadata})
        path.write_bytes(buffer.getbuffer())

    def loaded(self, path: Path) -> Loaded:
        extra = {f"{_KEY}.json": ""}
        module = torch.export.load(path, extra_files=extra).module()
        return Loaded(lambda inputs: _several(module(*inputs)), json.loads(extra[f"{_KEY}.json"]))


@final
@dataclass(frozen=True)
class AOTInductor(Format):
    """AOTInductor: a `.pt2` file of machine code for this kind of processor; writing it needs a C++ compiler."""

    SUFFIX = ".pt2"

    def write(self, program: ExportedProgram, names: tuple[list[str], list[str]], path: Path, metadata: str) -> None:
        options = {"aot_inductor.metadata": {_KEY: metadata}}
        # Into memory first, as above.
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                program, package_path=(buffer := BytesIO()), inductor_configs=options
            )
        path.write_bytes(buffer.getbuffer())

    def loaded(self, path: Path) -> Loaded:
        model = torch._inductor.aoti_load_package(str(path))
        return Loaded(lambda inputs: _several(model(*inputs)), json.loads(model.get_metadata()[_KEY]))


@final
@dataclass(frozen=True)
class ONNX(Format):
    """ONNX, run by onnxruntime; `opset` is the version of its operators."""

    opset: int = 18

    SUFFIX = ".onnx"
    EXTRA = "onnx"
    PACKAGES = ("onnx", "onnxscript", "onnxruntime")

    def __post_init__(self) -> None:
        require_sizes(opset=self.opset)
        if self.opset < 18:
            raise ExportError(f"opset is {self.opset}, expected at least 18")

    @property
    def runtime(self) -> str:
        return f"onnxruntime {importlib.import_module('onnxruntime').__version__}"

    def write(self, program: ExportedProgram, names: tuple[list[str], list[str]], path: Path, metadata: str) -> None:
        size = sum(value.nbytes for value in program.state_dict.values())
        if size >= _LARGEST:
            raise ExportError(
                f"the constants take {size:,} bytes, an ONNX file has less than {_LARGEST:,}: use TorchExport()"
            )
        inputs, outputs = names
        made = torch.onnx.export(
            program, input_names=inputs, output_names=outputs, opset_version=self.opset, dynamo=True, verbose=False
        )
        assert made is not None
        if (found := made.model.opset_imports.get("")) != self.opset:
            raise ExportError(
                f"opset is {self.opset}, and torch writes {found} instead: expected a version that it knows"
            )
        made.model.metadata_props[_KEY] = metadata
        made.save(path)

    def loaded(self, path: Path) -> Loaded:
        ort = importlib.import_module("onnxruntime")
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        inputs = [one.name for one in session.get_inputs()]

        def run(given: Sequence[Tensor]) -> list[Tensor]:
            feed = {name: value.numpy() for name, value in zip(inputs, given, strict=True)}
            return [torch.from_numpy(value) for value in session.run(None, feed)]

        return Loaded(run, json.loads(session.get_modelmeta().custom_metadata_map[_KEY]))


@final
@dataclass(frozen=True)
class ExecuTorch(Format):
    """ExecuTorch, for phones and small devices; it steps up to `batch` sequences, for which memory is planned."""

    backend: Literal["portable", "xnnpack"] = "portable"
    batch: int = 8

    SUFFIX = ".pte"
    EXTRA = "executorch"
    PACKAGES = ("executorch.exir", "executorch.runtime")
    takes = ("step",)

    def __post_init__(self) -> None:
        require_sizes(batch=self.batch)
        if self.backend not in ("portable", "xnnpack"):
            near = did_you_mean(self.backend, ("portable", "xnnpack"))
            raise ExportError(f"backend is {self.backend!r:.80}, expected 'portable' or 'xnnpack'{near}")

    @property
    def runtime(self) -> str:
        from importlib.metadata import version

        return f"executorch {version('executorch')}, {self.backend}"

    @property
    def most(self) -> int | None:
        return self.batch

    def write(self, program: ExportedProgram, names: tuple[list[str], list[str]], path: Path, metadata: str) -> None:
        exir = importlib.import_module("executorch.exir")
        partitioner = None
        if self.backend == "xnnpack":
            place = "executorch.backends.xnnpack.partition.xnnpack_partitioner"
            partitioner = [importlib.import_module(place).XnnpackPartitioner()]
        text = torch.tensor(list(metadata.encode()), dtype=torch.uint8)
        edge = exir.to_edge_transform_and_lower(program, partitioner=partitioner, constant_methods={_KEY: text})
        # Memory for the largest batch; without this, for the batch of the trace.
        passes = importlib.import_module("executorch.exir.passes.sym_shape_eval_pass")
        config = exir.ExecutorchBackendConfig(sym_shape_eval_pass=passes.ConstraintBasedSymShapeEvalPass())
        path.write_bytes(edge.to_executorch(config).buffer)

    def loaded(self, path: Path) -> Loaded:
        program = importlib.import_module("executorch.runtime").Runtime.get().load_program(str(path))
        method = program.load_method("forward")
        text = bytes(program.load_method(_KEY).execute([])[0].tolist()).decode()
        # The outputs lie in memory that the next call writes over.
        return Loaded(lambda inputs: [out.clone() for out in method.execute(list(inputs))], json.loads(text))


FORMATS: tuple[type[Format], ...] = (ONNX, TorchExport, AOTInductor, ExecuTorch)


def format_for(path: Path, format: Format | None) -> Format:
    """The format, by default that of the path's suffix."""
    by_suffix = {".onnx": ONNX, ".pt2": TorchExport, ".pte": ExecuTorch}
    if format is None:
        kind = by_suffix.get(path.suffix.lower())
        if kind is None:
            raise ExportError(
                f"{path.name} ends in {path.suffix!r}, expected .onnx, .pt2 (TorchExport) or .pte (ExecuTorch)"
            )
        return kind()
    if not isinstance(format, Format):
        names = ", ".join(f"{kind.__name__}()" for kind in FORMATS)
        raise ExportError(f"format is {format!r:.80}, expected one of {names} of compressm.exporting")
    if path.suffix.lower() != format.SUFFIX:
        raise ExportError(f"{path.name} ends in {path.suffix!r}, expected {format.SUFFIX} for {type(format).__name__}")
    return format


def _several(outputs: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else outputs


def reason_of(error: Exception) -> str:
    """The class of an error and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]


@contextmanager
def quietly() -> Iterator[None]:
    """Keep the chatter of exporters and compilers to themselves; their errors are raised all the same."""
    names = ("torch.onnx", "torch.export", "torch._inductor", "onnxscript", "onnx_ir", "executorch", "torchao", "root")
    held = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in held.items():
            logging.getLogger(name).setLevel(level)
