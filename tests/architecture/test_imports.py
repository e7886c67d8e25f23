"""Who may import whom, read from the syntax tree."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from .syntax import statements, tree

SOURCE = Path(__file__).parents[2] / "src" / "compressm"

# Each package may import itself and what stands to its right; None: everything.
ALLOWED = {
    "control": set(),
    "ops": set(),
    "data": set(),
    "runs": set(),
    "layers": {"ops"},
    "models": {"layers", "ops"},
    "adapters": {"control", "layers"},
    "families": {"control", "adapters", "layers", "models", "ops", "compression"},
    "compression": {"families", "control", "adapters", "layers", "models", "ops"},
    "saving": {"compression", "families", "control", "adapters", "layers", "models", "ops"},
    "baselines": {"control", "adapters"},
    "training": {"compression", "families", "saving", "data", "runs", "models", "layers", "control"},
    "integrations": {"compression"},
    "reports": {"runs", "control"},
    "experiments": None,
    "bench": None,
    "cli": None,
}
# Modules beside the packages that need nothing but Python.
FOR_ALL = {"errors", "files"}
# What stands above those that may import everything below them.
ABOVE = {"experiments": {"reports", "bench", "cli"}, "bench": {"reports", "cli"}, "cli": set()}

# Packages that are heavy or optional, and the only places that may name them.
CONFINED = {
    "triton": ("ops/",),
    "transformers": ("adapters/transformers/", "integrations/"),
    "mamba_ssm": ("adapters/transformers/", "integrations/"),
    "lightning": ("integrations/",),
    "accelerated_scan": ("bench/peer_scans.py",),
    "assoc_scan": ("bench/peer_scans.py",),
    "s5": ("bench/peer_scans.py",),
    "philtorch": ("bench/peer_scans.py",),
    "mambapy": ("bench/peer_scans.py",),
    "fla": ("bench/peer_scans.py",),
    "submitit": ("experiments/reproduction/slurm.py",),
    "matplotlib": ("reports/",),
    "typer": ("cli/",),
    "rich": ("cli/", "training/", "experiments/"),
}


@cache
def imported_modules(path):
    found = []
    for node in statements(tree(path)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            found.append(node.module)
            if node.module == "compressm":
                found += (f"compressm.{alias.name}" for alias in node.names)
    return found


def files():
    return sorted(SOURCE.rglob("*.py"))


def forbidden(path):
    """What of ours a file imports and may not."""
    relative = path.relative_to(SOURCE)
    package = relative.parts[0] if len(relative.parts) > 1 else None
    if package is None:  # compressm/__init__.py gathers the public names
        ours = {name for name in imported_modules(path) if name.startswith("compressm")}
        return ours if relative.stem in FOR_ALL else set()
    assert package in ALLOWED, f"{package} is a new package: say in ALLOWED what it may import"
    ours = {name.split(".")[1] for name in imported_modules(path) if name.startswith("compressm.")}
    ours -= {package, *FOR_ALL}
    allowed = ALLOWED[package]
    return ours & ABOVE[package] if allowed is None else ours - allowed


def test_imports_go_in_the_allowed_direction():
    assert len(files()) > 150
    assert {str(path.relative_to(SOURCE)): forbidden(path) for path in files() if forbidden(path)} == {}


def test_heavy_packages_stay_in_their_place():
    found = [(str(path.relative_to(SOURCE)), name) for path in files() for name in imported_modules(path)]
    confined = [(path, name, CONFINED.get(name.split(".")[0])) for path, name in found]
    assert [(path, name) for path, name, places in confined if places and not path.startswith(places)] == []


def test_importing_the_package_is_light():
    """Nothing heavy, torch included, is loaded before a name is used; then nothing that a plain install lacks."""
    heavy = {
        "scipy",
        "matplotlib",
        "sklearn",
        "pandas",
        "typer",
        "rich",
        "pydantic",
        "yaml",
        "jinja2",
        "pooch",
        "triton",
    }
    heavy |= {"transformers", "lightning", "torchvision", "jax", "tensorflow", "torch._dynamo", "torch._inductor"}
    script = "import sys; before = set(sys.modules); import compressm{}; print(*sorted(set(sys.modules) - before))"
    added, used = (
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout.split()
        for text in (script.format(""), script.format("; compressm.control"))
    )
    assert {name for name in used if name in heavy or name.split(".")[0] in heavy} == set()
    assert {name for name in added if name.split(".")[0] in {"torch", "numpy"}} == set()
    assert "compressm.control" not in added
    assert "compressm.control" in used


def test_there_is_no_drawer_for_odds_and_ends():
    assert [path for path in files() if path.stem in {"utils", "util", "helpers", "misc", "common"}] == []
