"""Modules that remember the arguments they were built with, so that a saved model can be built again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from compressm.ops import SequenceError

Kind = TypeVar("Kind", bound=type[nn.Module])

_KEPT = "_built_with"
_WITHOUT_NAMES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)


def keeps_arguments(kind: Kind) -> Kind:
    """Let every instance keep the arguments of its constructor, defaults included; `arguments_of` returns them."""
    build = kind.__init__
    signature = inspect.signature(build)
    nameless = [p.name for p in list(signature.parameters.values())[1:] if p.kind in _WITHOUT_NAMES]
    if nameless:
        raise SequenceError(f"{kind.__name__} takes {nameless[0]!r} by position alone: give it a name to keep it by")

    @functools.wraps(build)
    def build_and_keep(self: nn.Module, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        # Afterwards, so that a subclass overwrites what its base class kept; a tuple, which nobody can change.
        vars(self)[_KEPT] = tuple(_by_name(signature, self, *args, **options).items())

    kind.__init__ = build_and_keep  # type: ignore[method-assign]
    return kind


def arguments_of(module: nn.Module) -> dict[str, Any] | None:
    """What the module was built with, by name; None where its class does not keep it."""
    kept = vars(module).get(_KEPT)
    return None if kept is None else dict(kept)


def _by_name(signature: inspect.Signature, *args: Any, **options: Any) -> dict[str, Any]:
    bound = signature.bind(*args, **options)
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        else:
            named[name] = dict(value) if isinstance(value, Mapping) else value
    return named
