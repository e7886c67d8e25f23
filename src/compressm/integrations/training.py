"""Shared parts of the integrations: the package that is missing, plain optimizers, states as numbers and text."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from compressm.compression import Compressor, Schedule, rewrap_
from compressm.compression.cutting import followers
from compressm.compression.distributed import require_rewrappable, unwrapped, wrappers_in
from compressm.compression.record import Event, orders_after
from compressm.errors import CompressionError, warn_caller
from compressm.saving.orders import group_names, sort_groups_, take_orders_of_
from compressm.saving.rebuilding import orders_of

When = Iterable[int] | Schedule | Callable[[int], Iterable[int] | Schedule]


@dataclass(frozen=True)
class Place:
    """What is cut of a model in training: the part at a path in it, with models that follow, which may be paths too."""

    path: str = ""
    follow: Any = ()

    def __post_init__(self) -> None:
        if not isinstance(self.path, str):
            raise CompressionError(f"part is {self.path!r:.80}, expected text")

    def part(self, model: Any) -> nn.Module:
        """The model that is cut; if it is no part, with its wrappers."""
        found: nn.Module = _module_at("part", self.path, unwrapped(model)) if self.path else model
        return found

    def followers(self, model: nn.Module) -> tuple[nn.Module, ...]:
        """The models in follow, those that are paths in this model."""
        if isinstance(self.follow, str | nn.Module) or not isinstance(self.follow, Sequence):
            raise CompressionError(
                f"follow is {self.follow!r:.80}, expected a list of models, or of their paths in the model"
            )
        inner = unwrapped(model)
        named = ((f"follow[{k}]", one) for k, one in enumerate(self.follow))
        return followers([_module_at(said, one, inner) if isinstance(one, str) else one for said, one in named])

    def outside(self, model: nn.Module) -> list[nn.Module]:
        """Those of them that are no part of the model, whose weights checkpoints of the trainer do not hold."""
        inside = set(model.modules())
        return [one for one in self.followers(model) if one not in inside]

    def inside(self, average: nn.Module) -> list[nn.Module]:
        """The parts of an average of the whole model that follow a cut."""
        if not self.path:
            return [average]
        own = [one for one in self.follow if isinstance(one, str)]
        inner = average.module if isinstance(average, AveragedModel) else average
        return [_module_at("part of the average", path, inner) for path in (self.path, *own)]

    def step_(self, compressor: Compressor, step: int, model: Any) -> list[Event]:
        """Call the compressor; wrappers around the part that it cuts are renewed."""
        events = compressor.step(step)
        if events and self.path and wrappers_in(model):
            rewrap_(model)
        return events


class CallbackOfTrainer:
    """A callback's options, and the compressor of the training that it is in.

    It cuts the trainer's model, or the `part` at this path in it, with the models in `follow`, which may be paths too.
    """

    def __init__(self, *, when: When, keep: Any, name: str = "", part: str = "", **options: Any) -> None:
        super().__init__()
        if not isinstance(name, str):
            raise CompressionError(f"name is {name!r:.80}, expected text")
        if wrong := sorted({"model", "optimizer", "scheduler"} & options.keys()):
            raise CompressionError(f"{', '.join(wrong)}: the callback takes them from the trainer; leave them out")
        self._when, self._options, self._name = when, {"keep": keep, **options}, name
        self._place = Place(part, options.get("follow", ()))
        self._compressor: Compressor | None = None
        self._model: nn.Module | None = None
        self._optimizers: list[Any] = []

    @property
    def compressor(self) -> Compressor | None:
        """The compressor of the present training; None before it begins."""
        return self._compressor

    @property
    def history(self) -> list[Event]:
        """The cuts and restorations of the training."""
        return [] if self._compressor is None else self._compressor.history

    def _begin_(
        self, schedulers: Sequence[Any], *, total: float, step: int, saved: Any, averages: Sequence[nn.Module] = ()
    ) -> None:
        """Make the compressor for model and optimizers, and restore its state if the training resumes.

        `averages` are those of the trainer, which saves and loads them itself.
        """
        assert self._model is not None
        if saved is not None:
            sort_saved_(self._model, self._optimizers, saved)
            load_followers_(self._place.outside(self._model), saved)
        guarded: dict[str, Any] = {}
        if self._options.get("guard") is not None and schedulers:
            guarded = {"scheduler": list(schedulers)}
        when = schedule_of(self._when, total)
        follow = [
            *self._place.followers(self._model),
            *(one for model in averages for one in self._place.inside(model)),
        ]
        options = self._options | guarded | {"follow": follow}
        for wrapper in wrappers_in(self._model):
            require_rewrappable(wrapper)
        compressor = Compressor(self._place.part(self._model), self._optimizers or None, when=when, **options)
        if saved is not None:
            compressor.load_state_dict(saved["compressor"])
        elif step > 0:
            resumed_without_state_(compressor, step)
        self._compressor = compressor

    def _saved_state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        assert self._compressor is not None
        assert self._model is not None
        return saved_state(self._compressor, self._model, self._optimizers, self._place.outside(self._model))

    def _step_(self, step: int) -> list[Event]:
        assert self._compressor is not None
        return self._place.step_(self._compressor, step, self._model)

    def _metrics(self, events: Sequence[Event]) -> dict[str, int]:
        return metrics(events, self._place.part(self._model))


def _module_at(said: str, path: str, model: nn.Module) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        held = ", ".join(name for name, _ in model.named_children())
        raise CompressionError(
            f"{said} is {path!r}, which {type(model).__name__} does not have; it has {held}: expected a path such as"
            " 'model' or 'model.backbone'"
        ) from None


def require_package(name: str, extra: str) -> None:
    """Refuse to go on without a package, and say which extra installs it."""
    if importlib.util.find_spec(name) is None:
        raise ImportError(
            f"{name} is not installed, which this integration of compressm needs: pip install 'compressm[{extra}]'"
        )


def plain_optimizer(optimizer: Any) -> Any:
    """The optimizer inside the wrappers of Accelerate and Lightning."""
    while "optimizer" in vars(optimizer) or "_optimizer" in vars(optimizer):
        optimizer = vars(optimizer).get("optimizer", vars(optimizer).get("_optimizer"))
    return optimizer


def schedule_of(when: When, total: float) -> Iterable[int] | Schedule:
    """The steps of the cuts; a function gets the number of steps of the whole training."""
    if not callable(when):
        return when
    if not 0 < total < math.inf:
        raise CompressionError(
            f"when is a function of the number of steps, which this trainer does not know ({total}): set its max_steps,"
            " or pass the steps themselves, when=[1000, 2000]"
        )
    return when(int(total))


def saved_state(
    compressor: Compressor, model: nn.Module, optimizers: Sequence[Any], follow: Sequence[nn.Module] = ()
) -> dict[str, Any]:
    """The state of a compressor, with the orders, the names of the parameters in every group, and its followers."""
    inner = unwrapped(model)
    groups = [group_names(inner, one) for one in optimizers]
    saved = {"compressor": compressor.state_dict(), "groups": groups, "orders": orders_of(inner)}
    return saved | ({"followers": [one.state_dict() for one in follow]} if follow else {})


def load_followers_(follow: Sequence[nn.Module], saved: Mapping[str, Any]) -> None:
    """Give models that follow the compressor their saved weights and orders."""
    stored = saved.get("followers", [])
    if follow and not stored:
        warn_caller(
            "the checkpoint has no weights of the models in follow, and nothing is loaded there: load the saved state"
            " of each by its own load_state_dict before the training goes on"
        )
    elif len(stored) != len(follow):
        raise CompressionError(
            f"the checkpoint has weights of {len(stored)} models in follow, the training has {len(follow)}: expected"
            " the same follow=[...]"
        )
    for one, state in zip(follow, stored, strict=False):
        take_orders_of_(one, state)
        one.load_state_dict(state)


def sort_saved_(model: nn.Module, optimizers: Sequence[Any], saved: Any) -> None:
    """Give loaded moments to the parameters that they belong to; the model must have the saved orders."""
    if not isinstance(saved, dict) or not {"compressor", "groups", "orders"} <= saved.keys():
        raise CompressionError(f"the state of the compressor is {saved!r:.100}, expected what a checkpoint of it holds")
    inner = unwrapped(model)
    if (orders := orders_of(inner)) != saved["orders"]:
        raise CompressionError(
            f"the model has the orders {orders}, the checkpoint {saved['orders']}: load the weights of the checkpoint"
            " too"
        )
    if len(optimizers) != len(saved["groups"]):
        raise CompressionError(f"the checkpoint has {len(saved['groups'])} optimizers, the training {len(optimizers)}")
    for optimizer, names in zip(optimizers, saved["groups"], strict=True):
        sort_groups_(optimizer, inner, names)


def resumed_without_state_(compressor: Compressor, step: int) -> None:
    """Go on at a step of which the checkpoint says nothing: its steps of the schedule are over."""
    warn_caller(
        f"the training resumes at step {step} from a checkpoint without a state of the compressor: steps of the"
        " schedule up to there count as done, and the history begins anew"
    )
    state = compressor.state_dict()
    compressor.load_state_dict({**state, "seen": step})


def metrics(events: Iterable[Any], model: nn.Module) -> dict[str, int]:
    """The number of states in all layers, and in those that these events changed."""
    orders = orders_of(unwrapped(model))
    changed = {name for event in events for name in orders_after(event)}
    return {"states": sum(orders.values())} | {f"states/{name or 'model'}": orders[name] for name in sorted(changed)}
