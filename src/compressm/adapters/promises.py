"""The promises of linear and of selective adapters, one function per promise, and the trials that measure them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError

from compressm.adapters.base import encode_with, parameter_of, read_with, stacked_parameters, stacking_key
from compressm.adapters.writing import write
from compressm.control import DiagonalSystem, ShapeError, Truncation, balanced_truncation, fold
from compressm.control.folding import PairTruncation
from compressm.control.norms import distance_bound
from compressm.control.selective import SelectiveSystem
from compressm.control.system import LinearSystem
from compressm.errors import AdapterError

Simulation = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Finding:
    """One measured promise: it holds while `measured` does not exceed `allowed`."""

    promise: str
    measured: float
    allowed: float
    detail: str = ""

    @classmethod
    def none_of(cls, offenders: Iterable[str], promise: str) -> Finding:
        """The finding that there are no offenders; it names each one."""
        named = list(offenders)
        return cls(promise, float(len(named)), 0.0, ", ".join(named))

    @property
    def holds(self) -> bool:
        return self.measured <= self.allowed  # NaN does not hold

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.promise}: {self.measured:.3g}, allowed {self.allowed:.3g}{detail}"


@dataclass(frozen=True)
class _Trial:
    prototype: nn.Module
    adapter: Any
    run: Simulation
    dtype: torch.dtype
    tolerance: float
    length: int
    seed: int

    def original(self) -> nn.Module:
        """A new copy of the module, as it was made."""
        return copy.deepcopy(self.prototype)

    def module(self, dtype: torch.dtype | None = None) -> nn.Module:
        """A new copy in evaluation mode, in the precision of the checks or in `dtype`."""
        return self.original().to(dtype or self.dtype).eval()

    def read(self, module: nn.Module) -> Any:
        return read_with(self.adapter, module).detach()


@dataclass(frozen=True)
class Trial(_Trial):
    """A module with a linear adapter under test, the functions that make and run it, and the tolerance."""

    make: Callable[[], nn.Module]
    stream: Simulation | None

    def order(self, module: nn.Module) -> int:
        return int(self.read(module).order)

    def noise(self, module: nn.Module, dtype: torch.dtype | None = None) -> Float[Tensor, "batch length channels"]:
        """White noise, and its running sums, which have much power at low frequencies, where slow modes respond."""
        shape = (2, self.length, channels(self.read(module)))
        white = torch.randn(
            shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64, device="cpu"
        )
        slow = white.cumsum(1) / white.shape[1] ** 0.5
        device = next(module.parameters()).device
        return torch.cat([white, slow]).to(device, dtype or self.dtype)

    def output(self, module: nn.Module, u: Tensor) -> Float[Tensor, "batch length channels"]:
        with torch.no_grad():
            return self.run(module, u).double()

    def cut(self, module: nn.Module, order: int, *, folded: bool = True) -> Truncation:
        """Reduce the module in place to this order."""
        system = self.read(module)
        truncation = balanced_truncation(fold(system) if folded else system, order).diagonalise()
        reduced = diagonal(truncation)
        stored = self.adapter.nearest(module, reduced)
        write(module, self.adapter.encode(module, stored))
        if stored is reduced:
            return truncation
        assert truncation.error_bound is not None
        return replace(truncation, system=stored, error_bound=truncation.error_bound + distance_bound(reduced, stored))

    def half(self, module: nn.Module) -> int:
        return self.order(module) // 2


def make_seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Make the module with torch's generator seeded; its state is restored afterwards."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        module = make()
    if not isinstance(module, nn.Module):
        raise AdapterError(f"make_module returned a {type(module).__name__}, expected an nn.Module")
    return module


def diagonal(truncation: Truncation | PairTruncation) -> DiagonalSystem:
    """The truncated system; its A is diagonal after `diagonalise`."""
    assert isinstance(truncation.system, DiagonalSystem)
    return truncation.system


def channels(system: LinearSystem) -> int:
    """The number of channels of the module: the inputs of one system, or one for each member of a bank."""
    if not system.bank:
        return system.inputs
    if len(system.bank) > 1 or system.inputs != 1 or system.outputs != 1:
        raise AdapterError(f"read gives {system}, expected one system or a bank (H,) with one input and one output")
    return system.bank[0]


def simulated(system: LinearSystem, u: Float[Tensor, "batch length channels"]) -> Float[Tensor, "batch length out"]:
    """Re(C h) for the channels of a module."""
    if not system.bank:
        return system.simulate(u.double()).real
    return system.simulate(u.double().mT[..., None]).real[..., 0].mT


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference, as a share of the largest value of `one`."""
    scale = one.abs().max().item()
    return (one - other).abs().max().item() / (scale or 1.0)


