"""The command `compressm`."""

import sys


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    try:
        from compressm.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "compressm":
            raise
        sys.exit(
            f"compressm: the command line needs the package {error.name}; install it with: pip install 'compressm[cli]'"
        )
    app()
