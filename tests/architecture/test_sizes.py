"""Files under 600 lines, functions under 60: a file is a concept, and one that grows two of them is split."""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .syntax import statements, tree

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path for folder in ("src", "tests", "examples", "benchmarks", "studies") for path in (ROOT / folder).rglob("*.py")
)


class Function(NamedTuple):
    name: str
    lines: int
    can_fail: bool


@cache
def functions(path):
    """The functions of a file; a test can fail if it checks something."""
    nodes = (node for node in statements(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [Function(node.name, node.end_lineno - node.lineno + 1, _can_fail(node)) for node in nodes]


def _can_fail(node):
    body = ast.unparse(node) if node.name.startswith("test_") else ""
    return any(check in body for check in ("assert", "raises", "check_", "exec("))


# Kernels are read as text by a compiler that knows no calls to other files: they may be as long as they have to be.
KERNELS = "*_triton.py"
# Longer for a reason: (file, function or ""): the reason.
EXCEPTIONS: dict[tuple[str, str], str] = {}


def lengths(path):
    """The sizes of a file and of its functions, each with what is allowed."""
    name = str(path.relative_to(ROOT))
    yield (name, ""), path.read_text().count("\n") + 1, 600
    yield from (((name, function.name), function.lines, 60) for function in functions(path))


def test_files_and_functions_stay_small():
    found = [row for path in FILES if not path.match(KERNELS) for row in lengths(path)]
    assert [row for row in found if row[1] > row[2] and row[0] not in EXCEPTIONS] == []


def test_exceptions_are_still_needed():
    found = {place: size > allowed for path in FILES for place, size, allowed in lengths(path)}
    assert [place for place in EXCEPTIONS if not found.get(place)] == []


def test_every_test_can_fail():
    files = [path for path in FILES if "tests" in path.parts and path.name.startswith("test_")]
    found = [(path.name, function) for path in files for function in functions(path)]
    tests = [(file, function) for file, function in found if function.name.startswith("test_")]
    assert len(tests) > 1000
    assert [(file, function.name) for file, function in tests if not function.can_fail] == []
