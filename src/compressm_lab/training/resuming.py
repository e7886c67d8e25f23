"""Checkpoints of a run: what they hold, which are kept, and how a run continues from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
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
    """A run that can be saved and continued; `timed` is the last step whose time is in a record."""

    recipe: Recipe
    directory: RunDirectory
    learner: Learner
    steps: Steps
    compressor: Compressor | None
    tracker: HankelTracker | None
    clock: Clock
    step: int = field(default=0, kw_only=True)
    timed: int = field(default=0, kw_only=True)

    def save(self) -> None:
        """Write a checkpoint and remove the oldest ones."""
        self.directory.sync()
        path = self.directory.checkpoints / f"step-{self.step:08d}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        tracker, penalty = None, self.learner.penalty
        if self.tracker is not None:
            # The systems to compare with next; spectra are in the run's files.
            state = self.tracker.state_dict()
            before = _moved(state["before"], torch.device("cpu"))
            tracker = {"steps": state["steps"][-1:], "spectra": [], "bounds": [], "before": before}
        extra = {
            "timed": self.timed,
            "totals": list(self.steps.totals()),
            "seconds": [self.clock.total, self.clock.in_steps],
            "phases": self.clock.peek(),
            "tracker": tracker,
            "penalty": None if penalty is None else penalty.state_dict(),
        }
        save_checkpoint(path, **self._parts(), step=self.step, extra=extra)
        _remove(*checkpoints(self.directory)[self.recipe.training.keep_checkpoints :])

    def load(self) -> None:
        """Continue from the newest checkpoint that is whole, if there is one; newer ones are removed."""
        problems: dict[Path, str] = {}
        for path in checkpoints(self.directory):
            try:
                found = load_checkpoint(path, **self._parts())
            except SavingError as error:
                problems[path] = str(error)
                continue
            self.step, self.timed = found.step, found.extra["timed"]
            self._restore(found.extra)
            if self.learner.processes.is_first:
                _remove(*problems, *self.directory.checkpoints.glob(".step-*.pt"))  # a dot: half written
            return
        if problems:
            raise SavingError(f"no checkpoint of {self.directory.path} can be read: {'; '.join(problems.values())}")

    def _parts(self) -> dict[str, Any]:
        return {"model": self.learner.model, "optimizer": self.learner.optimizer, "compressor": self.compressor}

    def _restore(self, extra: Any) -> None:
        self.steps.restore(Totals(*extra["totals"]))
        keep_rates_on_(self.learner.optimizer, self.learner.device)
        total, in_steps = extra["seconds"]
        self.clock.restore(total, in_steps, extra["phases"])
        if self.learner.penalty is not None:
            self.learner.penalty.load_state_dict(extra["penalty"])
        if self.tracker is not None and extra["tracker"] is not None:
            before = _moved(extra["tracker"]["before"], self.learner.device)
            self.tracker.load_state_dict({**extra["tracker"], "before": before})


def is_finished(directory: RunDirectory, recipe: Recipe) -> bool:
    """Tell if the run in the folder is finished; a run of another recipe is refused."""
    if directory.finished:
        require_same_recipe(directory, recipe)
    return directory.finished


def require_same_recipe(directory: RunDirectory, recipe: Recipe) -> None:
    """Refuse to continue a run of another recipe."""
    mine = json.loads(json.dumps(recipe.as_dict()))
    if changed := "; ".join(differences(directory.config(), mine)):
        raise ConfigError(f"{directory.path} is a run of another recipe: {changed}")


def differences(stored: Any, mine: Any, key: str = "") -> Iterator[str]:
    """Describe each value that differs between two recipes, given as plain values."""
    if isinstance(stored, dict) and isinstance(mine, dict):
        for name in sorted({*stored, *mine}):
            yield from differences(stored.get(name), mine.get(name), f"{key}.{name}".strip("."))
    elif stored != mine:
        yield f"{key} was {stored!r:.200} and is {mine!r:.200}"


def checkpoints(directory: RunDirectory) -> list[Path]:
    """Checkpoints of a run, newest first."""
    return sorted((path for path in directory.checkpoints.glob("*.pt") if _NAME.fullmatch(path.name)), reverse=True)


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _moved(systems: dict[str, dict[str, Any]], device: torch.device) -> dict[str, dict[str, Any]]:
    return {name: {key: value.to(device) for key, value in parts.items()} for name, parts in systems.items()}
