"""`compressm report`: write the page and the figures of runs."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from compressm.cli.options import PathError, require_writable
from compressm.errors import SavingError, did_you_mean
from compressm_lab.cli.terminal import say, status
from compressm_lab.runs.groups import gather
from compressm_lab.runs.records import RunError

_FORMATS = ("png", "pdf", "svg")
_errors = Console(stderr=True)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders above several.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html and figures/.")] = Path("out/report"),
    title: Annotated[str | None, typer.Option(help="Title of the page. Default: the names of the recipes.")] = None,
    formats: Annotated[
        str, typer.Option(help=f"Formats of the figures beside the page, separated by commas: {', '.join(_FORMATS)}.")
    ] = "png",
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs on one HTML page that needs no network: results, Hankel values, orders and time; figures as files."""
    from compressm_lab.reports.run_report import write_report  # matplotlib takes a second to import

    kinds = _kinds(formats)
    try:
        require_writable(out / "report.html")
        found = gather(runs)
        for line in found.broken:
            _errors.print(f"warning: left out: {line}", soft_wrap=True, markup=False, highlight=False)
        with status("drawing") as progress:
            page = write_report(found.runs, out, title=title, formats=kinds, broken=found.broken, progress=progress)
    except (PathError, RunError, SavingError) as error:
        hint = "RUN" if isinstance(error, RunError) else "--out"
        raise typer.BadParameter(str(error), param_hint=hint) from None
    say(f"report: {page}")
    if show:
        webbrowser.open(page.absolute().as_uri())


def _kinds(text: str) -> list[str]:
    kinds = [kind.strip().lower() for kind in text.split(",") if kind.strip()]
    if not kinds or (unknown := [kind for kind in kinds if kind not in _FORMATS]):
        came = repr(text) if not kinds else ", ".join(map(repr, unknown))
        near = did_you_mean(unknown[0], _FORMATS) if kinds else ""
        raise typer.BadParameter(f"{came}, expected some of {', '.join(_FORMATS)}{near}", param_hint="--formats")
    return list(dict.fromkeys(kinds))
