"""Source files as syntax trees, each parsed once."""

import ast
from functools import cache


@cache
def tree(path):
    return ast.parse(path.read_text())


def statements(node):
    """All below a node, wherever they stand; expressions, which are most of a tree, hold none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            yield from statements(child)
