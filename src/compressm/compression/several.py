"""Several optimizers or schedulers of one training, seen as one; groups: kept, and joined or left by parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from compressm.errors import CompressionError, warn_caller


class Several:
    """Optimizers or schedulers of one training, seen as one; their states are saved and loaded as a list."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = tuple(parts)

    def state_dict(self) -> list[Any]:
        """The state of each, in order."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: Sequence[Any]) -> None:
        """Restore the state of each."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


@final
class Optimizers(Several):
    """Several optimizers seen as one; groups and states are their own objects, not copies."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in order."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> _States:
        """The states of all optimizers; a new one is given to the optimizer that holds the parameter."""
        return _States(self.parts)


@final
class _States(MutableMapping[Any, dict[str, Any]]):
    """The states of several optimizers by parameter."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def __getitem__(self, parameter: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._owner(parameter).state[parameter]
        return found

    def __setitem__(self, parameter: Any, state: dict[str, Any]) -> None:
        for part in self._parts:
            if parameter in part.state or holds(part, parameter):
                part.state[parameter] = state
                return
        raise KeyError(parameter)

    def __delitem__(self, parameter: Any) -> None:
        del self._owner(parameter).state[parameter]

    def __iter__(self) -> Iterator[Any]:
        return (parameter for part in self._parts for parameter in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)

    def _owner(self, parameter: Any) -> Any:
        for part in self._parts:
            if parameter in part.state:
                return part
        raise KeyError(parameter)


def as_optimizer(given: Any, error: type[ValueError] = CompressionError) -> Any | None:
    """One optimizer, several seen as one, or None, from what a user passed."""
    parts = _parts_given("optimizer", given, ("param_groups", "state"), "torch.optim", error)
    return Optimizers(parts) if len(parts) > 1 else parts[0] if parts else None


def as_scheduler(given: Any, error: type[ValueError] = CompressionError) -> Any | None:
    """One scheduler, several seen as one, or None, from what a user passed."""
    parts = _parts_given("scheduler", given, ("state_dict", "load_state_dict"), "torch.optim.lr_scheduler", error)
    return Several(parts) if len(parts) > 1 else parts[0] if parts else None


def require_own(scheduler: Any | None, optimizer: Any | None) -> None:
    """Refuse a scheduler that sets the rates of another optimizer."""
    own = {id(member) for group in getattr(optimizer, "param_groups", ()) for member in group["params"]}
    for part in parts_of(scheduler) if scheduler is not None else ():
        groups = getattr(getattr(part, "optimizer", None), "param_groups", None)
        if groups is not None and own.isdisjoint(id(member) for group in groups for member in group["params"]):
            kind = "no optimizer" if optimizer is None else f"another optimizer, a {kind_of(optimizer)}"
            raise CompressionError(
                f"scheduler: a {type(part).__name__} sets the rates of a {kind_of(part.optimizer)}, but optimizer is"
                f" {kind}: expected the optimizer of this scheduler, or scheduler=None"
            )


def _parts_given(what: str, given: Any, needs: Sequence[str], where: str, error: type[ValueError]) -> list[Any]:
    if given is None:
        return []
    parts = given.parts if isinstance(given, Several) else given if isinstance(given, list | tuple) else [given]
    for k, part in enumerate(parts):
        which = what if part is given else f"{what}[{k}]"
        if any(other is part for other in parts[:k]):
            raise error(f"{which} is the same {type(part).__name__} as one before it, expected each {what} once")
        lacking = [name for name in needs if not hasattr(part, name)]
        if lacking or isinstance(part, type):
            raise error(
                f"{which} is {_said(part)}, expected one of {where} (with {' and '.join(needs)}), a list of them, or"
                " None"
            )
    if not parts:
        raise error(f"{what} is {given!r}, expected one {what}, a list of at least one, or None")
    return list(parts)


def _said(part: Any) -> str:
    if part is None or isinstance(part, int | float | str):
        return f"{part!r:.100}"
    return f"the class {part.__name__}" if isinstance(part, type) else f"a {type(part).__name__}"


