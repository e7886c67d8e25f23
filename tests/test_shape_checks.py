"""The quick check of shapes takes and refuses what jaxtyping does, and binds the same axes."""

import itertools
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, Int, _storage
from torch import Tensor

from compressm.compression import TargetOrder
from compressm.control import error_bounds

AXES = (
    "",
    "n",
    "n n",
    "n m",
    "2 n",
    "_ n",
    "*bank",
    "*bank n",
    "2 *bank n",
    "n *bank n",
    "... n",
    "#n m",
    "*#bank n",
    "n+1",
    "n n+1",
    "n+1 m",
)
ANNOTATIONS = [Float[Tensor, axes] for axes in AXES] + [Int[Tensor, "n"], Float[np.ndarray, "n"], Float[Any, "n"]]
SHAPES = [(), (1,), (2,), (3,), (2, 2), (2, 3), (3, 2), (2, 3, 3), (2, 2, 3, 4), (2, 0, 2)]
ARRAYS = [*map(torch.ones, SHAPES), torch.ones(2, dtype=torch.int64), np.ones(2), None]


def outcome(is_instance, annotations, arrays):
    """What fits, and the axes that are bound then."""
    scope = _storage.push_shape_memo({})
    try:
        fits = [is_instance(array, kind) for kind, array in zip(annotations, arrays, strict=True)]
    except jaxtyping.AnnotationError:
        return "a name that is not known"
    finally:
        scope = _storage._shape_storage.memo_stack.pop()
    return fits, scope[:2]


def by_jaxtyping(array, kind):
    return kind.__instancecheck_str__(array) == ""


@pytest.mark.parametrize("first", ANNOTATIONS, ids=str)
def test_arrays_fit_two_annotations_as_jaxtyping_says(first):
    for second, *arrays in itertools.product(ANNOTATIONS, ARRAYS, ARRAYS):
        both = outcome(isinstance, [first, second], arrays), outcome(by_jaxtyping, [first, second], arrays)
        assert both[0] == both[1], (first, second, arrays)


@jaxtyping.jaxtyped(typechecker=beartype)
def added(x: Float[Tensor, "*bank n"], y: Float[Tensor, "*bank n"], length: int = 0) -> Float[Tensor, "*bank n"]:
    return (x + y)[..., : length or None]


def test_axes_are_those_of_one_call_and_of_what_it_returns():
    for n in (2, 3):
        assert added(torch.ones(4, n), torch.ones(4, n)).shape == (4, n)
    with pytest.raises(jaxtyping.TypeCheckError, match=r"size of dimension n is 3 .* existing value of 2"):
        added(torch.ones(2), torch.ones(3))
    with pytest.raises(jaxtyping.TypeCheckError, match=r"return .* size of dimension n is 1 .* existing value of 2"):
        added(torch.ones(2), torch.ones(2), length=1)


def test_the_library_is_checked_and_so_is_what_has_no_axes():
    with pytest.raises(jaxtyping.TypeCheckError, match="dtype complex64"):
        error_bounds(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(jaxtyping.TypeCheckError, match=r"least.* parameter n='two'"):
        TargetOrder(3).least("two")
