"""Files under 400 lines, functions under 40: a file that grows two concepts is split."""

import ast
from pathlib import Path

from .syntax import statements, tree

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("src", "tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def functions(tree):
    return (node for node in statements(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lengths(path):
    """Of the file, and of its functions; a kernel is one function."""
    yield path.name, path.read_text().count("\n") + 1, 400
    if not path.match("ops/*/triton.py"):
        yield from ((node.name, node.end_lineno - node.lineno + 1, 40) for node in functions(tree(path)))


def test_files_and_functions_stay_small():
    found = [(path.relative_to(ROOT), *row) for path in FILES for row in lengths(path)]
    assert [row for row in found if row[2] > row[3]] == []


def test_every_test_can_fail():
    checks = ("assert", "raises", "check_", "exec(")
    files = [path for path in FILES if "tests" in path.parts and path.name.startswith("test_")]
    tests = [(path.name, node) for path in files for node in functions(tree(path)) if node.name.startswith("test_")]
    assert len(tests) > 1000
    bodies = ((name, node.name, ast.unparse(node)) for name, node in tests)
    assert [(file, name) for file, name, body in bodies if not any(check in body for check in checks)] == []
