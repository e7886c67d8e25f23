"""Shapes are checked at run time in every test: what jaxtyping's annotations say, by beartype, at little cost."""

import functools
import typing
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType
from unittest.mock import patch

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import _array_types, _decorator, _import_hook, _storage, install_import_hook

SOURCE = Path(__file__).parents[1] / "src"


def install():
    """Check all modules of ours that are imported from here on."""
    install_import_hook(checked_modules(), "beartype.beartype")
    _compile_only_what_is_checked()
    _check_once()
    _bind_axes_quickly()


def checked_modules():
    """Those that say shapes; not the kernels, which are read as text and not called as functions."""
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if "from jaxtyping import" in path.read_text()]
    kept = (
        path.relative_to(SOURCE).with_suffix("") for path in paths if not path.stem.endswith(("__init__", "_triton"))
    )
    return [".".join(path.parts) for path in kept]


def _compile_only_what_is_checked():
    """jaxtyping has a name of its own for compiled files, also of all that a checked module imports: half of torch."""

    def get_code(loader, name):
        own = functools.partial(_import_hook._optimized_cache_from_source, loader._typechecker.get_hash())
        with patch("importlib._bootstrap_external.cache_from_source", own):
            return SourceFileLoader.get_code(loader, name)

    _import_hook._JaxtypingLoader.get_code = get_code
    del _import_hook._JaxtypingLoader.exec_module


def _check_once():
    """jaxtyping looks at arguments before a call and again with what is returned; a third of the time of all tests.

    Here beartype looks at both once, in a scope of their axes that is the call's own.
    """
    of_other_kinds = _decorator.jaxtyped
    checks = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))

    def jaxtyped(function=None, *, typechecker):
        if function is None:
            return functools.partial(jaxtyped, typechecker=typechecker)
        hints = getattr(function, "__annotations__", {})
        # Classes, properties and the like, whose functions come back here; and sizes that are computed from arguments.
        if not isinstance(function, FunctionType) or "{" in str(list(hints.values())):
            return of_other_kinds(function, typechecker=typechecker)
        for name, hint in hints.items():
            hints[name] = _decorator._destring_annotation(hint, function.__globals__)
        return _with_axes(checks(function), function) if any(map(_has_axes, hints.values())) else checks(function)

    jaxtyping.jaxtyped = _decorator.jaxtyped = jaxtyped


def _has_axes(hint):
    """Whether an annotation may name axes, by itself or anywhere inside."""
    if isinstance(hint, str | typing.ForwardRef | typing.TypeVar):
        return True
    inside = hint if isinstance(hint, list) else typing.get_args(hint)
    return isinstance(hint, _array_types._MetaAbstractArray) or any(map(_has_axes, inside))


def _with_axes(checked, function):
    """The checked function with a scope of axes for every call."""

    @functools.wraps(function)
    def with_axes(*args, **kwargs):
        _storage.push_shape_memo({})
        try:
            return checked(*args, **kwargs)
        finally:
            _storage.pop_shape_memo()

    return with_axes


def _bind_axes_quickly():
    """jaxtyping writes out the dtype and copies all axes before it looks at an array: 5 μs in the place of 1.5 μs.

    Here an array of an accepted dtype binds axes with a name, a size or a formula. Whatever does not fit, or is
    annotated otherwise, is left to jaxtyping, which says why.
    """
    in_detail, plans = _array_types._MetaAbstractArray.__instancecheck__, {}

    def is_instance(kind, value):
        plan = plans.get(kind)
        if plan is None:
            plan = plans[kind] = _Plan(kind)
        scopes = getattr(_storage._shape_storage, "memo_stack", None)
        if scopes and plan.dtypes and isinstance(value, plan.array_type) and value.dtype in plan.dtypes:
            single, variadic, *_ = scopes[-1]
            if plan.binds(tuple(value.shape), single, variadic):
                return True
        fits = in_detail(kind, value)
        if fits and plan.is_plain:
            plan.dtypes.add(value.dtype)
        return fits

    _array_types._MetaAbstractArray.__instancecheck__ = is_instance


class _Plan:
    """The axes of an annotation, and the dtypes that were found to fit it."""

    def __init__(self, kind):
        dims = list(kind.dims)
        plain = isinstance(kind.array_type, type) and kind.array_type is not typing.Any
        self.array_type, self.dtypes, self.variadic, self.split = kind.array_type, set(), None, kind.index_variadic
        if self.split is not None:
            variadic = dims.pop(self.split)
            self.variadic = getattr(variadic, "name", None)
            plain &= variadic is _array_types._anonymous_variadic_dim or _is_plain(variadic)
        self.is_plain = plain and all(dim is _array_types._anonymous_dim or _is_plain(dim) for dim in dims)
        self.axes = [_axis(dim) for dim in dims] if self.is_plain else []

    def binds(self, sizes, single, variadic):
        """Whether the sizes fit; if so, the new axes among them are bound."""
        split, rest = self.split, len(sizes) - len(self.axes)
        if rest and (split is None or rest < 0):
            return False
        if split is not None:
            middle, sizes = sizes[split : split + rest], sizes[:split] + sizes[split + rest :]
            if (known := variadic.get(self.variadic)) is not None and (known[0] or known[1] != middle):
                return False
        bound = []
        for axis, size in zip(self.axes, sizes, strict=True):
            if axis.__class__ is str:
                if (known := single.get(axis)) is None:
                    single[axis] = size
                    bound.append(axis)
                    continue
            elif axis.__class__ is CodeType and single.keys() >= set(axis.co_names):
                known = eval(axis, {}, single)
            else:
                known = size if axis is None else axis
            if known != size:
                for name in bound:
                    del single[name]
                return False
        if self.variadic is not None:
            variadic[self.variadic] = (False, middle)
        return True


def _is_plain(dim):
    """Whether an axis has a name, a size or a formula of names, and is not broadcast or part of a tree."""
    named = (_array_types._NamedDim, _array_types._NamedVariadicDim, _array_types._FixedDim)
    formula = isinstance(dim, _array_types._SymbolicDim) and "{" not in dim.elem
    return (isinstance(dim, named) or formula) and not dim.broadcastable and not getattr(dim, "treepath", False)


def _axis(dim):
    """The name of an axis, its size, the code of its formula, or None for any size."""
    if isinstance(dim, _array_types._SymbolicDim):
        return compile(dim.elem, "axis", "eval")
    return getattr(dim, "name", None) or getattr(dim, "size", None)