def reading(trial: Trial) -> Iterator[Finding]:
    """The system that is read simulates to the module's output, except for a skip D·u, measured by an impulse."""
    module = trial.module()
    system, u = trial.read(module), trial.noise(module)
    count = channels(system)
    impulses = u.new_zeros(count, trial.length, count)
    each = torch.arange(count, device=u.device)
    impulses[each, 0, each] = 1
    y = trial.output(module, impulses)
    response = simulated(system, impulses)
    if y.shape != response.shape:
        raise ShapeError(f"the module's output has shape {tuple(y.shape)}, the system's {tuple(response.shape)}")
    skip = (y - response)[:, 0]
    yield Finding(
        "the system that is read has the module's impulse response",
        difference(y[:, 1:], response[:, 1:]),
        trial.tolerance,
    )
    y = trial.output(module, u)
    simulation = simulated(system, u) + u.double() @ skip
    yield Finding("the system that is read gives the module's output", difference(y, simulation), trial.tolerance)


def encoding(trial: Trial) -> Iterator[Finding]:
    """encode(read) gives the same values and output; encode itself does not change the module."""
    module, twin = trial.module(), trial.module()
    u = trial.noise(module)
    before = trial.output(module, u)
    values = trial.adapter.encode(module, trial.read(module))
    wrong = [name for name, value in values.items() if value.dtype != torch.float64]
    yield Finding.none_of(wrong, "encode gives float64")
    yield Finding.none_of(changed(module, twin), "encode leaves the module alone")
    # An optimizer's moments belong to the present values, so encode must give exactly these.
    moved = max(difference(parameter_of(module, name).detach(), value.detach()) for name, value in values.items())
    yield Finding("encode(read) gives the values back", moved, trial.tolerance)
    write(module, values)
    yield Finding("encode(read) keeps the output", difference(before, trial.output(module, u)), trial.tolerance)
    for folded in (False, True):
        yield _stores(trial, folded)


def _stores(trial: Trial, folded: bool) -> Finding:
    """The module computes the system that was encoded, plus its skip."""
    module = trial.module()
    u, system = trial.noise(module), trial.read(module)
    skip = trial.output(module, u) - simulated(system, u)
    truncation = trial.cut(module, trial.half(module), folded=folded)
    expected = simulated(diagonal(truncation), u) + skip
    kind = "folded" if folded else "unfolded"
    return Finding(
        f"the module computes the {kind} system", difference(expected, trial.output(module, u)), trial.tolerance
    )


def dead_states(trial: Trial) -> Iterator[Finding]:
    """Removing one state without input and one without output keeps the output."""
    module = trial.module()
    system = trial.read(module)
    B, C = system.B.clone(), system.C.clone()
    B[..., 0, :], C[..., 1] = 0, 0
    write(module, trial.adapter.encode(module, DiagonalSystem(system.poles, B, C)))
    u = trial.noise(module)
    before = trial.output(module, u)
    trial.cut(module, system.order - 2, folded=False)
    yield Finding(
        "removing an uncontrollable and an unobservable state keeps the output",
        difference(before, trial.output(module, u)),
        trial.tolerance,
    )


def zero_states(trial: Trial) -> Iterator[Finding]:
    """Adding states that have neither input nor output keeps the output."""
    module = trial.module()
    n, u = trial.order(module), trial.noise(module)
    before = trial.output(module, u)
    write(module, _with_idle_states(trial, module, n + 3))
    yield Finding("three zero states keep the output", difference(before, trial.output(module, u)), trial.tolerance)
    yield Finding(f"with them the order is {n + 3}", float(abs(trial.order(module) - n - 3)), 0.0)


def _with_idle_states(trial: _Trial, module: nn.Module, order: int) -> dict[str, Tensor]:
    growth = trial.adapter.growth(module)
    return {name: own.resized(parameter_of(module, name).detach(), order) for name, own in growth.items()}


def bound(trial: Trial) -> Iterator[Finding]:
    """‖y − y_r‖₂ ≤ 2 Σ σ of the dropped states ‖u‖₂, measured on the module's own output."""
    for order in sorted({1, trial.half(trial.module())}):
        yield _within_bound(trial, order)


