"""Files under 600 lines, functions under 60: a file is a concept, and one that grows two of them is split."""

import ast
from pathlib import Path

from .syntax import statements, tree

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path for folder in ("src", "tests", "examples", "benchmarks", "studies") for path in (ROOT / folder).rglob("*.py")
)


def functions(tree):
    return (node for node in statements(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


# Kernels are read as text by a compiler that knows no calls to other files: they may be as long as they have to be.
KERNELS = "*_triton.py"
# Longer for a reason: (file, function or ""): the reason.
EXCEPTIONS: dict[tuple[str, str], str] = {}


def lengths(path):
    """The sizes of a file and of its functions, each with what is allowed."""
    name = str(path.relative_to(ROOT))
    yield (name, ""), path.read_text().count("\n") + 1, 600
    yield from (((name, node.name), node.end_lineno - node.lineno + 1, 60) for node in functions(tree(path)))


def test_files_and_functions_stay_small():
    found = [row for path in FILES if not path.match(KERNELS) for row in lengths(path)]
    assert [row for row in found if row[1] > row[2] and row[0] not in EXCEPTIONS] == []


def test_exceptions_are_still_needed():
    found = {place: size > allowed for path in FILES for place, size, allowed in lengths(path)}
    assert [place for place in EXCEPTIONS if not found.get(place)] == []


def test_every_test_can_fail():
    checks = ("assert", "raises", "check_", "exec(")
    files = [path for path in FILES if "tests" in path.parts and path.name.startswith("test_")]
    tests = [(path.name, node) for path in files for node in functions(tree(path)) if node.name.startswith("test_")]
    assert len(tests) > 1000
    bodies = ((name, node.name, ast.unparse(node)) for name, node in tests)
    assert [(file, name) for file, name, body in bodies if not any(check in body for check in checks)] == []
