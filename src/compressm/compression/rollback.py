"""A model, its optimizer and its scheduler as they are now, to be brought back bit for bit, also from other orders."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, final

import torch
from torch import Tensor, nn

from compressm.adapters import find
from compressm.compression.distributed import Processes
from compressm.compression.optimizer import leave_
from compressm.compression.record import Restored
from compressm.compression.surgery import attributes_of, optional_in
from compressm.errors import CompressionError
from compressm.families.choices import require_count, require_number
from compressm.files import replacing
from compressm.layers.parameters import replace_data


@final
@dataclass(frozen=True)
class Subject:
    """What a snapshot is of: models, and the optimizer and scheduler that train them."""

    models: Sequence[nn.Module]
    optimizer: Any | None = None
    scheduler: Any | None = None

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once: those of the models, and what else the optimizer trains."""
        named = {f"{k}/{name}": p for k, model in enumerate(self.models) for name, p in model.named_parameters()}
        seen = {id(parameter) for parameter in named.values()}
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        for i, group in enumerate(groups):
            others = (p for p in group["params"] if id(p) not in seen)
            named |= {f"group {i}/{j}": parameter for j, parameter in enumerate(others)}
        return named

    def buffers(self) -> dict[str, tuple[nn.Module, str]]:
        """Every buffer by the module and the name it has there."""
        return {
            f"{k}/{path}.{name}": (module, name)
            for k, model in enumerate(self.models)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def attributes(self) -> dict[str, tuple[Any, str]]:
        """What goes with the orders of layers beside their tensors, by the object that has it and its name there."""
        return {
            f"{k}/{path}": place for k, model in enumerate(self.models) for path, place in attributes_of(model).items()
        }

    def added(self, then: Collection[str]) -> dict[str, tuple[nn.Module, str]]:
        """Parameters and buffers that are not among those of then and that a cut may have added, by their places."""
        places = {
            id(getattr(module, leaf)): (module, leaf) for model in self.models for module, leaf in optional_in(model)
        }
        now = {**self.parameters(), **{name: getattr(*place) for name, place in self.buffers().items()}}
        return {name: places[id(value)] for name, value in now.items() if name not in then and id(value) in places}

    def remove_(self, added: Mapping[str, tuple[nn.Module, str]]) -> None:
        """Take them away, from the optimizer too."""
        if self.optimizer is not None:
            leave_(self.optimizer, [getattr(*place) for place in added.values()])
        for module, leaf in added.values():
            setattr(module, leaf, None)


@final
@dataclass(frozen=True)
class Snapshot:
    """Tensors by name, in memory or in a file, and the rest: numbers and text.

    Gradients are left out: they belong to a batch. After `restore` they are None.
    """

    tensors: Mapping[str, Tensor] | Path
    rest: Mapping[str, Any]

    @classmethod
    def of(cls, subject: Subject, path: Path | str | None = None) -> Snapshot:
        """Of all that training changes; with a path the tensors go to that file, written whole or not at all."""
        tensors: dict[str, Tensor] = {}
        with torch.no_grad():
            rest = {
                "parameters": {name: _parameter(name, p, tensors) for name, p in subject.parameters().items()},
                "buffers": [_buffer(name, *place, tensors) for name, place in subject.buffers().items()],
                "attributes": {path: getattr(*place) for path, place in subject.attributes().items()},
                "optimizer": _optimizer(subject, tensors),
                "scheduler": None if subject.scheduler is None else copy.deepcopy(subject.scheduler.state_dict()),
            }
        if path is None:
            return cls(tensors, rest)
        with replacing(Path(path)) as scratch:
            torch.save(tensors, scratch)
        return cls(Path(path), rest)

    def restore_(self, subject: Subject) -> None:
        """Bring it all back into the same objects; what is not as it was described is refused before that."""
        tensors = self._loaded()
        added = subject.added({*self.rest["parameters"], *self.rest["buffers"]})
        self._require_same(subject, added)
        subject.remove_(added)
        parameters, buffers = subject.parameters(), subject.buffers()
        with torch.no_grad():
            for name, parameter in parameters.items():
                _set_parameter_(parameter, tensors[f"parameter {name}"], **self.rest["parameters"][name])
            for name, (module, key) in buffers.items():
                module._buffers[key] = _assigned(module._buffers[key], tensors[f"buffer {name}"])
            places = subject.attributes()
            for path, value in self.rest.get("attributes", {}).items():
                setattr(*places[path], value)
            if subject.optimizer is not None:
                _restore_optimizer_(subject.optimizer, parameters, self.rest["optimizer"], tensors)
        if subject.scheduler is not None:
            subject.scheduler.load_state_dict(copy.deepcopy(self.rest["scheduler"]))

    def _require_same(self, subject: Subject, added: Collection[str]) -> None:
        for what, now, then in (
            ("parameters", set(subject.parameters()), set(self.rest["parameters"])),
            ("buffers", set(subject.buffers()), set(self.rest["buffers"])),
        ):
            now -= set(added)
            if now != then:
                other = ", ".join(sorted(now ^ then)[:8])
                raise CompressionError(f"the {what} are not those of the snapshot: {other} are on one side only")
        for what in ("optimizer", "scheduler"):
            if (getattr(subject, what) is None) != (self.rest[what] is None):
                raise CompressionError(
                    f"the snapshot was taken {'without' if self.rest[what] is None else 'with'} {what}"
                )
        groups = [] if subject.optimizer is None else subject.optimizer.param_groups
        then_groups = [] if subject.optimizer is None else self.rest["optimizer"]["groups"]
        if len(groups) != len(then_groups):
            raise CompressionError(f"the optimizer has {len(groups)} groups, at the snapshot it had {len(then_groups)}")

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text."""
        return {"tensors": dict(self._loaded()), "rest": copy.deepcopy(dict(self.rest))}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Snapshot:
        """The inverse, in memory."""
        return cls(dict(state["tensors"]), state["rest"])

    def discard(self) -> None:
        """Remove the file, if there is one."""
        if isinstance(self.tensors, Path):
            self.tensors.unlink(missing_ok=True)

    def _loaded(self) -> Mapping[str, Tensor]:
        if not isinstance(self.tensors, Path):
            return self.tensors
        try:
            loaded: dict[str, Tensor] = torch.load(self.tensors, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise CompressionError(f"the snapshot {self.tensors} cannot be read: {error}") from error
        return loaded


def _kept(name: str, value: Tensor, tensors: dict[str, Tensor]) -> str:
    tensors[name] = value.detach().clone()
    return name


def _buffer(name: str, module: nn.Module, key: str, tensors: dict[str, Tensor]) -> str:
    _kept(f"buffer {name}", module.get_buffer(key), tensors)
    return name


def _parameter(name: str, parameter: nn.Parameter, tensors: dict[str, Tensor]) -> dict[str, Any]:
    _kept(f"parameter {name}", parameter, tensors)
    return {"requires_grad": parameter.requires_grad}


def _set_parameter_(parameter: nn.Parameter, data: Tensor, *, requires_grad: bool) -> None:
    parameter.grad = None
    if parameter.shape == data.shape and parameter.dtype == data.dtype:
        # In the same memory, which a captured graph may read; not through the parameter, whose version a graph knows.
        parameter.data.copy_(data)
    else:
        replace_data(parameter, data.to(parameter.device, copy=True))
    parameter.requires_grad_(requires_grad)


def _assigned(now: Tensor | None, then: Tensor) -> Tensor:
    """The value of then, in the memory of now where it fits."""
    if isinstance(now, Tensor) and now.shape == then.shape and now.dtype == then.dtype:
        now.data.copy_(then)
        return now
    return then.clone() if now is None else then.to(now.device, copy=True)


def _optimizer(subject: Subject, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    if subject.optimizer is None:
        return None
    names = {id(parameter): name for name, parameter in subject.parameters().items()}

    def kept(place: str) -> Callable[[str, Any], Any]:
        def keep(key: str, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return {"value": copy.deepcopy(value)}
            return {"tensor": _kept(f"{place} {key}", value, tensors), "device": str(value.device)}

        return keep

    states = {}
    for parameter, state in subject.optimizer.state.items():
        if id(parameter) not in names:
            raise CompressionError("the optimizer has a state for a tensor that is in none of its groups")
        keep, name = kept(f"state {names[id(parameter)]}"), names[id(parameter)]
        states[name] = {key: keep(key, value) for key, value in state.items()}
    groups = []
    for k, group in enumerate(subject.optimizer.param_groups):
        keep = kept(f"group {k}")
        options = {key: keep(key, value) for key, value in group.items() if key != "params"}
        groups.append({"options": options, "params": [names[id(parameter)] for parameter in group["params"]]})
    return {"states": states, "groups": groups}


def _restore_optimizer_(
    optimizer: Any, parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    for parameter in [p for p in optimizer.state if id(p) not in {id(parameters[name]) for name in saved["states"]}]:
        del optimizer.state[parameter]
    for name, state in saved["states"].items():
        held = optimizer.state.get(parameters[name], {})
        _restore_entries_(held, state, tensors)
        optimizer.state[parameters[name]] = held
    for group, then in zip(optimizer.param_groups, saved["groups"], strict=True):
        group["params"][:] = [parameters[name] for name in then["params"]]
        _restore_entries_(group, then["options"], tensors, beside={"params": group["params"]})


def _restore_entries_(
    held: dict[str, Any], saved: Mapping[str, Any], tensors: Mapping[str, Tensor], beside: Mapping[str, Any] = {}
) -> None:
    """In the order they had, so that what is saved afterwards is the same too."""
    now = dict(held)
    held.clear()
    held.update(beside)
    for key, entry in saved.items():
        if "tensor" not in entry:
            held[key] = copy.deepcopy(entry["value"])
            continue
        then, before = tensors[entry["tensor"]], now.get(key)
        same_place = isinstance(before, Tensor) and str(before.device) == entry["device"]
        held[key] = _assigned(before, then) if same_place else then.to(entry["device"], copy=True)


@final
@dataclass(frozen=True)
class Rollback:
    """Undo a cut after which `evaluate()` stays worse than it was by more than the share `drop`.

    Higher is better, or with `lower_is_better`, as for a loss, lower; `measures` is its name in what a user reads.
    It is asked before a cut and again `settle` steps after it (the paper: 1 % of the value, 1 % of all steps). A cut
    that comes in between is judged together with the one before it: both stay, or neither. With a `folder` what may
    have to come back waits there in a file instead of in memory.
    """

    evaluate: Callable[[], float]
    drop: float = 0.01
    settle: int = 100
    folder: Path | str | None = None
    measures: str = "evaluate()"
    lower_is_better: bool = False

    def __post_init__(self) -> None:
        if not callable(self.evaluate):
            raise CompressionError(
                f"Rollback: evaluate is {self.evaluate!r:.100}, expected a function without arguments"
            )
        object.__setattr__(self, "drop", require_number("Rollback: drop", self.drop, 0, 1, below=True))
        object.__setattr__(self, "settle", require_count("Rollback: settle", self.settle, low=0))
        if not isinstance(self.measures, str):
            raise CompressionError(f"Rollback: measures is {self.measures!r:.100}, expected text")
        if not isinstance(self.lower_is_better, bool):
            raise CompressionError(
                f"Rollback: lower_is_better is {self.lower_is_better!r:.100}, expected True or False"
            )
        if self.folder is not None:
            if not isinstance(self.folder, str | os.PathLike) or Path(self.folder).is_file():
                raise CompressionError(f"Rollback: folder is {self.folder!r}, expected a folder, there or not, or None")
            object.__setattr__(self, "folder", Path(self.folder))

    def value(self, processes: Processes = Processes()) -> float:
        """What `evaluate` says, on all processes that of the first."""
        with processes.together("evaluating"):
            number = self._number()
        return processes.as_first(number)

    def _number(self) -> float:
        value = self.evaluate()
        try:
            return float(value)
        except (TypeError, ValueError):
            raise CompressionError(f"Rollback: evaluate returned {value!r:.100}, expected a number") from None

    def accepts(self, value: float, before: float) -> bool:
        """Whether the value is worse by at most drop·|before|; NaN is not."""
        worst = before + (self.drop if self.lower_is_better else -self.drop) * abs(before)
        return value <= worst if self.lower_is_better else value >= worst

    def verdict(self, value: float, before: float) -> str:
        """What is said of a value that is not accepted."""
        way = "rose" if self.lower_is_better else "fell"
        by = f" by {100 * abs(value - before) / abs(before):.3g} %" if before and math.isfinite(value) else ""
        allowed = f"{100 * self.drop:g} % is allowed"
        return f"{self.measures} {way}{by}, from {before:.6g} to {value:.6g} after the cut; {allowed}"

    def path(self, step: int) -> Path | None:
        """Where the snapshot of before that step goes, each process to its own; None for memory."""
        return None if self.folder is None else Path(self.folder) / f"before-step-{step}-{os.getpid()}.pt"


class Watch:
    """The cuts that have not been judged yet: what was before the first of them, and when to look."""

    def __init__(
        self,
        guard: Rollback,
        model: nn.Module,
        optimizer: Any | None = None,
        scheduler: Any | None = None,
        follow: Sequence[nn.Module] = (),
        processes: Processes = Processes(),
    ) -> None:
        self.guard, self.model, self.processes = guard, model, processes
        self.subject = Subject((model, *follow), optimizer, scheduler)
        self.snapshot: Snapshot | None = None
        self.before = math.nan
        self.due = -1
        self.latest: tuple[int, float] | None = None  # a step, and what `evaluate` said there
        # What the three were when the last cut began.
        self.earlier: tuple[Snapshot | None, float, int] = (None, self.before, self.due)

    def begin(self, step: int) -> None:
        """A cut is about to be made. One that comes before the last was judged is judged together with that."""
        self.earlier = self.snapshot, self.before, self.due
        if self.snapshot is None:
            asked = self.latest is not None and self.latest[0] == step
            before = self.latest[1] if asked and self.latest is not None else self.guard.value(self.processes)
            if not math.isfinite(before):
                raise CompressionError(f"Rollback: evaluate returned {before} before a cut, expected a finite number")
            self.before, self.snapshot = before, self._kept(step)
        self.due = step + self.guard.settle

    def _kept(self, step: int) -> Snapshot:
        snapshot: Snapshot | None = None
        try:
            with self.processes.together("keeping what was before the cut"):
                snapshot = Snapshot.of(self.subject, self.guard.path(step))
        except BaseException:
            if snapshot is not None:  # another process failed
                snapshot.discard()
            raise
        return snapshot

    def cancel(self) -> None:
        """The cut that was about to be made was not; those before it are judged when they would have been."""
        if self.snapshot is not None and self.snapshot is not self.earlier[0]:
            self.snapshot.discard()
        self.snapshot, self.before, self.due = self.earlier

    def forget(self) -> None:
        """There is nothing to judge any more."""
        if self.snapshot is not None:
            self.snapshot.discard()
        self.snapshot = None

    def settle(self, step: int) -> Restored | None:
        """At the step that is due, or later: nothing if all is well, else everything is brought back."""
        if self.snapshot is None or step < self.due:
            return None
        value = self.guard.value(self.processes)
        self.latest = step, value
        harmless = self.guard.accepts(value, self.before)
        if not harmless:
            with self.processes.together("bringing back what was before the cut"):
                self.snapshot.restore_(self.subject)
        self.forget()
        if harmless:
            return None
        orders = {name: adapter.order(module) for name, (module, adapter) in find(self.model).items()}
        return Restored(step, orders, self.guard.verdict(value, self.before))

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers and text; with the snapshot, if a cut has not been judged."""
        snapshot = None if self.snapshot is None else self.snapshot.state_dict()
        return {"snapshot": snapshot, "before": self.before, "due": self.due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; the snapshot is then in memory."""
        self.forget()
        self.snapshot = None if state["snapshot"] is None else Snapshot.from_state_dict(state["snapshot"])
        self.before, self.due = float(state["before"]), int(state["due"])
