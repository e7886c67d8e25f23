"""The paper's numbers: one JSON file for each of its tables and figures, by label."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from compressm.errors import did_you_mean
from compressm.runs.groups import Sample
from compressm.runs.records import RunError

FOLDER = Path(str(resources.files("compressm.runs"))) / "paper"
Key = tuple[str, str, str, str]


@dataclass(frozen=True)
class PaperItem:
    """A table or a figure: `origin` is its label in the paper's source, `says` what the paper reads from it.

    `values` is by task, method, column and quantity: order, accuracy (of the three best seeds), best, speed-up. Those
    of a table whose heads are final orders stand in the columns of the tolerances that led to them.
    """

    label: str
    origin: str
    title: str
    says: str
    values: Mapping[Key, Sample]

    @property
    def kind(self) -> str:
        return "table" if self.origin.startswith("tab:") else "figure"

    def value(self, task: str, method: str, column: str, quantity: str) -> Sample | None:
        """None where the paper has no such number."""
        return self.values.get((task, method, column, quantity))


def paper_labels() -> list[str]:
    """Of all files in the folder."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def read_paper(label: str) -> PaperItem:
    """By the label of a table or figure, without `tab:` or `fig:`."""
    if label not in paper_labels():
        hint = did_you_mean(label, paper_labels())
        raise RunError(f"{label!r} is not a label of the paper; expected one of {', '.join(paper_labels())}{hint}")
    stored = json.loads((FOLDER / f"{label}.json").read_text(encoding="utf-8"))
    values: dict[Key, Sample] = {}
    for row in stored.pop("rows"):
        spreads = row.get("spreads", [None] * len(row["means"]))
        for column, mean, spread in zip(row["columns"], row["means"], spreads, strict=True):
            # How many seeds a mean is of is not always said.
            values[row["task"], row["method"], column, row["quantity"]] = Sample(float(mean), spread, 0)
    return PaperItem(**stored, values=values)
