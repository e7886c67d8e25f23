"""Measure the house: how many files, how long, how many a call enters, and what an import loads.

python benchmarks/house.py            sizes, imports, files entered
python benchmarks/house.py --figures  the sizes alone, as one line of JSON
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
SHORT = 60
PACKAGES = ("compressm", "compressm_lab")

# Each script prints the files of ours whose functions were entered; what runs at import does not count.
_TRACE = """
import sys
from pathlib import Path
SOURCE = Path({source!r})
entered = set()

def profile(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(str(SOURCE)) and code.co_name != "<module>":
        walked, importing = frame, False
        while walked is not None:
            inner = walked.f_code
            importing = importing or inner.co_name == "<module>" and inner.co_filename.startswith(str(SOURCE))
            walked = walked.f_back
        if not importing:
            entered.add(code.co_filename)
"""
_SCRIPTS = {
    "compress_ of an LRU classifier": """
import torch
import compressm as cs
model = cs.models.SequenceClassifier(cs.layers.LRU, depth=2, width=8, order=16, inputs=3, classes=5)
sys.setprofile(profile)
cs.compress_(model, keep=cs.TargetOrder(8))
sys.setprofile(None)
""",
    "compress_ of a Mamba with calibrate": """
import torch
import compressm as cs
model = cs.models.LanguageModel(cs.layers.Mamba, depth=2, width=8, order=8, vocabulary=7)
x = torch.randint(7, (4, 30))
sys.setprofile(profile)
cs.compress_(model, keep=cs.TargetOrder(4), calibrate=lambda model: model(x))
sys.setprofile(None)
""",
    "compressm train digits with two cuts": """
import tempfile
from compressm.cli import main
options = ["training.steps=20", "training.evaluate_every=10", "compression.when={every: 5, last: 10}"]
sys.argv = ["compressm", "train", "digits", "--out", tempfile.mkdtemp() + "/run", "--device", "cpu", "--threads", "1"]
sys.argv += [part for option in options for part in ("--set", option)]
sys.setprofile(profile)
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
finally:
    sys.setprofile(None)
""",
}


def sizes(package: str) -> list[int]:
    """Lines of every file of a package but `__init__`, in falling order."""
    paths = (path for path in (SOURCE / package).rglob("*.py") if path.name != "__init__.py")
    return sorted((path.read_text().count("\n") for path in paths), reverse=True)


def import_share() -> float:
    """The share of all lines that belongs to import statements."""
    lines = imports = 0
    for package in PACKAGES:
        for path in (SOURCE / package).rglob("*.py"):
            text = path.read_text()
            lines += text.count("\n")
            found = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom))
            imports += sum(node.end_lineno - node.lineno + 1 for node in found)
    return imports / lines


def figures() -> dict[str, float]:
    """Files and lines of both packages."""
    found: dict[str, float] = {}
    for package in PACKAGES:
        found[f"{package}, files"] = sum(1 for _ in (SOURCE / package).rglob("*.py"))
    every = [size for package in PACKAGES for size in sizes(package)]
    found["median file, lines"] = statistics.median(every)
    found[f"files under {SHORT} lines, %"] = round(100 * sum(size < SHORT for size in every) / len(every), 1)
    paths = [path for package in PACKAGES for path in (SOURCE / package).rglob("*.py")]
    found["lines of src"] = sum(path.read_text().count("\n") for path in paths)
    found["imports, % of lines"] = round(100 * import_share(), 1)
    return found


def traced(script: str) -> str:
    """The script with what it takes to print the files of ours that it enters."""
    printed = "print('ENTERED', *sorted(str(Path(name).relative_to(SOURCE)) for name in entered))"
    return f"{_TRACE.format(source=str(SOURCE))}{script}\n{printed}\n"


def files_in(printed: str) -> list[str]:
    """The files that a traced script has printed."""
    return next(line.split()[1:] for line in printed.splitlines() if line.startswith("ENTERED"))


def entered(script: str) -> list[str]:
    """Files of ours that a script enters, imports left out."""
    done = subprocess.run(
        [sys.executable, "-c", traced(script)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        cwd=tempfile.gettempdir(),
    )
    return files_in(done.stdout)


def cpu_seconds_of_help() -> float:
    """User and system time of `compressm --help`, the least of five."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "compressm.cli", "--help"]
        subprocess.run(command, capture_output=True, check=True, env={**os.environ, "PYTHONPATH": str(SOURCE)})
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", action="store_true", help="sizes alone, as JSON")
    parser.add_argument("--list", action="store_true", help="name the files entered")
    parser.add_argument("--out", type=Path, help="a JSON file for the result, with machine, date and commit")
    options = parser.parse_args()
    if options.figures:
        print(json.dumps(figures()))
        return
    found: dict[str, object] = dict(figures())
    for name, script in _SCRIPTS.items():
        files = entered(script)
        found[f"files entered, {name}"] = len(files)
        if options.list:
            print(f"{name}:\n   ", "\n    ".join(files))
    found["compressm --help, seconds of CPU time"] = round(cpu_seconds_of_help(), 2)
    for name, measured in found.items():
        print(f"{name}: {measured}")
    if options.out is not None:
        from compressm_lab.runs.measurement import Environment

        result = {"figures": found, "environment": asdict(Environment.here())}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
