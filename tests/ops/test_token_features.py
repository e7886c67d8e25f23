"""Rows of a table and the sums of their gradients against one-hot products, on a GPU or in Triton's interpreter."""

import pytest
import torch
from torch import nn

from compressm.models import EmbeddingEncoder
from compressm.ops.block.encoder import token_features
from tests.kernels import DEVICE, GPU, MARK, few_programs, later, nan_memory, normal, relative

__all__ = ["few_programs", "nan_memory"]

pytestmark = MARK

# Vocabulary, width, and the shape of the tokens.
SIZES = [
    (1, 1, (1,)),
    (5, 6, (3, 7)),
    (64, 16, (2, 64)),
    (65, 33, (211,)),
    (7, 130, (2, 40)),
    (257, 128, (2, 3, 70)),
    later(1024, 130, (2, 300)),
    later(130, 300, (4, 513)),
]


@pytest.fixture
def small_tiles(monkeypatch):
    """Several programs forward, the last of them not full; few for the sums, which the interpreter makes one by one."""
    if not GPU:
        monkeypatch.setattr("compressm.ops.block.encoder_triton._VALUES", 512)
        monkeypatch.setattr("compressm.ops.sums_triton._ROWS", 2)
        monkeypatch.setattr("compressm.ops.sums_triton._COLS", 4096)


@pytest.fixture
def kernels_here(monkeypatch):
    monkeypatch.setattr("compressm.ops.dispatch._DEVICES", (DEVICE.type,))


@pytest.fixture
def looked_up(monkeypatch):
    """The dtypes in which the kernel was asked for rows."""
    from compressm.ops.block import encoder_triton as triton

    asked, apply = [], triton.TokenFeatures.apply
    monkeypatch.setattr(triton.TokenFeatures, "apply", lambda *args: asked.append(args[-1]) or apply(*args))
    return asked


def drawn(vocabulary, shape, dtype=torch.int64):
    """Tokens of which small ones are frequent and some do not occur."""
    uniform = torch.rand(shape, generator=torch.Generator().manual_seed(3))
    return (vocabulary * uniform**3).to(dtype).to(DEVICE)


def one_hot(tokens, vocabulary):
    return nn.functional.one_hot(tokens.long(), vocabulary).double()


def rounded(x, dtype):
    """As the kernel writes it: the interpreter cuts bfloat16 off."""
    if GPU or dtype is not torch.bfloat16 or x.dtype is dtype:
        return x.to(dtype)
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32).to(dtype)


def gradient_of(table, tokens, dtype, dout):
    from compressm.ops.block.encoder_triton import TokenFeatures

    return torch.autograd.grad(TokenFeatures.apply(tokens, table, dtype), table, dout)[0]


def make_embedding(vocabulary=9, width=6, **options):
    torch.manual_seed(0)
    return nn.Embedding(vocabulary, width, device=DEVICE, **options)


@pytest.mark.usefixtures("nan_memory", "few_programs", "small_tiles")
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize(("vocabulary", "width", "shape"), SIZES)
def test_features_are_rows_and_gradients_their_sums(vocabulary, width, shape, dtypes):
    from compressm.ops.block.encoder_triton import TokenFeatures

    table, tokens = normal(vocabulary, width, dtype=dtypes[0]).requires_grad_(), drawn(vocabulary, shape)
    features = TokenFeatures.apply(tokens, table, dtypes[1])
    dout = normal(*shape, width, seed=1, dtype=dtypes[1])
    (gradient,) = torch.autograd.grad(features, table, dout)
    hot = one_hot(tokens, vocabulary)
    assert features.dtype == dtypes[1]
    assert torch.equal(features.double(), hot @ rounded(table.detach(), dtypes[1]).double())
    assert gradient.dtype == dtypes[0]
    wanted = hot.flatten(0, -2).mT @ dout.double().flatten(0, -2)
    assert relative(gradient, wanted) < (2e-6 if dtypes[0] is torch.float32 else 4e-3)
    assert not gradient[hot.flatten(0, -2).sum(0) == 0].any()


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_everywhere_gets_every_gradient(dtype):
    table, tokens = normal(70, 20).requires_grad_(), torch.full((3, 90), 66, device=DEVICE)
    gradient = gradient_of(table, tokens, dtype, torch.ones(3, 90, 20, dtype=dtype, device=DEVICE))
    wanted = torch.zeros(70, 20, device=DEVICE)
    wanted[66] = 270
    assert torch.equal(gradient, wanted)


def test_the_same_gradient_gives_the_same_bits():
    table, tokens = normal(40, 24).requires_grad_(), drawn(40, (700,))
    dout = normal(700, 24, seed=1, dtype=torch.bfloat16)
    first, second = (gradient_of(table, tokens, torch.bfloat16, dout) for _ in range(2))
    assert first.any()
    assert torch.equal(first, second)


def test_tokens_of_32_bits_and_gradients_with_strides_are_read_as_they_are():
    table, tokens = normal(9, 6).requires_grad_(), drawn(9, (5, 8), torch.int32).mT
    dout = normal(6, 8, 5, seed=1).permute(1, 2, 0)
    wanted = one_hot(tokens, 9).flatten(0, 1).mT @ dout.double().reshape(40, 6)
    assert relative(gradient_of(table, tokens, torch.float32, dout), wanted) < 1e-6


