"""Mamba on IMDB (app:mamba): 128 states, 16 from the start, and 128 that become few within the warm-up.

The paper's way cuts every channel by the Hankel values of its mean system, with τ = 0.001 at each of four cuts. Ours
goes 128 → 76 → 45 → 27 → 16 by one projection for all channels, or to 16 in one cut after 50 steps; random states go
the first of these ways.

python studies/imdb_mamba.py --seeds 2 --data FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from compressm.compression import load_model
from compressm.layers import Mamba
from compressm_lab.experiments.engine import Campaign
from compressm_lab.experiments.recipes import BASELINE, Arm
from compressm_lab.experiments.rows import ResultFile, count, options, outcome, train_and_write
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.measurement import Row

STEPS, EVALUATIONS = 3_000, 6
LARGE, SMALL = 128, 16
# Labels and settings by name, where SIZE is the final order and SHARE the share that each of four cuts keeps; None:
# never cut.
VARIANTS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "whole": (f"{LARGE} states", None),
    "small": ("SIZE states", None),
    "paper": ("paper: means, τ = 0.001", ("compression.selective={kind: per-channel, surrogate: mean}",)),
    "baked": ("baked to SIZE", ("compression.tau=null", "compression.rho=SHARE", "compression.at_least=SIZE")),
    "once": (
        "baked to SIZE at once",
        ("compression.tau=null", "compression.order=SIZE", "compression.when={steps: [50]}"),
    ),
    "random": (
        "random states to SIZE",
        (
            "compression.tau=null",
            "compression.rho=SHARE",
            "compression.at_least=SIZE",
            "compression.selective={kind: shared-index}",
            "compression.select=random",
        ),
    ),
}


@dataclass(frozen=True)
class Scale:
    """Steps and evaluations of every training, and the order of small models and of models after their cuts."""

    steps: int = STEPS
    evaluations: int = EVALUATIONS
    size: int = SMALL

    def filled(self, text: str) -> str:
        """Replace SIZE and SHARE by numbers."""
        return text.replace("SIZE", str(self.size)).replace("SHARE", f"{(self.size / LARGE) ** 0.25:.4f}")


def plan(out: Path, variants: Iterable[str], seeds: int, scale: Scale) -> Campaign:
    """Plan all trainings, seed by seed; folders are named by final orders and numbers of steps."""
    return Campaign(tuple(_arm(name, scale) for name in variants), range(seeds), out / "runs", by_seed=True)


def _arm(variant: str, scale: Scale) -> Arm:
    name, differs = VARIANTS[variant]
    label = scale.filled(name)
    settings = (
        f"label={label!r}",
        "spectra=null",
        f"training.steps={scale.steps}",
        f"training.evaluate_every={max(1, scale.steps // scale.evaluations)}",
        f"training.checkpoint_every={max(1, scale.steps // EVALUATIONS)}",
        *(BASELINE if differs is None else map(scale.filled, differs)),
        f"model.order={scale.size if variant == 'small' else LARGE}",
    )
    final = f"-{scale.size}" if "SIZE" in name else ""
    return Arm("", label, "", "imdb-mamba", f"{variant}{final}-{scale.steps}", settings)


def file(out: Path, wanted: Campaign, steps: int) -> ResultFile:
    """The result file, one row a training: orders, test accuracies in percent, and seconds."""
    return ResultFile(out / "imdb_mamba.json", "Mamba on IMDB, cut in the warm-up", wanted.trainings(), _found, steps)


def _found(directory: RunDirectory) -> Row:
    return outcome(directory) | _sizes(directory)


def _sizes(directory: RunDirectory) -> Row:
    """The mean number of states of a channel, the number of layers with complex states, and that of all parameters."""
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
    options(parser, seeds=2, steps=str(STEPS))
    parser.add_argument("--only", action="append", choices=list(VARIANTS), help="one variant; again for more")
    parser.add_argument("--evaluations", type=count, default=EVALUATIONS, help="of each training (%(default)s)")
    parser.add_argument("--size", type=count, default=SMALL, help="order of small and of cut models (%(default)s)")
    given = parser.parse_args(arguments)
    if given.size > LARGE:
        parser.error(f"--size {given.size}: expected at most {LARGE}, which cuts begin with")
    scale = Scale(given.steps or STEPS, given.evaluations, given.size)
    wanted = plan(given.out, list(dict.fromkeys(given.only or VARIANTS)), given.seeds, scale)
    (path,) = train_and_write(parser, given, wanted, [file(given.out, wanted, scale.steps)])
    return path


if __name__ == "__main__":
    main()
