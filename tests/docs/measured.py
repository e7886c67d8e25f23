"""The committed result files, and the pages that speak of them."""

from pathlib import Path

from compressm_lab.runs.measurement import Measurement

ROOT = Path(__file__).parents[2]


def page(name):
    """With single spaces."""
    return " ".join((ROOT / name).read_text().split())


def result(name):
    return Measurement.read(ROOT / "benchmarks" / "results" / f"{name}.json")


def rows(name, **wanted):
    return [row for row in result(name).rows if all(row[key] == value for key, value in wanted.items())]
