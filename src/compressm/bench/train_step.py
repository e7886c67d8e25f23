"""One whole training step at the sizes of the paper's models, on random data: forward, backward and AdamW.

On a GPU the regions around the SSM layers are compiled and the step is one CUDA graph; on the CPU it runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from compressm.bench.timing import median_seconds, threads
from compressm.layers import LRU
from compressm.models import OneMask, SequenceClassifier
from compressm.ops import Path
from compressm.runs.measurement import Measurement


@dataclass(frozen=True)
class StepCase:
    """A row of the paper's table of hyper-parameters (tab:hyperparameters) at some order."""

    task: str
    depth: int
    width: int
    order: int
    batch: int
    length: int
    inputs: int | None
    vocabulary: int | None
    classes: int
    towers: int = 1
    precision: str = "float32"
    path: Path | None = None


def paper_case(task: str, order: int, *, precision: str = "float32", path: Path | None = None) -> StepCase:
    """The sizes of a task of the paper."""
    depth, width, batch, length, inputs, vocabulary, classes, towers = {
        "smnist": (1, 8, 50, 784, 1, None, 10, 1),
        "scifar": (6, 512, 50, 1024, 3, None, 10, 1),
        "listops": (6, 128, 32, 2048, None, 18, 10, 1),
        "imdb": (1, 256, 32, 4096, None, 257, 2, 1),
        "aan": (6, 128, 64, 4000, None, 257, 2, 2),
        "pathfinder": (6, 192, 64, 1024, 1, None, 2, 1),
    }[task]
    return StepCase(task, depth, width, order, batch, length, inputs, vocabulary, classes, towers, precision, path)


CPU_CASES = (paper_case("smnist", 256), paper_case("smnist", 28), paper_case("smnist", 13))
GPU_CASES = (
    paper_case("smnist", 256),
    paper_case("smnist", 13),
    paper_case("scifar", 384, precision="bfloat16"),
    paper_case("scifar", 57, precision="bfloat16"),
)


def measure_steps(
    cases: Iterable[StepCase] | None = None,
    *,
    device: str = "cpu",
    repeats: int = 9,
    progress: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Time one step of each case; on the CPU with one thread."""
    where = torch.device(device)
    rows: list[dict[str, float | int | str]] = []
    with threads(1 if where.type == "cpu" else torch.get_num_threads()):
        for case in cases if cases is not None else (CPU_CASES if where.type == "cpu" else GPU_CASES):
            progress(f"{case.task}, n = {case.order}, {case.precision}")
            rows.append(_row(case, where, repeats))
        return Measurement("step", "One training step: forward, backward, AdamW", repeats, rows)


def _row(case: StepCase, device: torch.device, repeats: int) -> dict[str, float | int | str]:
    torch.manual_seed(0)
    model = _model(case).to(device)
    x, target = _batch(case, device)
    step = captured_step(model, x, target, case) if device.type == "cuda" else eager_step(model, x, target, case)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = median_seconds(step, repeats=repeats, device=device)
    row: dict[str, float | int | str] = {
        "task": case.task,
        "order": case.order,
        "precision": case.precision,
        "path": case.path.name if case.path else "chosen",
        "device": device.type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step_s": seconds,
    }
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def _model(case: StepCase) -> SequenceClassifier:
    return SequenceClassifier(
        LRU,
        depth=case.depth,
        width=case.width,
        order=case.order,
        classes=case.classes,
        inputs=case.inputs,
        vocabulary=case.vocabulary,
        towers=case.towers,
        dropout=OneMask(0.1),
        layer_options={"path": case.path},
    )


def _batch(case: StepCase, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = (case.batch, case.length) if case.towers == 1 else (case.batch, case.towers, case.length)
    if case.vocabulary is None:
        x = torch.randn(*shape, case.inputs or 1, device=device)
    else:
        x = torch.randint(case.vocabulary, shape, device=device)
    return x, torch.randint(case.classes, (case.batch,), device=device)


def eager_step(model: SequenceClassifier, x: Tensor, target: Tensor, case: StepCase) -> Callable[[], None]:
    """A step as a plain training loop does it."""
    gpu = x.is_cuda
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=gpu)
    half = case.precision == "bfloat16"

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            loss = cross_entropy(model(x).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def captured_step(model: SequenceClassifier, x: Tensor, target: Tensor, case: StepCase) -> Callable[[], None]:
    """The same step as one CUDA graph, with the regions around the SSM layers compiled."""
    for block in model.blocks:
        block.compile()
    step = eager_step(model, x, target, case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
