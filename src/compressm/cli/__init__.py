"""The command `compressm`, and messages in its words: options and keys of recipes, not classes of Python."""

from __future__ import annotations

import os
import re
import sys
import warnings
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

INTERRUPTED = 130  # the exit code of a process that Ctrl-C ended
# The packages of each extra.
_EXTRAS = {"commands": {"typer", "rich"}, "lab": {"pydantic", "yaml", "pooch", "matplotlib", "jinja2", "sklearn"}}
# Policies and choices by the keys and values that stand for them in recipes.
_POLICIES = {
    "EnergyTolerance": "tau",
    "KeepFraction": "rho",
    "TargetOrder": "order",
    "ErrorBound": "bound",
    "Budget": "total_states",
    "FewerStates": "fewer",
}
_CHOICES = {
    "WhiteNoise": "white_noise",
    "Measured": "measured",
    "Modal": "modal",
    "Baked": "baked",
    "PerChannel": "per-channel",
    "SharedIndex": "shared-index",
}
_POLICY = re.compile(rf"(?:keep(=| is ))?\b({'|'.join(_POLICIES)})\((?:(\w+)=)?([^,()]*)[^()]*\)")
_FIELD = re.compile(rf"\b({'|'.join(_POLICIES)}): (\w+) is ")
_CHOICE = re.compile(rf"\b({'|'.join(_CHOICES)})\([^()]*\)|\b(PerChannel)\b")


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    _avoid_broken_kernels()
    if "" in sys.argv[1:]:
        print("compressm: an argument is empty, expected text: is a shell variable not set?", file=sys.stderr)
        sys.exit(2)
    _bear_surroundings()
    show_warnings_plainly()
    try:
        # Recipes may name the user's own layers and tasks, often modules in the current folder.
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())
        _run()
    except KeyboardInterrupt:
        _end_interrupted()
    except OSError as error:
        print(f"compressm: {_in_short(error)}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # Typer exits so after Ctrl-C, without a message
            _end_interrupted()
        raise


def _bear_surroundings() -> None:
    """Write letters that a terminal does not have as ?, and forget settings with which nothing can be shown."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ["MPLBACKEND"] = "agg"  # figures go to files
    if not (os.environ.get("COLUMNS") or "1").strip("0").isdecimal():
        del os.environ["COLUMNS"]


def _in_short(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.filename is None:
        # The folder in which a command was started may be gone.
        return f"{reason}; is the current folder still there?" if isinstance(error, FileNotFoundError) else reason
    return f"{error.filename!s:.200}: {reason}; expected what can be read and written"


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


def in_words(message: object, *, options: bool = False) -> str:
    """The message with `rho 0.5` in the place of `KeepFraction(rho=0.5)`; with `options`, `--rho 0.5`."""

    def named(policy: str, field: str | None) -> str:
        key = field if policy == "Budget" and field else _POLICIES[policy]
        return f"--{key.replace('_', '-')}" if options else key

    text = _POLICY.sub(lambda found: f"{named(found[2], found[3])}{found[1] or ' '}{found[4]}", str(message))
    text = _FIELD.sub(lambda found: f"{named(found[1], found[2])} is ", text)
    return _CHOICE.sub(lambda found: _CHOICES[found[1] or found[2]], text)


def show_warnings_plainly() -> None:
    """Show every warning as one line, without the line of Python that gave it."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        print(f"warning: {' '.join(in_words(message).split())}", file=file or sys.stderr)

    warnings.showwarning = show
