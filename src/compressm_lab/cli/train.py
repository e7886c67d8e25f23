"""`compressm train`: train a recipe, or go on with a run."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import MofNCompleteColumn, Progress, TaskID, TimeRemainingColumn

from compressm.cli import INTERRUPTED, in_words
from compressm.cli.options import (
    DataOption,
    DeviceChoice,
    OfflineOption,
    PathError,
    chosen_device,
    integer,
    require_writable,
)
from compressm.compression import Restored, load_model
from compressm.compression.record import Event
from compressm.errors import CompressionError, LostProcessError, SavingError
from compressm_lab.cli.opening import task_of
from compressm_lab.cli.terminal import (
    console,
    count,
    ending_in_words,
    integer_option,
    is_given,
    progress_bars,
    say,
    score_text,
)
from compressm_lab.data import DataError
from compressm_lab.data.table import located
from compressm_lab.experiments.comparisons import comparison
from compressm_lab.experiments.recipes import AUTOMATIC, BASELINE, RECIPE_FILES, find_recipe, recipe_names
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.lock import LockLostError
from compressm_lab.runs.records import Evaluation, PenaltyRecord, RunError, RunWriteError, TruncationRecord
from compressm_lab.training import ConfigError, CutError, Diverged, Interrupted, Plan, Recipe, Silent, train
from compressm_lab.training.loggers import Several, TensorBoard
from compressm_lab.training.loop import checkpoints, is_finished
from compressm_lab.training.reading import make_recipe
from compressm_lab.training.resuming import threads_of
from compressm_lab.training.steps import is_launched, process_group

_NARROW = 64
_REFUSED = (ConfigError, CompressionError, DataError, PathError, RunError, SavingError)
_WAYS = {
    "white_noise": "white noise",
    "measured": "measured Gramians",
    "modal": "dropping modes",
    "selective": "averages over data",
}


def _threads(text: str | int) -> int:
    """Read a number of threads, at most one a processor: more are slower, and far more end the process."""
    most = os.cpu_count() or 1
    if (found := count(text)) > most:
        raise typer.BadParameter(f"{found} is too many, expected 1 to {most}, the processors of this machine")
    return found


def command(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe by name, a .yaml file, or, with --resume, the folder of a run.")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show the recipes and stop.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one value, as compression.tau=0.02; again for more."),
    ] = None,
    seed: Annotated[int | None, integer_option("Seed of initial weights, order of data and dropout.", integer)] = None,
    order: Annotated[int | None, integer_option("States of every layer at the start.", integer)] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Train without compression, penalty, teacher and cuts after training.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: out/runs/NAME/LABEL-nORDER/seed-SEED.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the folder.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the run from a process of another machine that fell silent.")
    ] = False,
    device: DeviceChoice = "auto",
    threads: Annotated[
        int | None, integer_option("Threads on a CPU. Default: 1 below 64 channels, where more are slower.", _threads)
    ] = None,
    data: DataOption = None,
    offline: OfflineOption = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard events too.")] = False,
    auto: Annotated[bool, typer.Option("--auto", help="Find steps and orders of cuts; the loss may rise 1 %.")] = False,
) -> None:
    """Train a recipe: everything it does is written into the folder of the run, for `compressm report`.

    Ctrl-C saves a checkpoint; --resume goes on from it. `torchrun --nproc-per-node 2 -m compressm.cli train ...` trains
    on several processes.
    """
    with _exit_codes():
        console.quiet = not _is_first()
    if listed:
        _list(context)
        return
    if recipe is None:
        raise typer.BadParameter(f"missing; expected one of {', '.join(recipe_names())}", param_hint="RECIPE")
    with _exit_codes():
        wanted = _recipe(recipe, settings or [], seed, order, baseline, resume, auto)
        folder = _folder(wanted, recipe, out, resume, take_over)
    with _exit_codes(folder):
        if resume and is_finished(RunDirectory(folder), wanted):
            _say_finished(folder, wanted)
            return
        require_writable(folder / "config.json")
        if resume and not checkpoints(RunDirectory(folder)):
            say(f"{folder} has no checkpoint: training begins anew")
        _set_threads(threads or (threads_of(RunDirectory(folder)) if resume else None), wanted)
        with process_group(chosen_device(device)) as where:
            asked = partial(train, device=where, resume=resume, take_over=take_over)
            _train(_prepared(asked, wanted, folder, data, offline), folder, tensorboard)


def _say_finished(folder: Path, recipe: Recipe) -> None:
    _require_model(folder)
    say(
        f"{folder} is finished: all {recipe.training.steps} steps are trained, nothing is left to do",
        f"model: {RunDirectory(folder).model}; `compressm report {shlex.quote(str(folder))}` shows the run",
    )


@contextmanager
def _exit_codes(folder: Path | None = None) -> Iterator[None]:
    """Exit with 2 for what cannot be run, 130 for a run that was stopped, 1 for one that failed; each says why."""
    try:
        yield
    except (LockLostError, LostProcessError, RunWriteError, CutError, Diverged) as error:
        whole = "what was written before is whole: "
        if isinstance(error, RunWriteError):
            begun = folder is not None and RunDirectory(folder).exists
            whole += f"make room, or the folder writable, and {'add --resume' if begun else 'train again'}"
        elif isinstance(error, LostProcessError):
            whole += "--resume goes on from the last checkpoint"
            console.quiet = False  # the first process may be the lost one
        say(in_words(error), *([whole] if isinstance(error, RunWriteError | LostProcessError) else ()))
        raise typer.Exit(1) from None
    except _REFUSED as error:
        raise typer.BadParameter(in_words(error)) from error
    except Interrupted as stopped:
        say(str(stopped), f"to go on: compressm train {shlex.quote(str(stopped.directory))} --resume")
        raise typer.Exit(INTERRUPTED) from None


def _set_threads(chosen: int | None, recipe: Recipe) -> None:
    """Take the number of threads that was asked for, or that the run began with, or one for a narrow model."""
    if chosen := chosen or (1 if recipe.model.width < _NARROW else None):
        torch.set_num_threads(min(chosen, os.cpu_count() or 1))


def _prepared(
    asked: partial[RunDirectory], recipe: Recipe, folder: Path, data: Path | None, offline: bool
) -> partial[RunDirectory]:
    """The training with its data, and with the teacher or the penalty that the recipe asks for."""
    with ending_in_words("before training began: the run is as it was"):
        task = task_of(recipe, data, offline)
        return partial(asked, recipe, task, folder, **comparison(recipe, task)._asdict())


def _train(go: Callable[..., RunDirectory], folder: Path, tensorboard: bool) -> None:
    if not _is_first():
        go()
        return
    # A bar on a terminal, plain lines elsewhere.
    with progress_bars(MofNCompleteColumn(), TimeRemainingColumn(), transient=True) as bars:
        go(logger=Several(Spoken(bars), TensorBoard(folder / "tensorboard") if tensorboard else Silent()))
    say(f"run: {folder}; `compressm report {shlex.quote(str(folder))}` shows it")


def _recipe(
    name: str, settings: list[str], seed: int | None, order: int | None, baseline: bool, resume: bool, auto: bool
) -> Recipe:
    directory = RunDirectory(name)
    if resume and directory.exists:
        if settings or baseline or auto or seed is not None or order is not None:
            options = "--set, --seed, --order, --baseline and --auto"
            raise ConfigError(f"{name} goes on as it began: {options} are not for --resume")
        return make_recipe(directory.config(), source=str(directory.path / "config.json"), importing=_announce)
    if resume and name not in recipe_names() and Path(name).suffix not in RECIPE_FILES:
        if _is_first():
            directory.require_free()  # another process may be about to begin it
        raise RunError(f"{name!r} is not a recipe, and no run to go on with: it has no config.json")
    _require_once(settings, seed, order)
    if auto and baseline:
        raise ConfigError("--auto with --baseline, which trains without compression: leave one of them out")
    if baseline:
        _require_of_baseline(settings)
    spoken = dict.fromkeys(BASELINE, "--baseline") if baseline else {}
    spoken |= {f"seed={seed}": f"--seed {seed}"} if seed is not None else {}
    spoken |= {f"model.order={order}": f"--order {order}"} if order is not None else {}
    # The label that a recipe gives itself is not that of its baseline; one that is set is.
    first = {"label=''": "--baseline"} if baseline else dict.fromkeys(AUTOMATIC, "--auto") if auto else {}
    recipe = find_recipe(name, (*first, *settings, *spoken), spoken=first | spoken, importing=_announce)
    # Absolute paths lead to files and to the teacher from every folder: a run may be resumed in another one.
    recipe = replace(recipe, task=located(recipe.task, Path(name).parent))
    if recipe.distillation is None:
        return recipe
    teacher = str(Path(recipe.distillation.teacher).absolute())
    return replace(recipe, distillation=replace(recipe.distillation, teacher=teacher))


def _announce(module: str) -> None:
    """Say that a recipe runs code of somebody."""
    say(f"imports {module}, which the recipe names")


def _require_model(folder: Path) -> None:
    """Refuse to call a run finished whose model cannot be read."""
    model = RunDirectory(folder).model
    try:
        load_model(model)
    except (SavingError, CompressionError) as error:
        raise RunError(
            f"{folder} is finished, but its model cannot be read: {error}; delete {model}, and --resume writes it again"
        ) from error


def _require_once(settings: list[str], seed: int | None, order: int | None) -> None:
    """Refuse a key that is set twice, by --set or by an option of its own."""
    given = {} if seed is None else {"seed": "--seed"}
    given |= {} if order is None else {"model.order": "--order"}
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if key in given:
            raise ConfigError(f"--set {setting!r} and {given[key]} both set {key}: leave one of them out")
        given[key] = f"--set {setting!r}"


def _require_of_baseline(settings: list[str]) -> None:
    """Refuse settings of the parts that a baseline leaves out."""
    parts = [part.removesuffix("=null") for part in BASELINE]
    for setting in settings:
        part = setting.partition("=")[0].strip().partition(".")[0]
        if part in parts and setting.replace(" ", "") not in BASELINE:
            raise ConfigError(f"--set {setting!r} with --baseline, which trains without {part}: leave one of them out")


def _folder(recipe: Recipe, name: str, out: Path | None, resume: bool, take_over: bool) -> Path:
    if resume and RunDirectory(name).exists:
        if out is not None:
            raise ConfigError(f"{name} goes on where it is: --out is not for the --resume of a folder")
        return Path(name)
    folder = out or Path("out/runs") / recipe.name / f"{recipe.label}-n{recipe.model.order}" / f"seed-{recipe.seed}"
    run = RunDirectory(folder)
    if run.exists and not resume and _is_first():
        run.require_free()
        raise RunError(f"{folder} already holds a run: --resume goes on with it, --out takes another folder")
    if resume and not run.exists:
        raise RunError(f"{folder} holds no run to go on with")
    if not resume and (others := run.other_files()):
        raise RunError(f"{folder} holds other files ({', '.join(others[:3])}): --out takes a new or an empty folder")
    if take_over and not resume and _is_first() and not run.require_free(take_over=True):
        raise RunError(f"--take-over is for a run of a process that fell silent, and {folder} has none: leave it out")
    return folder


def _is_first() -> bool:
    """True in the first of the processes that torchrun started."""
    return not is_launched() or os.environ["RANK"] == "0"


def _list(context: typer.Context) -> None:
    known = {parameter.name: parameter.opts[0] for parameter in context.command.params if parameter.name}
    if others := [said for name, said in known.items() if name != "listed" and is_given(context, name)]:
        raise typer.BadParameter(f"--list only shows the recipes: leave {', '.join(others)} out")
    width = console.width if console.is_terminal else None
    say(*listing({name: find_recipe(name) for name in recipe_names()}, width))


def listing(recipes: Mapping[str, Recipe], width: int | None = None) -> list[str]:
    """Lines on recipes: two or more each, no longer than `width`; without a width one each, for files and pipes."""
    sizes = {name: _size(recipe) for name, recipe in recipes.items()}
    names, long = (max(map(len, words), default=0) for words in (sizes, sizes.values()))
    if width is None:
        return [f"{name:<{names}}  {sizes[name]:<{long}}  {recipes[name].description}".rstrip() for name in recipes]
    lines = []
    for name, recipe in recipes.items():
        beside = names + 2 + long <= width
        head, said = (f"{name:<{names}}  {sizes[name]}", []) if beside else (name, [sizes[name]])
        lines.append(head)
        for words in (*said, recipe.description):
            lines += textwrap.wrap(words, width, initial_indent="    ", subsequent_indent="    ")
    return lines


def _size(recipe: Recipe) -> str:
    model = recipe.model
    layers = f"{model.depth} {model.layer} layer{'s' if model.depth > 1 else ''}"
    return f"{layers} of {model.order} states, width {model.width}, {recipe.training.steps} steps"


class Spoken:
    """A logger that writes to the console what a run does."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bar: TaskID | None = None
        self._scores: dict[str, str] = {}

    def took_over(self, sentence: str) -> None:
        say(sentence)

    def begins(self, recipe: Recipe, plan: Plan, step: int) -> None:
        say(f"{recipe.name}, {recipe.label}, seed {recipe.seed}", *(f"  {line}" for line in str(plan).splitlines()))
        if step:
            say(f"goes on after step {step}")
        self._bar = self._progress.add_task("training", total=plan.steps, completed=step)

    def reached(self, step: int, loss: float) -> None:
        if self._bar is not None:
            self._progress.update(self._bar, completed=step, description=f"loss {loss:.4f}")

    def evaluated(self, evaluation: Evaluation) -> None:
        self._scores[evaluation.split] = _score(evaluation)
        if evaluation.split == "test":
            parts = ", ".join(f"{split} {value}" for split, value in self._scores.items())
            say(f"step {evaluation.step}: {parts} ({evaluation.seconds:.0f} s)")

    def happened(self, event: Event) -> None:
        ended = ("cutting has ended: no cut is made after a rollback",) if isinstance(event, Restored) else ()
        say(f"step {event.step}: {event}", *ended)

    def kept(self, step: int) -> None:
        say(f"step {step}: nothing cut, no layer would fall below the gate")

    def compared(self, record: PenaltyRecord | TruncationRecord) -> None:
        if isinstance(record, PenaltyRecord):
            each = 1e3 * record.seconds / max(1, record.evaluations)
            say(f"step {record.step}: {record.kind} {record.value:.4g}, found in {each:.3g} ms")
        elif record.split == "test":
            states = "1 state" if record.mean_order == 1 else f"{record.mean_order:g} states"
            cut = f"cut once to {states} by {_WAYS.get(record.gramian, record.gramian)}"
            if record.mean_order < record.order:  # layers that have fewer than they may keep stay as they are
                cut = f"cut once to {record.order} states where there were more, {record.mean_order:g} in the mean"
            say(f"{cut}: test {_score(record)}")


def _score(record: Evaluation | TruncationRecord) -> str:
    return score_text(record).removeprefix("accuracy ").removeprefix("loss ")
