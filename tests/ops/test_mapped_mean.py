"""A linear map of the mean over time by kernels, on a GPU or in the interpreter, and where it replaces two steps."""

import copy

import pytest
import torch
from torch import nn

from compressm.layers import LRU
from compressm.models import LastStep, SequenceClassifier
from compressm.ops.block.pooling import mapped_mean, maps_mean_by_kernel
from tests.kernels import DEVICE, MARK, nan_memory, normal, relative

__all__ = ["nan_memory"]

pytestmark = MARK


@pytest.fixture(autouse=True)
def _kernels_serve_here(monkeypatch):
    monkeypatch.setattr("compressm.ops.dispatch._DEVICES", (DEVICE.type,))


def linear_of(width, outputs, **options):
    return nn.Linear(width, outputs, **options).to(DEVICE)


@pytest.mark.parametrize("sizes", [(3, 5, 8, 10), (1, 1, 1, 1), (130, 9, 33, 20), (2, 300, 64, 64)], ids=str)
def test_values_and_gradients_are_those_of_both_operations(sizes, nan_memory):
    batch, length, width, outputs = sizes
    given = normal(batch, length, width), normal(outputs, width, seed=1), normal(outputs, seed=2)
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    exact = [tensor.double().requires_grad_() for tensor in given]
    got, wanted = mapped_mean(*leaves), nn.functional.linear(exact[0].mean(1), *exact[1:])
    pull = normal(batch, outputs, seed=3)
    pairs = [(got, wanted)]
    pairs += zip(torch.autograd.grad(got, leaves, pull), torch.autograd.grad(wanted, exact, pull.double()), strict=True)
    for one, other in pairs:
        assert one.shape == other.shape
        assert relative(one, other) < 2e-6


def test_the_gradient_of_a_step_is_not_written_once_a_step():
    x = normal(2, 30, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(mapped_mean(x, normal(3, 4), normal(3)).sum(), x)
    assert gradient.stride(1) == 0


def test_the_same_input_gives_the_same_bits():
    given = normal(100, 20, 8), normal(10, 8, seed=1).requires_grad_(), normal(10, seed=2).requires_grad_()
    pull = normal(100, 10, seed=3)
    once, again = (torch.autograd.grad(mapped_mean(*given), given[1:], pull) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


def test_a_second_derivative_is_refused():
    x = normal(2, 3, 4).requires_grad_()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*torch\.func"):
        torch.autograd.grad(mapped_mean(x, normal(3, 4), normal(3)).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("x", "linear"),
    [
        (normal(2, 3, 65), linear_of(65, 3)),
        (normal(2, 3, 4), linear_of(4, 65)),
        (normal(1025, 1, 4), linear_of(4, 3)),
        (normal(2, 3, 4), linear_of(4, 3, bias=False)),
        (normal(2, 3, 4), linear_of(4, 3, dtype=torch.bfloat16)),
        (normal(2, 3, 4, dtype=torch.bfloat16), linear_of(4, 3, dtype=torch.bfloat16)),
        (normal(2, 3, 4), linear_of(5, 3)),
        (normal(2, 3, 4), nn.utils.parametrizations.weight_norm(linear_of(4, 3))),
    ],
    ids=["width", "outputs", "batch", "no bias", "other dtype", "half precision", "other width", "parametrized"],
)
def test_other_heads_are_left_to_torch(x, linear):
    assert maps_mean_by_kernel(linear_of(4, 3), normal(2, 3, 4))
    assert not maps_mean_by_kernel(linear, x)


def test_a_head_with_a_hook_is_called():
    linear, seen = linear_of(4, 3), []
    linear.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    assert not maps_mean_by_kernel(linear, normal(2, 3, 4))


def test_a_head_is_left_to_torch_in_torch_func():
    linear = linear_of(4, 3)

    def mapped(x):
        assert not maps_mean_by_kernel(linear, x)
        return linear(x.mean(1)).sum()

    torch.func.grad(mapped)(normal(2, 3, 4))


def classifier(**options):
    torch.manual_seed(0)
    return SequenceClassifier(LRU, depth=1, width=4, order=3, classes=5, inputs=1, dropout=0.0, **options).to(DEVICE)


def learned(model, x, lengths=None):
    """The logits and the gradients of a training step."""
    out = model(x, lengths)
    out.square().sum().backward()
    return {"out": out.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"pooling": LastStep()}, {"towers": 2}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_classifier_learns_as_without_kernels(options, padded):
    model = classifier(**options)
    plain = copy.deepcopy(model).double()
    towers = (2,) if "towers" in options else ()
    x, lengths = normal(3, *towers, 7, 1, seed=1), torch.full((3, *towers), 5, device=DEVICE) if padded else None
    got, wanted = learned(model, x, lengths), learned(plain, x.double(), lengths)
    for name, value in wanted.items():
        assert relative(got[name], value) < 2e-4, name


def test_a_classifier_takes_the_kernel_where_it_can(monkeypatch):
    model, x = classifier(), normal(3, 7, 1)
    out = model(x)
    assert type(out.grad_fn).__name__ == "MappedMeanBackward"
    monkeypatch.setattr(nn.Linear, "forward", lambda *_: pytest.fail("the head was called"))
    model(x)
