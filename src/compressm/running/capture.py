"""A user's training step as one CUDA graph, recorded anew when sizes, memory or the batch change."""

from __future__ import annotations

import gc
import linecache
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from compressm.compression.distributed import RECORDED
from compressm.errors import CaptureError
from compressm.layers.parameters import form_changes

_MOST_RECORDINGS = 8  # of one batch shape: gradients may be there or not, options of optimizers may change
# DistributedDataParallel times its first ten steps, on the host; torch's notes on CUDA graphs ask for these.
_WARM_UP_OF_SEVERAL = 11
_RESTLESS = 16  # recordings after which options that change all the time are said to


@final
class CapturedStep:
    """`step_fn`, which makes one training step from a batch, as one CUDA graph; on a CPU it is just called.

    One call is one step. The first `warmup` calls run as they are; then the step is recorded, which changes nothing,
    and replayed. It is recorded anew, after `warmup` more calls, when a cut, a rollback or `load_checkpoint` changed
    the model, and for every new shape of the batch. What `step_fn` returns comes back as copies.

    Python code in `step_fn` runs only while it is recorded: what reads a value on the host is refused by its line.
    Rates of optimizers become tensors on the device; schedulers may step inside or outside. A model in
    DistributedDataParallel takes at least 11 calls to warm up, and must have been wrapped on a stream of its own.
    """

    def __init__(self, step_fn: Callable[..., Any], *, warmup: int = 3) -> None:
        if not callable(step_fn):
            raise CaptureError(f"step_fn is {step_fn!r:.100}, expected a function that makes a step from a batch")
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
            raise CaptureError(f"warmup is {warmup!r:.100}, expected an integer of at least 1")
        self.step_fn, self.warmup = step_fn, warmup
        self._shapes: dict[object, _Shape] = {}
        self._seen = _Seen()
        self._form = -1
        self._stream: torch.cuda.Stream | None = None

    @property
    def is_recorded(self) -> bool:
        """True if a recording is there to be replayed."""
        return any(shape.recordings for shape in self._shapes.values())

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Make one step."""
        leaves, spec = tree_flatten((args, named))
        if not torch.cuda.is_available() or self._seen.is_on_cpu(leaves):
            return self.step_fn(*args, **named)
        if self._form != form_changes() or not self._seen.is_in_place():
            self.forget()
        key = (spec, tuple(_kind(leaf) for leaf in leaves))
        shape = self._shapes.setdefault(key, _Shape())
        if shape.warm < (max(self.warmup, _WARM_UP_OF_SEVERAL) if self._seen.is_wrapped else self.warmup):
            shape.warm += 1
            return self._warm_up(args, named)
        self._seen.take_rates()
        recording = next((one for one in shape.recordings if one.fits()), None)
        if recording is None:
            recording = self._recorded(shape, leaves, spec)
        return recording.replay(leaves)

    def forget(self) -> None:
        """Drop all recordings, and their memory; the next calls warm up again."""
        self._shapes.clear()
        self._seen = _Seen()
        self._form = form_changes()

    def _warm_up(self, args: Any, named: Any) -> Any:
        """Run the step as it is, on a stream of its own; the first time, see what it trains."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), self._seen.watching(), _other_streams():
            returned = self.step_fn(*args, **named)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._seen.prepare_()
        return returned

    def _recorded(self, shape: _Shape, leaves: Sequence[Any], spec: TreeSpec) -> _Recording:
        shape.count += 1
        if shape.count == _RESTLESS:
            warnings.warn(
                f"CapturedStep recorded this step {_RESTLESS} times, because gradients or options of optimizers, such"
                " as betas, change between calls: keep them, or call the function without CapturedStep",
                stacklevel=4,
            )
        recording = _record(self.step_fn, self._seen, leaves, spec, self._stream)
        shape.recordings = [recording, *shape.recordings][:_MOST_RECORDINGS]
        return recording