def _within_bound(trial: Trial, order: int) -> Finding:
    whole, cut = trial.module(), trial.module()
    truncation = trial.cut(cut, order)
    assert truncation.error_bound is not None
    # Norms are over time, and over the channels of one system; a bank has one bound per channel.
    axes = (1,) if truncation.system.bank else (1, 2)
    u = trial.noise(whole)
    error = _gain(lambda u: trial.run(whole, u) - trial.run(cut, u), u, axes)
    excess = (error - trial.tolerance * _gain(lambda u: trial.run(whole, u), u, axes)).clamp_min(0)
    ratio = torch.where(excess > 0, excess / truncation.error_bound, 0).max().item()
    return Finding(f"at order {order} the gain of the error is within its bound", ratio, 1.0)


def _gain(function: Callable[[Tensor], Tensor], u: Tensor, axes: tuple[int, ...]) -> Float[Tensor, "batch *bank"]:
    """‖f(u)‖₂ / ‖u‖₂ of a linear f, for an input improved by ten power iterations with fᵀf."""
    for _ in range(10):
        u = (u / torch.linalg.vector_norm(u, dim=axes, keepdim=True)).detach().requires_grad_()
        y = function(u)
        (u,) = torch.autograd.grad(y.square().sum() / 2, u)
    return torch.linalg.vector_norm(y.detach().double(), dim=axes)


def parameters(trial: Trial) -> Iterator[Finding]:
    """A cut changes only the sizes of state axes; trained and frozen parameters stay trained and frozen."""
    for frozen in (False, True):
        module = trial.original()
        for parameter in module.parameters():
            parameter.requires_grad_(not frozen)
            parameter.__dict__["_optim"] = {"lr": 1e-3}
        axes = {name: own.axis for name, own in trial.adapter.growth(module).items()}
        order = trial.order(module)
        before = {name: (id(parameter), *_traits(parameter)) for name, parameter in module.named_parameters()}
        shapes = {name: _shape(parameter, axes.get(name)) for name, parameter in module.named_parameters()}
        rank = diagonal(trial.cut(module, trial.half(module))).order
        now = dict(module.named_parameters())
        lost = [name for name, parameter in now.items() if (id(parameter), *_traits(parameter)) != before[name]]
        kind = "frozen" if frozen else "trained"
        yield Finding.none_of(lost, f"{kind} parameters keep identity, dtype, device, requires_grad and attributes")
        bent = [name for name, parameter in now.items() if _shape(parameter, axes.get(name)) != shapes[name]]
        yield Finding.none_of(bent, "only axes of states change their sizes")
        missed = float(abs(trial.order(module) - rank))
        yield Finding(f"after a cut from {order} to {rank} states, the order that is read is {rank}", missed, 0.0)


def _traits(parameter: nn.Parameter) -> tuple[object, ...]:
    return parameter.dtype, parameter.device, parameter.requires_grad, parameter.layout, dict(vars(parameter))


def _shape(parameter: nn.Parameter, state_axis: int | None) -> list[int]:
    return [size for axis, size in enumerate(parameter.shape) if axis != state_axis]


def training(trial: Trial) -> Iterator[Finding]:
    """A training step moves every weight, before a cut and after it, even while the first loss is still referenced."""
    module = trial.original().train()
    u = trial.noise(module, next(module.parameters()).dtype)
    wanted = u.roll(1, dims=1).mean(-1, keepdim=True)
    held, *before = _train(module, lambda: (trial.run(module, u) - wanted).square().mean())
    yield Finding.none_of(before, "a training step moves every weight")
    trial.cut(module, trial.half(module))
    loss, *after = _train(module, lambda: (trial.run(module, u) - wanted).square().mean())
    after = [name for name in after if name not in trial.adapter.RESTING]
    yield Finding.none_of(after, "a training step after a cut moves every weight, while an earlier loss is referenced")
    losses = (value.item() for value in (held, loss))
    yield Finding.none_of((str(value) for value in losses if not math.isfinite(value)), "losses are finite")