def parts_of(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers or schedulers that are seen as one."""
    return optimizer.parts if isinstance(optimizer, Several) else (optimizer,)


def kind_of(optimizer: Any) -> str:
    """The class of an optimizer or scheduler, or the classes of several, for messages and files."""
    return " and ".join(type(part).__name__ for part in parts_of(optimizer))


def holds(optimizer: Any, parameter: Tensor) -> bool:
    """True if the parameter is in one of the optimizer's groups."""
    return any(member is parameter for group in optimizer.param_groups for member in group["params"])


def require_no_other_inside(optimizer: Any) -> None:
    """Refuse an optimizer around others whose moments are not in its own state, so that no cut would reach them."""
    own = getattr(optimizer, "__dict__", {})
    for name, value in own.items():
        inside = list(value.values()) if isinstance(value, Mapping) else value
        for one in inside if isinstance(inside, list | tuple) else [inside]:
            if not isinstance(one, Optimizer) or one is optimizer:
                continue
            if "state" not in own or one.state is optimizer.state:  # a wrapper, which shows the state inside
                require_no_other_inside(one)
            elif any(holds(optimizer, member) for group in one.param_groups for member in group["params"]):
                kind = type(optimizer).__name__
                raise CompressionError(
                    f"{kind} keeps another optimizer, {type(one).__name__}, in {name!r}, whose moments would keep their"
                    f" old sizes; expected optimizer={kind.lower()}.{name}, if {kind} itself remembers nothing from one"
                    " step to the next (SAM does not, Lookahead does), or an optimizer without another inside"
                )


@final
class _KeptGroups:
    """The groups of an optimizer as they are now, which `restore_` puts back: objects, options, rates in tensors."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._groups = optimizer, optimizer.param_groups
        self._held = [
            (group, dict(group), {key: _copy(value) for key, value in group.items()}) for group in self._groups
        ]

    def restore_(self) -> list[str]:
        """Put everything back; return what was changed."""
        kind, now = type(self._optimizer).__name__, self._optimizer.param_groups
        changed = []
        if len(now) != len(self._held):
            changed.append(f"the number of param_groups of {kind}, from {len(self._held)} to {len(now)}")
        elif odd := [k for k, (group, *_) in enumerate(self._held) if now[k] is not group]:
            changed.append(f"param_groups[{odd[0]}] of {kind}, which is another dictionary")
        if changed:
            self._groups[:] = [group for group, *_ in self._held]
            self._optimizer.param_groups = self._groups
        for k, (group, options, copies) in enumerate(self._held):
            odd_keys = [key for key in {**options, **group} if not _is_as(group, key, options, copies)]
            changed += [f"{key} of param_groups[{k}] of {kind}{_how(group, key, copies)}" for key in odd_keys]
            if odd_keys:
                group.clear()
                group.update(options)
                for key in odd_keys:
                    _write_(options.get(key), copies.get(key))
        return changed


def _copy(value: Any) -> Any:
    """A copy of what may change in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _write_(value: Any, copy: Any) -> None:
    if isinstance(value, Tensor):
        value.detach().copy_(copy)
    elif isinstance(value, list):
        value[:] = copy


def _is_as(group: Mapping[str, Any], key: str, options: Mapping[str, Any], copies: Mapping[str, Any]) -> bool:
    """True if an option of a group is what it was."""
    if key not in group or key not in options:
        return False
    now, then, copy = group[key], options[key], copies[key]
    if isinstance(then, Tensor):
        return now is then and torch.equal(then.detach(), copy)
    if isinstance(then, list):
        return now is then and [*map(id, then)] == [*map(id, copy)]
    return now is then or (isinstance(then, bool | int | float | str | tuple) and bool(now == then))


def _how(group: Mapping[str, Any], key: str, copies: Mapping[str, Any]) -> str:
    if key == "params":
        return ""
    if key not in copies:
        return ", which was not there"
    return f", from {copies[key]!r:.40} to {group[key]!r:.40}" if key in group else ", which is gone"


def kept_groups(optimizer: Any | None) -> list[Callable[[], list[str]]]:
    """Functions that put the groups of each optimizer back as they are now, and return what was changed."""
    return [] if optimizer is None else [_KeptGroups(part).restore_ for part in parts_of(optimizer)]


def require_no_moments_beside(optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer that keeps tensors of the shapes of these parameters elsewhere than in its state."""
    groups = [group["params"] for group in optimizer.param_groups]
    own = {id(one) for members in groups for member in members for one in (member, member.grad)}
    shapes = {parameter.shape: name for name, parameter in parameters.items() if parameter.numel() > 1}
    # Some keep the moments of all parameters in one long vector.
    flat = [sum(member.numel() for member in members) for members in groups]
    lengths = {*flat, sum(flat)} if any(holds(optimizer, one) for one in parameters.values()) else set()
    for place, value in _beside(optimizer):
        is_flat = value.ndim == 1 and len(value) > 1 and len(value) in lengths
        if id(value) in own or not (is_flat or value.shape in shapes):
            continue
        kind, of = type(optimizer).__name__, "all parameters" if is_flat else shapes[value.shape]
        raise CompressionError(
            f"{kind} keeps a tensor of the shape {tuple(value.shape)}, that of {of}, in {place}, not in its state: a"
            " cut would leave it as it is, and the next step would fail; expected an optimizer that keeps moments in"
            " state[parameter], such as AdamW, or a cut before it is made: compress_(model, ...), then a new optimizer"
        )


def _beside(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the optimizer's attributes, in its groups, and in its state under other keys than parameters."""
    for name, value in getattr(optimizer, "__dict__", {}).items():
        if name not in ("state", "param_groups", "defaults"):
            yield from ((f"its attribute {name!r}", one) for one in tensors_in(value))
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                yield from ((f"the entry {name!r} of a group", one) for one in tensors_in(value))
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            yield from ((f"state[{key!r:.40}]", one) for one in tensors_in(value))


def tensors_in(value: object, depth: int = 3) -> Iterator[Tensor]:
    """The tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one, depth - 1)
    elif depth and is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from tensors_in(getattr(value, entry.name, None), depth - 1)


_NAMES = "param_names"  # in optimizers built from named_parameters()


def join_(group: dict[str, Any], parameter: nn.Parameter, name: str, place: int | None = None) -> None:
    """Add a parameter to a group, at its end or at a place."""
    for key, new in (("params", parameter), (_NAMES, name)):
        if key in group:
            group[key].insert(len(group[key]) if place is None else place, new)


def group_without_decay(optimizer: Any, group: dict[str, Any], module: nn.Module, new: nn.Parameter) -> dict[str, Any]:
    """The group for a new parameter of the module that should not decay, beside one of this group.

    It is this group or one like it, else one of the module's other parameters, in each case without weight decay. A new
    group would be unknown to learning-rate schedulers, so without such a group the parameter decays, with a warning.
    """
    # Muon takes matrices alone.
    parts = [part for part in parts_of(optimizer) if new.ndim == 2 or type(part).__name__ != "Muon"]
    able = [one for part in parts for one in part.param_groups]
    alike = [one for one in able if _options(one) == _options(group)]
    own = {id(parameter) for parameter in module.parameters()}
    beside = [one for one in able if any(id(parameter) in own for parameter in one["params"])]
    itself = [one for one in able if one is group]
    found = next((one for one in (*itself, *alike, *beside) if not one.get("weight_decay")), None)
    if found is not None:
        return found
    if not itself and not beside:
        raise CompressionError(
            f"{kind_of(optimizer)} cannot train maps of shape {tuple(new.shape)}: train one of the layer's other"
            " parameters, such as A_log, by AdamW, optimizer=[muon, adamw], or pass form=Fitted()"
        )
    found = (*itself, *beside)[0]
    warn_caller(
        f"maps get the weight decay {found['weight_decay']} of their group, as if keys and queries decayed twice; to"
        " avoid it, give the optimizer a group without weight decay, {'params': [], 'weight_decay': 0.0}, which may"
        " be empty"
    )
    return found


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", _NAMES, "weight_decay")}


def leave_(optimizer: Any, gone: Collection[nn.Parameter]) -> None:
    """Remove parameters and their states from the optimizer."""
    numbers = {id(parameter) for parameter in gone}
    for group in optimizer.param_groups:
        stays = [id(parameter) not in numbers for parameter in group["params"]]
        for key in ("params", _NAMES):
            if key in group:
                group[key][:] = [item for item, kept in zip(group[key], stays, strict=True) if kept]
    for parameter in gone:
        optimizer.state.pop(parameter, None)


def name_beside(group: dict[str, Any], origin: nn.Parameter, old: str, new: str) -> str:
    """The name in the group for a parameter `new` that joins `origin`, whose name in the module is `old`."""
    names = group.get(_NAMES)
    if names is None:
        return new
    place = next(k for k, parameter in enumerate(group["params"]) if parameter is origin)
    return f"{str(names[place]).removesuffix(old)}{new}"
