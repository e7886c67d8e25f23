"""Three short trainings by the command line, in a process of their own, and what their folders hold.

Nothing of the library is imported here but the command, and only in that process: the files of a run are JSON lines
and tensors, which stay where modules move.
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECIPES = {path.stem: path for path in sorted((HERE / "recipes").glob("*.yaml"))}
# Set before torch is loaded: kernels without wide vectors and MKL's code that is the same on every processor.
ANY_PROCESSOR = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
_CLOCKS = ("seconds", "step_seconds")


def train_all(checkout, folder, **environment):
    """Train every recipe with the library of a checkout; what each run came to, by recipe."""
    source = Path(checkout).absolute() / "src"
    # Data are made anew, by this checkout as well.
    where = {"PYTHONPATH": str(source), "COMPRESSM_DATA": str(folder / "data"), "COMPRESSM_COMMIT": "pinned"}
    variables = {**os.environ, **_ONE_THREAD, **where, **environment}
    command = [sys.executable, str(Path(__file__).absolute()), str(source), str(folder)]
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"training with {source} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return {name: outcome(folder / name) for name in RECIPES}


def outcome(run):
    """All that a run wrote, but for what a clock said."""
    metrics, cuts, spectra = (lines(run / f"{name}.jsonl") for name in ("metrics", "cuts", "spectra"))
    return {
        "losses": {split: [row["loss"] for row in metrics if row["split"] == split] for split in _splits(metrics)},
        "accuracies": {
            split: [row["accuracy"] for row in metrics if row["split"] == split] for split in _splits(metrics)
        },
        "evaluated": [row["step"] for row in metrics if row["split"] == "test"],
        "rates": [row["learning_rate"] for row in metrics if row["split"] == "test"],
        "cuts": cuts,
        "spectra": spectra,
        "orders": json.loads((run / "model" / "config.json").read_text())["orders"],
    }


def fingerprint(run):
    """SHA-256 of the final weights, and of what the last checkpoint holds of the model and its optimizer."""
    stored = torch.load(max((run / "checkpoints").iterdir()), weights_only=True)
    weights = load_file(run / "model" / "model.safetensors")
    return {"weights": digest(weights), "optimizer": digest([stored["model"], stored["optimizer"]["state"]])}


def digest(value):
    """SHA-256 of tensors, numbers and text, in containers of any depth."""
    total = hashlib.sha256()
    for path, leaf in sorted(leaves(value), key=lambda pair: pair[0]):
        total.update(path.encode())
        if isinstance(leaf, torch.Tensor):
            total.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            total.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(repr(leaf).encode())
    return total.hexdigest()


def leaves(value, path=""):
    """Every value that is no container, with its path."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from leaves(inner, f"{path}.{key}".strip("."))
    else:
        yield path, value


def lines(path):
    """Records of a JSONL file, without times."""
    stored = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in _CLOCKS} for row in stored]


def _splits(metrics):
    return sorted({row["split"] for row in metrics})


def command_line(source, module=""):
    """The package `compressm.cli` below `source`, or a module of it."""
    found = importlib.import_module(f"compressm.cli{module}")
    assert Path(found.__file__).is_relative_to(source), f"{found.__file__} is not below {source}"
    return found


def _main(source, folder):
    main = command_line(Path(source)).main
    for name, recipe in RECIPES.items():
        options = ["--out", str(Path(folder) / name), "--device", "cpu", "--threads", "1", "--offline"]
        sys.argv = ["compressm", "train", str(recipe), *options]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    _main(*sys.argv[1:])