@pytest.mark.parametrize(("dtype", "vocabulary"), [(torch.bfloat16, 1025), (torch.float32, 513)])
def test_of_a_large_vocabulary_torch_sums_the_gradients(dtype, vocabulary, monkeypatch):
    from compressm.ops.block import encoder_triton as triton

    monkeypatch.setattr(triton, "_gradient", lambda *_: pytest.fail("a product with a one-hot matrix"))
    table, tokens = normal(vocabulary, 6).requires_grad_(), drawn(vocabulary, (4, 9))
    dout = normal(4, 9, 6, seed=1, dtype=dtype)
    gradient = gradient_of(table, tokens, dtype, dout)
    wanted = torch.zeros(vocabulary, 6, dtype=torch.float64, device=DEVICE)
    wanted.index_add_(0, tokens.flatten(), dout.double().flatten(0, 1))
    assert gradient.dtype == torch.float32
    assert relative(gradient, wanted) < 1e-6


@pytest.mark.usefixtures("few_programs")
def test_a_token_that_is_not_in_the_table_gives_nan_and_no_gradient():
    from compressm.ops.block.encoder_triton import TokenFeatures

    table, tokens = normal(7, 5).requires_grad_(), torch.tensor([2, 7, -1, 6], device=DEVICE)
    features = TokenFeatures.apply(tokens, table, torch.float32)
    assert features.isnan().all(dim=1).tolist() == [False, True, True, False]
    (gradient,) = torch.autograd.grad(features, table, torch.ones_like(features))
    assert gradient.sum(1).tolist() == [0, 0, 5, 0, 0, 0, 5]


@pytest.mark.usefixtures("kernels_here")
@pytest.mark.parametrize("autocast", [False, True])
def test_the_encoder_has_the_features_and_gradients_of_the_module(autocast, looked_up):
    torch.manual_seed(0)
    encoder = EmbeddingEncoder(30, 12).to(DEVICE)
    tokens, weight = drawn(30, (3, 11), torch.uint8), encoder.embedding.weight
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        features = encoder(tokens)
    plain, dtype = encoder.embedding(tokens.long()), torch.bfloat16 if autocast else torch.float32
    assert looked_up == [features.dtype] == [dtype]
    assert torch.equal(features, rounded(plain.detach(), dtype))
    dout = normal(3, 11, 12, seed=1, dtype=dtype)
    (one,), (other,) = (torch.autograd.grad(out, weight, dout.to(out.dtype)) for out in (features, plain))
    assert one.dtype == weight.dtype
    assert relative(one, other) < 1e-6
    assert list(encoder.state_dict()) == ["embedding.weight"]


@pytest.mark.usefixtures("kernels_here")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # tokens have no gradient
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "register",
    [
        lambda module, hook: module.register_forward_pre_hook(lambda *_: hook()),
        lambda module, hook: module.register_forward_hook(lambda *_: hook()),
        lambda module, hook: module.register_full_backward_pre_hook(lambda *_: hook()),
        lambda module, hook: module.register_full_backward_hook(lambda *_: hook()),
    ],
    ids=["forward pre", "forward", "backward pre", "backward"],
)
def test_hooks_of_the_embedding_are_called(register, autocast, looked_up):
    embedding, calls = make_embedding(), []
    handle = register(embedding, lambda: calls.append(1))
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        features = token_features(drawn(9, (4,)), embedding)
    features.sum().backward()
    assert features.dtype == (torch.bfloat16 if autocast else torch.float32)
    assert (calls, looked_up) == ([1], [])
    handle.remove()
    token_features(drawn(9, (4,)), embedding)
    assert looked_up == [torch.float32]


@pytest.mark.usefixtures("kernels_here")
@pytest.mark.parametrize(
    "options", [{"max_norm": 0.5}, {"padding_idx": 0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
def test_an_embedding_with_options_does_what_they_say(options, looked_up):
    tokens, dout = torch.tensor([0, 2, 2, 8], device=DEVICE), normal(4, 6, seed=1)
    ours, theirs = make_embedding(**options), make_embedding(**options)
    features, wanted = token_features(tokens, ours), theirs(tokens)
    features.backward(dout)
    wanted.backward(dout)
    assert looked_up == []
    assert torch.equal(features, wanted)
    assert torch.equal(ours.weight.grad.to_dense(), theirs.weight.grad.to_dense())
    assert ours.weight.grad.is_sparse == bool(options.get("sparse"))


@pytest.mark.usefixtures("kernels_here")
def test_what_stands_in_the_place_of_an_embedding_is_called(looked_up):
    class Doubled(nn.Embedding):
        def forward(self, tokens):
            return 2 * super().forward(tokens)

    embedding = Doubled(9, 6, device=DEVICE)
    assert torch.equal(token_features(drawn(9, (4,)), embedding), 2 * embedding.weight[drawn(9, (4,))])
    assert looked_up == []


@pytest.mark.usefixtures("kernels_here")
def test_of_tokens_on_a_gpu_no_value_is_read(monkeypatch):
    """A step would wait for all steps before it; a token outside the vocabulary is NaN in its features instead."""
    from compressm.models import encoder as module

    monkeypatch.setattr(module, "require_within", lambda *_: pytest.fail("values are read"))
    features = module.EmbeddingEncoder(9, 6).to(DEVICE)(torch.tensor([[0, 8], [9, -1]], device=DEVICE))
    assert features[0].isfinite().all()
    assert features[1].isnan().all()


def test_a_gradient_of_tokens_outside_a_large_vocabulary_stays_in_the_table():
    table = normal(1500, 4).requires_grad_()
    tokens = torch.tensor([3, 1500, -1], device=DEVICE)
    assert gradient_of(table, tokens, torch.float32, torch.ones(3, 4, device=DEVICE)).shape == table.shape
