"""Functions as ops that torch.compile does not look into: inside, the code of eager mode chooses its path by shapes.

Sizes may then change, as the order does in a cut, without another compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from compressm.ops.dispatch import once_differentiable

# Kept here: the ops are gone when it is.
_LIBRARY = torch.library.Library("compressm", "DEF")

# Takes tensors or None, then flags; returns several tensors, or None for some.
Function = Callable[..., Sequence[Tensor | None]]


def define(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], derived: Callable[..., Any] | None = None
) -> None:
    """Define an op of the namespace `compressm` for all devices; `fake` gives tensors of the shapes of its results.

    `derived` is the op with its gradient, which calls it in `inside`. torch.compile sees the op alone: it would turn
    off the refusal of second derivatives in an autograd function that it traces.
    """
    _LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"compressm::{name}", fake, lib=_LIBRARY)
    if derived is not None:
        _LIBRARY.impl(name, derived, "Autograd")


def inside() -> AbstractContextManager[None]:
    """Call ops without their gradients."""
    return torch._C._AutoDispatchBelowAutograd()


def define_recomputed(name: str, arguments: str, function: Function, fake: Function) -> None:
    """Define an op that `recomputed` calls, and one for its gradient, which computes `function` again.

    Nothing is kept for the gradient, as its shape would depend on the path that is chosen inside. The op returns an
    empty tensor for None.
    """

    def op(*given: Any) -> list[Tensor]:
        with torch.no_grad():
            return _apart(_filled(function(*given)), given)

    def fake_op(*given: Any) -> list[Tensor]:
        return _filled(fake(*given))

    def derived(*given: Any) -> list[Tensor]:
        return list(_Recomputed.apply(name, *given))

    def back(grads: list[Tensor], *given: Any) -> list[Tensor]:
        with _recording(), torch.enable_grad():
            given = tuple(value.detach().requires_grad_() if _is_real(value) else value for value in given)
            leaves = [value for value in given if _is_real(value)]
            results = [(value, grad) for value, grad in zip(function(*given), grads, strict=True) if value is not None]
            values, pulls = zip(*results, strict=True)
            found = torch.autograd.grad(values, leaves, pulls, allow_unused=True, materialize_grads=True)
        return _apart(found, grads)

    def fake_back(grads: list[Tensor], *given: Any) -> list[Tensor]:
        return [value.new_empty(value.shape) for value in given if _is_real(value)]

    define(f"{name}({arguments}) -> Tensor[]", op, fake_op, derived)
    define(f"{name}_back(Tensor[] grads, {arguments}) -> Tensor[]", back, fake_back)


def define_kept(
    name: str,
    tensors: str,
    states: str,
    flags: str,
    function: Callable[..., Sequence[Tensor]],
    fake: Callable[..., Sequence[Tensor]],
    pull: Callable[..., Sequence[Tensor | None]],
    results: tuple[int, int],
) -> None:
    """Define an op, and one for its gradient, which reads what the first one has kept for it.

    `function` takes tensors, states, which it updates in place, and flags. It returns the results and then all that is
    kept, as many as `results` says, in shapes that are the same for every path inside. `pull` takes the gradients of
    the results, what was kept, tensors and flags, and returns a gradient, or None, for every tensor.
    """
    count, moved = tensors.count("Tensor"), states.count("Tensor")

    def op(*given: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(_apart(function(*given), given))

    def fake_op(*given: Any) -> tuple[Tensor, ...]:
        return tuple(fake(*given))

    def derived(*given: Any) -> tuple[Tensor, ...]:
        return _Kept.apply(name, (results[0], count, moved), *given)

    def back(grads: list[Tensor], saved: list[Tensor], *given: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            found = [grads[0].new_empty(0) if value is None else value for value in pull(grads, saved, *given)]
            return tuple(_apart(found, (*grads, *saved, *given)))

    def fake_back(grads: list[Tensor], saved: list[Tensor], *given: Any) -> tuple[Tensor, ...]:
        none = grads[0].new_empty(0)
        return tuple(value.new_empty(value.shape) if _is_real(value) else none.clone() for value in given[:count])

    arguments, shared = (", ".join(filter(None, parts)) for parts in ((tensors, states, flags), (tensors, flags)))
    define(f"{name}({arguments}) -> ({_tensors(sum(results))})", op, fake_op, derived)
    define(f"{name}_back(Tensor[] grads, Tensor[] saved, {shared}) -> ({_tensors(count)})", back, fake_back)


def _tensors(count: int) -> str:
    return ", ".join(["Tensor"] * count)


class _Kept(torch.autograd.Function):
    """An op of `define_kept`; states, which later passes update, are not saved."""

    @staticmethod
    def forward(name: str, counts: tuple[int, int, int], *given: Any) -> tuple[Tensor, ...]:
        with inside():
            return tuple(getattr(torch.ops.compressm, name)(*given))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name, (results, count, moved), *given = inputs
        ctx.mark_non_differentiable(*output[results:])
        ctx.counts, ctx.flags = (results, count, moved), given[count + moved :]
        ctx.save_for_backward(*given[:count], *output[results:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        results, count, moved = ctx.counts
        kept = ctx.saved_tensors
        given, saved = kept[:count], kept[count:]
        back = getattr(torch.ops.compressm, f"{ctx.name}_back")
        found = back(list(grads[:results]), list(saved), *given, *ctx.flags)
        pulled = [one if _is_real(value) else None for one, value in zip(found, given, strict=True)]
        return None, None, *pulled, *[None] * (moved + len(ctx.flags))


def _filled(results: Sequence[Tensor | None]) -> list[Tensor]:
    first = next(value for value in results if value is not None)
    return [first.new_empty(0) if value is None else value for value in results]


# Code that torch.compile generates reads 16 bytes at once.
_ALIGNED = 16


def _apart(results: Sequence[Tensor], given: Sequence[Any]) -> list[Tensor]:
    """The results in one piece each, aligned, and none in the memory of what was given, as torch.compile expects."""
    places = {value.data_ptr() for value in given if isinstance(value, Tensor)}
    return [
        value.clone(memory_format=torch.contiguous_format)
        if value.data_ptr() in places or value.data_ptr() % _ALIGNED
        else value.contiguous()
        for value in results
    ]


def _recording() -> AbstractContextManager[None]:
    """Let autograd record what an op does, also inside dispatch modes such as counters of flops, which turn it off."""
    keys = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")
    off = torch._C._dispatch_tls_local_exclude_set()
    for key in keys:
        off = off.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), off)


def _is_real(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def recomputed(name: str, given: Sequence[Tensor | None], *flags: Any) -> tuple[Tensor, ...]:
    """Call the op of this name; its gradient is the other op."""
    return tuple(getattr(torch.ops.compressm, name)(*given, *flags))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(name: str, *given: Any) -> tuple[Tensor, ...]:
        with inside():
            return tuple(getattr(torch.ops.compressm, name)(*given))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.name, *given = inputs
        ctx.flags = [value for value in given if value is not None and not isinstance(value, Tensor)]
        ctx.save_for_backward(*given[: len(given) - len(ctx.flags)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        given = ctx.saved_tensors
        found = list(getattr(torch.ops.compressm, f"{ctx.name}_back")(list(grads), *given, *ctx.flags))
        pulled = [found.pop(0) if _is_real(value) else None for value in given]
        return None, *pulled, *(None for _ in ctx.flags)
