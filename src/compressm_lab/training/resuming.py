"""Checkpoints of a run: the last few, each whole, and what goes on from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compressm.compression import Compressor, HankelTracker
from compressm.errors import SavingError
from compressm.saving.checkpoints import load_checkpoint, save_checkpoint
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.training.building import keep_rates_on_
from compressm_lab.training.clock import Clock
from compressm_lab.training.config import ConfigError, Recipe
from compressm_lab.training.steps import Learner, Steps, Totals

_NAME = re.compile(r"step-(\d+)\.pt")


@dataclass
class Resumable:
    """All that changes from step to step."""

    learner: Learner
    steps: Steps
    compressor: Compressor | None
    tracker: HankelTracker | None
    clock: Clock

    def save(self, directory: RunDirectory, step: int, timed: int, *, keep: int) -> Path:
        """One more checkpoint; of those before it the last `keep` − 1 stay. `timed`: the last step in a `Timing`."""
        directory.sync()
        path = directory.checkpoints / f"step-{step:08d}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(
            path,
            model=self.learner.model,
            optimizer=self.learner.optimizer,
            compressor=self.compressor,
            step=step,
            extra={
                "timed": timed,
                "totals": list(self.steps.totals()),
                "seconds": [self.clock.total, self.clock.in_steps],
                "phases": self.clock.peek(),
                "tracker": _latest(self.tracker),
                "penalty": None if self.learner.penalty is None else self.learner.penalty.state_dict(),
            },
        )
        _remove(*checkpoints(directory)[keep:])
        return path

    def load(self, directory: RunDirectory) -> tuple[int, int]:
        """Step and `timed` of the newest checkpoint that is whole, newer ones go; 0 and 0 if there is none yet."""
        problems: dict[Path, str] = {}
        for path in checkpoints(directory):
            try:
                found = load_checkpoint(
                    path, model=self.learner.model, optimizer=self.learner.optimizer, compressor=self.compressor
                )
            except SavingError as error:
                problems[path] = str(error)
                continue
            self._remember(found.extra)
            if self.learner.processes.is_first:
                _remove(*problems, *directory.checkpoints.glob(".step-*.pt"))  # those half written have a dot
            return found.step, found.extra["timed"]
        if problems:
            raise SavingError(f"no checkpoint of {directory.path} can be read: {'; '.join(problems.values())}")
        return 0, 0

    def _remember(self, extra: Any) -> None:
        self.steps.restore(Totals(*extra["totals"]))
        keep_rates_on_(self.learner.optimizer, self.learner.device)
        total, in_steps = extra["seconds"]
        self.clock.restore(total, in_steps, extra["phases"])
        if self.learner.penalty is not None:
            self.learner.penalty.load_state_dict(extra["penalty"])
        if self.tracker is not None and extra["tracker"] is not None:
            self.tracker.load_state_dict(_moved(extra["tracker"], self.learner.device))


def is_finished(directory: RunDirectory, recipe: Recipe) -> bool:
    """Whether nothing of this recipe is left to do there; a run of another recipe is refused."""
    if not directory.finished:
        return False
    require_same_recipe(directory, recipe)
    return True


def require_same_recipe(directory: RunDirectory, recipe: Recipe) -> None:
    """A run goes on as it began."""
    mine = json.loads(json.dumps(recipe.as_dict()))
    if changed := "; ".join(differences(directory.config(), mine)):
        raise ConfigError(f"{directory.path} is a run of another recipe: {changed}")


def differences(stored: Any, mine: Any, key: str = "") -> Iterator[str]:
    """What two recipes as plain values differ in, in words."""
    if isinstance(stored, dict) and isinstance(mine, dict):
        for name in sorted({*stored, *mine}):
            yield from differences(stored.get(name), mine.get(name), f"{key}.{name}".strip("."))
    elif stored != mine:
        yield f"{key} was {stored!r:.200} and is {mine!r:.200}"


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def checkpoints(directory: RunDirectory) -> list[Path]:
    """Newest first."""
    found = [path for path in directory.checkpoints.glob("step-*.pt") if _NAME.fullmatch(path.name)]
    return sorted(found, reverse=True)


def _latest(tracker: HankelTracker | None) -> dict[str, Any] | None:
    """What it compares with next; the spectra themselves are in the run's files."""
    if tracker is None:
        return None
    state = tracker.state_dict()
    cpu = {name: {key: value.cpu() for key, value in parts.items()} for name, parts in state["before"].items()}
    return {"steps": state["steps"][-1:], "spectra": [], "bounds": [], "before": cpu}


def _moved(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The tracker's systems where the model is."""
    moved = {name: {key: value.to(device) for key, value in parts.items()} for name, parts in state["before"].items()}
    return {**state, "before": moved}
