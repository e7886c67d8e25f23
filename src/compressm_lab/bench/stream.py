"""Time a token of a language model that streams: by its own `step`, and by a `Stream`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from compressm import layers
from compressm.models import LanguageModel
from compressm.running import Stream
from compressm_lab.bench.timing import Progress, columns, measure_each, median_seconds, silent
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.training.building import DTYPES

_VOCABULARY = 256
# Tokens for each repeat: most are shorter than the time that a busy machine leaves a process alone.
_TOKENS = 50


@dataclass(frozen=True)
class StreamCase:
    """A language model of tied bytes, and the number of its sequences."""

    layer: str
    order: int
    batch: int
    depth: int = 4
    width: int = 128
    precision: str = "float32"

    def __str__(self) -> str:
        return f"{self.layer}, n = {self.order}, batch {self.batch}"


def default_cases(device: str) -> tuple[StreamCase, ...]:
    """LRU and Mamba before and after a cut; on a GPU the Mamba model that other rows of the tables have too."""
    lru = [StreamCase("LRU", n, batch) for batch in (1, 8) for n in (256, 28)]
    if device == "cpu":
        return (*lru, *(StreamCase("Mamba", n, batch) for batch in (1, 8) for n in (64, 16)))
    return (*lru, *(StreamCase("Mamba", n, 8, width=256, precision="bfloat16") for n in (128, 16)))


def measure_streams(
    cases: Iterable[StreamCase] | None = None, *, device: str = "cpu", repeats: int = 9, progress: Progress = silent
) -> Measurement:
    """Time a token of each case; on the CPU with one thread, on a GPU also without the recorded graph."""
    chosen = default_cases(torch.device(device).type) if cases is None else cases
    return measure_each("stream", "A token of a stream", chosen, _row, device, repeats, progress)


def _row(case: StreamCase, device: torch.device, repeats: int) -> Row:
    torch.manual_seed(0)
    kind, dtype = getattr(layers, case.layer), DTYPES[case.precision]
    model = LanguageModel(kind, vocabulary=_VOCABULARY, depth=case.depth, width=case.width, order=case.order)
    model = model.to(device, dtype).eval()
    token, state = torch.randint(_VOCABULARY, (case.batch,), device=device), model.initial_state(case.batch)

    def step() -> None:
        nonlocal state
        _, state = model.step(token, state)

    def a_token(work: Callable[[], object]) -> float:
        return median_seconds(work, repeats=_TOKENS * repeats, device=device)

    with torch.inference_mode():
        row = columns(case, "layer", "order", "batch", "depth", "width", "precision")
        row |= {"device": device.type, "step_s": a_token(step)}
    if device.type == "cuda":
        row["unrecorded_s"] = a_token(partial(Stream(model, case.batch, record=False), token))
    return row | {"stream_s": a_token(partial(Stream(model, case.batch), token))}
