"""Rollback of a cut: snapshots that restore model, optimizer and scheduler bit for bit, from any orders."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import re
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, final

import torch
from torch import Tensor, nn

from compressm.adapters import AdapterError, find
from compressm.adapters.base import require_call
from compressm.compression.distributed import Processes
from compressm.compression.record import Restored, require_entries
from compressm.compression.several import kept_groups, leave_
from compressm.compression.stored_states import require_snapshot
from compressm.compression.surgery import attributes_of, optional_in, renew_shared_
from compressm.errors import CompressionError, warn_caller
from compressm.families.choices import require_count, require_number
from compressm.families.observing import untouched
from compressm.files import has_ended, process_name, replacing, write_by
from compressm.layers.parameters import replace_data


@final
@dataclass(frozen=True)
class Subject:
    """Everything that a snapshot contains: models, and the optimizer and scheduler that train them."""

    models: Sequence[nn.Module]
    optimizer: Any | None = None
    scheduler: Any | None = None

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once: those of the models, and others that the optimizer trains."""
        named = {f"{k}/{name}": p for k, model in enumerate(self.models) for name, p in model.named_parameters()}
        seen = {id(parameter) for parameter in named.values()}
        for i, group in enumerate(_groups(self.optimizer)):
            others = (p for p in group["params"] if id(p) not in seen)
            named |= {f"group {i}/{j}": parameter for j, parameter in enumerate(others)}
        return named

    def buffers(self) -> dict[str, tuple[nn.Module, str]]:
        """The owner of every buffer, and its name there."""
        return {
            f"{k}/{path}.{name}": (module, name)
            for k, model in enumerate(self.models)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def attributes(self) -> dict[str, tuple[Any, str]]:
        """The owner of every attribute that a cut changes in place, and its name there."""
        return {
            f"{k}/{path}": place for k, model in enumerate(self.models) for path, place in attributes_of(model).items()
        }

    def added(self, then: Collection[str]) -> dict[str, tuple[nn.Module, str]]:
        """The owners and names of parameters and buffers that a cut has added since `then`."""
        places = {
            id(getattr(module, leaf)): (module, leaf) for model in self.models for module, leaf in optional_in(model)
        }
        now = {**self.parameters(), **{name: getattr(*place) for name, place in self.buffers().items()}}
        return {name: places[id(value)] for name, value in now.items() if name not in then and id(value) in places}


class UnreadableSnapshotError(CompressionError):
    """The file of a snapshot is gone or damaged."""


@final
@dataclass(frozen=True)
class Snapshot:
    """Tensors by name, in memory or in a file, and the rest: numbers and text.

    Gradients are not included: they belong to a batch. After `restore_` they are None.
    """

    tensors: Mapping[str, Tensor] | Path
    rest: Mapping[str, Any]
    digest: str = ""  # of the file: torch loads tensors with flipped bits

    @classmethod
    def of(cls, subject: Subject, path: Path | str | None = None) -> Snapshot:
        """A snapshot of everything that training changes; with a path, tensors go to that file, atomically."""
        parameters, buffers = subject.parameters(), subject.buffers()
        tensors = {f"parameter {name}": _copy(parameter) for name, parameter in parameters.items()}
        tensors |= {f"buffer {name}": _copy(module.get_buffer(key)) for name, (module, key) in buffers.items()}
        rest = {
            "parameters": {name: {"requires_grad": p.requires_grad} for name, p in parameters.items()},
            "buffers": list(buffers),
            "attributes": {path: getattr(*place) for path, place in subject.attributes().items()},
            "optimizer": _optimizer(subject, tensors),
            "scheduler": None if subject.scheduler is None else copy.deepcopy(subject.scheduler.state_dict()),
        }
        if path is None:
            return cls(tensors, rest)
        with replacing(Path(path), archive_bytes(tensors)) as scratch:
            write_by(partial(torch.save, tensors), scratch)
            digest = _digest(scratch)
        return cls(Path(path), rest, digest)

    def restore_(self, subject: Subject, undo: ExitStack | None = None) -> None:
        """Restore everything in the same objects; a subject that does not match is refused before anything changes.

        After an error everything is as it was. Closing `undo` takes the restoration back.
        """
        tensors = self._loaded()
        added = subject.added({*self.rest["parameters"], *self.rest["buffers"]})
        self._require_same(subject, added)
        if undo is not None:
            self._restore_(subject, added, tensors, undo)
            return
        undo = ExitStack()
        try:
            self._restore_(subject, added, tensors, undo)
        except BaseException:
            undo.close()
            raise

    def _restore_(
        self,
        subject: Subject,
        added: Mapping[str, tuple[nn.Module, str]],
        tensors: Mapping[str, Tensor],
        undo: ExitStack,
    ) -> None:
        if subject.optimizer is not None:
            undo.callback(_put_back_, subject.optimizer, *_shallow(subject.optimizer))
            leave_(subject.optimizer, [getattr(*place) for place in added.values()])
        for module, leaf in added.values():
            undo.callback(setattr, module, leaf, getattr(module, leaf))
            setattr(module, leaf, None)
        parameters, buffers = subject.parameters(), subject.buffers()
        with torch.no_grad():
            for name, parameter in parameters.items():
                _set_parameter_(parameter, tensors[f"parameter {name}"], undo, **self.rest["parameters"][name])
            for name, (module, key) in buffers.items():
                undo.callback(module._buffers.__setitem__, key, module._buffers[key])
                module._buffers[key] = _assigned(module._buffers[key], tensors[f"buffer {name}"], undo)
            then = self.rest.get("attributes", {})
            for path, place in subject.attributes().items():
                if path in then:
                    undo.callback(setattr, *place, getattr(*place))
                    setattr(*place, then[path])
            renew_shared_(subject.models, undo)
            if subject.optimizer is not None:
                stay = () if subject.scheduler is not None else _SCHEDULED
                _restore_optimizer_(subject.optimizer, parameters, self.rest["optimizer"], tensors, undo, stay)
        if subject.scheduler is not None:
            undo.callback(subject.scheduler.load_state_dict, copy.deepcopy(subject.scheduler.state_dict()))
            subject.scheduler.load_state_dict(copy.deepcopy(self.rest["scheduler"]))

    def _require_same(self, subject: Subject, added: Collection[str]) -> None:
        for what, now, then in (
            ("parameters", set(subject.parameters()), set(self.rest["parameters"])),
            ("buffers", set(subject.buffers()), set(self.rest["buffers"])),
        ):
            now -= set(added)
            if now != then:
                other = ", ".join(sorted(now ^ then)[:8])
                raise CompressionError(f"the {what} differ from those of the snapshot: {other} are on one side only")
        for what in ("optimizer", "scheduler"):
            if (getattr(subject, what) is None) != (self.rest[what] is None):
                raise CompressionError(
                    f"the snapshot was taken {'without' if self.rest[what] is None else 'with'} {what}"
                )
        groups = _groups(subject.optimizer)
        then_groups = [] if subject.optimizer is None else self.rest["optimizer"]["groups"]
        if len(groups) != len(then_groups):
            raise CompressionError(f"the optimizer has {len(groups)} groups, in the snapshot it had {len(then_groups)}")

    def state_dict(self) -> dict[str, Any]:
        """The snapshot as tensors, numbers and text."""
        return {"tensors": dict(self._loaded()), "rest": copy.deepcopy(dict(self.rest))}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Snapshot:
        """The snapshot of a state dict, in memory."""
        return cls(dict(state["tensors"]), state["rest"])

    def discard(self) -> None:
        """Remove the file, if there is one."""
        if isinstance(self.tensors, Path):
            self.tensors.unlink(missing_ok=True)

    def _loaded(self) -> Mapping[str, Tensor]:
        if not isinstance(self.tensors, Path):
            return self.tensors
        try:
            if _digest(self.tensors) != self.digest:
                raise UnreadableSnapshotError(
                    f"the snapshot {self.tensors} is damaged: its bytes are not those that were written"
                )
            # An open file: torch would choose its reader by the ending of a path.
            with self.tensors.open("rb") as file:
                loaded: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise UnreadableSnapshotError(f"the snapshot {self.tensors} cannot be read: {error}") from error
        return loaded


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def archive_bytes(value: object) -> int:
    """About the size of the file that `torch.save` writes of tensors in nested containers."""
    if isinstance(value, Tensor):
        return value.nbytes + 300  # names and places of a tensor in the archive
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(map(archive_bytes, inside))


def _copy(value: Tensor) -> Tensor:
    return value.detach().clone()


def _set_parameter_(parameter: nn.Parameter, data: Tensor, undo: ExitStack, *, requires_grad: bool) -> None:
    undo.callback(parameter.requires_grad_, parameter.requires_grad)
    undo.callback(setattr, parameter, "grad", parameter.grad)
    parameter.grad = None
    if parameter.shape == data.shape and parameter.dtype == data.dtype:
        _overwrite_(parameter, data, undo)
    else:
        undo.callback(replace_data, parameter, parameter.data)
        replace_data(parameter, data.to(parameter.device, copy=True))
    parameter.requires_grad_(requires_grad)


def _overwrite_(now: Tensor, then: Tensor, undo: ExitStack) -> None:
    """Copy into the same memory, which a captured CUDA graph may read; `.data` keeps the version of autograd."""
    undo.callback(now.data.copy_, _copy(now))
    now.data.copy_(then)


def _assigned(now: Tensor | None, then: Tensor, undo: ExitStack) -> Tensor:
    """The earlier value, in the memory of the present one if it fits."""
    if isinstance(now, Tensor) and now.shape == then.shape and now.dtype == then.dtype:
        _overwrite_(now, then, undo)
        return now
    return then.clone() if now is None else then.to(now.device, copy=True)


def _shallow(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """The optimizer's dictionaries and lists with their present entries, for `_put_back_`."""
    lists = [{key: list(held) for key, held in group.items() if isinstance(held, list)} for group in _groups(optimizer)]
    groups = [(group, dict(group), kept) for group, kept in zip(_groups(optimizer), lists, strict=True)]
    return [(parameter, held, dict(held)) for parameter, held in optimizer.state.items()], groups


def _groups(optimizer: Any | None) -> list[dict[str, Any]]:
    return [] if optimizer is None else optimizer.param_groups


def _put_back_(optimizer: Any, states: Sequence[Any], groups: Sequence[Any]) -> None:
    """Give the same dictionaries and lists the entries that they had."""
    known = {id(parameter) for parameter, _, _ in states}
    for parameter in [parameter for parameter in optimizer.state if id(parameter) not in known]:
        del optimizer.state[parameter]
    for parameter, held, entries in states:
        held.clear()
        held.update(entries)
        optimizer.state[parameter] = held
    for group, entries, lists in groups:
        group.clear()
        group.update(entries)
        for key, kept in lists.items():
            group[key][:] = kept


def _optimizer(subject: Subject, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    if subject.optimizer is None:
        return None
    names = {id(parameter): name for name, parameter in subject.parameters().items()}
    states = {}
    for parameter, state in subject.optimizer.state.items():
        if id(parameter) not in names:
            raise CompressionError("the optimizer has a state for a tensor that is in none of its groups")
        name = names[id(parameter)]
        states[name] = _entries(f"state {name}", state, tensors)
    groups = []
    for k, group in enumerate(subject.optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        members = [names[id(parameter)] for parameter in group["params"]]
        groups.append({"options": _entries(f"group {k}", options, tensors), "params": members})
    return {"states": states, "groups": groups}


def _entries(place: str, held: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The entries of a dictionary; its tensors are copied to `tensors`, under this place."""
    kept = {}
    for key, value in held.items():
        if isinstance(value, Tensor):
            tensors[f"{place} {key}"] = _copy(value)
            kept[key] = {"tensor": f"{place} {key}", "device": str(value.device)}
        else:
            kept[key] = {"value": copy.deepcopy(value)}
    return kept


# Options of groups that schedulers set.
_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "base_momentum", "max_momentum")


def _restore_optimizer_(
    optimizer: Any,
    parameters: Mapping[str, nn.Parameter],
    saved: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    undo: ExitStack,
    stay: Collection[str],
) -> None:
    """Restore states and groups; where a scheduler sets the rates of a group, the options in `stay` stay."""
    for parameter in [p for p in optimizer.state if id(p) not in {id(parameters[name]) for name in saved["states"]}]:
        del optimizer.state[parameter]
    for name, state in saved["states"].items():
        held = optimizer.state.get(parameters[name], {})
        _restore_entries_(held, state, tensors, undo)
        optimizer.state[parameters[name]] = held
    for group, then in zip(optimizer.param_groups, saved["groups"], strict=True):
        group["params"][:] = [parameters[name] for name in then["params"]]
        # Flags that an earlier torch did not have stay.
        flags = {key: value for key, value in group.items() if value is None or isinstance(value, bool)}
        newer = {key: value for key, value in flags.items() if key not in then["options"]}
        kept = stay if "initial_lr" in group else ()
        beside = {"params": group["params"], **newer}
        _restore_entries_(group, then["options"], tensors, undo, beside=beside, stay=kept)


def _restore_entries_(
    held: dict[str, Any],
    saved: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    undo: ExitStack,
    beside: Mapping[str, Any] = {},
    stay: Collection[str] = (),
) -> None:
    """Restore the entries in their earlier order, so that a later checkpoint is the same too."""
    now = dict(held)
    held.clear()
    held.update(beside)
    for key, entry in saved.items():
        if key in stay and key in now:
            held[key] = now[key]
            continue
        if "tensor" not in entry:
            held[key] = copy.deepcopy(entry["value"])
            continue
        then, before = tensors[entry["tensor"]], now.get(key)
        same_place = isinstance(before, Tensor) and str(before.device) == entry["device"]
        held[key] = _assigned(before, then, undo) if same_place else then.to(entry["device"], copy=True)


@final
@dataclass(frozen=True)
class Rollback:
    """Undo a cut if `evaluate()` is worse afterwards by more than the share `drop`.

    Higher values are better, or, with `lower_is_better`, lower ones, as for a loss; `measures` is the value's name in
    messages. It is evaluated before a cut and again `settle` steps after it (the paper: 1 % of the value, 1 % of all
    steps). A cut in between is judged together with the one before it: both stay, or neither. With a `folder` the
    snapshot is a file there instead of in memory. Without `scheduler=`, rates that a scheduler sets are not restored.

    `evaluate` may only run the model: what else it does to it is put back, and changed weights are an error.
    """

    evaluate: Callable[[], float]
    drop: float = 0.01
    settle: int = 100
    folder: Path | str | None = None
    measures: str = "evaluate()"
    lower_is_better: bool = False

    def __post_init__(self) -> None:
        try:
            require_call("evaluate", self.evaluate)
        except AdapterError as error:
            raise CompressionError(f"Rollback: {error}") from None
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

    def value(self, model: nn.Module, processes: Processes = Processes(), optimizer: Any | None = None) -> float:
        """The result of `evaluate` for this model; all processes get that of the first."""
        with processes.together("evaluating"):
            number = _number(untouched(model, "evaluate", self.evaluate, kept_groups(optimizer)))
        return processes.as_first(number, "evaluating")

    def accepts(self, value: float, before: float) -> bool:
        """True if the value is worse by at most drop·|before|; False for NaN."""
        worst = before + (self.drop if self.lower_is_better else -self.drop) * abs(before)
        return value <= worst if self.lower_is_better else value >= worst

    def verdict(self, value: float, before: float) -> str:
        """The message about a value that is not accepted."""
        way = "rose" if self.lower_is_better else "fell"
        by = f" by {100 * abs(value - before) / abs(before):.3g} %" if before and math.isfinite(value) else ""
        allowed = f"{100 * self.drop:g} % is allowed"
        return f"{self.measures} {way}{by}, from {before:.6g} to {value:.6g} after the cut; {allowed}"

    def path(self, step: int) -> Path | None:
        """A new name for the file of a snapshot before that step, with that of the process; None for memory."""
        if self.folder is None:
            return None
        # Guards of several compressors may share a folder.
        return Path(self.folder) / f"before-step-{step}-{process_name()}-{uuid.uuid4().hex}.pt"


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool | str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise CompressionError(f"Rollback: evaluate returned {value!r:.100}, expected a number") from None


_FILE = re.compile(r"before-step-\d+-(?P<process>\d+-[0-9a-f]+)(-[0-9a-f]{32})?\.pt")


def _remove_left(folder: Path) -> None:
    """Remove the snapshots of killed processes."""
    with suppress(OSError):
        for path in folder.iterdir():
            if (named := _FILE.fullmatch(path.name)) is not None and has_ended(named["process"]):
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a file that may not be there, in a folder that may not be one."""
    with suppress(OSError):
        path.unlink()


# The state of a Watch without a cut to judge.
NOTHING_TO_JUDGE: Mapping[str, Any] = {"snapshot": None, "before": math.nan, "due": -1}


class Watch:
    """The cuts that are not judged yet: the snapshot before the first of them, and the step to judge them.

    What a method changes, closing `undo` takes back; call `tidy` once nothing can be taken back any more.
    """

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
        self.latest: tuple[int, float] | None = None  # a step, and the result of `evaluate` there
        self.spent: list[Snapshot] = []  # snapshots of judged cuts, whose files may go
        self.orders: dict[str, int] | None = None  # those after the last cut, if that is known

    def is_due(self, step: int) -> bool:
        """True if there are cuts to judge at this step."""
        return self.snapshot is not None and step >= self.due

    def begin(self, step: int, undo: ExitStack) -> None:
        """Prepare for a cut; if the last one is not judged yet, both are judged together."""
        undo.callback(vars(self).update, dict(vars(self)))
        if self.snapshot is None:
            known = self.latest is not None and self.latest[0] == step
            before = self.latest[1] if known and self.latest is not None else self._value()
            if not math.isfinite(before):
                raise CompressionError(f"Rollback: evaluate returned {before} before a cut, expected a finite number")
            self.before, self.snapshot = before, self._kept(step, undo)
        self.due = step + self.guard.settle

    def made(self) -> None:
        """Remember the orders after a cut: what somebody else cuts later is not undone with it."""
        self.orders = self._orders()

    def _orders(self) -> dict[str, int]:
        return {name: adapter.order(module) for name, (module, adapter) in find(self.model).items()}

    def _kept(self, step: int, undo: ExitStack) -> Snapshot:
        path = self.guard.path(step)
        if path is not None:
            _remove_left(path.parent)
            undo.callback(_remove, path)
        with self.processes.together("taking a snapshot before the cut"):
            return Snapshot.of(self.subject, path)

    def settle(self, step: int, undo: ExitStack) -> Restored | None:
        """Judge the cuts if that is due; if they are not accepted, restore everything and say why."""
        if self.snapshot is None or not self.is_due(step):
            return None
        undo.callback(vars(self).update, dict(vars(self)))
        value = self._value()
        self.latest = step, value
        harmless = self.guard.accepts(value, self.before)
        if not harmless:
            with self.processes.together("restoring the snapshot from before the cut"):
                self._restore_(self.snapshot, self.guard.verdict(value, self.before), undo)
        self.spent, self.snapshot = [*self.spent, self.snapshot], None
        if harmless:
            return None
        return Restored(step, self._orders(), self.guard.verdict(value, self.before))

    def _value(self) -> float:
        return self.guard.value(self.model, self.processes, self.subject.optimizer)

    def _restore_(self, snapshot: Snapshot, verdict: str, undo: ExitStack) -> None:
        now = self._orders()
        then = now if self.orders is None else self.orders
        try:
            # More states are zeros that somebody added: they go with the cut.
            if odd := [name for name in now if now[name] < then.get(name, 0)]:
                raise CompressionError(
                    f"{odd[0] or 'the model'} has order {now[odd[0]]} and had {then.get(odd[0])} after that cut:"
                    " another compressor, or compress_, has cut the model since, and would lose its cut"
                )
            snapshot.restore_(self.subject, undo)
        except CompressionError as error:
            raise CompressionError(
                f"{verdict}, but {error}. To undo the cut, load a checkpoint from before it, or one that was saved"
                " while the snapshot was there; to keep it, call accept() of the compressor"
            ) from error

    def accept(self) -> None:
        """Keep the cuts that are not judged yet."""
        self.spent, self.snapshot = self.spent + ([] if self.snapshot is None else [self.snapshot]), None
        self.tidy()

    def tidy(self) -> None:
        """Remove the files of snapshots that nothing needs any more."""
        while self.spent:
            try:
                self.spent[-1].discard()
            except OSError as error:
                warnings.warn(f"the snapshot {self.spent[-1].tensors} cannot be removed: {error}", stacklevel=3)
            self.spent = self.spent[:-1]

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors, numbers and text, with the snapshot if a cut is not judged yet, and if it is there."""
        snapshot = None
        if self.snapshot is not None:
            try:
                snapshot = self.snapshot.state_dict()
            except UnreadableSnapshotError as error:
                warn_caller(f"{error}: a training that is resumed from this state keeps the cuts that are not judged")
        return {"snapshot": snapshot, "before": self.before, "due": self.due}

    def require_loadable(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that could not be judged or restored later; nothing is changed."""
        what = "the state of a Rollback"
        require_entries(what, state, snapshot=Mapping | None, before=float | int, due=int)
        if state["snapshot"] is not None:
            require_entries(f"{what}: snapshot", state["snapshot"], tensors=Mapping, rest=Mapping)
            rest = {"parameters": Mapping, "buffers": list | tuple, "optimizer": Mapping | None}
            require_entries(f"{what}: snapshot: rest", state["snapshot"]["rest"], **rest)
            if not math.isfinite(state["before"]):
                raise CompressionError(f"{what}: before is {state['before']}, expected a finite number")
            require_snapshot(state["snapshot"], self.subject)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; the snapshot is then in memory."""
        self.require_loadable(state)
        loaded = None if state["snapshot"] is None else Snapshot.from_state_dict(state["snapshot"])
        due, before = int(state["due"]), float(state["before"])
        self.spent += [] if self.snapshot is None else [self.snapshot]
        self.snapshot, self.before, self.due, self.latest, self.orders = loaded, before, due, None, None
        self.tidy()
