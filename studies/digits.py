"""scikit-learn's handwritten digits, read pixel by pixel: a small task of sequences that needs no download."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from compressm.layers import LRU
from compressm.models import SequenceClassifier

TEST_SAMPLES = 360  # of 1797, drawn once


@dataclass(frozen=True)
class DigitsSplits:
    """Images in [0, 1] as sequences of one channel, and the digit of each."""

    train_x: Float[Tensor, "train length 1"]
    train_y: Int[Tensor, " train"]
    test_x: Float[Tensor, "test length 1"]
    test_y: Int[Tensor, " test"]

    @property
    def length(self) -> int:
        return self.train_x.shape[1]

    def batches(self, size: int, *, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield training batches without end, in a new order every epoch that the seed determines."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            shuffled = torch.randperm(len(self.train_y), generator=generator)
            for chosen in shuffled.split(size):
                if len(chosen) == size:
                    yield self.train_x[chosen], self.train_y[chosen]


@dataclass(frozen=True)
class DigitsSetting:
    """Sizes of a model and options of its training, on digits of `side` × `side` pixels."""

    name: str
    side: int
    depth: int
    width: int
    order: int
    steps: int
    learning_rate: float
    weight_decay: float = 0.01
    batch: int = 50

    def model(self) -> SequenceClassifier:
        """Make a model with random weights from torch's generator."""
        return SequenceClassifier(LRU, depth=self.depth, width=self.width, order=self.order, inputs=1, classes=10)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the AdamW optimizer of a model; without weight decay it is Adam."""
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)


def load_digits(side: int = 8) -> DigitsSplits:
    """Load the digits, with 8 × 8 pixels or resized by bilinear interpolation; all sizes have the same split."""
    from sklearn import datasets  # takes a second, and only studies need it

    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    if side != images.shape[-1]:
        images = nn.functional.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)
    x, y = images.flatten(1)[..., None], torch.tensor(bunch.target)
    shuffled = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    test, train = shuffled[:TEST_SAMPLES], shuffled[TEST_SAMPLES:]
    return DigitsSplits(x[train], y[train], x[test], y[test])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """Make one optimizer step; returns the loss before it."""
    model.train()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def trained(
    setting: DigitsSetting, data: DigitsSplits, *, seed: int, progress: Callable[[str], None] = lambda _: None
) -> SequenceClassifier:
    """Train a model for all steps of its setting; the random state outside is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = setting.model()
        optimizer = setting.optimizer(model)
        for step, (x, y) in zip(range(1, setting.steps + 1), data.batches(setting.batch, seed=seed), strict=False):
            loss = train_step(model, optimizer, x, y)
            if step % 500 == 0:
                progress(f"{setting.name}, seed {seed}: step {step} of {setting.steps}, loss {loss:.4f}")
    return model.eval()


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Compute accuracy and mean cross-entropy, without dropout."""
    model.eval()
    logits = torch.cat([model(part) for part in x.split(120)])
    return float((logits.argmax(1) == y).double().mean()), float(nn.functional.cross_entropy(logits, y))
