"""Trained digits models cut once, without training afterwards, in four ways: what accuracy is left?"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from command import Progress, run, silent
from compressm.compression import PAPER, Random, TargetOrder, WhiteNoise, compress_
from compressm_lab.runs.measurement import Measurement, Row
from digits import DigitsSetting, DigitsSplits, evaluate, load_digits, trained

SETTINGS = (
    DigitsSetting("two blocks, 64 steps", side=8, depth=2, width=32, order=64, steps=2000, learning_rate=1e-3),
    DigitsSetting("two blocks, 196 steps", side=14, depth=2, width=32, order=64, steps=2000, learning_rate=1e-3),
    DigitsSetting(
        "one block, 784 steps", side=28, depth=1, width=8, order=256, steps=6000, learning_rate=1e-3, weight_decay=0.0
    ),
)
QUICK = (DigitsSetting("one block, 64 steps", side=8, depth=1, width=8, order=32, steps=60, learning_rate=1e-2),)
# n/2, n/4, n/8, and n/16 where that is the 16 of 256 states of an earlier study.
SHARES = (2, 4, 8, 16)
_LEAST_RANK = 8
_CALIBRATION_BATCHES = 4


def measure_one_shot(
    *, seeds: int = 3, quick: bool = False, progress: Progress = silent, settings: Iterable[DigitsSetting] | None = None
) -> Measurement:
    """Measure one row a model, way and order: test accuracy and loss right after the cut, and before it."""
    rows: list[Row] = []
    for setting in settings or (QUICK if quick else SETTINGS):
        data = load_digits(setting.side)
        for seed in range(seeds):
            model = trained(setting, data, seed=seed, progress=progress)
            found = cut_in_every_way(setting, model, data, seed)
            progress(f"{setting.name}, seed {seed}: {_summary(found)}")
            rows += found
    return Measurement("one_shot", "Test accuracy right after one cut", seeds, rows)


def ways(data: DigitsSplits, batch: int, seed: int) -> dict[str, Mapping[str, Any]]:
    """Options of `compress_` by way."""

    def calibrate(model: nn.Module) -> None:
        for k in range(_CALIBRATION_BATCHES):
            model(data.train_x[k * batch : (k + 1) * batch])

    return {
        "paper": PAPER,
        "folded": {"gramian": WhiteNoise()},
        "measured": {"calibrate": calibrate},
        "random": {**PAPER, "select": Random(seed)},
    }


def cut_in_every_way(setting: DigitsSetting, model: nn.Module, data: DigitsSplits, seed: int) -> list[Row]:
    """Cut copies of one model in every way and to every order; one row each."""
    full_accuracy, full_loss = evaluate(model, data.test_x, data.test_y)
    rows: list[Row] = []
    for rank in (setting.order // share for share in SHARES if setting.order // share >= _LEAST_RANK):
        for way, options in ways(data, setting.batch, seed).items():
            smaller = copy.deepcopy(model)
            compress_(smaller, keep=TargetOrder(rank), **options)
            accuracy, loss = evaluate(smaller, data.test_x, data.test_y)
            rows.append(_row(setting, seed, way, rank) | {"accuracy": accuracy, "loss": loss})
    return [row | {"full_accuracy": full_accuracy, "full_loss": full_loss} for row in rows]


def _row(setting: DigitsSetting, seed: int, way: str, rank: int) -> Row:
    return {
        "setting": setting.name,
        "seed": seed,
        "way": way,
        "order": setting.order,
        "rank": rank,
        "width": setting.width,
        "device": "cpu",
    }


def _summary(rows: list[Row]) -> str:
    cells = [f"{row['way']} {row['rank']}: {float(row['accuracy']):.3f}" for row in rows]
    return f"{float(rows[0]['full_accuracy']):.3f} before; {', '.join(cells)}"


if __name__ == "__main__":
    run(measure_one_shot, seeds=3, description=__doc__ or "")
