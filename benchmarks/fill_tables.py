"""Put tables where README and docs ask for them: `python benchmarks/fill_tables.py`.

They come from committed result files, of which docs/results.md has a summary, and in docs/models.md from the adapters.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from compressm.adapters import Adapter, Basis, MemoryAdapter, SSMAdapter
from compressm.adapters.base import adapters_by_kind
from compressm.adapters.dense import DenseAdapter
from compressm.adapters.mamba import REFUSED, REFUSED_ELSEWHERE
from compressm_lab.reports.automatic_tables import summary_grid as automatic_summary
from compressm_lab.reports.measurements import markdown
from compressm_lab.reports.summary import summary_grid
from compressm_lab.runs.measurement import Measurement

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_MADE = re.compile(r"<!-- (models|refused|summary|automatic) -->\n.*?<!-- end of \1 -->", re.DOTALL)
_TABLE = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end of table -->", re.DOTALL)


def filled(text: str) -> str:
    """The text with every table as its result file has it, and a word where there is no file yet."""

    def table(match: re.Match[str]) -> str:
        path = ROOT / match[1]
        shown = markdown(Measurement.read(path)) if path.exists() else "*Not measured yet.*"
        return f"<!-- table: {match[1]} -->\n{shown}\n<!-- end of table -->"

    def made(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{_TABLES[match[1]]()}\n<!-- end of {match[1]} -->"

    return _MADE.sub(made, _TABLE.sub(table, text))


# How cuts are stored, each with the basis change that it needs; those of the second line need this package afterwards.
_FORMS = {"Folded()": Basis.ANY, "Fitted()": Basis.SELECTED, "Selected()": Basis.SELECTED, "Mapped()": Basis.MAPPED}
_METHODS = {"Baked()": Basis.AVERAGED, "SharedIndex()": Basis.SELECTED, "PerChannel()": Basis.BY_CHANNEL}
_WITH_US = {"Mapped()", "PerChannel()"}


def modules() -> str:
    """Every module that can be cut: its order, the forms of a cut, and what the result loads in."""
    rows = []
    for path, adapter in adapters_by_kind().items():
        package, name = path.partition(".")[0], path.rpartition(".")[2]
        if package not in _PACKAGES:  # an adapter of somebody else's
            continue
        if isinstance(adapter, SSMAdapter | DenseAdapter):
            forms, others = ["balanced, with a bound"], []
        else:
            known = _FORMS if isinstance(adapter, MemoryAdapter) else _METHODS
            stored = [form for form, needs in known.items() if needs in adapter.STORES]
            forms, others = ([f"`{form}`" for form in stored if (form in _WITH_US) == ours] for ours in (False, True))
        loads = f"{package}; {', '.join(others)}: compressm" if others and package != "compressm" else package
        rows.append((package, name, _recurrence(adapter), adapter.SIZE, ", ".join([*forms, *others]), loads))
    rows.sort(key=lambda row: (_PACKAGES.index(row[0]), row[2], row[1].lower()))
    return "\n".join(
        [
            "| package | module | recurrence | order | forms | loads in |",
            "|---|---|---|---|---|---|",
            *(f"| {p} | `{m}` | {kind} | `{size}` | {forms} | {loads} |" for p, m, kind, size, forms, loads in rows),
        ]
    )


def _recurrence(adapter: Adapter[Any, Any]) -> str:
    if adapter.RECURRENCE or not isinstance(adapter, MemoryAdapter):
        return adapter.RECURRENCE
    if adapter.ERASES:
        return "delta rule, with gates" if adapter.GATED else "delta rule"
    return "matrix state, with gates" if adapter.GATED else "matrix state, scalar decay"


_PACKAGES = ("compressm", "transformers", "fla", "mamba_ssm")


def refused() -> str:
    """Every module that is refused, with the reason."""
    tables = {"transformers": REFUSED, **{owner.partition(".")[0]: own for owner, own in REFUSED_ELSEWHERE.items()}}
    rows = [f"| {owner} | `{name}` | {why} |" for owner, own in tables.items() for name, why in own.items()]
    return "\n".join(["| package | module | it … |", "|---|---|---|", *rows])


def summary() -> str:
    """The paper, its authors' code and ours, over all tasks."""
    return summary_grid(ROOT / "benchmarks" / "results").markdown()


def automatic() -> str:
    """Automatic cuts on all tasks."""
    return automatic_summary(ROOT / "benchmarks" / "results").markdown()


_TABLES = {"models": modules, "refused": refused, "summary": summary, "automatic": automatic}


def main() -> None:
    """Rewrite the pages that changed, and name them."""
    for page in PAGES:
        before = page.read_text()
        after = filled(before)
        if after != before:
            page.write_text(after)
            sys.stdout.write(f"{page.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