def _train(module: nn.Module, loss_of: Callable[[], Tensor]) -> tuple[Tensor, *tuple[str, ...]]:
    """The loss, with its graph, and the names of the parameters that a step of Adam did not move."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    loss = loss_of()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    trained = ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)
    return loss, *(name for name, parameter in trained if bool((parameter == before[name]).all()))


def saving(trial: Trial) -> Iterator[Finding]:
    """The state dict of a cut module loads into another one of the same order; a copy gives the same output."""
    module = trial.original().eval()
    u = trial.noise(module, next(module.parameters()).dtype)
    rank = diagonal(trial.cut(module, trial.half(module))).order
    expected = trial.output(module, u)
    other = copy.deepcopy(make_seeded(trial.make, trial.seed + 1)).eval()
    trial.cut(other, rank)
    other.load_state_dict(module.state_dict())
    yield Finding("the state dict round-trips after a cut", difference(expected, trial.output(other, u)), 0.0)
    copied = copy.deepcopy(module)
    yield Finding("a copy of a cut module is the same", difference(expected, trial.output(copied, u)), 0.0)


def streaming(trial: Trial) -> Iterator[Finding]:
    """Single steps give the output of the whole sequence after a cut."""
    if trial.stream is None:
        return
    module = trial.module()
    u = trial.noise(module)
    trial.cut(module, trial.half(module))
    with torch.no_grad():
        streamed = trial.stream(module, u).double()
    yield Finding(
        "single steps equal the sequence after a cut", difference(trial.output(module, u), streamed), trial.tolerance
    )


def derivatives(trial: Trial) -> Iterator[Finding]:
    """The derivatives of read and encode equal finite differences."""
    module = trial.module(torch.float64)
    names, tensors = zip(*((name, p.detach().clone()) for name, p in module.named_parameters()), strict=True)

    def read(*values: Tensor) -> Tensor:
        system = read_with(trial.adapter, module, dict(zip(names, values, strict=True)))
        return in_one(system.poles, system.B, system.C)

    yield gradients("read", read, tensors)
    for folded in (False, True):
        system = trial.read(module)
        system = diagonal(balanced_truncation(fold(system) if folded else system, trial.half(module)).diagonalise())
        yield gradients(
            f"encode of {'a folded' if folded else 'an unfolded'} system",
            _encode_near(trial, module, system),
            (torch.zeros_like(system.poles), system.B, system.C),
        )


def stacking(trial: Trial) -> Iterator[Finding]:
    """Modules with the same setting are read and encoded together as each of them alone."""
    modules = [trial.module(torch.float64), make_seeded(trial.make, trial.seed + 1).to(torch.float64)]
    keys = {stacking_key(module, trial.adapter) for module in modules}
    if len(keys) > 1 or None in keys:
        return
    present, first, alone = stacked_parameters(modules), modules[0], [trial.read(module) for module in modules]
    together = read_with(trial.adapter, first, present)
    for k, one in enumerate(alone):
        parts = [(getattr(together, part)[k], getattr(one, part)) for part in ("poles", "B", "C")]
        yield Finding(f"module {k} of a stack is read as alone", _difference(parts), trial.tolerance)
    values = encode_with(trial.adapter, first, present, DiagonalSystem.stack(alone))
    for k, (module, one) in enumerate(zip(modules, alone, strict=True)):
        pairs = [(values[name][k], value) for name, value in trial.adapter.encode(module, one).items()]
        yield Finding(f"module {k} of a stack is encoded as alone", _difference(pairs), trial.tolerance)


def _difference(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of each pair, over the largest entry."""
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) for a, b in pairs)


def _encode_near(trial: Trial, module: nn.Module, system: DiagonalSystem) -> Callable[..., Tensor]:
    """Encode systems near `system`, with poles moved in units of 1 − |λ|²: at |λ| = 1 − 1e-5 even 1e-6 is not small."""

    def encode(moves: Tensor, B: Tensor, C: Tensor) -> Tensor:
        values = trial.adapter.encode(module, DiagonalSystem(system.poles + system.decay * moves, B, C))
        return in_one(*values.values())

    return encode


