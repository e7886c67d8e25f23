"""Who may import whom, read from the syntax tree."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from .syntax import statements, tree

SOURCE = Path(__file__).parents[2] / "src"

# The rooms of each package, from the ground up: one imports itself and what stands before it.
ROOMS = {
    "compressm": (
        *("moved", "errors", "files", "control", "ops", "layers", "models", "adapters"),
        *("families", "compression", "saving", "running", "deploy", "exporting", "integrations", "cli"),
    ),
    "compressm_lab": ("data", "runs", "baselines", "rivals", "training", "experiments", "reports", "bench", "cli"),
}
# Not below one another, though they stand one after the other.
STRANGERS = {("ops", "control"), ("layers", "control"), ("models", "control"), ("runs", "data"), ("control", "errors")}

# Packages that are heavy or optional, and the only places that may name them.
CONFINED = {
    "triton": ("_triton.py", "compressm/ops/selective/gpu.py"),
    "transformers": (*("compressm/adapters/transformers/", "compressm/integrations/", "compressm_lab/bench/plain.py"),),
    "mamba_ssm": ("compressm/adapters/", "compressm/integrations/"),
    "lightning": ("compressm/integrations/",),
    "accelerate": ("compressm/integrations/",),
    "onnx": ("compressm/exporting/",),
    "onnxruntime": ("compressm/exporting/",),
    "executorch": ("compressm/exporting/",),
    "accelerated_scan": ("compressm_lab/bench/peers.py",),
    "assoc_scan": ("compressm_lab/bench/peers.py",),
    "s5": ("compressm_lab/bench/peers.py",),
    "philtorch": ("compressm_lab/bench/peers.py",),
    "mambapy": ("compressm_lab/bench/peers.py",),
    "fla": ("compressm_lab/bench/peers.py",),
    "submitit": ("compressm_lab/experiments/",),
    "pyarrow": ("compressm_lab/data/cells.py",),
    "matplotlib": ("compressm_lab/reports/",),
    "typer": ("compressm/cli/", "compressm_lab/cli/"),
    "rich": ("compressm/cli/", "compressm_lab/"),
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
    return sorted(path for package in ROOMS for path in (SOURCE / package).rglob("*.py"))


def forbidden(path):
    """What of ours a file imports and may not."""
    package, *inside = path.relative_to(SOURCE).with_suffix("").parts
    if inside == ["__init__"]:  # gathers the public names, each when it is used
        return {name for name in imported_modules(path) if name.split(".")[0] in ROOMS} - {"compressm.moved"}
    rooms, room = ROOMS[package], inside[0]
    assert room in rooms, f"{package}.{room} is a new room: say in ROOMS where it stands"
    ours = [name.split(".") for name in imported_modules(path) if name.split(".")[0] in ROOMS]
    wrong = {".".join(name) for name in ours if name[0] == "compressm_lab" and package == "compressm"}
    above = set(rooms[rooms.index(room) + 1 :]) | {other for own, other in STRANGERS if own == room}
    return wrong | {".".join(name) for name in ours if name[0] == package and len(name) > 1 and name[1] in above}


def test_imports_go_in_the_allowed_direction():
    assert len(files()) > 150
    found = {str(path.relative_to(SOURCE)): forbidden(path) for path in files() if forbidden(path)}
    assert found == {}


def test_heavy_packages_stay_in_their_place():
    found = [(str(path.relative_to(SOURCE)), name) for path in files() for name in imported_modules(path)]
    confined = [(path, name, CONFINED.get(name.split(".")[0], ())) for path, name in found]
    assert [(path, name) for path, name, places in confined if places and not any(p in path for p in places)] == []


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
    heavy |= {
        "onnx",
        "onnxscript",
        "onnxruntime",
        "executorch",
        "transformers",
        "lightning",
        "accelerate",
        "torchvision",
        "jax",
        "tensorflow",
        "torch._dynamo",
        "torch._inductor",
    }
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
