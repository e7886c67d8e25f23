"""`compressm report`."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from compressm.cli.options import PathError, require_writable
from compressm.errors import did_you_mean
from compressm_lab.runs.groups import Gathered, gather
from compressm_lab.runs.records import RunError

_FORMATS = ("png", "pdf", "svg")
_console, _errors = Console(), Console(stderr=True)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders above several.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html and figures/.")] = Path("out/report"),
    title: Annotated[str | None, typer.Option(help="Of the page. Default: the names of the recipes.")] = None,
    formats: Annotated[
        str, typer.Option(help=f"Of the figures beside the page, separated by commas: {', '.join(_FORMATS)}.")
    ] = "png,pdf",
    show: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Show runs on one HTML page that needs no network: results, Hankel values, orders and time; figures as files."""
    kinds = _kinds(formats)
    try:
        require_writable(out / "report.html")
    except PathError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None
    try:
        found = gather(runs)
        for line in found.broken:
            _errors.print(f"warning: left out: {line}", soft_wrap=True, markup=False, highlight=False)
        page = _write(found, out, title, kinds)
    except RunError as error:
        raise typer.BadParameter(str(error), param_hint="RUN") from None
    _console.print(f"report: {page}", soft_wrap=True, markup=False, highlight=False)
    if show:
        webbrowser.open(page.absolute().as_uri())


def _write(found: Gathered, out: Path, title: str | None, kinds: list[str]) -> Path:
    from compressm_lab.reports.run_report import write_report  # matplotlib takes a second to import

    with _console.status("reading") as status:

        def say(line: str) -> None:
            if _console.is_terminal:
                status.update(f"drawing {line}")
            else:
                _console.print(line, highlight=False, markup=False)

        return write_report(found.runs, out, title=title, formats=kinds, broken=found.broken, progress=say)


def _kinds(text: str) -> list[str]:
    kinds = [kind.strip().lower() for kind in text.split(",") if kind.strip()]
    if not kinds or (unknown := [kind for kind in kinds if kind not in _FORMATS]):
        came = repr(text) if not kinds else ", ".join(map(repr, unknown))
        near = did_you_mean(unknown[0], _FORMATS) if kinds else ""
        raise typer.BadParameter(f"{came}, expected some of {', '.join(_FORMATS)}{near}", param_hint="--formats")
    return list(dict.fromkeys(kinds))
