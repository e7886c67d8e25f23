"""What matters for sMNIST without compression: initial phases, dropout, normalisation, precision.

40 000 steps at 256 and at 28 states, beside the curve of the paper's own code (seed 42, without reduction): 93.3 and
89.5 % as the mean of steps 35 000 and 40 000.

python -m compressm_lab.experiments.smnist_settings --seeds 3 --data FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from compressm_lab.experiments.command import count
from compressm_lab.experiments.jobs import Job, train
from compressm_lab.experiments.outcomes import collected, kept
from compressm_lab.experiments.trainings import Training, different
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Measurement, Row
from compressm_lab.runs.records import Evaluation, RunError

STEPS, EVERY = 40_000, 5_000
TURN = "model.layer_options={max_phase: 6.28}"
# What differs from the recipe, and the orders to look at.
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "recipe": ((), (256, 28)),
    "phases up to 2π": ((TURN,), (256, 28)),
    "phases up to π": (("model.layer_options={max_phase: 3.14}",), (28,)),
    "2π, dropout by element": ((TURN, "model.dropout_form=element"), (28,)),
    "2π, no dropout": ((TURN, "model.dropout=0.0"), (28,)),
    "2π, slow norm without affine": ((TURN, "model.norm_options={affine: false, momentum: 0.01}"), (28,)),
    "2π, running norm": ((TURN, "model.norm=running"), (28,)),
    "2π, running norm, no dropout": ((TURN, "model.norm=running", "model.dropout=0.0"), (28,)),
    "running norm": (("model.norm=running",), (28,)),
    "tf32": (("training.precision=tf32",), (256, 28)),
}


def jobs(out: Path, variants: Iterable[str], seeds: int, steps: int) -> list[Job]:
    """All trainings; folders have the number of steps in their names."""
    return [
        Job(variant, seed, _training(out, variant, order, seed, steps), order)
        for variant in variants
        for order in VARIANTS[variant][1]
        for seed in range(seeds)
    ]


def _training(out: Path, variant: str, order: int, seed: int, steps: int) -> Training:
    settings = (
        *VARIANTS[variant][0],
        f"label={variant!r}",
        "spectra=null",
        f"training.steps={steps}",
        f"training.evaluate_every={max(1, steps // 8)}",
        f"training.checkpoint_every={steps}",
    )
    folder = out / "runs" / f"{_plain(variant)}-n{order}-{steps}" / f"seed-{seed}"
    return Training("smnist", folder, ("--baseline", "--order", str(order), "--seed", str(seed)), settings)


def collect(wanted: Sequence[Job]) -> Measurement | None:
    """One row a training that is done: accuracies of the last two evaluations in percent."""
    title = "sMNIST without compression: test accuracy of the last two evaluations"
    return collected("smnist_settings", title, wanted, _last_two)


def _last_two(directory: RunDirectory) -> Row:
    tests = [found for found in directory.records(Evaluation) if found.split == "test"][-2:]
    values = [100 * found.accuracy for found in tests if found.accuracy is not None]
    if not values:
        raise RunError(f"{directory.path} is finished, but has no accuracy on test: move it away to train it again")
    return {"steps": tests[-1].step, "before": values[0], "last": values[-1], "seconds": tests[-1].seconds}


def main(arguments: Sequence[str] | None = None) -> Path:
    """Train what is not done yet, and write OUT/smnist_settings.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("out/studies"), help="folder of result and runs (%(default)s)")
    parser.add_argument("--seeds", type=count, default=3, help="trainings of each (%(default)s)")
    parser.add_argument("--only", action="append", choices=list(VARIANTS), help="one variant; again for more")
    parser.add_argument("--processes", type=count, default=3, help="trainings at a time (%(default)s)")
    parser.add_argument("--data", type=Path, help="folder of data sets")
    parser.add_argument("--steps", type=count, default=STEPS, help="of each training (%(default)s)")
    given = parser.parse_args(arguments)
    wanted = jobs(given.out, list(dict.fromkeys(given.only or VARIANTS)), given.seeds, given.steps)
    if why := different(wanted):
        parser.error(why)
    train(wanted, processes=given.processes, data=given.data)
    return kept(collect(wanted), [], given.out / "smnist_settings.json", wanted)


def _plain(name: str) -> str:
    return name.replace("π", "pi").replace(",", "").replace(" ", "-")


if __name__ == "__main__":
    main()
