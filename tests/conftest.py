"""Shapes are checked at run time in every test; hypothesis is repeatable and never judges by the clock."""

import functools
import gc
import importlib.util
import os
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import FunctionType
from unittest.mock import patch

# Some AMX kernels for bfloat16 end in an illegal instruction on virtual machines; must be said before torch is loaded.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Said to what is loaded from here on, and to processes that tests start; NumPy may be there already, see below.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Tables as wide as their words, wherever tests run; consoles look when they are made.
os.environ["COLUMNS"] = "160"

import hypothesis
import jaxtyping
import torch
from jaxtyping import install_import_hook

# Without a GPU its kernels are interpreted; must be said before they are loaded.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def checked_modules():
    """Those that say shapes; not the kernels, which are read as text and not called as functions."""
    source = Path(__file__).parents[1] / "src"
    paths = [path for path in sorted(source.rglob("*.py")) if "from jaxtyping import" in path.read_text()]
    kept = (
        path.relative_to(source).with_suffix("") for path in paths if not path.stem.endswith(("__init__", "_triton"))
    )
    return [".".join(path.parts) for path in kept]


def _compile_only_what_is_checked():
    """jaxtyping has a name of its own for compiled files, also of all that a checked module imports: half of torch."""
    from jaxtyping import _import_hook

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
    from beartype.roar import BeartypeCallHintViolation
    from jaxtyping import _decorator, _storage

    of_other_kinds = _decorator.jaxtyped

    def jaxtyped(function=None, *, typechecker):
        if function is None:
            return functools.partial(jaxtyped, typechecker=typechecker)
        hints = getattr(function, "__annotations__", {})
        # Classes, properties and the like, whose functions come back here; and sizes that are computed from arguments.
        if not isinstance(function, FunctionType) or "{" in str(list(hints.values())):
            return of_other_kinds(function, typechecker=typechecker)
        for name, hint in hints.items():
            hints[name] = _decorator._destring_annotation(hint, function.__globals__)
        checked = typechecker(function)

        @functools.wraps(function)
        def with_axes(*args, **kwargs):
            _storage.push_shape_memo({})
            try:
                return checked(*args, **kwargs)
            except BeartypeCallHintViolation as error:
                raise jaxtyping.TypeCheckError(str(error)) from None
            finally:
                _storage.pop_shape_memo()

        return with_axes

    jaxtyping.jaxtyped = _decorator.jaxtyped = jaxtyped


if importlib.util.find_spec("beartype"):  # in the development extra; not on every machine with a GPU
    install_import_hook(checked_modules(), "beartype.beartype")
    _compile_only_what_is_checked()
    _check_once()


def pytest_collection_finish():
    """What was imported stays: without it a collection has 100 000 objects to look at in the place of 500 000."""
    gc.collect()
    gc.freeze()


# One thread: on a shared machine with few cores two can be ten times slower than one. Those of NumPy wait for each
# other by spinning: 2.7 s in the place of 5 ms for the singular values of a matrix of 180 rows.
torch.set_num_threads(1)
if importlib.util.find_spec("threadpoolctl"):  # comes with scikit-learn
    importlib.import_module("threadpoolctl").threadpool_limits(1)

hypothesis.settings.register_profile(
    "default",
    max_examples=25,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.register_profile("thorough", hypothesis.settings.get_profile("default"), max_examples=250)
hypothesis.settings.load_profile("default")
