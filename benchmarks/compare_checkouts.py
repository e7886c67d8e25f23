"""Compare the speed of two checkouts: `compressm bench step` and `bench cut`, in turns, on one machine.

    python benchmarks/compare_checkouts.py OLD NEW --device cuda --out result.json

Each turn measures both checkouts in fresh processes; what counts is the median over turns of every row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# The columns that say which row it is, and the one that says how long it took.
BENCHES = {
    "step": (("task", "order", "precision"), "step_s"),
    "cut": (("task", "gramian", "moments", "ranks", "run"), "cut_s"),
}


def measured(checkout: Path, bench: str, device: str, tasks: list[str]) -> dict[str, float]:
    """Seconds by row, of one benchmark in one checkout."""
    named, timed = BENCHES[bench]
    options = [part for task in tasks for part in ("--task", task)]
    options += ["--precision", "bfloat16"] if device == "cuda" else []
    paths = [str(checkout / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "compressm.cli", "bench", bench, "--device", device, *options, "--out", folder]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=folder)
        rows: list[dict[str, Any]] = json.loads((Path(folder) / f"{bench}-{device}.json").read_text())["rows"]
    return {f"{bench}: {', '.join(str(row[key]) for key in named)}": row[timed] for row in rows}


def main() -> None:
    """Measure in turns, print the ratio of every row, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--bench", action="append", choices=tuple(BENCHES), help="again for more; default: all")
    parser.add_argument("--task", action="append", help="again for more; default: smnist")
    parser.add_argument("--commits", nargs=2, default=("", ""), help="of OLD and NEW, where they are no git checkouts")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tasks, found = options.task or ["smnist"], dict[str, dict[str, list[float]]]()
    for _ in range(options.turns):
        for bench in options.bench or BENCHES:
            for side in ("old", "new"):
                for row, seconds in measured(getattr(options, side).resolve(), bench, options.device, tasks).items():
                    found.setdefault(row, {"old": [], "new": []})[side].append(seconds)
    rows = []
    for row, sides in found.items():
        old, new = (statistics.median(sides[side]) for side in ("old", "new"))
        rows.append({"row": row, "old_s": old, "new_s": new, "ratio": new / old})
        print(f"{row}: {1e3 * old:.3f} ms, now {1e3 * new:.3f} ms, ratio {new / old:.3f}", flush=True)
    ratios = [row["ratio"] for row in rows]
    print(f"median ratio {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    if options.out is not None:
        result = {"name": "compare_checkouts", "device": options.device, "turns": options.turns, "rows": rows}
        result |= {"commits": [_commit(options.old) or options.commits[0], _commit(options.new) or options.commits[1]]}
        result |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": _machine(options.device)}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def _commit(checkout: Path) -> str:
    done = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if (checkout / ".git").exists() else ""


def _machine(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else (os.uname().machine + ", " + os.uname().sysname)


if __name__ == "__main__":
    main()
