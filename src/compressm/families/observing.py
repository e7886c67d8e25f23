"""Running the model on data, once, while its layers are observed; which of that data is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.hooks import RemovableHandle

from compressm.errors import CompressionError
from compressm.families.base import Observer

# On how much a cut's error is measured: sequences at least, and as many as make so many steps.
_KEPT_SEQUENCES, _KEPT_STEPS = 8, 1 << 13
_STATE_BYTES = 1 << 28  # of all states at once
# Where data is scarce, steps lie closer than the stride: fewer samples than states would call the others dead.
_SAMPLES_A_STATE = 4
_GOLDEN, _SILVER = (5**0.5 - 1) / 2, 2**0.5 - 1  # whose multiples fill [0, 1) evenly


@dataclass
class Sample:
    """Some of the sequences that a layer saw, by their numbers and without padding, spread evenly over all of them.

    Sequence k has the place frac(k·φ) with φ the golden ratio, and those with the lowest places stay: of any stretch of
    the data about the same share, also where it is sorted or repeats, and the same ones every time.
    """

    sequences: dict[int, Float[Tensor, "length channels"]] = field(default_factory=dict)
    count: int = 0
    steps: int = 0
    longest: int = 1

    def add(
        self, x: Float[Tensor, "batch length channels"], counts: Bool[Tensor, "batch length"] | None = None
    ) -> None:
        """See a batch, of which some steps may not count; memory stays bounded."""
        lengths = [x.shape[1]] * len(x) if counts is None else counts.sum(1).tolist()
        first, self.count = self.count, self.count + len(x)
        self.steps, self.longest = self.steps + sum(lengths), max(self.longest, x.shape[1])
        room = max(_KEPT_SEQUENCES, _KEPT_STEPS // self.longest)
        new = (number for number in range(first, self.count) if lengths[number - first] > 0)
        chosen = sorted((*self.sequences, *new), key=lambda number: _GOLDEN * number % 1)[:room]
        self.sequences = {
            number: self.sequences[number] if number < first else _counted(x, counts, number - first)
            for number in chosen
        }

    @property
    def weight(self) -> float:
        """How many steps were seen for each that stayed."""
        return self.steps / max(1, sum(len(sequence) for sequence in self.sequences.values()))

    def parts(self, share: int) -> Iterator[tuple[Float[Tensor, "batch length channels"], Tensor]]:
        """Up to `share` sequences at a time, in float64, with a mask (batch, length) of the steps that count."""
        kept = list(self.sequences.values())
        for start in range(0, len(kept), share):
            part = kept[start : start + share]
            u = pad_sequence([sequence.to(torch.float64) for sequence in part], batch_first=True)
            ends = torch.tensor([len(sequence) for sequence in part], device=u.device)
            yield u, torch.arange(u.shape[1], device=u.device) < ends[:, None]


def _counted(x: Tensor, counts: Tensor | None, row: int) -> Float[Tensor, "length channels"]:
    return x[row].clone() if counts is None else x[row][counts[row]]


def up_to(lengths: Int[Tensor, " batch"] | None, x: Tensor) -> Bool[Tensor, "batch length"] | None:
    """Which steps of x lie before the ends of their sequences; None where all do."""
    return None if lengths is None else torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]


def without_padding(x: Tensor, counts: Tensor | None) -> Tensor:
    """Zeros where padding was, which may hold anything."""
    return x if counts is None else torch.where(counts[..., None], x, 0)


def sequences_at_once(length: int, states: int) -> int:
    """So many that their states, 16 bytes each, fit into the memory that they may have."""
    return max(1, _STATE_BYTES // (16 * length * states))


def close_enough(stride: int, available: int, order: int) -> int:
    """The stride, or a shorter one at which there are four samples a state."""
    return max(1, min(stride, available // (_SAMPLES_A_STATE * order)))


def sampled_steps(batch: int, length: int, stride: int) -> Int[Tensor, "batch samples"]:
    """One step of every `stride`, at a place that differs from sequence to sequence and from stride to stride.

    At steps a fixed distance apart, an image that is read row by row shows one of its columns only: a digits model cut
    from 64 states to 8 fell from a test accuracy of 0.99 to 0.67 that way, and falls to 0.94 this way.
    """
    count = max(1, length // stride)
    numbers = torch.arange(count, dtype=torch.float64)
    place = (_GOLDEN * numbers + _SILVER * torch.arange(batch, dtype=torch.float64)[:, None]) % 1
    return ((numbers + place) * (length / count)).long().clamp_max(length - 1)


def ratio_of(squares: Float[Tensor, "2"]) -> float:
    """√ of the first over the second; 0 where there is nothing to compare with."""
    changed, whole = squares.tolist()
    return (changed / whole) ** 0.5 if whole > 0 else 0.0


Calibrate = Callable[[nn.Module], object]


def observe(model: nn.Module, calibrate: Calibrate, observers: Sequence[Observer]) -> None:
    """Run `calibrate(model)` once, in evaluation mode and without gradients; every observer must hear something."""
    for observer in observers:
        _require_finite(observer.name, observer.module)
    before = [_sums(observer) for observer in observers]
    # What is compiled is not asked again for hooks that came later.
    with _attached(observers), _evaluating(model), torch.compiler.set_stance("force_eager"):
        calibrate(model)
    for observer, then in zip(observers, before, strict=True):
        if changed := [name for name, now in _sums(observer).items() if then.get(name) != now]:
            raise CompressionError(
                f"calibrate changed {observer.name or 'the model'}: {', '.join(changed)}; expected it to run the model"
                " and nothing else"
            )
    missed = [repr(observer.name) if observer.name else "the model" for observer in observers if observer.passes == 0]
    if missed:
        raise CompressionError(
            f"calibrate did not run {', '.join(missed)}: it must call the model that it is given"
            " so that the `forward` of these layers runs (`step` is not listened to)"
        )


def _sums(observer: Observer) -> dict[str, tuple[object, ...]]:
    """Of every parameter what other values would hardly have too; those that were put back count as the same."""
    found: dict[str, tuple[object, ...]] = {}
    with torch.no_grad():
        for name, parameter in observer.module.named_parameters():
            values = parameter.detach().to(torch.complex128 if parameter.is_complex() else torch.float64)
            found[name] = (tuple(parameter.shape), values.sum().item(), values.abs().sum().item())
    return found


def _require_finite(name: str, layer: nn.Module) -> None:
    """Before the model stumbles over them, and does not say in which layer."""
    for weight, parameter in layer.named_parameters(prefix=name):
        if unusable := int((~parameter.isfinite()).sum()):
            raise CompressionError(f"{weight} holds {unusable} entries that are not finite")


@contextmanager
def _attached(observers: Sequence[Observer]) -> Iterator[None]:
    handles: list[RemovableHandle] = []
    try:
        for observer in observers:
            handles += observer.attach()
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """As an evaluation: no dropout, no new statistics, no gradients, and random numbers as if it had not been."""
    modes: Mapping[nn.Module, bool] = {module: module.training for module in model.modules()}
    devices = {tensor.device for tensor in model.parameters() if tensor.is_cuda}
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
