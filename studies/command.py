"""The command line of studies that measure in this process: `python studies/NAME.py --seeds K --quick --out FOLDER`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from compressm_lab.experiments.rows import count
from compressm_lab.runs.measurement import Measurement

Progress = Callable[[str], None]
# Called as study(seeds=…, quick=…, progress=…): seeds 0, 1, …; `quick` is a small version that takes seconds. A study
# that can do several things at a time takes processes=… too.
Study = Callable[..., Measurement]


def silent(line: str) -> None:
    """Drop a line of progress."""


def spoken(line: str) -> None:
    """Print a line of progress at once, from any process."""
    print(line, flush=True)


def run(
    study: Study, *, seeds: int, description: str, arguments: Sequence[str] | None = None, parallel: bool = False
) -> Path:
    """Run a study from the command line, print its progress, and write OUT/NAME.json."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path("out/studies"), help="folder of the result (%(default)s)")
    parser.add_argument("--seeds", type=count, default=seeds, help="how often, each with its own seed (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small version, in seconds")
    if parallel:
        parser.add_argument(
            "--processes", type=count, default=1, help="models at a time, on one core each (%(default)s)"
        )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the models are small: on several threads they are slower
    options = {"processes": given.processes} if parallel else {}
    measurement = study(seeds=given.seeds, quick=given.quick, progress=spoken, **options)
    path = measurement.write(given.out / f"{measurement.name}.json")
    print(f"result: {path}; `compressm bench table {path}` shows it")
    return path
