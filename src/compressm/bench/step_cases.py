"""What a training step is measured on: sizes of a model and of its data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compressm.ops import Path


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """An LRU classifier, its batch, and how a step of it runs."""

    task: str
    depth: int
    width: int
    order: int
    batch: int
    length: int
    classes: int
    inputs: int | None = None
    vocabulary: int | None = None
    towers: int = 1
    dropout: float = 0.1
    precision: str = "float32"
    path: Path | None = None
    compiled: bool = False

    @property
    def sequences(self) -> int:
        """In a batch: two for every pair where there are two towers."""
        return self.batch * self.towers


# Depth, width, order, batch and dropout: tab:hyperparameters. The rest: the tasks.
PAPER = {
    case.task: case
    for case in (
        StepCase(task="smnist", depth=1, width=8, order=256, batch=50, length=784, inputs=1, classes=10),
        StepCase(task="scifar", depth=6, width=512, order=384, batch=50, length=1024, inputs=3, classes=10),
        StepCase(
            task="listops", depth=6, width=128, order=256, batch=32, length=2048, vocabulary=18, classes=10, dropout=0.0
        ),
        StepCase(task="imdb", depth=1, width=256, order=192, batch=32, length=4096, vocabulary=257, classes=2),
        StepCase(task="aan", depth=6, width=128, order=256, batch=64, length=4000, vocabulary=257, classes=2, towers=2),
        StepCase(
            task="pathfinder", depth=6, width=192, order=256, batch=64, length=1024, inputs=1, classes=2, dropout=0.0
        ),
    )
}


def paper_case(
    task: str,
    order: int | None = None,
    *,
    precision: str = "float32",
    path: Path | None = None,
    compiled: bool = False,
) -> StepCase:
    """A row of the paper's table of hyper-parameters, at its own order or another."""
    case = PAPER[task]
    return replace(case, order=order or case.order, precision=precision, path=path, compiled=compiled)


def paper_orders(task: str) -> tuple[int, ...]:
    """What the tables compare: sMNIST at the orders the paper cuts it to, the others whole and at a quarter."""
    whole = PAPER[task].order
    return (256, 28, 13) if task == "smnist" else (whole, whole // 4)


def default_cases(device: str, *, compiled: bool = False) -> tuple[StepCase, ...]:
    """The sMNIST model on a CPU; on a GPU every model of the paper, the larger ones in bfloat16."""
    if device == "cpu":
        return tuple(paper_case("smnist", n, compiled=compiled) for n in (256, 28, 13))
    half = [("scifar", 384), ("scifar", 57)]
    half += [(task, n) for task in ("listops", "aan", "imdb", "pathfinder") for n in paper_orders(task)]
    return (
        *(
            paper_case("smnist", n, precision=precision, compiled=compiled)
            for precision in ("float32", "tf32")
            for n in (256, 13)
        ),
        *(paper_case(task, n, precision="bfloat16", compiled=compiled) for task, n in half),
    )
