"""A penalty's value and gradient as one CUDA graph, instead of some 250 small kernels that Python launches in 9 ms.

A recording reads parameters in place and writes to tensors that stay, so that a replay is one launch; after a cut it is
made anew. Work that reads values on the host cannot be recorded: `require_no_waiting` refuses it beforehand, because a
recording that breaks off leaves the random number generator in a broken state.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compressm.compression.distributed import Processes, unwrapped
from compressm.control.validation import values_unread
from compressm_lab.runs.records import PenaltyRecord
from compressm_lab.training.clock import Clock
from compressm_lab.training.config import RegulariserConfig

# Operations whose result, or its size, the host reads.
_WAITING = (
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "_unique2"),
    *("repeat_interleave", "linalg_eig", "_linalg_eigvals", "_linalg_eigh", "_linalg_svd", "_linalg_solve_ex"),
    *("linalg_cholesky_ex", "linalg_inv_ex", "linalg_lstsq", "linalg_lu_factor_ex", "linalg_ldl_factor_ex"),
)


class Waiting(TorchDispatchMode):
    """Counters of the operations that a GPU would launch, and of those that the host would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in _WAITING or _masks(name, args) or _moves(result, (args, kwargs)):
            self.waited[name] += 1
        elif not func.is_view and name not in ("detach", "empty", "empty_like", "empty_strided", "_unsafe_view"):
            self.launched[name] += 1
        return result


def _masks(name: str, args: tuple[Any, ...]) -> bool:
    """Tell if it is x[mask], whose size depends on the mask."""
    indices = tree_leaves(args[1]) if name.startswith("index") and len(args) > 1 else []
    return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in indices)


def _moves(result: object, given: object) -> bool:
    """Tell if the operation copies from a GPU to the host."""
    there = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves(given))
    return there and any(isinstance(leaf, Tensor) and not leaf.is_cuda for leaf in tree_leaves(result))


class Unrecordable(RuntimeError):  # noqa: N818 - read as a sentence
    """Work that no CUDA graph can hold; the message says why."""


def require_no_waiting(work: Callable[[], object]) -> Waiting:
    """Run work once and refuse it if the host waits for the device."""
    with Waiting() as counts:
        work()
    if counts.waited:
        listed = ", ".join(f"{name} ({count} times)" for name, count in counts.waited.items())
        raise Unrecordable(f"the host waits for {listed}")
    return counts


class Recording:
    """A CUDA graph of `work`, which reads `read` and writes `written`; valid until one of these moves."""

    def __init__(self, work: Callable[[], object], read: Iterable[Tensor], written: Mapping[str, Tensor]) -> None:
        self._tensors = [*read, *written.values()]
        self._places = self._look()
        self._graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # Libraries open their handles, and kernels are loaded, before anything is recorded.
        own = torch.cuda.Stream()
        own.wait_stream(stream)
        with torch.cuda.stream(own):
            require_no_waiting(work)
        stream.wait_stream(own)
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(self._graph):
                work()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a recording that breaks off leaves its own in place
            raise Unrecordable(" ".join(str(error).split())[:300]) from error

    def holds(self) -> bool:
        """Tell if no tensor has been moved or resized since."""
        return self._look() == self._places

    def replay(self) -> None:
        """Run the work again, on the current stream."""
        self._graph.replay()

    def _look(self) -> list[tuple[int, torch.Size, torch.dtype]]:
        return [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in self._tensors]


# A number of a model that can be differentiated with respect to its parameters.
Penalty = Callable[[nn.Module], Tensor]


