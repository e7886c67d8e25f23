"""The command `compressm compress`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from compressm.cli import in_words
from compressm.cli.inspect import BAD_INPUT, say
from compressm.cli.options import (
    DataOption,
    MeasuredOption,
    OfflineOption,
    PathError,
    integer,
    number,
    orders,
    require_writable,
)
from compressm.cli.saved import SavedModel, open_saved
from compressm.compression import Budget, EnergyTolerance, ErrorBound, KeepFraction, TargetOrder, compress_
from compressm.compression.policies import Policy
from compressm.errors import CompressionError, SavingError
from compressm.saving.models import write_model

BytesOption = Annotated[
    int | None, typer.Option(parser=integer, metavar="INTEGER", help="Bytes of a stream's states, for one sequence.")
]
ParametersOption = Annotated[
    int | None, typer.Option(parser=integer, metavar="INTEGER", help="Parameters of the whole model.")
]
RoundToOption = Annotated[
    Any,
    typer.Option(
        parser=orders,
        metavar="ORDERS",
        help="Allowed orders: 8 for its multiples, 16,32, powers-of-two, or a runtime such as llama-cpp-cuda.",
    ),
]


def command(
    path: Annotated[Path, typer.Argument(help="The folder of a saved model, its .safetensors file, or a run.")],
    out: Annotated[Path, typer.Option(help="Folder for the smaller model.")],
    tau: Annotated[
        float | None, typer.Option(parser=number, metavar="NUMBER", help="Share of the Hankel energy that may go.")
    ] = None,
    rho: Annotated[
        float | None, typer.Option(parser=number, metavar="NUMBER", help="Share of the states that stays.")
    ] = None,
    order: Annotated[
        int | None, typer.Option(parser=integer, metavar="INTEGER", help="States that stay in every layer.")
    ] = None,
    bound: Annotated[
        float | None, typer.Option(parser=number, metavar="NUMBER", help="Error bound, relative to the largest gain.")
    ] = None,
    total_states: Annotated[
        int | None, typer.Option(parser=integer, metavar="INTEGER", help="States of the whole model.")
    ] = None,
    state_bytes: BytesOption = None,
    parameters: ParametersOption = None,
    round_to: RoundToOption = 1,
    uniform: Annotated[bool, typer.Option("--uniform", help="One order for all layers.")] = False,
    measured: MeasuredOption = False,
    fold: Annotated[bool, typer.Option(help="Fold conjugate poles first.")] = True,
    data: DataOption = None,
    offline: OfflineOption = False,
) -> None:
    """Cut a trained model once and save the smaller one; of a run, show its test accuracy before and after."""
    _require_new(out)
    try:
        budgets = {"total_states": total_states, "state_bytes": state_bytes, "parameters": parameters}
        keep = _policy(tau=tau, rho=rho, order=order, bound=bound, budgets=budgets, measured=measured)
        saved = open_saved(path, with_data=measured, data=data, offline=offline)
        saved.require_data()
        before, missing = _tested(saved)
        options: dict[str, Any] = {"calibrate": saved.calibrate, "selective": saved.selective()}
        # A runtime says itself if it needs one order for all layers.
        cuts = compress_(saved.model, keep=keep, fold=fold, round_to=round_to, uniform=uniform or None, **options)
        after, _ = _tested(saved)
    except BAD_INPUT as error:
        raise typer.BadParameter(in_words(error, options=True)) from error
    if saved.note:
        say(saved.note)
    for line in map(str, cuts) if cuts else ["nothing to cut: all states stay"]:
        say(line)
    if before:
        say(f"test {before} before, {after} after")
    elif missing:
        say(f"not tested: {missing}")
    try:
        write_model(saved.model, out, commit=saved.commit)
    except SavingError as error:
        if out.is_dir() and not any(out.iterdir()):
            out.rmdir()
        raise typer.BadParameter(str(error), param_hint="--out") from None
    say(f"model: {out}")


def _tested(saved: SavedModel) -> tuple[str, str]:
    """The score of the present model, and why there is none; both are empty for a model without a task."""
    try:
        return ("" if saved.tested is None else saved.tested()), ""
    except SavingError as error:
        return "", str(error)


def _require_new(out: Path) -> None:
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise typer.BadParameter(f"{out} exists already; expected a new folder", param_hint="--out")
    try:
        require_writable(out if out.suffix == ".safetensors" else out / "model.safetensors")
    except PathError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None


def _policy(
    *,
    tau: float | None,
    rho: float | None,
    order: int | None,
    bound: float | None,
    budgets: Mapping[str, int | None],
    measured: bool,
) -> Policy:
    given: dict[str, tuple[Callable[[Any], Policy], float | None]] = {
        "--tau": (EnergyTolerance, tau),
        "--rho": (KeepFraction, rho),
        "--order": (TargetOrder, order),
        "--bound": (ErrorBound, bound),
        **{f"--{unit.replace('_', '-')}": (partial(_budget, unit), limit) for unit, limit in budgets.items()},
    }
    chosen = [name for name, (_, value) in given.items() if value is not None]
    if len(chosen) != 1:
        raise typer.BadParameter(f"{' and '.join(chosen) or 'nothing'} given, expected one of {', '.join(given)}")
    if measured and bound is not None:
        raise typer.BadParameter("--bound needs an error bound, which --measured does not have: leave one of them out")
    make, value = given[chosen[0]]
    try:
        return make(value)
    except CompressionError as error:
        raise typer.BadParameter(in_words(error, options=True), param_hint=chosen[0]) from None


def _budget(unit: str, limit: int) -> Policy:
    given: dict[str, Any] = {unit: limit}
    return Budget(**given)
