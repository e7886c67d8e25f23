"""The promises of every selective adapter, one function per promise, each measured on the module itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compressm.adapters.base import parameter_of, write
from compressm.adapters.mamba import SelectiveAdapter
from compressm.adapters.promises import Finding, Simulation, difference
from compressm.control.selective import SelectiveSystem


@dataclass(frozen=True)
class SelectiveTrial:
    """A module under test, the function that runs it, and the tolerance."""

    prototype: nn.Module
    adapter: SelectiveAdapter[Any]
    run: Simulation
    dtype: torch.dtype
    tolerance: float
    length: int
    seed: int

    def module(self) -> nn.Module:
        """A new copy of the module, in evaluation mode and in the precision of the checks."""
        return copy.deepcopy(self.prototype).to(self.dtype).eval()

    def read(self, module: nn.Module) -> SelectiveSystem:
        return self.adapter.read(module).detach()

    def output(self, module: nn.Module) -> Tensor:
        """The module's output for white noise."""
        shape = (2, self.length, parameter_of(module, "in_proj.weight").shape[1])
        x = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        with torch.no_grad():
            return self.run(module, x.to(next(module.parameters()).device, self.dtype)).double()

    def become(self, module: nn.Module, system: SelectiveSystem) -> None:
        """Write the system into the module, with the attributes that go with its order."""
        attributes = self.adapter.attributes(module, system.order)
        write(module, self.adapter.encode(module, system))
        for path, value in attributes.items():
            setattr(*self.adapter.place(module, path), value)


def reading(trial: SelectiveTrial) -> Iterator[Finding]:
    """The observed part gets u, and encode(read) gives the values back and changes nothing."""
    module = trial.module()
    system, heard = trial.read(module), []
    before = {name: value.clone() for name, value in module.state_dict().items()}
    handle = trial.adapter.observed(module).register_forward_pre_hook(lambda part, args: heard.append(args[0].shape))
    trial.output(module)
    handle.remove()
    expected = (2, trial.length, system.channels)
    wrong = [str(tuple(shape)) for shape in heard if tuple(shape) != expected] if heard else ["it is not called"]
    yield Finding.none_of(wrong, f"x_proj is given u of shape (batch, length, {system.channels})")
    values = trial.adapter.encode(module, system)
    moved = max(difference(parameter_of(module, name).detach(), value) for name, value in values.items())
    yield Finding("encode(read) gives the values back", moved, trial.tolerance)
    changed = [name for name, value in module.state_dict().items() if not torch.equal(value, before[name])]
    yield Finding.none_of(changed, "encode leaves the module alone")


def renaming(trial: SelectiveTrial) -> Iterator[Finding]:
    """Reversing the states, and doubling B while halving C, keeps the output."""
    module = trial.module()
    system, before = trial.read(module), trial.output(module)
    turned = torch.arange(system.order - 1, -1, -1, device=system.device)
    W_B, W_C = 2 * system.W_B[turned], system.W_C[turned] / 2
    trial.become(module, replace(system, rates=system.rates[:, turned], W_B=W_B, W_C=W_C))
    yield Finding(
        "states in another order and scale keep the output",
        difference(before, trial.output(module)),
        trial.tolerance,
    )


def dead_states(trial: SelectiveTrial) -> Iterator[Finding]:
    """Removing one state without input and one without output keeps the output."""
    module = trial.module()
    system = trial.read(module)
    W_B, W_C = system.W_B.clone(), system.W_C.clone()
    W_B[0], W_C[1] = 0, 0
    trial.become(module, replace(system, W_B=W_B, W_C=W_C))
    before, objects = trial.output(module), [id(parameter) for parameter in module.parameters()]
    trial.become(module, replace(system, rates=system.rates[:, 2:], W_B=W_B[2:], W_C=W_C[2:]))
    yield Finding(
        "removing an undriven and an unread state keeps the output",
        difference(before, trial.output(module)),
        trial.tolerance,
    )
    missed = float(abs(trial.adapter.order(module) - (system.order - 2)))
    yield Finding(f"after that the order is {system.order - 2}", missed, 0.0)
    others = [id(parameter) for parameter in module.parameters()] != objects
    yield Finding.none_of(["others"] if others else [], "parameters stay the same objects")


def training(trial: SelectiveTrial) -> Iterator[Finding]:
    """A training step after a cut moves every weight that is trained."""
    module = trial.module().train()
    system = trial.read(module)
    trial.become(module, replace(system, rates=system.rates[:, 2:], W_B=system.W_B[2:], W_C=system.W_C[2:]))
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    width = parameter_of(module, "in_proj.weight").shape[1]
    x = torch.randn(2, trial.length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(trial.seed))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    loss = trial.run(module, x.to(next(module.parameters()).device, trial.dtype)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    named = ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
    still = [name for name, parameter in named if bool((parameter == before[name]).all())]
    yield Finding.none_of(still, "a training step after a cut moves every weight")


SELECTIVE_PROMISES: tuple[Callable[[SelectiveTrial], Iterator[Finding]], ...] = (
    reading,
    renaming,
    dead_states,
    training,
)
