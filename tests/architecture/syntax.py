"""Source files as syntax trees.

A tree is not kept: half a million nodes would slow down every garbage collection and search of all tests that follow.
"""

import ast


def tree(path):
    return ast.parse(path.read_text())


def statements(node):
    """All statements below a node; expressions, which are most of a tree, hold none.

    Left out is what only a type checker reads (`if TYPE_CHECKING:`).
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            yield from statements(child)
