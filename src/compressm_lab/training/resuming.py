"""Checkpoints of a run: what they hold, which are kept, and how a run continues from them."""

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
    """The state of a run that changes from step to step."""

    learner: Learner
    steps: Steps
    compressor: Compressor | None
    tracker: HankelTracker | None
    clock: Clock

    def save(self, directory: RunDirectory, step: int, timed: int, *, keep: int) -> Path:
        """Write a checkpoint and keep the newest `keep`; `timed` is the last step of a `Timing`."""
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
                "tracker": None if self.tracker is None else self._latest(self.tracker),
                "penalty": None if self.learner.penalty is None else self.learner.penalty.state_dict(),
            },
        )
        _remove(*checkpoints(directory)[keep:])
        return path

    def load(self, directory: RunDirectory) -> tuple[int, int]:
        """Load the newest checkpoint that is whole, remove newer ones, and return its step and `timed`, or 0 and 0."""
        problems: dict[Path, str] = {}
        for path in checkpoints(directory):
            try:
                found = load_checkpoint(
                    path, model=self.learner.model, optimizer=self.learner.optimizer, compressor=self.compressor
                )
            except SavingError as error:
                problems[path] = str(error)
                continue
            self._restore(found.extra)
            if self.learner.processes.is_first:
                _remove(*problems, *directory.checkpoints.glob(".step-*.pt"))  # a dot: written by half
            return found.step, found.extra["timed"]
        if problems:
            raise SavingError(f"no checkpoint of {directory.path} can be read: {'; '.join(problems.values())}")
        return 0, 0

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

    @staticmethod
    def _latest(tracker: HankelTracker) -> dict[str, Any]:
        """The tracker's state without spectra, which are in the run's files: the systems to compare with next."""
        state = tracker.state_dict()
        before = _moved(state["before"], torch.device("cpu"))
        return {"steps": state["steps"][-1:], "spectra": [], "bounds": [], "before": before}


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
