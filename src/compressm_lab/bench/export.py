"""Export models to every runtime: differences and sizes of files, and the time of a step before and after a cut."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressm import layers
from compressm.compression import Baked, TargetOrder, compress_
from compressm.errors import ExportError
from compressm.exporting import ONNX, AOTInductor, ExecuTorch, Format, TorchExport, export, flat
from compressm.models import LanguageModel, SequenceClassifier
from compressm.running import Stream
from compressm_lab.bench.timing import Progress, columns, median_seconds, silent, threads_for
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.training.building import DTYPES

_VOCABULARY, _INPUTS, _CLASSES = 256, 3, 10
_STEPS = 50  # for each repeat
_LAYERS = {"LRU": (256, 28), "S5": (256, 28), "S4D": (256, 28), "Mamba": (128, 16)}  # orders before and after a cut
_MODELS = ("classifier", "language model")
FORMATS: dict[str, Format] = {
    "torch.export": TorchExport(),
    "onnxruntime": ONNX(),
    "ExecuTorch portable": ExecuTorch(),
    "ExecuTorch XNNPACK": ExecuTorch(backend="xnnpack"),
    "AOTInductor": AOTInductor(),
}
OF_SEQUENCES = ("torch.export", "onnxruntime")


@dataclass(frozen=True)
class ExportCase:
    """A model and what of it is exported, before its cut and after it; `unequal` cuts blocks to different orders."""

    layer: str
    model: str
    what: str
    order: int
    rank: int
    depth: int = 4
    width: int = 128
    precision: str = "float32"
    unequal: bool = False
    formats: tuple[str, ...] = tuple(FORMATS)

    def __str__(self) -> str:
        more = ", unequal orders" if self.unequal else "" if self.precision == "float32" else f", {self.precision}"
        return f"{self.what} of a {self.layer} {self.model}, {self.order} → {self.rank}{more}"

    def build(self) -> nn.Module:
        """The model before its cut, with norms as after some training."""
        torch.manual_seed(0)
        kind, sizes = getattr(layers, self.layer), columns(self, "depth", "width", "order")
        if self.model == "language model":
            return LanguageModel(kind, vocabulary=_VOCABULARY, **sizes).to(DTYPES[self.precision])  # type: ignore[arg-type]
        model = SequenceClassifier(kind, inputs=_INPUTS, classes=_CLASSES, **sizes)  # type: ignore[arg-type]
        for _ in range(3):
            model(torch.randn(8, 32, _INPUTS))  # running averages
        return model.to(DTYPES[self.precision])

    def cut_(self, model: nn.Module) -> None:
        """Cut every layer to `rank`, or the first ones to fewer states."""
        tokens = self.model == "language model"
        given = torch.randint(_VOCABULARY, (4, 64)) if tokens else torch.randn(4, 64, _INPUTS)
        fewer = {f"blocks.{k}.ssm": TargetOrder(self.rank - k) for k in range(self.depth)}
        compress_(
            model,
            keep=TargetOrder(self.rank),
            overrides=fewer if self.unequal else None,
            calibrate=lambda one: one(given),
            selective=Baked(),
        )


def default_cases() -> tuple[ExportCase, ...]:
    """Steps of all layers and models in all runtimes, unequal orders and bfloat16; sequences at smaller sizes."""
    pairs = [(layer, model) for layer in _LAYERS for model in _MODELS]
    small: dict[str, Any] = {"order": 32, "rank": 8, "depth": 2, "width": 32}
    steps = [ExportCase(layer, model, "step", *_LAYERS[layer]) for layer, model in pairs]
    sequences = [ExportCase(layer, model, "forward", **small, formats=OF_SEQUENCES) for layer, model in pairs]
    unequal = [ExportCase(layer, "language model", "step", **small, unequal=True) for layer in ("LRU", "S5", "S4D")]
    halves = [ExportCase(layer, "language model", "step", **small, precision="bfloat16") for layer in _LAYERS]
    return (*steps, *sequences, *unequal, *halves)


def measure_export(
    cases: Iterable[ExportCase] | None = None, *, device: str = "cpu", repeats: int = 9, progress: Progress = silent
) -> Measurement:
    """Export every case in every format, check it, and time its steps for one sequence, on one thread."""
    rows: list[Row] = []
    with threads_for(torch.device(device)):
        for case in default_cases() if cases is None else cases:
            progress(str(case))
            rows += _rows(case, repeats)
        return Measurement("export", "Exported models", repeats, rows)


def _rows(case: ExportCase, repeats: int) -> Iterator[Row]:
    model = case.build()
    for cut in ("before", "after"):
        if cut == "after":
            case.cut_(model.float())
            model.to(DTYPES[case.precision])
        orders = [layer.order for layer in model.modules() if isinstance(layer, layers.SSMLayer)]
        told = columns(case, "layer", "model", "what", "depth", "width", "precision")
        told |= {"cut": cut, "orders": " ".join(map(str, orders)), "kind": "unequal" if case.unequal else "equal"}
        for row in _runtimes(case, model.eval(), repeats):
            yield told | row


def _runtimes(case: ExportCase, model: nn.Module, repeats: int) -> Iterator[Row]:
    """One row a runtime: those of this package, then those of files."""
    timed = case.what == "step" and case.precision == "float32"
    x = torch.zeros(1, dtype=torch.int64) if case.model == "language model" else torch.zeros(1, _INPUTS)
    state = flat(model.initial_state(1)) if timed else torch.zeros(0)  # type: ignore[operator]

    def a_step(runtime: str, work: Callable[[], object]) -> Row:
        return {"runtime": runtime, "step_s": median_seconds(work, repeats=_STEPS * repeats)}

    if timed:
        with torch.inference_mode():
            initial = model.initial_state(1)  # type: ignore[operator]
            yield a_step("eager step", lambda: model.step(x, initial))  # type: ignore[operator]
        yield a_step("Stream", partial(Stream(model), x))
    for name in case.formats:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"model{FORMATS[name].SUFFIX}"
            try:
                done = export(model, path, what=case.what, format=FORMATS[name])  # type: ignore[arg-type]
            except ExportError as error:
                yield {"runtime": name, "reason": str(error)}
                continue
            row: Row = {"runtime": name, **columns(done, "difference", "tolerance", "bytes")}
            yield row | a_step(name, partial(_called, FORMATS[name].load(path).run, x, state)) if timed else row


def _called(run: Callable[[Sequence[Tensor]], Sequence[Tensor]], x: Tensor, state: Tensor) -> object:
    with torch.inference_mode():
        return run((x, state))
