"""Cuts in distributed training: sums over processes, decisions of the first one, and renewed wrappers."""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compressm.adapters.base import COMPILED
from compressm.errors import CompressionError, LostProcessError, StaleWrapperError
from compressm.layers.parameters import refuse_outdated_, refuses_with, trust_, wrapped_name

Value = TypeVar("Value")

# Seconds that a failed exchange waits for the other processes to notice it too: those that do are not lost.
_NOTICE = 2.0
# How many exchanges this process has begun in every group. It tells the store, without waiting for an answer.
_EXCHANGES: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


@final
@dataclass(frozen=True)
class Processes:
    """The processes of a group, or all of torch.distributed; without it, only this one.

    All processes must call every method that communicates. If one of them ends or stalls, the others get a
    `LostProcessError` that names it and ends with `promise`.
    """

    group: Any = None
    promise: str = ""

    @property
    def count(self) -> int:
        """The number of processes that train together."""
        return dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def is_first(self) -> bool:
        """True in the process that decides."""
        return self.index == 0

    @property
    def index(self) -> int:
        """The index of this process, from 0."""
        return 0 if self.count == 1 else dist.get_rank(self.group)

    def total(self, tensor: Tensor, doing: str = "adding up the values of all processes") -> Tensor:
        """The sum over all processes, as a new tensor, the same everywhere."""
        if self.count == 1:
            return tensor
        # NCCL cannot sum tensors on the CPU.
        only_cuda = dist.get_backend(self.group) == "nccl"
        total = tensor.to(torch.device("cuda") if only_cuda else tensor.device, copy=True).contiguous()
        with self._exchange(doing):
            # Not all backends support complex sums; all support real pairs.
            dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, group=self.group)
        return total.to(tensor.device)

    def as_first(self, value: Value, doing: str = "sending the values of the first process") -> Value:
        """The first process's value; tensors in it must be on the CPU."""
        if self.count == 1:
            return value
        box = [value]
        with self._exchange(doing):
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def meet(self, call: str, **options: object) -> None:
        """Wait until all processes make this call; refuse, in all of them, calls or options that differ.

        Collectives of processes at different places wait for ever or mix up their data. This asks the store of the
        group: when the group's timeout has passed, the error names the processes that did not come.
        """
        if self.count == 1:
            return
        mine = {"call": call, **{name: str(value) for name, value in options.items()}}
        timeout = self._store()[1].total_seconds()
        try:
            said = _answered(timeout + 2 * _NOTICE, lambda: self._met(mine))
        except (RuntimeError, TimeoutError) as error:
            raise self.lost(f"calling {call}") from error
        for index, other in enumerate(said):
            _require_same_call(self._named(index), mine, json.loads(other))

    def _met(self, mine: dict[str, str]) -> list[str]:
        """The calls of all processes, once all have come."""
        store, timeout = self._store()
        # Every process counts its own meetings, in the store, so that the count is as old as the group.
        number = store.add(f"compressm/{self.index}/meetings", 1)
        places = [f"compressm/{index}/meeting {number}" for index in range(self.count)]
        store.set(places[self.index], json.dumps(mine))
        try:
            store.wait(places, timeout)
        except RuntimeError as error:
            # Another attempt is the same meeting again; those who leave first were here.
            store.set(f"{places[self.index]}, left", "")
            store.delete_key(places[self.index])
            came = [store.check([place]) or store.check([f"{place}, left"]) for place in places]
            absent = [self._named(index) for index, here in enumerate(came) if not here]
            store.add(f"compressm/{self.index}/meetings", -1)
            raise CompressionError(
                f"{' and '.join(absent) or 'another process'} did not call {mine['call']} within {timeout}, the timeout"
                " of the process group: every process must make the same calls"
            ) from error
        said = [store.get(place) for place in places]
        if any(json.loads(other) != mine for other in said):
            # The first process of all keeps the store, and may end by the error, which the others must read before.
            store.set(f"{places[self.index]}, read", "")
            if dist.get_rank() == 0:
                with suppress(RuntimeError):
                    store.wait([f"{place}, read" for place in places], timedelta(seconds=_NOTICE))
        return said

    def require_same(self, what: str, mine: dict[str, str]) -> None:
        """Refuse, in all processes, values that are not the same in all; the error names the first one."""
        for index, other in enumerate(self._gathered(mine, f"comparing the {what}")):
            for name in mine | other:
                if mine.get(name) != other.get(name):
                    here, there = mine.get(name, "missing"), other.get(name, "missing")
                    raise CompressionError(
                        f"{name} is {here:.200} here, {there:.200} in {self._named(index)}: every process must have the"
                        f" same {what}"
                    )

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a block that succeeds in all processes or raises in all; none waits for one that failed."""
        if self.count == 1:
            yield
            return
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            # Raised again below, after all processes know of it, even of Ctrl-C in one of them.
            failure = error
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            results = self._gathered(said, doing)
        except LostProcessError as lost:
            # A collective inside the block fails by the same loss; any other error is this process's own.
            if failure is None or is_of_collective(failure):
                raise lost from failure or lost.__cause__
            results = []
        if failure is not None:
            raise failure
        failed = [f"{self._named(index)} failed while {doing}: {other}" for index, other in enumerate(results) if other]
        if failed:
            raise CompressionError("; ".join(failed))

    def lost(self, doing: str, began: float | None = None) -> LostProcessError:
        """The error after a failed exchange that began then: it names the processes that did not come or have ended."""
        try:
            who = _answered(2 * _NOTICE, lambda: self._missing(began or time.monotonic()))
        except (RuntimeError, TimeoutError):
            who = "the first process, which keeps the store of the process group, cannot be reached"
        return LostProcessError(f"{who}, while {doing}{self.promise}")

    def _missing(self, began: float) -> str:
        """The processes that did not come to the exchange of this one, or else those that have not noticed its failure.

        Only neighbours of a process that has ended notice it at once. Others wait for them until the timeout.
        """
        store, timeout = self._store()
        mine, others = _EXCHANGES.get(self._group, 0), [k for k in range(self.count) if k != self.index]
        store.set(f"compressm/{self.index}/exchange {mine} failed", "")
        until = min(began + timeout.total_seconds(), time.monotonic() + _NOTICE)
        while True:
            counts = {k: store.add(f"compressm/{k}/exchanges", 0) for k in others}
            silent = {k: n for k, n in counts.items() if not store.check([f"compressm/{k}/exchange {n} failed"])}
            if len(silent) <= 1 or time.monotonic() > until:
                break
            time.sleep(0.05)
        late = [self._named(k) for k, n in silent.items() if n < mine]
        who = " and ".join(late) or " or ".join(map(self._named, silent))
        if not who:
            return "the other processes have given up"
        return f"{who} ended, or did not come within {timeout}, the timeout of the process group"

    @contextmanager
    def _exchange(self, doing: str) -> Iterator[None]:
        """Count an exchange of this process, in the store; if it fails, the error names the processes that are lost."""
        began, number = time.monotonic(), _EXCHANGES.get(self._group, 0) + 1
        try:
            _EXCHANGES[self._group] = number
            self._store()[0].set(f"compressm/{self.index}/exchanges", str(number))
            yield
        except RuntimeError as error:
            raise self.lost(doing, began) from error

    def _gathered(self, value: object, doing: str) -> list[Any]:
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with self._exchange(doing):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def _named(self, index: int) -> str:
        """A process of the group by its rank among all processes."""
        return f"process {dist.get_global_rank(self._group, index)}"

    @property
    def _group(self) -> Any:
        return dist.group.WORLD if self.group is None else self.group

    def _store(self) -> tuple[Any, timedelta]:
        """The key-value store through which the processes of the group found each other, and the group's timeout."""
        group = self._group
        store = group.get_group_store()
        backends = [group._get_backend(device) for device in group._device_types]
        # The store has the timeout of the whole world.
        waits = [backend.options._timeout for backend in backends if hasattr(backend, "options")]
        return store, min(waits, default=store.timeout)


