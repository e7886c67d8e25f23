"""`export`: write a model for a runtime, run the file there against the model, and keep it only if both agree."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from compressm.errors import ExportError, did_you_mean
from compressm.exporting.formats import Format, Loaded, format_for, quietly, reason_of
from compressm.exporting.graphs import Graph, Model, SequenceGraph, StepGraph, layers_of, require_exportable
from compressm.exporting.recurrences import LONGEST, Traced, at_ends, wide
from compressm.files import replacing
from compressm.layers.base import require_sizes
from compressm.models import ClassifierState, MeanPooling, SequenceClassifier
from compressm.models.encoder import EmbeddingEncoder, LinearEncoder
from compressm.saving.kinds import as_path

VERSION = 1  # of the metadata
Result = TypeVar("Result")
# The largest difference that a file may have, relative to the largest number of the model's own output.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_BATCH, _SEED = 3, 0
_TRACED = 40  # steps of the sequences that a forward pass is traced with


@final
@dataclass(frozen=True)
class Exported:
    """A file that was written and checked: the largest difference from the model, relative to its largest output."""

    path: Path
    format: Format
    what: str
    runtime: str
    steps: int
    batch: int
    difference: float
    tolerance: float
    bytes: int
    metadata: dict[str, Any]

    def __str__(self) -> str:
        steps, sequences = f"step{'s' * (self.steps != 1)}", f"sequence{'s' * (self.batch != 1)}"
        return (
            f"{self.path}: {self.what}, {self.bytes:,} bytes; {self.runtime} ran {self.steps} {steps} of {self.batch}"
            f" {sequences}, the largest relative difference is {self.difference:.1e} (allowed: {self.tolerance:.0e})"
        )


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    what: Literal["step", "forward"] = "step",
    format: Format | None = None,
    example: Tensor | None = None,
    check: int = 64,
) -> Exported:
    """Write the model's step, or its forward pass, to a file for a runtime, if it computes there what the model does.

    `step` takes (x, state) and gives (y, next_state): x is a token or a frame of each sequence, the state is one flat
    tensor, zeros at the start. `forward` takes (x, lengths) and gives (y, next_state), from which steps can go on.
    Batch and length are dynamic. The format follows from the suffix: .onnx, .pt2 (TorchExport), .pte (ExecuTorch).

    The file runs `check` steps in its runtime against the model in evaluation mode, on `example`, inputs of shape
    (batch, length, ...), or on random ones. If they differ by more than `TOLERANCE`, nothing is left.
    """
    return write(model, path, what=what, format=format, example=example, check=check)


@contextmanager
def _plainly() -> Iterator[None]:
    """Leave out the caller's default device and autocast: neither is that of the file."""
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        yield


@_plainly()
def write(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    what: str,
    format: Format | None,
    example: Tensor | None,
    check: int,
    **facts: str,
) -> Exported:
    """Do as `export`, with more facts for the metadata, such as the commit of a run."""
    inner, target = require_exportable(model), as_path(path)
    if what not in ("step", "forward"):
        near = did_you_mean(what, ("step", "forward"))
        raise ExportError(f"what is {what!r:.80}, expected 'step' or 'forward'{near}")
    require_sizes(check=check)
    if what == "forward" and check > LONGEST:
        raise ExportError(f"check is {check}, expected at most {LONGEST}, the longest sequence of a forward pass")
    format = format_for(target, format)
    if what not in format.takes:
        raise ExportError(f"what is {what!r}, {type(format).__name__} takes {', '.join(map(repr, format.takes))} only")
    if target.is_dir():
        raise ExportError(f"{target} is a folder, expected a file")
    with quietly():
        format.require()
    case = Case(inner, what, example, check)
    metadata = case.metadata() | ({} if format.most is None else {"largest_batch": format.most}) | facts
    with quietly(), torch.no_grad(), replacing(target) as scratch:
        program = _reached("torch.export", "trace the model", lambda: case.program(format), case.advice)
        text = json.dumps(metadata)
        _reached(format.runtime, "write the file", lambda: format.write(program, case.names, scratch, text))
        difference = _reached(format.runtime, "run the file", lambda: case.difference(format.loaded(scratch), format))
        if not difference <= case.tolerance:
            raise ExportError(
                f"in {format.runtime} the {what} differs from the model by {difference:.2e} of its largest output,"
                f" allowed are {case.tolerance:.0e}: the file is not kept"
            )
        size = scratch.stat().st_size
    return Exported(
        *(
            target,
            format,
            what,
            format.runtime,
            check,
            min(len(case.inputs), format.most or 2**31),
            difference,
            case.tolerance,
            size,
            metadata,
        )
    )


