"""Modules that have moved: importing one by its old name raises an error that says the new name.

A module inside a moved package, such as compressm.data.task, gets the answer for its package.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

# New names and old names of modules, both below compressm.
_IN_THE_LIBRARY = {
    "adapters.base": "adapters.validation",
    "adapters.mamba": "adapters.selective",
    "adapters.promises": "adapters.selective_promises adapters.trial",
    "adapters.transformers": "adapters.foreign",
    "cli.options": "cli.choices cli.paths",
    "compression.distributed": "compression.wrapping",
    "compression.inspection": "compression.inspecting compression.tracker",
    "compression.optimizer": "compression.groups compression.moments compression.optimizer_state",
    "compression.planning": "compression.options compression.rehearsal compression.stages compression.suitability",
    "compression.policies": "compression.orders compression.spectra",
    "compression.rollback": "compression.snapshot",
    "compression.surgery": "compression.attributes",
    "control.balancing": "control.bounds",
    "control.folding": "control.real_balancing",
    "control.gramians": "control.lyapunov control.measured",
    "control.linear_algebra": "control.parts control.side_by_side",
    "control.nuclear_norm": "control.geometric_mean",
    "control.projection": "control.modes",
    "control.selective": "control.averaging",
    "control.truncation": "control.diagonalisation",
    "control.validation": "control.errors",
    "errors": "adapters.errors compression.errors nearest",
    "families.base": "compression.change compression.layer",
    "families.choices": "compression.checks compression.gramian compression.selection",
    "families.linear.family": "compression.linear",
    "families.linear.observer": "compression.calibration",
    "families.linear.reduction": "compression.basis compression.modal",
    "families.linear.transport": "compression.carrying compression.linearisation compression.spread",
    "families.observing": "compression.listening compression.sample",
    "families.selective": "compression.selective",
    "files": "compression.whole_files",
    "layers.base": "layers.arguments layers.lti",
    "layers.discretisation": "layers.pairs",
    "layers.initialisation": "layers.hippo",
    "layers.mamba": "layers.channel_maps",
    "layers.parameters": "layers.replacing layers.wrappers",
    "models.block": "models.dropout",
    "models.checks": "models.padding",
    "ops.block.encoder": "ops.few_inputs ops.token_features",
    "ops.block.gated_residual": "ops.dropped_residual ops.gated_residual",
    "ops.block.norm": "ops.batch_norm ops.link ops.moments ops.rms_norm",
    "ops.block.pooling": "ops.time_mean ops.valid_rows",
    "ops.dispatch": "ops.availability ops.errors ops.kernels",
    "ops.lti": "ops.diagonal_scan",
    "ops.lti.layer_triton": "ops.chunked_layer ops.narrow_layer",
    "ops.lti.lru_system": "ops.lru_system",
    "ops.lti.scan_triton": "ops.driven_scan",
    "ops.memory": "ops.fresh_memory ops.launch ops.packed ops.products ops.rows",
    "ops.selective": "ops.selective_scan",
    "ops.selective.conv_and_gate": "ops.around_scan ops.causal_conv",
    "ops.selective.scan_triton": "ops.selective_tiles",
    "ops.sums_triton": "ops.column_sums",
    "saving.checkpoints": "compression.checkpoint compression.plain compression.random_state compression.sealing",
    "saving.kinds": "compression.kinds",
    "saving.models": "compression.pretrained compression.saving",
    "saving.rebuilding": "compression.fitting compression.naming compression.rebuilding",
}
_PACKAGES_OF_THE_LABORATORY = ("data", "training", "runs", "baselines", "experiments", "reports", "bench")
_COMMANDS_OF_THE_LABORATORY = {
    "cli.bench": "cli.bench",
    "cli.data": "cli.data",
    "cli.demo": "cli.demo",
    "cli.report": "cli.report",
    "cli.reproduce": "cli.reproduce",
    "cli.train": "cli.progress cli.train",
}

# Full old names and full new names.
MOVED = {
    **{f"compressm.{old}": f"compressm.{new}" for new, names in _IN_THE_LIBRARY.items() for old in names.split()},
    **{f"compressm.{name}": f"compressm_lab.{name}" for name in _PACKAGES_OF_THE_LABORATORY},
    **{
        f"compressm.{old}": f"compressm_lab.{new}"
        for new, names in _COMMANDS_OF_THE_LABORATORY.items()
        for old in names.split()
    },
}


class MovedModuleError(ModuleNotFoundError):
    """A module was imported by its old name; the message says the new name."""


def moved(name: str) -> str | None:
    """A sentence that says the new name of a module; None if it has not moved."""
    place = MOVED.get(name)
    if place is None:
        return None
    install = ": pip install 'compressm[lab]'" if place.startswith("compressm_lab.") else ""
    return f"{name} has moved to {place}{install}"


class _MovedModules(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        sentence = moved(name)
        if sentence is not None:
            # Without the argument `name`: with it `from compressm import data` would hide this error and its sentence.
            raise MovedModuleError(sentence)


def refuse_moved_modules() -> None:
    """Make every import of a moved module raise `MovedModuleError`.

    The check runs before the search in folders: a folder of the old module may still exist, with old bytecode.
    """
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedModules())
