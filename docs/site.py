"""Write the pages of the documentation site: those of this folder, the notebooks, and the reference of all names."""

from __future__ import annotations

import argparse
import base64
import importlib
import inspect
import os
import re
import shutil
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "examples" / "notebooks"
# The packages whose public names have a page of the API. A name is described on the first page that has it.
PACKAGES = {
    "compressm": "Everyday names",
    "compressm.compression": "Compression",
    "compressm.layers": "Layers",
    "compressm.models": "Models",
    "compressm.saving": "Saving",
    "compressm.running": "Running",
    "compressm.exporting": "Exporting",
    "compressm.deploy": "Runtimes",
    "compressm.control": "Control theory",
    "compressm.adapters": "Adapters",
    "compressm.families": "Families",
    "compressm.ops": "Operations",
    "compressm_lab.data": "Tasks of the laboratory",
}
# Where their use is explained.
GUIDES = {
    "compressm": "compressing.md",
    "compressm.compression": "compressing.md",
    "compressm.layers": "layers.md",
    "compressm.models": "layers.md",
    "compressm.saving": "saving.md",
    "compressm.running": "speed.md",
    "compressm.exporting": "deploy.md",
    "compressm.deploy": "runtimes.md",
    "compressm.control": "concepts.md",
    "compressm.adapters": "adding_an_adapter.md",
    "compressm.families": "adding_a_family.md",
    "compressm.ops": "layers.md",
    "compressm_lab.data": "tasks.md",
}
# The everyday names by what they are for; those that are in no list come last.
GROUPS = {
    "Cut a model": ("Compressor", "compress_", "inspect", "HankelTracker", "compare_forms", "Cut", "Restored"),
    "How many states stay": (
        *("EnergyTolerance", "ErrorBound", "KeepFraction", "TargetOrder", "Budget", "powers_of_two", "pad_orders_"),
    ),
    "When": ("every", "during_warmup"),
    "Which states stay": ("WhiteNoise", "Measured", "Modal", "Largest", "Smallest", "Random", "PAPER"),
    "How a cut of Mamba is stored": ("Baked", "SharedIndex", "PerChannel", "Folded", "Fitted", "Selected", "Mapped"),
    "The optimizer, wrappers, and cuts that are undone": ("Transport", "Restart", "Slice", "Rollback", "rewrap_"),
    "Keep it, run it": ("save_model", "load_model", "export", "Stream", "CapturedStep"),
}
# They need packages of their own, so they are not imported here.
INTEGRATIONS = {
    "Trainer of transformers": "compressm.integrations.transformers_trainer.CompressionCallback",
    "Lightning": "compressm.integrations.lightning.CompressionCallback",
    "Accelerate": "compressm.integrations.accelerate.AcceleratedCompressor",
}
_RESULT = re.compile(r"\]\(\.\./benchmarks/results/([^)#]+)\)")
_PICTURE = re.compile(r"^(!\[[^\]]*\]\((images/[^)]+)\))$", re.MULTILINE)
# Notebooks lead to pages and to each other as they lie in the repository.
_OF_NOTEBOOKS = re.compile(r"\]\((?:\.\./(\.\./)docs/|())(\w+)\.(?:md|ipynb)")
# Where a cell may not break: within a number with its error or its unit.
_WITHIN_NUMBER = re.compile(
    r"(?<=\w) (?=[=±→×%])|(?<=\d) (?=(?:ns|µs|ms|s|min|h|kB|MB|GB|states|seeds?)\b)|(?<=[=±→×]) (?=\d)"
)
_NOTEBOOK = re.compile(r"\]\(\.\./examples/notebooks/(\w+)\.ipynb\)")


def public_names(package: str) -> list[str]:
    """The public names of a package that are no packages themselves, in the order of the alphabet."""
    module = importlib.import_module(package)
    named = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    things = {name: getattr(module, name) for name in named if not name.startswith("__")}
    return sorted((name for name, thing in things.items() if not isinstance(thing, types.ModuleType)), key=str.lower)


