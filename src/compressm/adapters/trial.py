"""What the checks of an adapter share: modules made the same way each time, signals, a cut, and what was measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from compressm.adapters.base import SSMAdapter
from compressm.adapters.errors import AdapterError
from compressm.adapters.writing import write
from compressm.control import DiagonalSystem, Truncation, balanced_truncation, fold

Run = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Finding:
    """One measured promise: it holds while `measured` does not exceed `allowed`."""

    promise: str
    measured: float
    allowed: float
    detail: str = ""

    @classmethod
    def none_of(cls, offenders: Iterable[str], promise: str) -> Finding:
        """That there are no offenders, each of which is named."""
        named = list(offenders)
        return cls(promise, float(len(named)), 0.0, ", ".join(named))

    @property
    def holds(self) -> bool:
        return self.measured <= self.allowed  # NaN does not hold

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.promise}: {self.measured:.3g}, allowed {self.allowed:.3g}{detail}"


@dataclass(frozen=True)
class Trial:
    """How to make the module, run it, and what to allow."""

    make: Callable[[], nn.Module]
    prototype: nn.Module
    adapter: SSMAdapter[Any]
    run: Run
    stream: Run | None
    dtype: torch.dtype
    tolerance: float
    length: int
    seed: int

    def original(self) -> nn.Module:
        """A copy of the same module every time, as it was made."""
        return copy.deepcopy(self.prototype)

    def module(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The same in the precision of the checks, unless another is given."""
        return self.original().to(dtype or self.dtype).eval()

    def read(self, module: nn.Module) -> DiagonalSystem:
        return self.adapter.read(module).detach()

    def encode(self, module: nn.Module, system: DiagonalSystem) -> dict[str, Tensor]:
        return self.adapter.encode(module, system)

    def order(self, module: nn.Module) -> int:
        return self.read(module).order

    def noise(self, module: nn.Module, dtype: torch.dtype | None = None) -> Float[Tensor, "batch length channels"]:
        """White, and slow: sums of the same, which are loud where slow modes listen."""
        shape = (2, self.length, channels(self.read(module)))
        white = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        slow = white.cumsum(1) / white.shape[1] ** 0.5
        device = next(module.parameters()).device
        return torch.cat([white, slow]).to(device, dtype or self.dtype)

    def output(self, module: nn.Module, u: Tensor) -> Float[Tensor, "batch length channels"]:
        with torch.no_grad():
            return self.run(module, u).double()

    def cut(self, module: nn.Module, order: int, *, folded: bool = True) -> Truncation:
        """Reduce the module itself to this order."""
        system = self.read(module)
        truncation = balanced_truncation(fold(system) if folded else system, order).diagonalise()
        write(module, self.encode(module, diagonal(truncation)))
        return truncation

    def half(self, module: nn.Module) -> int:
        return self.order(module) // 2


def make_seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module made with torch's generator set, and set back afterwards."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        module = make()
    if not isinstance(module, nn.Module):
        raise AdapterError(f"make_module returned a {type(module).__name__}, expected an nn.Module")
    return module


def diagonal(truncation: Truncation) -> DiagonalSystem:
    """Its system, which `diagonalise` made one with diagonal A."""
    assert isinstance(truncation.system, DiagonalSystem)
    return truncation.system


def channels(system: DiagonalSystem) -> int:
    """Those of the module: the inputs of one system, or one for each of a bank."""
    if not system.bank:
        return system.inputs
    if len(system.bank) > 1 or system.inputs != 1 or system.outputs != 1:
        raise AdapterError(f"read gives {system}, expected one system or a bank (H,) with one input and one output")
    return system.bank[0]


def simulated(system: DiagonalSystem, u: Float[Tensor, "batch length channels"]) -> Float[Tensor, "batch length out"]:
    """Re(C h) for the channels of a module."""
    if not system.bank:
        return system.simulate(u.double()).real
    return system.simulate(u.double().mT[..., None]).real[..., 0].mT


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a share of the largest value of `one`."""
    scale = one.abs().max().item()
    return (one - other).abs().max().item() / (scale or 1.0)