def _answered(seconds: float, ask: Callable[[], Value]) -> Value:
    """The answer of a store. By itself it waits for ever for a process that is frozen, or whose machine is gone."""
    answer: Future[Value] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return answer.result(seconds)


# Errors of gloo are plain RuntimeErrors. These are in the path of its sources, and in the one message without it.
_GLOO = ("/gloo/", "pair closure")


def is_of_collective(error: BaseException) -> bool:
    """True for torch's errors about a process that cannot be reached."""
    said = isinstance(error, RuntimeError) and any(part in str(error) for part in _GLOO)
    return said or isinstance(error, dist.DistError)


def _require_same_call(where: str, mine: dict[str, str], other: dict[str, str]) -> None:
    """Refuse a meeting with a process that is somewhere else, or has other options."""
    if mine["call"] != other["call"]:
        raise CompressionError(
            f"{mine['call']} here, {other['call']} in {where}: every process must make the same calls"
        )
    for name in mine | other:
        if mine.get(name) != other.get(name):
            raise CompressionError(
                f"{name} is {mine.get(name)!s:.200} here, {other.get(name)!s:.200} in {where}: every process"
                " must have the same options"
            )


refuses_with(StaleWrapperError)

# Options that DistributedDataParallel stores under their own names; options that this version lacks are left out.
_OPTIONS = (
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
)
# The option to share normalisation statistics in every forward pass; the first name is that before torch 2.13.
_SYNCHRONISED = ("broadcast_buffers", "forward_sync_buffers", "require_forward_param_sync")
_MEGABYTE = 1024 * 1024


