"""Value and gradient of a penalty as one CUDA graph: some 250 small kernels, which Python launches in 9 ms.

A recording reads parameters where they lie and writes to tensors that stay, so that a replay is one launch. It holds as
long as all of them do: after a cut it is made anew. Work that looks at values on the host cannot be recorded; it is
found out beforehand, because a recording that breaks off leaves the generator of random numbers inside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations whose result, or its size, is read on the host.
_WAITING = (
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "_unique2"),
    *("repeat_interleave", "linalg_eig", "_linalg_eigvals", "_linalg_eigh", "_linalg_svd", "_linalg_solve_ex"),
    *("linalg_cholesky_ex", "linalg_inv_ex", "linalg_lstsq", "linalg_lu_factor_ex", "linalg_ldl_factor_ex"),
)


class Waiting(TorchDispatchMode):
    """Counts what a GPU would run, and what the host would wait for in between, by name."""

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
    """x[mask], whose size depends on the mask."""
    indices = tree_leaves(args[1]) if name.startswith("index") and len(args) > 1 else []
    return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in indices)


def _moves(result: object, given: object) -> bool:
    """From a GPU to the host."""
    there = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves(given))
    return there and any(isinstance(leaf, Tensor) and not leaf.is_cuda for leaf in tree_leaves(result))


class Unrecordable(RuntimeError):  # noqa: N818 - read as a sentence
    """Work of which no CUDA graph can be made; the message says why."""


def require_no_waiting(work: Callable[[], object]) -> Waiting:
    """Run it once and refuse it where the host waits for the device."""
    with Waiting() as seen:
        work()
    if seen.waited:
        listed = ", ".join(f"{name} ({count} times)" for name, count in seen.waited.items())
        raise Unrecordable(f"the host waits for {listed}")
    return seen


class Recording:
    """`work`, which reads `read` and writes `written`, to be replayed as long as these lie where they did."""

    def __init__(self, work: Callable[[], object], read: Iterable[Tensor], written: Mapping[str, Tensor]) -> None:
        self._read, self._written = list(read), dict(written)
        self._places = self._look()
        _warm_up(work)
        self._graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self._graph):
                work()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a recording that breaks off leaves its own in place
            raise Unrecordable(" ".join(str(error).split())[:300]) from error

    def holds(self) -> bool:
        """Nothing has been moved or resized since."""
        return self._look() == self._places

    def replay(self) -> None:
        """On the current stream."""
        self._graph.replay()

    def _look(self) -> list[tuple[int, torch.Size, torch.dtype]]:
        tensors = [*self._read, *self._written.values()]
        return [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]


def _warm_up(work: Callable[[], object]) -> None:
    """On a stream of its own: libraries open their handles, and kernels are loaded, before anything is recorded."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        require_no_waiting(work)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
