"""The command `compressm`."""

import sys

_INTERRUPTED = 130  # what shells report for a process that Ctrl-C ended


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    try:
        _run()
    except KeyboardInterrupt:
        _end_interrupted()
    except SystemExit as end:
        if end.code == _INTERRUPTED:  # Typer's own answer to Ctrl-C, which says nothing
            _end_interrupted()
        raise


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
    sys.exit(_INTERRUPTED)