def place_of(package: str, name: str) -> str:
    """The path at which the documentation of a public name is read: where it is defined."""
    thing: Any = getattr(importlib.import_module(package), name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        return f"{thing.__module__}.{thing.__qualname__}"
    same = (p for p in PACKAGES if name in public_names(p) and getattr(importlib.import_module(p), name) is thing)
    return f"{next(same)}.{name}"


def described(package: str) -> dict[str, str]:
    """The public names of a package that its page describes, with their places: those of no earlier page."""
    earlier = list(PACKAGES)[: list(PACKAGES).index(package)]
    taken = {place_of(other, name) for other in earlier for name in public_names(other)}
    places = {name: place_of(package, name) for name in public_names(package)}
    return {name: place for name, place in places.items() if place not in taken}


def cell(text: str) -> str:
    """A text as a cell of a table: what Markdown would read as its own signs is escaped outside of code."""
    parts = " ".join(text.split()).split("`")
    parts[::2] = [re.sub(r"([_*<\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


def first_line(package: str, name: str) -> str:
    """The first line of a name's documentation, or the value of a constant."""
    thing: Any = getattr(importlib.import_module(package), name)
    if callable(thing) and thing.__doc__ and (inspect.isclass(thing) or inspect.isfunction(thing)):
        return cell((inspect.getdoc(thing) or "").split("\n")[0])
    return cell(f"`{thing}`") if len(str(thing)) < 90 else f"a `{type(thing).__name__}`"


def table_of(package: str, names: list[str]) -> list[str]:
    """A table of names with their first lines; each leads to its description, wherever that is."""
    rows = [f"| [`{name}`][{place_of(package, name)}] | {first_line(package, name)} |" for name in names]
    return ["| name | |", "|---|---|", *rows, ""]


def api_page(package: str, title: str) -> str:
    """The page of a package: a table of its names, then the description of those that no earlier page has."""
    names = public_names(package)
    guide = GUIDES[package]
    heading = (ROOT / "docs" / guide).read_text().partition("\n")[0].removeprefix("# ")
    lines = [f"# {title}", "", f"`import {package}`. How to use it: [{heading}](../{guide}).", ""]
    groups = GROUPS if package == "compressm" else {}
    for group, members in groups.items():
        lines += [f"**{group}**", "", *table_of(package, [name for name in members if name in names])]
    rest = [name for name in names if not any(name in members for members in groups.values())]
    lines += (["**More**", ""] if groups and rest else []) + (table_of(package, rest) if rest else [])
    places = described(package)
    for name in sorted(places, key=lambda name: _place_in_groups(name, groups)):
        lines += [f"::: {places[name]}", ""]
    return "\n".join(lines)


def _place_in_groups(name: str, groups: dict[str, tuple[str, ...]]) -> int:
    """Descriptions stand in the order of the tables above them; sorting leaves the rest as it is."""
    order = [member for members in groups.values() for member in members]
    return order.index(name) if name in order else len(order)


def integrations_page() -> str:
    """The page of the trainers of other packages."""
    lines = ["# Trainers", "", "What they do together with each trainer: [Trainers](../trainers.md).", ""]
    for title, place in INTEGRATIONS.items():
        lines += [f"## {title}", "", f"`from {place.rpartition('.')[0]} import {place.rpartition('.')[2]}`", ""]
        lines += [f"::: {place}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def commands_of(command: Any, path: tuple[str, ...] = ("compressm",)) -> Iterator[tuple[str, Any]]:
    """Every command with its whole name, those that only group others left out."""
    children = getattr(command, "commands", None)
    if not children:
        yield " ".join(path), command
    for name, child in (children or {}).items():
        yield from commands_of(child, (*path, name))


def commands_page() -> str:
    """The page of the command line: every command, its arguments and its options."""
    import typer

    from compressm.cli.app import app

    lines = ["# Command line", "", "`compressm COMMAND --help` shows the same in a terminal.", ""]
    for name, command in commands_of(typer.main.get_command(app)):
        lines += [f"## `{name}`", "", cell(command.help or ""), "", "| option | |", "|---|---|"]
        for parameter in command.params:
            shown = ", ".join(f"`{word}`" for word in (*parameter.opts, *parameter.secondary_opts))
            given = f"`{parameter.name.upper()}`" if parameter.param_type_name == "argument" else shown
            lines.append(f"| {given} | {cell(parameter.help or '')} |")
        lines.append("")
    return "\n".join(lines)


@contextmanager
def kernel() -> Iterator[Any]:
    """The process that runs the notebooks, one after the other: to load torch takes longer than most of them."""
    from jupyter_client.manager import KernelManager

    # Two thousand tiny operations a second: threads that wait for each other would take ten times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("MPLBACKEND", None)  # any other than the kernel's own shows no pictures
    process = KernelManager(kernel_name="python3", transport="ipc")  # no ports
    process.start_kernel()
    try:
        yield process
    finally:
        process.shutdown_kernel(now=True)


def notebook_page(path: Path, folder: Path, process: Any) -> str:
    """A notebook as a page: it is run, its pictures are written into the folder, and what it prints is shown."""
    import nbclient
    import nbformat
    from nbformat import v4

    # Without the names of the notebook before it.
    for book in (v4.new_notebook(cells=[v4.new_code_cell("%reset -f")]), nbformat.read(path, as_version=4)):
        nbclient.NotebookClient(book, timeout=300, km=process).execute()
    parts = []
    for number, cell in enumerate(book.cells):
        if cell.cell_type == "markdown":
            parts.append(_OF_NOTEBOOKS.sub(r"](\1\3.md", cell.source))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        said = "".join(map(_said, cell.outputs)).rstrip()
        if said:
            parts.append(f"``` {{ .text .output }}\n{said}\n```")
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                picture = folder / f"{path.stem}-{number}.png"
                picture.write_bytes(base64.b64decode(output.data["image/png"]))
                parts.append(f"![{cell.metadata['alt']}]({picture.name})")
    shutil.copy(path, folder / path.name)
    parts.insert(1, f"This page is a notebook that was run: [download it]({path.name}).")
    return "\n\n".join(parts) + "\n"


def _said(output: Any) -> str:
    """What an output says in words: nothing for pictures, nor for the progress that packages show on stderr."""
    if output.output_type == "stream":
        return "" if output.name == "stderr" else str(output.text)
    return "" if "image/png" in output.data else f"{output.data['text/plain']}\n"


def with_whole_numbers(text: str) -> str:
    """The tables of a page with numbers that no line break parts, so that their cells may wrap."""
    lines = text.split("\n")
    return "\n".join(_WITHIN_NUMBER.sub("\u00a0", line) if line.startswith("|") else line for line in lines)


def write_pages(folder: Path) -> None:
    """Write all pages into a folder, anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name in ("results", "api", "notebooks"):
        (folder / name).mkdir()
    for page in folder.glob("*.md"):
        text = page.read_text()
        for name in set(_RESULT.findall(text)):
            shutil.copy(ROOT / "benchmarks" / "results" / name, folder / "results" / name)
        text = _NOTEBOOK.sub(r"](notebooks/\1.md)", _RESULT.sub(r"](results/\1)", text))
        page.write_text(_PICTURE.sub(r"[\1](\2)", with_whole_numbers(text)))  # a phone shows the whole picture by a tap
    for package, title in PACKAGES.items():
        (folder / "api" / f"{package}.md").write_text(api_page(package, title))
    (folder / "api" / "integrations.md").write_text(integrations_page())
    (folder / "api" / "commands.md").write_text(commands_page())
    with kernel() as process:
        for path in sorted(NOTEBOOKS.glob("*.ipynb")):
            (folder / "notebooks" / f"{path.stem}.md").write_text(notebook_page(path, folder / "notebooks", process))


def main() -> None:
    """Write the pages; `zensical build` turns them into HTML."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--out", type=Path, default=ROOT / "out" / "site" / "pages", help="where pages are written")
    write_pages(asked.parse_args().out)


if __name__ == "__main__":
    main()