def _reached(runtime: str, aim: str, work: Callable[[], Result], advice: str = "") -> Result:
    """Do the work; an error of a runtime is one of ours, with its own reason."""
    try:
        return work()
    except (ExportError, OSError):
        raise
    except Exception as error:
        # Runtimes have their own classes of errors, some right below Exception.
        raise ExportError(f"{runtime} cannot {aim}: {reason_of(error)}{advice}") from error


@final
class Case:
    """A model to export, as a copy in evaluation mode on the CPU, and the inputs of its check."""

    def __init__(self, model: Model, what: str, example: Tensor | None, check: int) -> None:
        for name, parameter in model.named_parameters():
            if parameter.is_meta or parameter.dtype not in TOLERANCE:
                raise ExportError(f"{name} is {parameter.dtype} on {parameter.device}, expected floats with values")
        # Of several dtypes the one that rounds none of the weights.
        self.dtype = reduce(torch.promote_types, {parameter.dtype for parameter in model.parameters()})
        self.what, self.steps, self.tolerance, self.wide = what, check, TOLERANCE[self.dtype], wide(self.dtype)
        try:
            copied = copy.deepcopy(model)
        except Exception as error:  # of whatever a user keeps in a model
            raise ExportError(
                f"the {type(model).__name__} cannot be copied: {reason_of(error)}; remove from it what is no tensor"
                " of the model, or load its state into a new one"
            ) from error
        # Of half precision the copy has the same numbers in float32: its own rounding is not what is checked.
        self.model: Any = copied.cpu().eval().to(self.wide)
        self.graph: Graph = (StepGraph if what == "step" else SequenceGraph)(self.model, self.dtype).eval()
        if what == "step" and isinstance(model, SequenceClassifier):
            model.initial_state(1)  # refuses two towers
        self.inputs = self._inputs(example)

    @property
    def advice(self) -> str:
        """Advice for a graph that cannot be traced: a loop over time, in somebody's own layer, is one of one length."""
        own = sorted({type(part.layer).__name__ for part in self.graph.modules() if isinstance(part, Traced)})
        if not own or self.what == "step":
            return ""
        return f"; the forward pass of {', '.join(own)} must be traceable for any batch and length: export the step"

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """The names of inputs and outputs."""
        outputs = ["y"] if self.graph.towers == 2 else ["y", "next_state"]
        return ["x", "state" if self.what == "step" else "lengths"], outputs

    def _inputs(self, example: Tensor | None) -> Tensor:
        """(batch, steps, …) inputs of the check."""
        towers = (2,) if self.graph.towers == 2 else ()
        channels = () if self.graph.tokens else (self._channels(),)
        if example is None:
            source = torch.Generator().manual_seed(_SEED)
            shape = (_BATCH, *towers, self.steps, *channels)
            if self.graph.tokens:
                return torch.randint(self._vocabulary(), shape, generator=source)
            return torch.randn(shape, generator=source, dtype=self.wide)
        kind = "tokens" if self.graph.tokens else "numbers"
        expected = f"(batch, {'2, ' if towers else ''}length{f', {channels[0]}' if channels else ''}) {kind}"
        known = isinstance(example, Tensor) and example.layout is torch.strided and not example.is_meta
        if not known or example.is_complex() or example.is_floating_point() == self.graph.tokens:
            got = f"{example.dtype}" if isinstance(example, Tensor) else type(example).__name__
            got += f", {example.layout} on {example.device}" if isinstance(example, Tensor) and not known else ""
            raise ExportError(f"example is {got}, expected a tensor of {expected}")
        axes = (*towers, None, *channels)
        fits = example.ndim == 1 + len(axes) and 0 not in example.shape
        if not fits or any(axis not in (None, size) for axis, size in zip(axes, example.shape[1:], strict=True)):
            raise ExportError(f"example has shape {tuple(example.shape)}, expected {expected}")
        if self.graph.tokens and not 0 <= int(example.min()) <= int(example.max()) < self._vocabulary():
            raise ExportError(f"example has tokens outside 0 to {self._vocabulary() - 1}")
        if not self.graph.tokens and not bool(torch.isfinite(example).all()):
            raise ExportError("example has values that are not finite, expected inputs of the model")
        given = example.detach().cpu().to(torch.int64 if self.graph.tokens else self.wide)
        time = 1 + len(towers)
        return given.index_select(time, torch.arange(self.steps) % given.shape[time])

    def _channels(self) -> int:
        encoder = getattr(self.model, "encoder", None)
        return encoder.linear.in_features if isinstance(encoder, LinearEncoder) else self.graph.width

    def _vocabulary(self) -> int:
        assert isinstance(self.model.encoder, EmbeddingEncoder)
        return self.model.encoder.embedding.num_embeddings

    def program(self, format: Format) -> ExportedProgram:
        """The graph by torch.export, traced at another batch and length than those of the check."""
        # Of one sequence, or one step, torch would make a constant.
        most = format.most or 2**31 - 1
        traced = 1 if most == 1 else max(2, min(most, len(self.inputs) + 1))
        batch = {} if most == 1 else {0: Dim("batch", min=1, max=most)}
        x = self.inputs.index_select(0, torch.arange(traced) % len(self.inputs))
        if self.what == "step":
            given: tuple[Tensor, ...] = (x[:, 0].contiguous(), self._zeros(traced))
            shapes: tuple[Any, ...] = (batch, batch)
        else:
            time = 1 + (self.graph.towers == 2)
            x = x.index_select(time, torch.arange(_TRACED) % self.steps)
            given = x, torch.full(x.shape[:time], _TRACED)
            shapes = batch | {time: Dim("length", min=1, max=LONGEST)}, batch
        return torch.export.export(self.graph, given, dynamic_shapes=shapes, strict=False)

    def _zeros(self, batch: int) -> Tensor:
        return torch.zeros(batch, self._parts()[-1]["stop"], dtype=self.wide)

    def difference(self, loaded: Loaded, format: Format) -> float:
        """The largest difference between the runtime and the model, relative to the model's largest number."""
        inputs = self.inputs if format.most is None else self.inputs[: format.most]
        compared = self._stepped if self.what == "step" else self._read
        worst, largest = dict[str, float](), dict[str, float]()
        # One sequence too: torch and others have paths of their own for sizes of 1.
        for pairs in chain(compared(loaded, inputs), compared(loaded, inputs[:1])):
            for name, ours, theirs in self._apart(pairs):
                if not bool(torch.isfinite(ours).all()):
                    raise ExportError(
                        f"{name} of the {type(self.model).__name__} itself is not finite, and the file would"
                        " not be either: see its buffers, such as running_var, or give an example in its range"
                    )
                if ours.shape != theirs.shape or not bool(torch.isfinite(theirs).all()):
                    raise ExportError(f"{name}, as {format.runtime} gives it, is misshapen or not finite")
                worst[name] = max(worst.get(name, 0.0), float((ours - theirs).abs().max()))
                largest[name] = max(largest.get(name, 0.0), float(ours.abs().max()))
        return max(off / largest[name] if largest[name] else off for name, off in worst.items())

    def _apart(self, pairs: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The output, and each part of the state by itself: the number of steps is larger than all states."""
        (y, found), *states = pairs
        yield "y", y, found
        for ours, theirs in states:
            for part in self._parts():
                place = slice(part["start"], part["stop"])
                yield f"the state of {part['name']}", ours[:, place], theirs[:, place]

    def _stepped(self, loaded: Loaded, inputs: Tensor) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """(ours, theirs) of output and state, step by step."""
        batch = len(inputs)
        state, theirs = self._initial(batch), self._zeros(batch)
        for x in inputs.unbind(1):
            y, state = self.model.step(x.contiguous(), state)
            found, theirs = loaded(x.contiguous(), theirs)
            yield [(y, found), (flat(state), theirs)]

    def _read(self, loaded: Loaded, inputs: Tensor) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """(ours, theirs) of whole sequences, of all the steps and of about half of them, of unequal lengths."""
        time = 1 + (self.graph.towers == 2)
        for length in sorted({self.steps, self.steps // 2 + 1}):
            x = inputs.narrow(time, 0, length).contiguous()
            lengths = length - torch.arange(x.shape[:time].numel()).reshape(x.shape[:time]) % length
            ours, theirs = self._forward(x, lengths), list(loaded(x, lengths))
            if theirs[0].shape[1:2] == (length,) and theirs[0].ndim == 3:
                # What stands in padding means nothing.
                valid = torch.arange(length) < lengths[:, None]
                ours[0], theirs[0] = ours[0][valid], theirs[0][valid]
            yield list(zip(ours, theirs, strict=True))

    def _forward(self, x: Tensor, lengths: Tensor) -> list[Tensor]:
        """The model's own output, and its state as one tensor."""
        model = self.model
        if not isinstance(model, SequenceClassifier):
            y, state = model(x, None, lengths)
            return [y, flat(state)]
        if model.towers == 2:
            return [model(x, lengths)]
        features, layers = model.blocks(model.encoder(x, lengths), lengths=lengths)
        mean = isinstance(model.pooling, MeanPooling)
        pooled = model.pooling(features, lengths) if mean else at_ends(features, lengths)
        return [model(x, lengths), flat(ClassifierState(layers, pooled, lengths))]

    def _initial(self, batch: int) -> Any:
        layer = getattr(self.model, "ssm", None)  # of a block
        return (self.model if layer is None else layer).initial_state(batch)

    def _parts(self) -> list[dict[str, Any]]:
        """The names of all states, and where each stands."""
        shapes = {
            name or "layer": list(layer.initial_state(1).shape[1:]) for name, layer in layers_of(self.model).items()
        }
        if isinstance(self.model, SequenceClassifier):
            shapes |= {"pooled": [self.model.width], "steps": [1]}
        parts, start = [], 0
        for name, shape in shapes.items():
            stop = start + torch.Size(shape).numel()
            parts.append({"name": name, "start": start, "stop": stop, "shape": shape})
            start = stop
        return parts

    def metadata(self) -> dict[str, Any]:
        """All that a user of the file wants to know."""
        import compressm

        orders = {name or "layer": layer.order for name, layer in layers_of(self.model).items()}
        kinds = {name or "layer": type(layer).__name__ for name, layer in layers_of(self.model).items()}
        inputs, outputs = self.names
        told = {"compressm_export": VERSION, "compressm": compressm.__version__, "torch": str(torch.__version__)}
        told |= {"what": self.what, "model": type(self.model).__name__, "layers": kinds, "orders": orders}
        told |= {"dtype": str(self.dtype).removeprefix("torch."), "state_dtype": str(self.wide).removeprefix("torch.")}
        told |= {"inputs": inputs, "outputs": outputs, "tolerance": self.tolerance}
        told |= {"vocabulary": self._vocabulary()} if self.graph.tokens else {"channels": self._channels()}
        told |= {"longest": LONGEST} if self.what == "forward" else {}
        if self.graph.towers == 1:
            told |= {"state_size": self._parts()[-1]["stop"], "states": self._parts(), "initial_state": "zeros"}
        return told


def flat(state: Any) -> Tensor:
    """A state, as `step` and `forward` of a model give it, as the one tensor that exported files take and give."""
    if isinstance(state, Tensor):
        return state.flatten(1)
    if isinstance(state, ClassifierState):
        tail: Sequence[Tensor] = (state.pooled, state.steps[:, None].to(state.pooled.dtype))
        return torch.cat([*(part.flatten(1) for part in state.layers), *tail], -1)
    parts = state if isinstance(state, Sequence) else ()
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise ExportError(f"state is {state!r:.80}, expected what step or forward of a model give")
    return torch.cat([part.flatten(1) for part in parts], -1)
