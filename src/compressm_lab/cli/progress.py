"""What a run says while it trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from compressm.compression import Cut, Restored
from compressm_lab.runs.records import Evaluation, PenaltyRecord, TruncationRecord
from compressm_lab.training import Plan, Recipe

_WAYS = {
    "white_noise": "white noise",
    "measured": "measured Gramians",
    "modal": "dropping modes",
    "selective": "averages over data",
}


class Spoken:
    """A listener that writes to the console."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console, self._progress = console, progress
        self._bar: TaskID | None = None
        self._losses: dict[str, str] = {}

    def begins(self, recipe: Recipe, plan: Plan, step: int) -> None:
        self._say(f"{recipe.name}, {recipe.label}, seed {recipe.seed}")
        for line in str(plan).splitlines():
            self._say(f"  {line}")
        if step:
            self._say(f"goes on after step {step}")
        self._bar = self._progress.add_task("training", total=plan.steps, completed=step)

    def reached(self, step: int, loss: float) -> None:
        if self._bar is not None:
            self._progress.update(self._bar, completed=step, description=f"loss {loss:.4f}")

    def evaluated(self, evaluation: Evaluation) -> None:
        score = f"{evaluation.loss:.4f}"
        if evaluation.accuracy is not None:
            score = f"{100 * evaluation.accuracy:.2f} %"
        self._losses[evaluation.split] = score
        if evaluation.split == "test":
            parts = ", ".join(f"{split} {value}" for split, value in self._losses.items())
            self._say(f"step {evaluation.step}: {parts} ({evaluation.seconds:.0f} s)")

    def happened(self, event: Cut | Restored) -> None:
        self._say(f"step {event.step}: {event}")

    def kept(self, step: int) -> None:
        self._say(f"step {step}: nothing cut, no layer would fall below the gate")

    def compared(self, record: PenaltyRecord | TruncationRecord) -> None:
        if isinstance(record, PenaltyRecord):
            each = 1e3 * record.seconds / max(1, record.evaluations)
            self._say(f"step {record.step}: {record.kind} {record.value:.4g}, found in {each:.3g} ms")
        elif record.split == "test":
            score = f"{record.loss:.4f}" if record.accuracy is None else f"{100 * record.accuracy:.2f} %"
            states = "1 state" if record.mean_order == 1 else f"{record.mean_order:g} states"
            cut = f"cut once to {states} by {_WAYS.get(record.gramian, record.gramian)}"
            if record.mean_order < record.order:  # layers that have fewer than they may keep stay as they are
                cut = f"cut once to {record.order} states where there were more, {record.mean_order:g} in the mean"
            self._say(f"{cut}: test {score}")

    def _say(self, line: str) -> None:
        self._console.print(escape(line), highlight=False, soft_wrap=True)


@contextmanager
def spoken(console: Console | None = None) -> Iterator[Spoken]:
    """A listener for one run."""
    console = console or Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield Spoken(console, progress)