class HeldPenalty:
    """The gradient of beta times a penalty, held in tensors that every step, or its CUDA graph, adds.

    `record` computes it by a CUDA graph if the model is on a GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        penalty: Penalty,
        config: RegulariserConfig,
        clock: Clock,
        processes: Processes,
        *,
        record: bool = True,
    ) -> None:
        self.config = config
        self._model, self._penalty, self._clock, self._processes = unwrapped(model), penalty, clock, processes
        self._held: dict[str, Tensor] = {}
        self._stale = True
        self._value: Tensor | float = math.nan
        self._record = record
        self._recording: Recording | None = None
        self.found_at = 0
        self.evaluations = 0
        self.seconds = 0.0

    @property
    def recorded(self) -> bool:
        """Tell if a CUDA graph computes the gradient."""
        return self._recording is not None

    @property
    def value(self) -> float:
        """The last value of the penalty, without its weight."""
        return float(self._value)

    def record(self, step: int) -> PenaltyRecord:
        """A record of the last value, for an evaluation at `step`."""
        numbers = (self.value, self.config.beta, self.found_at, self.evaluations, self.seconds)
        return PenaltyRecord(step, self.config.kind, *numbers)

    def weigh(self, loss: Tensor) -> Tensor:
        """Multiply the loss of the task by alpha."""
        return loss if self.config.alpha == 1 else self.config.alpha * loss

    def add_(self) -> None:
        """Add the held gradient to those of the parameters."""
        gradients: Any = []
        held: Any = []
        for name, part in self._held.items():
            parameter = self._parameter(name)
            if parameter.grad is None:
                parameter.grad = part.clone()
            else:
                gradients.append(parameter.grad)
                held.append(part)
        if held:
            torch._foreach_add_(gradients, held)

    def ready(self, step: int) -> int:
        """Hold the gradient that this step adds; returns the last step that adds the same."""
        every, hold = self.config.every, self.config.hold
        due = (step - 1) % every == 0
        # A step that is repeated, as after the recording of a graph, has its gradient already.
        if (due and self.found_at != step) or (self._stale and hold):
            self._find(step)
        elif not (hold or due):
            self._hold({name: torch.zeros_like(self._parameter(name)) for name in self._held})
        self._stale = False
        return step if due and not hold else step + every - 1 - (step - 1) % every

    def renew(self) -> None:
        """Forget everything that depends on the sizes before a cut."""
        self._stale, self._recording = True, None

    def state_dict(self) -> dict[str, Any]:
        """State of a checkpoint: a run resumes with the same bits in the middle of an interval."""
        held = {name: part.cpu() for name, part in self._held.items()}
        counts = {"found_at": self.found_at, "evaluations": self.evaluations, "seconds": self.seconds}
        return {"held": held, "stale": self._stale, "value": self.value, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, on the device of the model."""
        self._recording = None
        self._held = {name: part.to(self._parameter(name).device) for name, part in state["held"].items()}
        self._stale, self._value, self.found_at = state["stale"], state["value"], state["found_at"]
        self.evaluations, self.seconds = state["evaluations"], state["seconds"]

    def _find(self, step: int) -> None:
        begin = time.perf_counter()
        with self._clock.phase("regulariser"):
            if self._recording is not None and self._recording.holds():
                self._recording.replay()
            else:
                self._recording = None
                self._value, gradients = self._evaluate()
                self._hold(self._as_first(gradients))
        self.found_at = step
        self.evaluations += 1
        self.seconds += time.perf_counter() - begin
        if self._recording is None and self._recordable:
            self._capture()

    @property
    def _recordable(self) -> bool:
        return self._record and self._processes.count == 1 and next(self._model.parameters()).is_cuda

    def _evaluate(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the value, and the gradients with their weight."""
        names, parameters = zip(*self._model.named_parameters(), strict=True)
        with torch.enable_grad():
            value = self._penalty(self._model)
            found = torch.autograd.grad(value, parameters, allow_unused=True)
        there = {name: part for name, part in zip(names, found, strict=True) if part is not None}
        weight = self.config.beta * (1 if self.config.hold else self.config.every)
        gradients: Any = list(there.values())
        return value.detach(), dict(zip(there, torch._foreach_mul(gradients, weight), strict=True))

    def _capture(self) -> None:
        """Record the next evaluation as a CUDA graph; without one if that cannot be."""
        assert isinstance(self._value, Tensor)
        held, value = self._held, self._value.clone()

        def work() -> None:
            with values_unread():
                found, gradients = self._evaluate()
            value.copy_(found)
            into: Any = [held[name] for name in gradients]
            parts: Any = list(gradients.values())
            torch._foreach_copy_(into, parts)

        with self._clock.phase("capture"):
            try:
                self._recording = Recording(work, self._model.parameters(), held)
                self._value = value
            except Unrecordable as reason:
                self._record = False
                warnings.warn(f"the penalty runs without a CUDA graph, several times slower: {reason}", stacklevel=2)

    def _as_first(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The first process's bits on all: rounding may differ between machines, and weights would drift apart."""
        if self._processes.count == 1:
            return gradients
        sent = self._processes.as_first({name: part.cpu() for name, part in gradients.items()})
        return {name: part.to(gradients[name].device) for name, part in sent.items()}

    def _hold(self, gradients: dict[str, Tensor]) -> None:
        """Copy gradients into the held tensors, which a graph reads; new tensors only for new shapes."""
        for name, part in gradients.items():
            before = self._held.get(name)
            if before is not None and before.shape == part.shape:
                before.copy_(part)
            else:
                self._held[name] = part.clone()

    def _parameter(self, name: str) -> nn.Parameter:
        return self._model.get_parameter(name)