# The mark of a wrapper whose steps are recorded as CUDA graphs.
RECORDED = "_compressm_recorded"


def rewrap_(model: nn.Module) -> None:
    """Renew every DistributedDataParallel in the model, in place, with its options and hooks.

    After a cut or a rollback it averages gradients again. A compressor renews the wrapper that is passed to it; call
    this for any other wrapper. All processes must call it; nothing is sent.
    """
    require_model(model)
    wrappers = wrappers_in(model)
    if not wrappers:
        raise CompressionError(f"{type(model).__name__} has no DistributedDataParallel; expected a wrapped model")
    for wrapper in wrappers:
        require_rewrappable(wrapper)
    for wrapper in wrappers:
        _made_anew_(wrapper)


def require_model(model: object) -> None:
    """Refuse anything but a model of Python modules."""
    if not isinstance(model, nn.Module):
        raise CompressionError(f"model is a {type(model).__name__}, expected an nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise CompressionError(COMPILED.format(model.original_name))


def wrappers_in(model: nn.Module) -> list[DistributedDataParallel]:
    """All DistributedDataParallel wrappers in the model, even inside torch.compile."""
    require_model(model)
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside all wrappers around it."""
    require_model(model)
    while True:
        if isinstance(model, DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif wrapped_name(model) == "_orig_mod":  # torch.compile
            model = model.get_submodule("_orig_mod")
        else:
            return model


def renew_wrappers_(model: nn.Module, changed: Iterable[nn.Module]) -> None:
    """Renew the model's wrappers after parameters of these modules have changed their shapes.

    Other wrappers of these modules refuse to train, and so do the model's own if they cannot be renewed. Averages of
    the old shapes refuse to average.
    """
    known = wrappers_in(model) if dist.is_available() and dist.is_initialized() else []
    try:
        if known:
            rewrap_(model)
    except BaseException:
        refuse_outdated_(unwrapped(model), changed)
        raise
    refuse_outdated_(unwrapped(model), changed, but=known)


def require_rewrappable(wrapper: DistributedDataParallel) -> None:
    """Refuse wrappers that keep copies of parameters."""
    for option in ("mixed_precision", "_delay_all_reduce_params"):
        if getattr(wrapper, option, None):
            said = option.strip("_")
            raise CompressionError(f"DistributedDataParallel with {said} keeps copies of parameters and cannot be cut")


def _made_anew_(wrapper: DistributedDataParallel) -> None:
    before, module = dict(wrapper.__dict__), wrapper.module
    hooks = [(hook, state) for hook, state in wrapper._comm_hooks]
    try:
        # All processes already agree, so nothing is compared or sent.
        with _stream_aside(next(module.parameters()).device) if before.get(RECORDED) else nullcontext():
            DistributedDataParallel.__init__(wrapper, module, init_sync=False, **_options(wrapper))
        for hook, state in hooks:
            wrapper.register_comm_hook(state, hook)
    except BaseException:
        wrapper.__dict__.clear()
        wrapper.__dict__.update(before)
        raise
    _bring_back_(wrapper, before)


@contextmanager
def _stream_aside(device: torch.device) -> Iterator[None]:
    """A stream of its own on a GPU: gradients that are gathered on the default one cannot be recorded as a graph."""
    if device.type != "cuda":
        yield
        return
    present = torch.cuda.current_stream(device)
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(present)
    with torch.cuda.stream(aside):
        yield
    present.wait_stream(aside)


def _bring_back_(wrapper: DistributedDataParallel, before: dict[str, Any]) -> None:
    """Restore hooks except the refusal, the mode, and everything that a subclass added."""
    for name in nn.Module().__dict__:
        if name not in ("_modules", "_parameters", "_buffers"):
            wrapper.__dict__[name] = before[name]
    for name in _SYNCHRONISED:
        if name in before:
            wrapper.__dict__[name] = before[name]
    if before.get(RECORDED):
        wrapper.__dict__[RECORDED] = True
    wrapper._modules.update({name: child for name, child in before["_modules"].items() if name != "module"})
    trust_(wrapper)


def _options(wrapper: DistributedDataParallel) -> dict[str, Any]:
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    options = {name: getattr(wrapper, name) for name in _OPTIONS if name in known and hasattr(wrapper, name)}
    mesh = getattr(wrapper, "device_mesh", None)
    options |= {"process_group": wrapper.process_group} if mesh is None else {"device_mesh": mesh}
    if wrapper.device_ids is not None:
        options |= {"device_ids": wrapper.device_ids, "output_device": wrapper.output_device}
    sizes = getattr(wrapper, "bucket_bytes_cap_list", None)
    if sizes:
        options["bucket_cap_mb_list"] = [size / _MEGABYTE for size in sizes]
    elif not wrapper.bucket_bytes_cap_default:
        options["bucket_cap_mb"] = wrapper.bucket_bytes_cap / _MEGABYTE
    return options
