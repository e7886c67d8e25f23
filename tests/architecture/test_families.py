"""The pipeline asks no family question: only families and adapters know kinds of recurrences."""

import ast
from pathlib import Path

import compressm.adapters
import compressm.families
import compressm.layers

from .syntax import tree

SOURCE = Path(__file__).parents[2] / "src"
# Who may know: the families themselves, adapters, and the layers that are asked about.
KNOWING = ("compressm/families/", "compressm/adapters/", "compressm/layers/", "compressm/control/")


def kinds():
    """Names of adapters, families, their layers and cuts, systems and SSM layers."""
    adapters = {name for name in compressm.adapters.__all__ if name.endswith("Adapter")} - {"Adapter"}
    families = {
        f"{family}{part}"
        for family in ("Linear", "Dense", "Selective", "Memory")
        for part in ("Family", "Layer", "Cut")
    }
    layers = {"LRU", "S5", "S4", "S4D", "LinOSS", "Mamba", "LTILayer"}
    assert all(hasattr(compressm.layers, name) for name in layers)
    return (
        adapters
        | families
        | layers
        | {"DiagonalSystem", "SelectiveSystem", "Memory", "InputObserver", "SelectiveObserver"}
    )


def questions(path):
    """Names of kinds that a file asks about by isinstance or issubclass, and names of layers that it compares with."""
    for node in ast.walk(tree(path)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"isinstance", "issubclass"}
        ):
            yield from (part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name))
        if isinstance(node, ast.Compare):
            texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            yield from (text for text in texts if text in {"LRU", "S5", "S4", "S4D", "LinOSS", "Mamba"})


def test_nobody_else_asks_what_kind_a_layer_is():
    files = [path for package in ("compressm", "compressm_lab") for path in (SOURCE / package).rglob("*.py")]
    names = {path: str(path.relative_to(SOURCE)) for path in files}
    asked = {(name, kind) for path, name in names.items() if not name.startswith(KNOWING) for kind in questions(path)}
    assert {(name, kind) for name, kind in asked if kind in kinds()} == set()


def test_questions_are_found(tmp_path):
    file = tmp_path / "one.py"
    file.write_text('isinstance(x, (int, SSMAdapter)) or layer == "Mamba"')
    assert list(questions(file)) == ["int", "SSMAdapter", "Mamba"]
