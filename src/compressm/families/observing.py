"""Observation of layers while a user's functions run the model, and bases of families that need it.

What else such a function changes is put back.
"""

from __future__ import annotations

import inspect
import random
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from compressm.adapters.base import read_with
from compressm.control import ControlError, StateCovariance
from compressm.control.linear_algebra import each
from compressm.control.validation import are_finite, is_finite, require_finite
from compressm.errors import CompressionError
from compressm.families.base import Change, Layer, Observer, PlannedCut, SeparateFamily, Total, Writing, energy_lost
from compressm.families.choices import Choices, Measured
from compressm.layers.parameters import Kept
from compressm.ops.dispatch import trained_kernels

# A cut's error is measured on at least this many sequences, or on more until they have this many steps.
_KEPT_SEQUENCES, _KEPT_STEPS = 8, 1 << 13
_STATE_BYTES = 1 << 28  # memory for states
# If data is scarce, steps lie closer than the stride: with fewer samples than states some states would look dead.
_SAMPLES_A_STATE = 4
_GOLDEN, _SILVER = (5**0.5 - 1) / 2, 2**0.5 - 1  # their multiples fill [0, 1) evenly


@dataclass
class Sample:
    """A sample of a layer's input sequences, by number and without padding, spread evenly over all of them.

    Sequence k has the place frac(k·φ) with φ the golden ratio, and those with the lowest places stay: about the same
    share of any part of the data, even if it is sorted or repeats, and the same sequences every time.
    """

    sequences: dict[int, Float[Tensor, "length channels"]] = field(default_factory=dict)
    count: int = 0
    steps: int = 0
    longest: int = 1

    def add(
        self, x: Float[Tensor, "batch length channels"], counts: Bool[Tensor, "batch length"] | None = None
    ) -> None:
        """Add a batch; `counts` masks the steps that are not padding. Memory stays bounded."""
        lengths = [x.shape[1]] * len(x) if counts is None else counts.sum(1).tolist()
        first, self.count = self.count, self.count + len(x)
        self.steps, self.longest = self.steps + sum(lengths), max(self.longest, x.shape[1])
        most = max(_KEPT_SEQUENCES, _KEPT_STEPS // self.longest)
        new = (number for number in range(first, self.count) if lengths[number - first] > 0)
        chosen = sorted((*self.sequences, *new), key=lambda number: _GOLDEN * number % 1)[:most]
        self.sequences = {
            number: self.sequences[number] if number < first else _without_padding(x, counts, number - first)
            for number in chosen
        }

    @property
    def weight(self) -> float:
        """The number of observed steps for each step in the sample."""
        return self.steps / max(1, sum(len(sequence) for sequence in self.sequences.values()))

    def parts(self, share: int) -> Iterator[tuple[Float[Tensor, "batch length channels"], Tensor]]:
        """Up to `share` sequences at a time, in float64, with a mask (batch, length) of the steps that count."""
        kept = list(self.sequences.values())
        for start in range(0, len(kept), share):
            part = kept[start : start + share]
            u = pad_sequence([sequence.to(torch.float64) for sequence in part], batch_first=True)
            ends = torch.tensor([len(sequence) for sequence in part], device=u.device)
            yield u, torch.arange(u.shape[1], device=u.device) < ends[:, None]


def _without_padding(x: Tensor, counts: Tensor | None, row: int) -> Float[Tensor, "length channels"]:
    return x[row].clone() if counts is None else x[row][counts[row]]


ZERO_INPUTS = "calibrate gave it inputs that are all zeros: run the model on real data"


@dataclass
class Observations:
    """The covariance of one layer's states, unless a method does not need it, and a sample of its inputs."""

    name: str = ""
    covariance: StateCovariance | None = field(default_factory=StateCovariance)
    sample: Sample = field(default_factory=Sample)
    passes: int = 0

    @property
    def said(self) -> str:
        """The layer's name in messages."""
        return repr(self.name or "the model")

    def over(self, total: Total) -> Any:
        """The observations of all processes together; the sample stays that of this process."""
        if self.covariance is None:
            return self
        return replace(self, covariance=self.covariance.over(total))

    @property
    def are_zeros(self) -> bool:
        """True if all observed states are zero."""
        return self.covariance is not None and self.covariance.total is not None and not self.covariance.total.any()

    def require_enough(self, steps: int, order: int) -> None:
        """Refuse fewer steps than states: some states would look dead."""
        if steps < order:
            ran = f"{steps} step{'s' * (steps != 1)}"
            raise CompressionError(
                f"calibrate ran {ran} through a layer of {order} states ({self.said}), expected"
                " at least as many steps as states: run it on more data"
            )


@dataclass
class InputObserver(Observer):
    """An observer of the inputs of one layer; a family says where they are and what is computed from them."""

    observations: Any
    module: nn.Module
    system: Any
    choice: Measured

    @property
    def name(self) -> str:
        return str(self.observations.name)

    @property
    def passes(self) -> int:
        return int(self.observations.passes)

    def add(self, u: Float[Tensor, "batch length channels"], counts: Bool[Tensor, "batch length"] | None) -> None:
        """Add the inputs of one forward pass; `counts` masks the steps that are not padding."""
        # Padding may hold anything.
        u = u if counts is None else torch.where(counts[..., None], u, 0)
        try:
            require_finite("u", u)
            self.accumulate(u.to(torch.float64), counts)
        except ControlError as error:
            raise CompressionError(
                f"calibrate gave {self.observations.said} inputs that cannot be measured, expected finite ones: {error}"
            ) from error
        self.observations.sample.add(u, counts)
        self.observations.passes += 1

    @abstractmethod
    def accumulate(self, u: Tensor, counts: Tensor | None) -> None:
        """Add inputs in float64 to the sums over data, some sequences at a time."""

    def sampled_steps(self, u: Tensor, counts: Tensor | None) -> Int[Tensor, "batch samples"]:
        """The steps of these inputs at which states are measured."""
        available = len(u) * u.shape[1] if counts is None else int(counts.sum())
        stride = max(1, min(self.choice.stride, available // (_SAMPLES_A_STATE * self.system.order)))
        return sampled_steps(len(u), u.shape[1], stride).to(u.device)


def sequences_at_once(length: int, states: int) -> int:
    """The number of sequences whose states, 16 bytes each, fit into the memory for states."""
    return max(1, _STATE_BYTES // (16 * length * states))


def sampled_steps(batch: int, length: int, stride: int) -> Int[Tensor, "batch samples"]:
    """One step of every `stride`, at a place that differs between sequences and between strides.

    At a fixed distance, the steps of an image that is read row by row lie in one column: a digits model cut from 64
    states to 8 fell from a test accuracy of 0.99 to 0.67 that way, and falls to 0.94 this way.
    """
    count = max(1, length // stride)
    numbers = torch.arange(count, dtype=torch.float64, device="cpu")
    place = (_GOLDEN * numbers + _SILVER * torch.arange(batch, dtype=torch.float64, device="cpu")[:, None]) % 1
    return ((numbers + place) * (length / count)).long().clamp_max(length - 1)


def ratio_of(squares: Float[Tensor, "2"]) -> float:
    """The root of the first over the second; 0 if the second is 0."""
    changed, whole = squares.tolist()
    return (changed / whole) ** 0.5 if whole > 0 else 0.0


def squared_change(
    outputs: Callable[[Any, Tensor], Tensor], old: Any, new: Any, sample: Sample, share: int, unit: Tensor | float = 1.0
) -> Float[Tensor, "2"]:
    """‖y_new − y_old‖² and ‖y_old‖², scaled up to all observed steps, so that they can be summed over processes.

    Outputs are divided by `unit`: squares of outputs at 1e-170 would underflow.
    """
    squares = torch.zeros(2, dtype=torch.float64, device=old.device)
    for u, counts in sample.parts(share):
        before, after = (outputs(system, u) / unit * counts[..., None] for system in (old, new))
        squares += torch.stack([(after - before).square().sum(), before.square().sum()])
    return squares * sample.weight


class MeasuredLayer(Layer):
    """A layer whose states are valued on observations; subclasses are dataclasses with a field `observations`."""

    observations: Any

    @property
    def order(self) -> int:
        return int(self.system.order)

    @property
    @abstractmethod
    def way(self) -> Any:
        """The way in which the layer is cut: an object with `spectrum(data)` and `reduce(data, kept)`."""

    @property
    @abstractmethod
    def data(self) -> Any:
        """The system and its observations, as `way` takes them."""

    @abstractmethod
    def _cut(self, reduction: Any, lost: float) -> MeasuredCut:
        """The cut by this reduction, not measured yet."""

    def with_observations(self, observer: Any) -> Any:
        return self._observed(observer.observations)

    def over(self, total: Total) -> Any:
        return self._observed(self.observations.over(total))

    def _observed(self, observations: Any) -> Any:
        return replace(self, observations=observations)  # type: ignore[type-var]  # every layer is a dataclass

    def received(self, sent: Any) -> Any:
        reduction, lost = sent
        return self._cut(reduction.to(self.system.device), lost)

    def spectrum(self) -> Float[Tensor, "*channels n"]:
        """The values of the states; errors name the layer."""
        try:
            found: Tensor = self.way.spectrum(self.data)
        except ControlError as error:
            raise CompressionError(f"{self.said}: {error}") from error
        return found

    def cut(self, kept: Any, lost: float) -> Any:
        """The cut that keeps the states at these places of the spectrum, with its error; errors name the layer."""
        try:
            cut = self._cut(self.way.reduce(self.data, kept), lost)
        except ControlError as error:
            raise CompressionError(f"{self.said}: {error}") from error
        return cut.measured(ratio_of(cut.squared_change()))


@dataclass(frozen=True)
class MeasuredCut(PlannedCut):
    """A reduction of one layer without an error bound; there is only `measured_error`."""

    layer: Any
    reduction: Any
    measured_error: float | None
    energy_lost: float
    error_bound: float | None = None

    @property
    def rank(self) -> int:
        return int(self.reduction.order)

    def change(self) -> Change:
        found: Change = self.reduction.change(self.layer.module, self.layer.adapter, self.layer.system)
        return found

    def following(self, module: nn.Module, adapter: Any) -> Writing:
        found: Writing = self.reduction.change(module, adapter, read_with(adapter, module).detach()).writing
        return found

    def sent(self) -> Any:
        return self.reduction.to("cpu"), self.energy_lost

    @abstractmethod
    def squared_change(self) -> Float[Tensor, "2"]:
        """‖y_new − y_old‖² and ‖y_old‖² on the sample."""


class MeasuredFamily(SeparateFamily):
    """Cuts by averages over data."""

    needs_data = True
    # What `gramian` may be, for errors.
    gramians: ClassVar[str]

    def require_choices(self, names: Sequence[str], choices: Choices) -> None:
        super().require_choices(names, choices)
        if choices.is_modal:
            said = ", ".join(name or "the model" for name in names)
            raise CompressionError(
                f"{said}: {choices.gramian} needs fixed poles, which {self.called} do not have; expected"
                f" {self.gramians}"
            )

    def require_layer(self, layer: Any, choices: Choices) -> None:
        layer.way.require(layer.said, layer.module, layer.adapter, layer.system)

    def spectra(self, layers: Sequence[Any], choices: Choices) -> dict[str, Float[Tensor, "*channels n"]]:
        return dict(each(lambda layer: (layer.name, layer.spectrum()), layers))

    def planned(self, layer: Any, order: Any, sigma: Tensor, choices: Choices, salt: int) -> Any:
        kept = choices.select(sigma, order, salt=f"{layer.name}@{salt}")
        return layer.cut(kept, energy_lost(sigma, kept))


Calibrate = Callable[[nn.Module], object]
Result = TypeVar("Result")
# Puts something back, and returns what was changed, in words.
PutBack = Callable[[], list[str]]


def require_calibrate(calibrate: object) -> None:
    """Refuse what cannot be called with the model alone."""
    said = f"calibrate is {calibrate!r:.100}, expected a function of the model, such as lambda model: model(inputs)"
    # A class, such as int, makes something of the model but does not run it.
    if not callable(calibrate) or isinstance(calibrate, type):
        raise CompressionError(said)
    try:
        signature = inspect.signature(calibrate)
    except (TypeError, ValueError):
        return  # some functions that are written in C have none
    try:
        signature.bind(None)
    except TypeError as error:
        raise CompressionError(f"{said}: it takes {signature}, and with one argument {error}") from None


def observe(
    model: nn.Module, calibrate: Calibrate, observers: Sequence[Observer], also: Sequence[PutBack] = ()
) -> None:
    """Run `calibrate(model)` once, in evaluation mode and without gradients; every observer must get inputs.

    It may not change what `also` is put back.
    """
    _require_finite(observers)

    def run() -> None:
        # Compiled code would not call hooks that were added later.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), trained_kernels():
            model.eval()
            calibrate(model)

    untouched(model, "calibrate", lambda: _attached(observers, run), also)
    missed = [repr(observer.name) if observer.name else "the model" for observer in observers if observer.passes == 0]
    if missed:
        raise CompressionError(
            f"calibrate did not run {', '.join(missed)}: it must call the model that it is given"
            " so that the `forward` of these layers runs (`step` is not observed)"
        )


def untouched(model: nn.Module, who: str, run: Callable[[], Result], also: Sequence[PutBack] = ()) -> Result:
    """Run a user's function, named `who`: modes, gradients, buffers, random numbers and settings of torch stay.

    Weights that it changes are put back, and it is refused; so is whatever `also` puts back, and a step of an optimizer
    that trains the model. The copy of all tensors on a CPU, and the comparison afterwards, take 0.08 s for 100 MB on
    one core.
    """
    kept, random_before, settings = Kept(model), random_state(), _Settings()
    modes = {module: module.training for module in model.modules()}
    changed: list[str] = []

    def restore() -> None:
        settings.restore_()  # first: they say where tensors are made
        changed.extend(kept.restore_())
        for put_back in also:
            changed.extend(put_back())
        for module, training in modes.items():
            module.training = training
        set_random_state(random_before)

    def hidden() -> Result:
        kept.hide_gradients_()
        return _without_steps(model, who, run)

    result = surely(hidden, restore)
    if changed:
        shown = ", ".join(changed[:4]) + (f" and {len(changed) - 4} more" if len(changed) > 4 else "")
        raise CompressionError(
            f"{who} changed {shown}; expected a function that only runs the model. That is put back, but not what else"
            " it changed, such as the moments of an optimizer"
        )
    return result


class _Settings:
    """Settings of torch for the whole process, as they are now."""

    def __init__(self) -> None:
        self.dtype, self.device = torch.get_default_dtype(), _default_device()
        self.gradients, self.deterministic = torch.is_grad_enabled(), torch.get_deterministic_debug_mode()

    def restore_(self) -> None:
        torch.set_default_dtype(self.dtype)
        if _default_device() != self.device:
            torch.set_default_device(self.device)
        torch.set_grad_enabled(self.gradients)
        if torch.get_deterministic_debug_mode() != self.deterministic:
            torch.set_deterministic_debug_mode(self.deterministic)


def _default_device() -> torch.device | None:
    """The device of `torch.set_default_device`; None if there is none, where torch's own function says the CPU."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    found: torch.device | None = getattr(context, "device", None)
    return found


def _without_steps(model: nn.Module, who: str, run: Callable[[], Result]) -> Result:
    """Refuse the step of an optimizer that trains this model before it changes weights or moments."""
    own, refused = {id(parameter) for parameter in model.parameters()}, list[CompressionError]()

    def refuse(optimizer: Any, args: object, options: object) -> None:
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            said = f"{who} called step() of {type(optimizer).__name__}, which trains this model"
            refused.append(CompressionError(f"{said}; nothing was changed: expected a function that only runs it"))
            raise refused[-1]

    handles: list[RemovableHandle] = []

    def watched() -> Result:
        handles.append(register_optimizer_step_pre_hook(refuse))
        return run()

    def remove() -> None:
        for handle in handles:
            handle.remove()

    result = surely(watched, remove)
    if refused:  # and it went on
        raise refused[-1]
    return result


def random_state() -> dict[str, Any]:
    """The state of all random number generators, as tensors, numbers and text."""
    # Reading the state would initialise every GPU of a process that uses none.
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    # The global generator, which other data sets and augmentations use.
    numpy_state = np.random.get_state(legacy=False)  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": _converted(numpy_state, np.ndarray, lambda array: torch.from_numpy(array.copy())),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if started else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the random number generators; devices that this machine lacks are left out."""
    random.setstate(state["python"])
    np.random.set_state(_converted(state["numpy"], Tensor, Tensor.numpy))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, stored in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(stored, device)


def require_random_state(state: Mapping[str, Any]) -> None:
    """Refuse a state that `set_random_state` could not restore, by setting it in generators of no use."""
    if not isinstance(state, Mapping):
        raise TypeError(f"it is {state!r:.40}, expected the state of each generator")
    random.Random().setstate(state["python"])
    np.random.RandomState().set_state(_converted(state["numpy"], Tensor, Tensor.numpy))
    torch.Generator().set_state(state["torch"])
    for stored in state["cuda"]:
        if torch.cuda.is_available():
            torch.Generator("cuda").set_state(stored)
        elif not isinstance(stored, Tensor) or stored.dtype != torch.uint8 or stored.ndim != 1:
            raise TypeError(f"the state of a GPU is {stored!r:.40}, expected bytes")


def _converted(value: Any, kind: type[Any], convert: Callable[[Any], Any]) -> Any:
    """Convert all values of one kind in nested dictionaries."""
    if isinstance(value, dict):
        return {name: _converted(item, kind, convert) for name, item in value.items()}
    return convert(value) if isinstance(value, kind) else value


def _require_finite(observers: Sequence[Observer]) -> None:
    """Refuse a layer with NaN or infinity by name; the model itself would not say which layer it is."""
    layers = (observer.module.named_parameters(prefix=observer.name) for observer in observers)
    weights = {name: parameter for layer in layers for name, parameter in layer}
    if not are_finite(weights.values()):
        name = next(name for name, parameter in weights.items() if not is_finite(parameter))
        unusable = int((~weights[name].isfinite()).sum())
        raise CompressionError(f"{name} holds {unusable} entries that are not finite")


# The tables of hooks that observers add to.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


def _attached(observers: Sequence[Observer], run: Callable[[], Result]) -> Result:
    """Run with the observers attached; afterwards the layers have the hooks that they had."""
    modules = [module for observer in observers for module in observer.module.modules()]
    tables = [
        (table, dict(table)) for module in modules for name in _HOOKS if (table := vars(module)[name]) is not None
    ]

    def observed() -> Result:
        for observer in observers:
            observer.attach()
        return run()

    def detach() -> None:
        for table, before in tables:
            if table.keys() != before.keys():
                table.clear()
                table.update(before)

    return surely(observed, detach)


def surely(run: Callable[[], Result], clean_up: Callable[[], None]) -> Result:
    """Run and clean up, whatever happens; a clean-up that Ctrl-C interrupts starts again.

    No context manager: Ctrl-C inside contextlib would delay the clean-up to when Python drops the exception.
    """
    done = False
    try:
        try:
            return run()
        finally:
            clean_up()
            done = True
    except BaseException:
        if not done:
            clean_up()
        raise
