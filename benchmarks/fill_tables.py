"""Put the tables of committed result files where README and docs ask for them: `python benchmarks/fill_tables.py`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from compressm_lab.reports.measurements import markdown
from compressm_lab.runs.measurement import Measurement

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_TABLE = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end of table -->", re.DOTALL)


def filled(text: str) -> str:
    """The text with every table as its result file has it, and a word where there is no file yet."""

    def table(match: re.Match[str]) -> str:
        path = ROOT / match[1]
        shown = markdown(Measurement.read(path)) if path.exists() else "*Not measured yet.*"
        return f"<!-- table: {match[1]} -->\n{shown}\n<!-- end of table -->"

    return _TABLE.sub(table, text)


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
