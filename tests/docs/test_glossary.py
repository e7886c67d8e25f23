"""Every name in the glossary exists in the code."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROWS = [
    line
    for line in (Path(__file__).parents[2] / "docs" / "glossary.md").read_text().splitlines()
    if re.match(r"\|.*`compressm", line)
]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`(compressm[\w.]+)`", row)})


def found(path):
    """The object at a dotted path; a field of a dataclass is its annotation."""
    parts = path.split(".")
    place = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        if hasattr(place, part):
            place = getattr(place, part)
        elif isinstance(place, type):
            place = {name: kind for base in place.__mro__ for name, kind in inspect.get_annotations(base).items()}[part]
        else:
            place = importlib.import_module(".".join(parts[:depth]))
    return place


@pytest.mark.parametrize("name", NAMES)
def test_the_name_exists(name):
    assert found(name) is not None


@pytest.mark.parametrize("row", [row for row in ROWS if "=`" in row], ids=lambda row: row.split("|")[1].strip())
def test_the_argument_exists(row):
    (argument,) = re.findall(r"`(\w+)=`", row)
    taken = [name for name in re.findall(r"`(compressm[\w.]+)`", row) if callable(found(name))]
    assert any(argument in inspect.signature(found(name)).parameters for name in taken)


def test_every_row_names_code():
    table = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text().splitlines()
    assert len(ROWS) == sum(line.startswith("|") for line in table) - 2, "all rows but the head"
    assert len(NAMES) > 50
