"""The command `compressm`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from compressm.cli.words import show_warnings_plainly

INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended
# The packages of each extra.
_EXTRAS = {"commands": {"typer", "rich"}, "lab": {"pydantic", "yaml", "pooch", "matplotlib", "jinja2", "sklearn"}}


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    _avoid_broken_kernels()
    if "" in sys.argv[1:]:
        print("compressm: an argument is empty, expected text: is a shell variable not set?", file=sys.stderr)
        sys.exit(2)
    # Recipes may name the user's own layers and tasks, often modules in the current folder.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    show_warnings_plainly()
    try:
        _run()
    except KeyboardInterrupt:
        _end_interrupted()
    except PermissionError as error:
        print(f"compressm: {error.filename}: {error.strerror}; expected what can be read", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # Typer exits so after Ctrl-C, without a message
            _end_interrupted()
        raise


def _avoid_broken_kernels() -> None:
    """Switch off oneDNN's AMX kernels on virtual machines, where they may be illegal; call it before torch loads."""
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
