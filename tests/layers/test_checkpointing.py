"""Layers under torch.utils.checkpoint, which computes the forward pass again and gives each saved tensor once."""

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import compressm as cs
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba

SOURCE = Path(cs.__file__).parent


@pytest.mark.parametrize("kind", [LRU, S5, S4, S4D, LinOSS, Mamba])
def test_a_checkpointed_layer_has_the_gradients_of_the_layer(kind):
    torch.manual_seed(0)
    layer = kind(4, 6).double()
    x = torch.randn(2, 11, 4, dtype=torch.float64)
    wanted = torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters()))
    out = checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)
    got = torch.autograd.grad(out.square().sum(), list(layer.parameters()))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def read(path):
    """How often each class of a file reads `ctx.saved_tensors`."""
    classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    return Counter(
        f"{path.name}: {kind.name}"
        for kind in classes
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute) and node.attr == "saved_tensors" and getattr(node.value, "id", "") == "ctx"
    )


def test_every_function_of_ours_reads_its_saved_tensors_once():
    counts = sum((read(path) for path in SOURCE.rglob("*.py")), Counter())
    assert len(counts) > 10
    assert {place: count for place, count in counts.items() if count > 1} == {}
