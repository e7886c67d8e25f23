"""Mamba on IMDB (app:mamba): 128 states, 16 from the start, and 128 that become few within the warm-up.

The paper's way cuts every channel by the Hankel values of its mean system, with τ = 0.001 at each of four cuts. Ours
goes 128 → 76 → 45 → 27 → 16 by one projection for all channels, or to 16 in one cut after 50 steps; random states go
the first of these ways.

python -m compressm_lab.experiments.imdb_mamba --seeds 2 --data FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from compressm.compression import load_model
from compressm.layers import Mamba
from compressm_lab.experiments.command import count, earlier_results, result
from compressm_lab.experiments.jobs import Job, train
from compressm_lab.experiments.outcomes import collected, kept, outcome
from compressm_lab.experiments.trainings import Training, different
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Measurement, Row

STEPS, EVALUATIONS = 3_000, 6
LARGE, SMALL = 128, 16
# By what a user calls them, what their labels are and what differs from the recipe, where SIZE is the final order and
# SHARE what each of four cuts leaves; None: never cut, with so many states from the start.
VARIANTS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "whole": (f"{LARGE} states", None),
    "small": ("SIZE states", None),
    "paper": ("paper: means, τ = 0.001", ("compression.selective={kind: per-channel, surrogate: mean}",)),
    "baked": ("baked to SIZE", ("compression.tau=null", "compression.rho=SHARE")),
    "once": (
        "baked to SIZE at once",
        ("compression.tau=null", "compression.order=SIZE", "compression.when={steps: [50]}"),
    ),
    "random": (
        "random states to SIZE",
        (
            "compression.tau=null",
            "compression.rho=SHARE",
            "compression.selective={kind: shared-index}",
            "compression.select=random",
        ),
    ),
}


@dataclass(frozen=True)
class Scale:
    """Steps and evaluations of every training, and the order that small models have and cut ones get."""

    steps: int = STEPS
    evaluations: int = EVALUATIONS
    size: int = SMALL

    def filled(self, text: str) -> str:
        """With numbers in the place of SIZE and SHARE."""
        return text.replace("SIZE", str(self.size)).replace("SHARE", f"{(self.size / LARGE) ** 0.25:.4f}")


def jobs(out: Path, variants: Iterable[str], seeds: int, scale: Scale) -> list[Job]:
    """All trainings, seed by seed; folders are named by final orders and numbers of steps."""
    wanted = list(variants)
    return [_job(out, name, seed, scale) for seed in range(seeds) for name in wanted]


def _job(out: Path, variant: str, seed: int, scale: Scale) -> Job:
    name, differs = VARIANTS[variant]
    label = scale.filled(name)
    order = scale.size if variant == "small" else LARGE
    uncut = ("--baseline",) if differs is None else ()
    settings = (
        f"label={label!r}",
        "spectra=null",
        f"training.steps={scale.steps}",
        f"training.evaluate_every={max(1, scale.steps // scale.evaluations)}",
        f"training.checkpoint_every={max(1, scale.steps // EVALUATIONS)}",
        *map(scale.filled, differs or ()),
    )
    final = f"-{scale.size}" if "SIZE" in name else ""
    folder = out / "runs" / f"{variant}{final}-{scale.steps}" / f"seed-{seed}"
    options = (*uncut, "--order", str(order), "--seed", str(seed))
    return Job(label, seed, Training("imdb-mamba", folder, options, settings))


def collect(wanted: Sequence[Job]) -> Measurement | None:
    """One row a training that is done: orders, test accuracies in percent, and seconds."""
    return collected("imdb_mamba", "Mamba on IMDB, cut in the warm-up", wanted, _found)


def _found(directory: RunDirectory) -> Row:
    return outcome(directory) | _sizes(directory)


def _sizes(directory: RunDirectory) -> Row:
    """States of a channel in the mean over channels and layers, how many layers have complex ones, and all numbers."""
    model = load_model(directory.model)
    layers = [module for module in model.modules() if isinstance(module, Mamba)]
    states = [layer.order if layer.orders is None else float(layer.orders.double().mean()) for layer in layers]
    return {
        "channel_order": fmean(states),
        "complex_layers": sum(layer.A_imag is not None for layer in layers),
        "numbers": sum(tensor.numel() for tensor in model.state_dict().values()),
    }


def main(arguments: Sequence[str] | None = None) -> Path:
    """Train what is not done yet, and write OUT/imdb_mamba.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("out/studies"), help="folder of result and runs (%(default)s)")
    parser.add_argument("--seeds", type=count, default=2, help="trainings of each (%(default)s)")
    parser.add_argument("--only", action="append", choices=list(VARIANTS), help="one variant; again for more")
    parser.add_argument(
        "--processes", type=count, default=1, help="trainings at a time; times compare only one by one (%(default)s)"
    )
    parser.add_argument("--data", type=Path, help="folder of data sets")
    parser.add_argument("--steps", type=count, default=STEPS, help="of each training (%(default)s)")
    parser.add_argument("--evaluations", type=count, default=EVALUATIONS, help="of each training (%(default)s)")
    parser.add_argument(
        "--add", type=result, nargs="+", default=[], help="results of other trainings, as of an earlier day"
    )
    parser.add_argument("--size", type=count, default=SMALL, help="order of small and of cut models (%(default)s)")
    given = parser.parse_args(arguments)
    if given.size > LARGE:
        parser.error(f"--size {given.size}: expected at most {LARGE}, which cuts begin with")
    path = given.out / "imdb_mamba.json"
    earlier_results(parser, path, given.add, given.steps)
    wanted = jobs(
        given.out,
        list(dict.fromkeys(given.only or VARIANTS)),
        given.seeds,
        Scale(given.steps, given.evaluations, given.size),
    )
    if why := different(wanted):
        parser.error(why)
    train(wanted, processes=given.processes, data=given.data)
    earlier = earlier_results(parser, path, given.add, given.steps)  # another command may have written since
    return kept(collect(wanted), earlier, path, wanted)


if __name__ == "__main__":
    main()