def in_one(*tensors: Tensor) -> Tensor:
    """Join all tensors to one vector: torch would not check separate results that have no gradient."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def gradients(what: str, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Finding:
    """The finding that derivatives equal finite differences."""
    inputs = tuple(tensor.requires_grad_() for tensor in inputs)
    promise = f"derivatives of {what} equal finite differences"
    if not function(*inputs).requires_grad:
        return Finding.none_of(["it carries no gradient"], promise)
    try:
        # Fast mode tests one random direction for each input.
        torch.autograd.gradcheck(function, inputs, rtol=1e-3, atol=1e-4, fast_mode=True)
    except GradcheckError as error:
        return Finding.none_of([" ".join(str(error).split())[:300]], promise)
    return Finding.none_of([], promise)


def changed(module: nn.Module, twin: nn.Module) -> list[str]:
    """The tensors in which two modules differ."""
    other = twin.state_dict()
    return [name for name, value in module.state_dict().items() if not torch.equal(value, other[name])]


PROMISES: tuple[Callable[[Trial], Iterator[Finding]], ...] = (
    reading,
    encoding,
    dead_states,
    zero_states,
    bound,
    parameters,
    training,
    saving,
    streaming,
    derivatives,
    stacking,
)


@dataclass(frozen=True)
class SelectiveTrial(_Trial):
    """A module with a selective adapter under test, the function that runs it, and the tolerance."""

    def noise(self, module: nn.Module) -> Tensor:
        """White noise as the module's input."""
        shape = (2, self.length, parameter_of(module, "in_proj.weight").shape[1])
        x = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64, device="cpu")
        return x.to(next(module.parameters()).device, self.dtype)

    def output(self, module: nn.Module) -> Tensor:
        """The module's output for white noise."""
        with torch.no_grad():
            return self.run(module, self.noise(module)).double()

    def become(self, module: nn.Module, system: SelectiveSystem) -> None:
        """Write the system into the module, with the attributes of its order."""
        attributes = self.adapter.attributes(module, system.order)
        write(module, self.adapter.encode(module, system))
        for path, value in attributes.items():
            owner, leaf = self.adapter.place(module, path)
            setattr(owner, leaf, value)


def selective_reading(trial: SelectiveTrial) -> Iterator[Finding]:
    """The observed part gets u, and encode(read) gives the values back and changes nothing."""
    module = trial.module()
    system, shapes = trial.read(module), []
    handle = trial.adapter.observed(module).register_forward_pre_hook(lambda part, args: shapes.append(args[0].shape))
    trial.output(module)
    handle.remove()
    expected = (2, trial.length, system.channels)
    wrong = [str(tuple(shape)) for shape in shapes if tuple(shape) != expected] if shapes else ["it is not called"]
    yield Finding.none_of(wrong, f"x_proj is given u of shape (batch, length, {system.channels})")
    values = trial.adapter.encode(module, system)
    moved = max(difference(parameter_of(module, name).detach(), value) for name, value in values.items())
    yield Finding("encode(read) gives the values back", moved, trial.tolerance)
    yield Finding.none_of(changed(module, trial.module()), "encode leaves the module alone")


def renaming(trial: SelectiveTrial) -> Iterator[Finding]:
    """Reversing the states, and doubling B while halving C, keeps the output."""
    module = trial.module()
    system, before = trial.read(module), trial.output(module)
    turned = torch.arange(system.order - 1, -1, -1, device=system.device)
    W_B, W_C = 2 * system.W_B[turned], system.W_C[turned] / 2
    trial.become(module, replace(system, rates=system.rates[:, turned], W_B=W_B, W_C=W_C))
    yield Finding(
        "states in another order and scale keep the output", difference(before, trial.output(module)), trial.tolerance
    )


def selective_dead_states(trial: SelectiveTrial) -> Iterator[Finding]:
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


def selective_zero_states(trial: SelectiveTrial) -> Iterator[Finding]:
    """Adding states that have neither input nor output keeps the output."""
    module = trial.module()
    n, before = trial.adapter.order(module), trial.output(module)
    values = _with_idle_states(trial, module, n + 3)
    attributes = trial.adapter.attributes(module, n + 3)
    write(module, values)
    for path, value in attributes.items():
        owner, leaf = trial.adapter.place(module, path)
        setattr(owner, leaf, value)
    yield Finding("three zero states keep the output", difference(before, trial.output(module)), trial.tolerance)
    yield Finding(f"with them the order is {n + 3}", float(abs(trial.adapter.order(module) - n - 3)), 0.0)


def selective_training(trial: SelectiveTrial) -> Iterator[Finding]:
    """A training step after a cut moves every weight that is trained."""
    module = trial.module().train()
    system = trial.read(module)
    trial.become(module, replace(system, rates=system.rates[:, 2:], W_B=system.W_B[2:], W_C=system.W_C[2:]))
    _, *still = _train(module, lambda: trial.run(module, trial.noise(module)).square().mean())
    yield Finding.none_of(still, "a training step after a cut moves every weight")


SELECTIVE_PROMISES: tuple[Callable[[SelectiveTrial], Iterator[Finding]], ...] = (
    selective_reading,
    renaming,
    selective_dead_states,
    selective_zero_states,
    selective_training,
)
