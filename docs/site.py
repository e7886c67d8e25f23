"""Write the pages of the documentation site: those of this folder, results that they link to, and the API."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import shutil
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# The packages whose public names have a page of the API.
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
}
_RESULT = re.compile(r"\]\(\.\./benchmarks/results/([^)#]+)\)")


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
    return f"{package}.{name}"


def api_page(package: str, title: str) -> str:
    """The page of a package; every name has its documentation there."""
    lines = [f"# {title}", "", f"`import {package}`", ""]
    for name in public_names(package):
        lines += [f"::: {place_of(package, name)}", ""]
    return "\n".join(lines)


def write_pages(folder: Path) -> None:
    """Write all pages into a folder, anew."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "results").mkdir()
    for page in folder.glob("*.md"):
        text = page.read_text()
        for name in set(_RESULT.findall(text)):
            shutil.copy(ROOT / "benchmarks" / "results" / name, folder / "results" / name)
        page.write_text(_RESULT.sub(r"](results/\1)", text))
    (folder / "api").mkdir()
    for package, title in PACKAGES.items():
        (folder / "api" / f"{package}.md").write_text(api_page(package, title))


def main() -> None:
    """Write the pages; `zensical build` turns them into HTML."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--out", type=Path, default=ROOT / "out" / "site" / "pages", help="where pages are written")
    write_pages(asked.parse_args().out)


if __name__ == "__main__":
    main()
