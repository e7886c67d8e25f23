"""The committed result files, and the pages that speak of them: numbers are compared, words are free."""

import re
from collections import Counter
from pathlib import Path

from compressm_lab.runs.measurement import Measurement

ROOT = Path(__file__).parents[2]
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def says(page, *numbers):
    """Whether one paragraph, list item or row of a table on the page has all of these numbers, as often as here."""
    text = (ROOT / page).read_text()
    parts = re.split(r"\n\s*\n|\n(?=- |\|)", text)
    return any(Counter(numbers) <= Counter(_NUMBER.findall(part)) for part in parts)


def tenths(*values):
    """As pages write them, one digit after the point; their signs are said in words."""
    return [f"{abs(value):.1f}" for value in values]


def whole(*values):
    return [f"{abs(value):.0f}" for value in values]


def result(name):
    return Measurement.read(ROOT / "benchmarks" / "results" / f"{name}.json")


def rows(name, **wanted):
    return [row for row in result(name).rows if all(row[key] == value for key, value in wanted.items())]