@contextmanager
def _other_streams() -> Iterator[None]:
    """Let a DistributedDataParallel gather gradients on the stream that it was made on, which torch warns of."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    try:
        yield
    finally:
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)


def _kind(leaf: Any) -> object:
    return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


@dataclass
class _Shape:
    """The recordings for one shape of the batch, after a number of calls to warm up."""

    warm: int = 0
    count: int = 0
    recordings: list[_Recording] = field(default_factory=list)


class _Seen:
    """The parameters, optimizers and schedulers that a step was seen to use."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[LRScheduler] = []
        self.device: torch.device | None = None
        self.is_wrapped = False  # in a DistributedDataParallel
        self._watched = False
        self._memory: list[tuple[nn.Parameter, int]] = []
        self._states: list[tuple[Optimizer, object]] = []
        self._rates: list[tuple[dict[str, Any], Tensor]] = []

    def is_on_cpu(self, leaves: Sequence[Any]) -> bool:
        """True if neither the batch nor what was trained is on a GPU."""
        return self._watched and self.device is None and not any(isinstance(x, Tensor) and x.is_cuda for x in leaves)

    def is_in_place(self) -> bool:
        """True if parameters and states of optimizers are the ones that were seen, in the same memory."""
        return all(p.data_ptr() == place for p, place in self._memory) and all(
            optimizer.state is state for optimizer, state in self._states
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See what is used inside; only the first time, as all living objects are looked at."""
        if self._watched:
            yield
            return
        stepped: list[Optimizer] = []
        hook = register_optimizer_step_post_hook(lambda optimizer, args, named: stepped.append(optimizer))
        parameters, schedulers, optimizers, wrappers = _living(
            nn.Parameter, LRScheduler, Optimizer, DistributedDataParallel
        )
        gradients = [(p, p.grad, None if p.grad is None else p.grad._version) for p in parameters if p.is_leaf]
        counts = [(scheduler, scheduler.last_epoch) for scheduler in schedulers]
        rates = [(group, group["lr"]) for o in optimizers for group in o.param_groups if "lr" in group]
        try:
            yield
        finally:
            hook.remove()
        self.optimizers = list({id(optimizer): optimizer for optimizer in stepped}.values())
        self.schedulers = [scheduler for scheduler, count in counts if scheduler.last_epoch != count]
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        held = [p for group in groups for p in group["params"]]
        trained = [p for p, g, version in gradients if p.grad is not g or (g is not None and g._version != version)]
        self.parameters = list({id(p): p for p in (*held, *trained)}.values())
        self.device = next((p.device for p in self.parameters if p.is_cuda), None)
        known = set(map(id, self.parameters))
        around = [wrapper for wrapper in wrappers if any(id(p) in known for p in wrapper.parameters())]
        self.is_wrapped = bool(around)
        for wrapper in around if self.device is not None else ():
            vars(wrapper)[RECORDED] = True
        self._watched = True
        # A tensor that is changed in place is changed by the recording too.
        changed = [group for group, rate in rates if group["lr"] is not rate and not _is_equal(group["lr"], rate)]
        self._require_host_free(any(one is group for one in changed for group in groups))

    def _require_host_free(self, set_inside: bool) -> None:
        for scheduler in self.schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                raise CaptureError(
                    "step_fn calls step() of a ReduceLROnPlateau, which reads the loss on the host: call it outside,"
                    " with what the captured step returns. This call has made its step"
                )
        if set_inside and not self.schedulers:
            raise CaptureError(
                "step_fn sets a learning rate, which a recording would repeat: set it outside, before the captured"
                " step. This call has made its step"
            )

    def prepare_(self) -> None:
        """Let optimizers count on the device, and remember where everything is."""
        for optimizer in self.optimizers if self.device is not None else ():
            for group in optimizer.param_groups:
                if group.get("capturable") is False:
                    group["capturable"] = True
                if isinstance(optimizer, torch.optim.SGD):
                    group["fused"], group["foreach"] = True, False  # the others read the rate on the host
                for parameter in group["params"]:
                    _count_on_device_(optimizer.state.get(parameter, {}), parameter.device)
        self._memory = [(parameter, parameter.data_ptr()) for parameter in self.parameters]
        self._states = [(optimizer, optimizer.state) for optimizer in self.optimizers]
        self._rates = [
            (group, _tensor_rate(group, self.device))
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            if "lr" in group and self.device is not None
        ]

    def take_rates(self) -> None:
        """Put rates that were set since the last call into the tensors that a recording reads."""
        for group, rate in self._rates:
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate

    def options(self) -> list[tuple[dict[str, Any], str, Any]]:
        """The numbers in the groups of optimizers, which a recording repeats."""
        return [
            (group, name, value)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for name, value in group.items()
            if name not in ("params", "lr", "initial_lr") and not isinstance(value, Tensor)
        ]


def _count_on_device_(state: dict[str, Any], device: torch.device) -> None:
    """Move step counts and the like to the device of their parameter."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.ndim == 0 and value.device != device:
            state[name] = value.to(device, torch.float32)


def _is_equal(now: Any, then: Any) -> bool:
    return not isinstance(now, Tensor) and not isinstance(then, Tensor) and now == then


def _tensor_rate(group: dict[str, Any], device: torch.device | None) -> Tensor:
    if not (isinstance(group["lr"], Tensor) and group["lr"].device == device):
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
    rate: Tensor = group["lr"]
    return rate


def _living(*kinds: type[Any]) -> list[list[Any]]:
    """All living objects of each class; not isinstance, which proxies of other packages answer."""
    things = gc.get_objects()
    present = set(map(type, things))
    found = []
    for kind in kinds:
        numbers = {id(own) for own in present if issubclass(own, kind)}
        found.append(list(compress(things, map(numbers.__contains__, map(id, map(type, things))))))
    return found


@dataclass(eq=False)
class _Recording:
    """A CUDA graph with its static inputs and outputs, and what Python would have done beside it."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Any]
    returned: Any
    needs: list[tuple[nn.Parameter, Tensor | None]]  # gradients that it adds to, or that must not be there
    leaves: list[tuple[nn.Parameter, Tensor | None]]  # gradients after it, where they differ from those before it
    options: list[tuple[dict[str, Any], str, Any]]
    schedulers: list[LRScheduler]

    def fits(self) -> bool:
        """True if gradients and options are those that it was recorded with."""
        return all(p.grad is gradient for p, gradient in self.needs) and all(
            group.get(name) == value for group, name, value in self.options
        )

    def replay(self, given: Sequence[Any]) -> Any:
        """Make the step with these inputs; its results are copied."""
        for static, value in zip(self.inputs, given, strict=True):
            if isinstance(static, Tensor) and static is not value:
                static.copy_(value, non_blocking=True)
        self.graph.replay()
        for parameter, gradient in self.leaves:
            parameter.grad = gradient
        for scheduler in self.schedulers:
            scheduler.step()
        return tree_map(lambda value: value.detach().clone() if isinstance(value, Tensor) else value, self.returned)


def _record(
    step_fn: Callable[..., Any], seen: _Seen, leaves: Sequence[Any], spec: TreeSpec, stream: torch.cuda.Stream | None
) -> _Recording:
    """Record a step; nothing is run, and after an error gradients are as before."""
    device = seen.device or next(leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda)
    inputs = [leaf.detach().to(device, copy=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, named = tree_unflatten(inputs, spec)
    before = [(parameter, parameter.grad) for parameter in seen.parameters]
    versions = [0 if gradient is None else gradient._version for _, gradient in before]
    options = seen.options()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with ExitStack() as afterwards:
        # To free the graphs of earlier recordings is not allowed while another is being made.
        gc.collect()
        if gc.isenabled():
            gc.disable()
            afterwards.callback(gc.enable)
        for scheduler in seen.schedulers:
            vars(scheduler)["step"] = lambda *args, **named: None
            afterwards.callback(vars(scheduler).pop, "step", None)
        try:
            # Other threads, such as those that load data, may use the GPU meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"), _other_streams():
                returned = step_fn(*args, **named)
        except BaseException as error:
            for parameter, gradient in before:
                parameter.grad = gradient
            _end_broken_recording(device)
            if isinstance(error, Exception):
                raise _refused(error, seen.is_wrapped) from error
            raise
    after = {id(parameter): parameter.grad for parameter in seen.parameters}
    # A gradient that was replaced without being added to was not read.
    needs = [
        (p, then)
        for (p, then), version in zip(before, versions, strict=True)
        if then is None or then is after[id(p)] or then._version != version
    ]
    left = [(p, after[id(p)]) for p, then in before if after[id(p)] is not then]
    return _Recording(graph, inputs, returned, needs, left, options, seen.schedulers)


_OF_WRAPPERS = (
    " A DistributedDataParallel is recorded if it was made inside `with torch.cuda.stream(torch.cuda.Stream()):`, in a"
    " process group of nccl, and without find_unused_parameters."
)


def _end_broken_recording(device: torch.device) -> None:
    """Record next to nothing: torch's random generator believes in a recording until one has ended well."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=device)


def _refused(error: Exception, is_wrapped: bool) -> CaptureError:
    """The error that names the line of the user's code at which recording failed."""
    chain: list[BaseException] = [error]
    while (behind := chain[-1].__context__) is not None:
        chain.append(behind)
    first = chain[-1]  # ending a broken recording fails too, later
    place = _users_line(first.__traceback__) or _users_line(error.__traceback__)
    said = str(first).splitlines()[0] if str(first) else type(first).__name__
    return CaptureError(
        f"step_fn cannot be recorded as a CUDA graph: {said}{place}. A recorded step may not read values on the host"
        " (.item(), .cpu(), float(loss), if on a tensor, a GradScaler) nor wait for the device: return the tensor and"
        f" read it outside.{_OF_WRAPPERS if is_wrapped else ''} This call has changed nothing"
    )


def _users_line(trace: TracebackType | None) -> str:
    """The deepest line that is neither ours nor torch's."""
    own, found = (Path(torch.__file__).parent, Path(__file__).parents[1]), ""
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        if not any(folder in path.parents for folder in own):
            text = linecache.getline(str(path), trace.tb_lineno).strip()
            found = f", at {path.name}:{trace.tb_lineno}: {text}"
        trace = trace.tb_next
    return found
