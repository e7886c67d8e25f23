"""Tensors that a layer has beside those of the class that its adapter knows: a cut could not resize them."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Collection, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import Tensor, nn

from compressm.adapters.base import Adapter, registered_kind
from compressm.errors import AdapterError


def require_nothing_beside(name: str, module: nn.Module, adapter: Adapter[Any, Any], written: Collection[str]) -> None:
    """Refuse a tensor of the layer that its adapter does not know, if an axis has as many entries as the layer states.

    n or 2n entries count, unless another size of the layer is the same, such as its width: then nothing says what the
    entries are. A tensor is known if the code of the adapter's class makes it. A cut writes those in `written`.
    """
    kind = registered_kind(type(module))
    known = _made_by(kind) | adapter.OPTIONAL | {path.split(".")[0] for path in written}
    beside = {path: value for path, value in _tensors(module) if not _is_known(path.split(".")[0], known)}
    if not beside:
        return
    order = adapter.order(module)
    sizes = {size for size in (order, 2 * order) if size > 2}
    for path, value in _tensors(module):
        if path not in beside:
            sizes -= _fixed_sizes(value, order if path in written else None)
    for path, value in beside.items():
        if found := sizes.intersection(value.shape):
            raise AdapterError(
                f"{f'{name}.' if name else ''}{path} has the shape {tuple(value.shape)}, and so an axis of"
                f" {max(found)} entries where the layer has {order} states; {adapter}, which reads a {kind.__name__},"
                " does not know it: a cut would leave it as it is. Write an adapter of your own,"
                f" @adapts({type(module).__name__}), that encodes it too; or leave the layer out by filter_fn; if it"
                " has nothing to do with the states, keep it in another module"
            )


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters, buffers and plain attributes of a layer and of the modules inside, by path.

    Those of parametrizations and pruning are no tensors of their own.
    """
    for path, part in module.named_modules():
        held = {**part._parameters, **part._buffers, **vars(part)}
        for leaf, value in held.items():
            own = f"{path}.{leaf}" if path else leaf
            computed = own.startswith("parametrizations.") or leaf.endswith(("_orig", "_mask"))
            if isinstance(value, Tensor) and value.ndim and not computed:
                yield own, value


def _is_known(leaf: str, names: Collection[str]) -> bool:
    """True for one of the names, or one that begins or ends with a part of a formatted name, such as "_proj"."""
    return leaf in names or any(
        (part[0] == "_" and leaf.endswith(part)) or (part[-1] == "_" and leaf.startswith(part)) for part in names
    )


@lru_cache(maxsize=64)
def _made_by(kind: type) -> frozenset[str]:
    """The attributes that the code of a class and of its ancestors sets, by their names or by texts in the code."""
    found: set[str] = set()
    for ancestor in kind.__mro__:
        if ancestor not in (nn.Module, object):
            found.update(inspect.get_annotations(ancestor))
            for member in vars(ancestor).values():
                _collect(member, found)
    return frozenset(name for name in found if len(name) > 1 or name.isalpha())


# The functions that set attributes whose names are texts.
_SETTING = ("setattr", "register", "add_module")


def _collect(member: Any, found: set[str]) -> None:
    if isinstance(member, str):  # as in self.add_module(self.NAME, ...)
        found.add(member)
    function = inspect.unwrap(getattr(member, "__func__", getattr(member, "fget", None)) or member)
    codes = [getattr(function, "__code__", None)]
    for code in codes:
        if not isinstance(code, CodeType):
            continue
        codes += code.co_consts
        found.update(str(one.argval) for one in dis.get_instructions(code) if one.opname == "STORE_ATTR")
        if any(text in name for name in code.co_names for text in _SETTING):
            texts = (text for one in code.co_consts for text in (one if isinstance(one, tuple) else (one,)))
            found.update(text for text in texts if isinstance(text, str))


def _fixed_sizes(value: Tensor, order: int | None) -> set[int]:
    """The sizes of all axes of a tensor, but for that of its states if it has an order."""
    sizes = list(value.shape)
    states = [size for size in (order, 2 * order) if size in sizes] if order is not None else []
    for size in states[:1]:
        sizes.remove(size)
    return set(sizes)
