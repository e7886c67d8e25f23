"""The command `compressm`."""

import os
import sys
from pathlib import Path

INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    _avoid_broken_kernels()
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
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "compressm":
            raise
        sys.exit(
            f"compressm: the command line needs the package {error.name}; install it with: pip install 'compressm[cli]'"
        )
    app()


def _end_interrupted() -> None:
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)
