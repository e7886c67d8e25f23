"""Where kernels are tested: on a GPU, or on the CPU by Triton's interpreter."""

import dataclasses
import functools
import importlib.util
import itertools
import math

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
MARK = pytest.mark.gpu if GPU else pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton")


def later(*values):
    """A case for `make slow` in the interpreter, which runs program after program in Python; a GPU takes all."""
    return pytest.param(*values, marks=() if GPU else pytest.mark.slow)


def some_of(*axes):
    """The product of all axes; at once every value of every axis, and every combination of the short ones."""
    longest = max(range(len(axes)), key=lambda k: len(axes[k]))
    others = [axis for k, axis in enumerate(axes) if k != longest]
    picked = []
    for i in range(max(len(axes[longest]), math.prod(map(len, others)))):
        rest, values = i, []
        for axis in others:
            values.append(axis[rest % len(axis)])
            rest //= len(axis)
        values.insert(longest, axes[longest][i % len(axes[longest])])
        picked.append(tuple(values))
    return [case if case in picked else later(*case) for case in itertools.product(*axes)]


def _repair_interpreter():
    """NumPy 2.4 makes no number of an array of one element, by which Triton 3.6 reads the bounds of loops."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _multiply_bfloat16():
    """Triton 3.6 holds bfloat16 as integers of 16 bits in its interpreter, and multiplies matrices of those."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    of_numbers = InterpreterBuilder.create_dot

    def create_dot(builder, a, b, *rest):
        wide = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return of_numbers(builder, *wide, *rest)

    InterpreterBuilder.create_dot = create_dot


def _hasten_interpreter():
    """Two thirds of its time go into what changes nothing here.

    Its words take the place of the language's at every call of a function inside a kernel: once is enough where nothing
    else speaks the language. Every sum and product of integers is made again with 64 bits, to find overflows. Shapes
    and names of types are made for every intermediate result, and equal shapes are broadcast to each other.
    """
    import triton.language
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    def seeing_all():
        """What a function sees is what is replaced."""

    core = triton.language.core
    interpreter._patch_lang(type(seeing_all)(seeing_all.__code__, {"tl": triton.language, "core": core}))
    nothing = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda function: nothing
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    of_numbers, of_any = functools.cache(interpreter._get_np_dtype), interpreter._get_np_dtype
    interpreter._get_np_dtype = lambda type: (of_any if type.scalar.is_ptr() else of_numbers)(type.scalar)

    @functools.cache
    def sizes(shape):
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    def fill(tensor, handle, type):
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.numel, tensor.shape = sizes(tuple(type.shape.values) if type.is_block() else ())

    core.tensor.__init__ = fill

    @functools.cache
    def block(sizes, element):
        assert sizes, "a block has an axis"
        shape = core.tuple(sizes)
        return shape, core.validate_block_shape(shape), f"<{shape}, {element}>"

    def of_blocks(type, element_ty, shape):
        type.element_ty = element_ty
        type.shape, type.numel, type.name = block(tuple(map(core._unwrap_if_constexpr, shape)), str(element_ty))

    core.block_type.__init__ = of_blocks

    to_one_shape = TritonSemantic.broadcast_impl_value

    def broadcast(semantic, one, other):
        are_blocks = one.type.is_block() and other.type.is_block()
        if are_blocks and one.type.shape.values == other.type.shape.values:
            return one, other
        return to_one_shape(semantic, one, other)

    TritonSemantic.broadcast_impl_value = broadcast


if not GPU and importlib.util.find_spec("triton"):
    _repair_interpreter()
    _multiply_bfloat16()
    _hasten_interpreter()


def normal(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


@pytest.fixture
def nan_memory(monkeypatch):
    """Fresh memory is full of NaN: what a kernel leaves unwritten shows."""
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, _allocate=allocate, **kwargs: _nan(_allocate(*args, **kwargs)))
    fresh = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: _nan(fresh(*args, **kwargs)))


@pytest.fixture
def few_programs(monkeypatch):
    """Every program takes several tiles, as at sizes that a test cannot have."""
    from compressm.ops.launching_triton import forget_plans
    from compressm.ops.memory import Launch

    workers = Launch.workers
    monkeypatch.setattr(Launch, "workers", lambda launch, tiles: workers(launch._replace(programs=3), tiles))
    forget_plans()
    yield
    forget_plans()


def _nan(tensor):
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


def relative(got, wanted):
    """Largest error over the largest entry."""
    return ((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-30)).item()
