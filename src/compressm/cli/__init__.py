"""The command `compressm`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended
# The packages that an extra brings.
_EXTRAS = {
    "commands": {"typer", "rich"},
    "lab": {"pydantic", "yaml", "pooch", "matplotlib", "jinja2", "sklearn"},
}


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    _avoid_broken_kernels()
    # Recipes name layers and tasks of one's own, which often stand in the folder where the command is given.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        _run()
    except KeyboardInterrupt:
        _end_interrupted()
    except SystemExit as end:
        if end.code == INTERRUPTED:  # Typer's own answer to Ctrl-C, which says nothing
            _end_interrupted()
        raise


def _avoid_broken_kernels() -> None:
    """On virtual machines oneDNN's AMX kernels for bfloat16 can be illegal instructions; to be said before torch."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file() and " hypervisor" in cpuinfo.read_text():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def _run() -> None:
    try:
        from compressm.cli.app import app

        app()
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        extra = next((extra for extra, packages in _EXTRAS.items() if package in packages), None)
        if extra is None:
            raise
        who = "the command line" if extra == "commands" else "this command"
        sys.exit(f"compressm: {who} needs the package {package}; install it with: pip install 'compressm[{extra}]'")


def _end_interrupted() -> None:
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)
