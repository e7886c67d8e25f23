"""Every model of the paper's table of hyperparameters, with its number of parameters counted by hand."""

import pytest

from compressm.layers import LRU
from compressm.models import BatchNorm, OneMask, PerElement, SequenceClassifier

# Depth, width, order and dropout: the paper's tab:hyperparameters. The rest: the tasks.
PAPER = {
    "sMNIST": (1, 8, 256, 0.1, {"inputs": 1, "classes": 10}),
    "CIFAR10": (6, 512, 384, 0.1, {"inputs": 3, "classes": 10}),
    "ListOps": (6, 128, 256, 0.0, {"vocabulary": 18, "classes": 10}),
    "IMDB": (1, 256, 192, 0.1, {"vocabulary": 257, "classes": 2}),
    "AAN": (6, 128, 256, 0.1, {"vocabulary": 257, "classes": 2, "towers": 2}),
    "Pathfinder": (6, 192, 256, 0.0, {"inputs": 1, "classes": 2}),
}
COUNTS = {
    "sMNIST": 9_234,
    "CIFAR10": 7_893_770,
    "ListOps": 995_082,
    "IMDB": 395_842,
    "AAN": 1_090_306,
    "Pathfinder": 1_633_154,
}


def counted(depth, width, order, affine, *, classes, inputs=None, vocabulary=None, towers=1):
    encoder = vocabulary * width if inputs is None else inputs * width + width
    poles_and_gamma, matrices, feedthrough = 3 * order, 4 * order * width, width
    norm, gate = 2 * width * affine, 2 * width * width + 2 * width
    block = poles_and_gamma + matrices + feedthrough + norm + gate
    comparison = 4 * width * width + width if towers == 2 else 0
    return encoder + depth * block + comparison + width * classes + classes


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("task", PAPER)
def test_a_paper_model_has_as_many_parameters_as_counted(task, affine):
    depth, width, order, rate, options = PAPER[task]
    dropout = PerElement(rate) if affine else OneMask(rate)
    norm = BatchNorm(affine=affine)
    model = SequenceClassifier(LRU, depth=depth, width=width, order=order, norm=norm, dropout=dropout, **options)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == counted(depth, width, order, affine, **options)
    if affine:
        assert parameters == COUNTS[task]
    assert [block.ssm.order for block in model.blocks] == [order] * depth
