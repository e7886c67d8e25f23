"""The command `compressm export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from compressm.cli.inspect import say
from compressm.cli.options import PathError, count, require_writable
from compressm.cli.saved import open_saved
from compressm.errors import ExportError, SavingError
from compressm.exporting import ONNX, AOTInductor, ExecuTorch, Format
from compressm.exporting.formats import format_for
from compressm.exporting.writing import write
from compressm.layers import SequenceError


def command(
    model: Annotated[Path, typer.Argument(help="The folder of a saved model, or of a run.")],
    path: Annotated[
        Path,
        typer.Argument(help="The file to write: .onnx, .pt2 for torch.export and AOTInductor, .pte for ExecuTorch."),
    ],
    what: Annotated[
        Literal["step", "forward"],
        typer.Option(help="One step with its state in and out, or the forward pass of whole sequences."),
    ] = "step",
    aot: Annotated[bool, typer.Option("--aot", help="Compile a .pt2 file for this kind of processor.")] = False,
    opset: Annotated[
        int | None, typer.Option(parser=count, metavar="INTEGER", help="Version of the operators of ONNX.")
    ] = None,
    backend: Annotated[
        Literal["portable", "xnnpack"] | None, typer.Option(help="Who computes in ExecuTorch. Default: portable.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(parser=count, metavar="INTEGER", help="Largest batch of ExecuTorch. Default: 8.")
    ] = None,
    check: Annotated[
        int, typer.Option(parser=count, metavar="INTEGER", help="Steps that the file runs against the model.")
    ] = 64,
) -> None:
    """Write a model for onnxruntime, torch.export, AOTInductor or ExecuTorch, and check it there against the model."""
    given = {"aot": aot or None, "opset": opset, "backend": backend, "batch": batch}
    try:
        require_writable(path)
        format = _format(path, {name: value for name, value in given.items() if value is not None})
        saved = open_saved(model, with_data=False, data=None, offline=True)
        facts = {} if saved.commit is None else {"commit": saved.commit}
        done = write(saved.model, path, what=what, format=format, example=None, check=check, **facts)
    except PathError as error:
        raise typer.BadParameter(str(error), param_hint="PATH") from None
    except (ExportError, SavingError, SequenceError) as error:
        raise typer.BadParameter(str(error)) from error
    if saved.note:
        say(saved.note)
    say(str(done))


def _format(path: Path, given: dict[str, object]) -> Format:
    """The format of the path, with the options that are given; those of other formats are refused."""
    found = format_for(path, AOTInductor() if "aot" in given and path.suffix.lower() == AOTInductor.SUFFIX else None)
    known = {AOTInductor: {"aot"}, ONNX: {"opset"}, ExecuTorch: {"backend", "batch"}}.get(type(found), set())
    if odd := [name for name in given if name not in known]:
        raise ExportError(f"--{odd[0]} is not for {path.suffix} files: leave it out")
    return type(found)(**{name: value for name, value in given.items() if name != "aot"})
