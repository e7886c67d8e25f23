"""A stream gives what `forward` gives, step by step, whatever it computed in advance."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compressm.layers import LRU, S4, S4D, S5, Bilinear, LinOSS, Mamba, SequenceError
from compressm.layers.base import SSMLayer
from compressm.models import (
    BatchNorm,
    Block,
    Blocks,
    EveryStep,
    LanguageModel,
    LastStep,
    LayerNorm,
    MeanPooling,
    MixerBlock,
    NoNorm,
    RMSNorm,
    RunningNorm,
    SequenceClassifier,
)
from compressm.running import Stream
from tests.layers.test_channel_maps import make as mamba_with_maps

LAYERS = (LRU, S5, S4, S4D, LinOSS, Mamba)
NORMS = (LayerNorm(), LayerNorm(affine=False), BatchNorm(), RunningNorm(), RMSNorm(), RMSNorm(affine=False), NoNorm())
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-11}
BATCH, WIDTH, VOCABULARY = 3, 6, 11


def language_model(layer=LRU, dtype=torch.float64, order=7, depth=2, norm=None, **options):
    """A language model whose norms do something, in evaluation mode."""
    torch.manual_seed(0)
    options |= {} if norm is None else {"norm": norm}
    model = LanguageModel(layer, vocabulary=VOCABULARY, depth=depth, width=WIDTH, order=order, **options)
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ in ("StepNorm", "StepRMSNorm", "PaddedBatchNorm") and module.weight is not None:
                module.weight.uniform_(0.5, 2)
                if getattr(module, "bias", None) is not None:
                    module.bias.normal_()
    model.to(dtype)(tokens())  # moves running averages
    return model.eval()


def tokens(length=20, batch=BATCH):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def numbers(length=20, width=WIDTH, dtype=torch.float64):
    return torch.randn(BATCH, length, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def streamed(stream, x):
    return torch.stack([stream(x[:, t]) for t in range(x.shape[1])], dim=1)


def check_close(one, other, dtype=torch.float64):
    tolerance = TOLERANCE[dtype] * max(1.0, float(other.detach().abs().max()))
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_language_model_streams_what_forward_gives(layer, norm, dtype):
    model, x = language_model(layer, dtype, norm=norm), tokens()
    logits, state = model(x)
    stream = Stream(model, BATCH)
    check_close(streamed(stream, x), logits, dtype)
    for mine, theirs in zip(stream.state, state, strict=True):
        check_close(mine, theirs, dtype)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_model_in_half_precision_is_streamed_at_least_as_exactly_as_forward(layer):
    model, x = language_model(layer, torch.bfloat16), tokens()
    exact = copy.deepcopy(model).double()(x)[0]
    stream = Stream(model, BATCH)
    y = streamed(stream, x)
    assert y.dtype == torch.bfloat16
    assert (y - exact).abs().max() <= 0.004 * exact.abs().max()  # the rounding of the output alone
    assert (y - exact).norm() <= (model(x)[0] - exact).norm()
    assert all(s.dtype == like.dtype for s, like in zip(stream.state, model.initial_state(BATCH), strict=True))


@pytest.mark.parametrize("pooling", [MeanPooling(), LastStep(), EveryStep()], ids=str)
@pytest.mark.parametrize("layer", [S5, Mamba])
def test_a_classifier_streams_its_running_answer(layer, pooling):
    torch.manual_seed(0)
    sizes = {"depth": 2, "width": WIDTH, "order": 4, "classes": 3, "inputs": 2}
    model, x = SequenceClassifier(layer, **sizes, pooling=pooling).double().eval(), numbers(width=2)
    stream, state = Stream(model, BATCH), model.initial_state(BATCH)
    for t in range(x.shape[1]):
        running, (answer, state) = stream(x[:, t]), model.step(x[:, t], state)
        check_close(running, answer)
        whole = model(x[:, : t + 1])
        check_close(running, whole[:, -1] if isinstance(pooling, EveryStep) else whole)
    for mine, theirs in zip((*stream.state.layers, *stream.state[1:]), (*state.layers, *state[1:]), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_gelu_may_be_its_approximation_by_tanh(dtype):
    sizes = {"depth": 2, "width": WIDTH, "order": 3, "inputs": 2, "classes": 3}
    torch.manual_seed(0)
    model, x = SequenceClassifier(LRU, **sizes, gelu="tanh").to(dtype), 5 * numbers(width=2, dtype=dtype)
    model(x)
    check_close(streamed(Stream(model.eval(), BATCH), x)[:, -1], model(x), dtype)


def test_a_classifier_of_tokens_is_streamed_too():
    torch.manual_seed(0)
    sizes = {"depth": 1, "width": WIDTH, "order": 4, "classes": 3, "vocabulary": VOCABULARY}
    model = SequenceClassifier(LRU, **sizes).double().eval()
    check_close(streamed(Stream(model, BATCH), tokens())[:, -1], model(tokens()))


@pytest.mark.parametrize("order", [1, 2, 5])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_alone_is_streamed(layer, order):
    torch.manual_seed(0)
    model, x = layer(WIDTH, order=order).double(), numbers()
    stream = Stream(model, BATCH)
    check_close(streamed(stream, x), model(x)[0].detach())
    check_close(stream.state, model(x)[1].detach())


@pytest.mark.parametrize(
    "model",
    [
        Mamba(WIDTH, order=3, conv_width=1, bias=True, conv_bias=False),
        Mamba(WIDTH, order=3, expand=3, conv_width=2, dt_rank=4, bias=True),
        S5(WIDTH, order=3, discretisation=Bilinear()),
        *(mamba_with_maps(kind, width=WIDTH) for kind in ("real", "complex")),
        Block(LRU(WIDTH, order=3)),
        MixerBlock(LRU(WIDTH, order=3), norm=RMSNorm()),
        MixerBlock(Mamba(WIDTH, order=3), norm=NoNorm()),
        Blocks([Block(LRU(WIDTH, order=2)), MixerBlock(Mamba(WIDTH, order=3)), Block(S4D(WIDTH, order=5))]),
    ],
    ids=lambda model: type(model).__name__,
)
def test_forms_and_stacks_are_streamed(model):
    model, x = copy.deepcopy(model).double().eval(), numbers()
    with torch.no_grad():
        y, state = model(x)
    stream = Stream(model, BATCH)
    check_close(streamed(stream, x), y)
    for mine, theirs in zip(stream.state, state, strict=True):
        check_close(mine, theirs)
    assert torch.equal(x, numbers())


@pytest.mark.parametrize("layer", [LRU, S4D])
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_a_skip_of_any_size_is_streamed(layer, value):
    model = language_model(layer)
    with torch.no_grad():
        model.blocks[0].ssm.D[::2] = value
    check_close(streamed(Stream(model, BATCH), tokens()), model(tokens())[0])


class Leaky(SSMLayer):
    """Somebody's own layer."""

    def __init__(self):
        super().__init__(WIDTH, 1)
        self.decay = torch.nn.Parameter(torch.tensor(0.5))

    order = property(lambda self: 1)

    def shape_at(self, name, order):
        return ()

    def forward(self, x, state=None, lengths=None, *, keep_state=True):
        h, ys = self.initial_state(len(x)) if state is None else state, []
        for t in range(x.shape[1]):
            y, h = self.step(x[:, t], h)
            ys.append(y)
        return torch.stack(ys, dim=1), h

    def step(self, x, state):
        h = self.decay * state + x
        return h.tanh(), h

    def initial_state(self, batch):
        return self.decay.new_zeros(batch, WIDTH)

    def dynamics(self):
        yield self.decay


def test_a_layer_of_somebody_else_is_streamed_by_its_step():
    model = Blocks([MixerBlock(Leaky(), norm=LayerNorm()), Block(S5(WIDTH, order=2))]).double().eval()
    stream = Stream(model, BATCH)
    y, state = model(numbers())
    check_close(streamed(stream, numbers()), y.detach())
    check_close(stream.state[0], state[0].detach())


def test_parts_that_compute_more_than_their_weights_are_called():
    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    layer = Mamba(WIDTH, order=2)
    layer.in_proj = Adapted(WIDTH, 4 * WIDTH, bias=False)
    layer.double()
    check_close(streamed(Stream(layer, BATCH), numbers()), layer(numbers())[0].detach())


@pytest.mark.parametrize("layer", LAYERS)
def test_states_go_from_forward_to_the_stream_and_on_to_step(layer):
    model, x = language_model(layer), tokens()
    logits, _ = model(x)
    stream = Stream(model, BATCH)
    stream.load_state(model(x[:, :8])[1])
    check_close(streamed(stream, x[:, 8:12]), logits[:, 8:12])
    state = stream.state
    stream(x[:, 0])  # the state that was taken is a copy
    for t in range(12, 20):
        y, state = model.step(x[:, t], state)
        check_close(y, logits[:, t])


@pytest.mark.parametrize("layer", LAYERS)
def test_reset_begins_only_the_given_sequences_anew(layer):
    model, x = language_model(layer), tokens()
    stream, other = Stream(model, BATCH), Stream(model, BATCH)
    streamed(stream, x[:, :5]), streamed(other, x[:, :5])
    fresh, on = Stream(model, BATCH)(x[:, 5]), other(x[:, 5])
    stream.reset([0, 2])
    y = stream(x[:, 5])
    check_close(y[[0, 2]], fresh[[0, 2]])
    check_close(y[1], on[1])
    for rows in (1, slice(1, 2), torch.tensor([1]), torch.tensor([False, True, False])):
        stream.reset(rows)
        assert not stream.state[0][1].any()
        assert stream.state[0][0].any()
    stream.reset()
    check_close(stream(x[:, 5]), fresh)


def test_a_classifier_resets_what_it_has_pooled():
    torch.manual_seed(0)
    model = SequenceClassifier(LRU, depth=1, width=WIDTH, order=3, classes=3, inputs=WIDTH).double().eval()
    stream = Stream(model, BATCH)
    first = stream(numbers()[:, 0])
    streamed(stream, numbers())
    stream.reset(1)
    assert stream.state.steps.tolist() == [21, 0, 21]
    check_close(stream(numbers()[:, 0])[1], first[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_state_of_a_classifier_keeps_its_mean_in_float32_or_better(dtype):
    torch.manual_seed(0)
    model = SequenceClassifier(LRU, depth=1, width=WIDTH, order=3, classes=3, inputs=2, norm=LayerNorm())
    model = model.to(dtype).eval()
    x = numbers(600, 2, dtype)
    x[:, 300:] += 3
    stream, held = Stream(model, BATCH), Stream(model, BATCH)
    for t in range(x.shape[1]):
        stream.load_state(stream.state)
        y, kept = stream(x[:, t]), held(x[:, t])
    assert stream.state.pooled.dtype == model.initial_state(BATCH).pooled.dtype
    assert torch.equal(y, kept)


class Calls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_a_token_takes_eight_operations_a_block():
    calls = []
    for depth in (1, 5):
        stream, x = Stream(language_model(depth=depth, dtype=torch.float32), BATCH), tokens()[:, 0]
        with Calls() as seen:
            stream(x)
        calls.append(seen.count)
    # Norm, drive, readout, two for GELU, gate product, sigmoid, residual; and for all blocks embedding, poles,
    # norm, head, copy.
    assert calls[1] - calls[0] == 4 * 8
    assert calls[0] <= 8 + 5


def test_all_states_are_in_one_buffer():
    stream = Stream(language_model(Mamba), BATCH)
    program = stream._program
    assert program.buffer.is_contiguous()
    assert program.buffer.numel() == sum(state.numel() for state in stream.state)
    assert {s.state.untyped_storage().data_ptr() for s in program.steppers} == {program.buffer.data_ptr()}


def test_the_output_is_an_ordinary_tensor_of_its_own():
    stream = Stream(language_model(), BATCH)
    first = stream(tokens()[:, 0])
    kept = first.clone()
    second = stream(tokens()[:, 1])
    assert torch.equal(first, kept)
    assert not second.requires_grad
    assert not second.is_inference()
    second[:, 0] = -torch.inf


def test_modes_of_the_caller_change_nothing():
    model = language_model().float().train()
    expected = streamed(Stream(model, BATCH), tokens())
    with torch.inference_mode():
        stream = Stream(model, BATCH)
    assert torch.equal(streamed(stream, tokens()), expected)
    for mode in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.no_grad()):
        with mode:
            stream.reset()
            assert torch.equal(streamed(stream, tokens()), expected)
            with torch.inference_mode(False):
                state = stream.state
            stream.load_state(state)


def test_inputs_that_need_gradients_are_read_without():
    layer = LRU(WIDTH, order=2).double()
    x = numbers().requires_grad_()
    assert not Stream(layer, BATCH)(x[:, 0]).requires_grad


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_tokens_of_other_integers_are_read(dtype):
    model = language_model()
    check_close(streamed(Stream(model, BATCH), tokens().to(dtype)), model(tokens())[0])


def test_wrong_inputs_are_refused_and_leave_the_state():
    stream = Stream(language_model(), BATCH)
    stream(tokens()[:, 0])
    before = stream.state
    for x, said in (
        (tokens()[:2, 0], r"x is \(2,\), expected a tensor of shape \(3,\)"),
        (3, "x is a int"),
        (torch.zeros(BATCH), "x has dtype torch.float32, expected integers"),
        (torch.full((BATCH,), VOCABULARY), "tokens run from 11 to 11, expected 0 to 10"),
        (torch.full((BATCH,), -1), "tokens run from -1 to -1, expected 0 to 10"),
        (torch.zeros(BATCH, dtype=torch.int64, device="meta"), "x is on meta, expected cpu"),
    ):
        with pytest.raises(SequenceError, match=said):
            stream(x)
    with pytest.raises(SequenceError, match=r"x has dtype torch.float32, expected torch.float64"):
        Stream(LRU(WIDTH, order=2).double(), BATCH)(numbers(dtype=torch.float32)[:, 0])
    assert all(torch.equal(a, b) for a, b in zip(stream.state, before, strict=True))


def test_wrong_states_and_rows_are_refused_before_anything_is_written():
    model = language_model()
    stream, other = Stream(model, BATCH), language_model(order=5)
    stream(tokens()[:, 0])
    before = stream.state
    for state, said in (
        (None, "state is a NoneType, expected one tensor for each of 2 blocks"),
        (before[:1], "state is 1 tensors"),
        ((before[0] + 1, other.initial_state(BATCH)[1]), r"state is \(3, 2, 5\), expected \(3, 2, 7\)"),
        (model.initial_state(2), r"state is \(2, 2, 7\), expected \(3, 2, 7\)"),
    ):
        with pytest.raises(SequenceError, match=said):
            stream.load_state(state)
    for rows in (3, [0, 7], "a", 1.5, [0.5], torch.tensor([0.5])):
        with pytest.raises(SequenceError, match="expected places from 0 to 2"):
            stream.reset(rows)
    assert all(torch.equal(a, b) for a, b in zip(stream.state, before, strict=True))
    classifier = SequenceClassifier(LRU, depth=1, width=WIDTH, order=3, classes=3, inputs=2)
    with pytest.raises(SequenceError, match="state is a tuple, expected that of initial_state"):
        Stream(classifier, BATCH).load_state(())
    with pytest.raises(SequenceError, match=r"pooled is of shape \(2, 6\), expected \(3, 6\)"):
        Stream(classifier, BATCH).load_state(classifier.initial_state(BATCH)._replace(pooled=torch.zeros(2, WIDTH)))


def test_what_cannot_be_streamed_is_refused_by_name():
    for model, said in (
        (torch.nn.Linear(2, 2), "model is a Linear, expected a LanguageModel"),
        ("model", "model is a str"),
        (Blocks([]), "the parameters are on"),
        (LRU(2, order=2).to("meta"), "the parameters are on"),
    ):
        with pytest.raises(SequenceError, match=said):
            Stream(model)
    sizes = {"depth": 1, "width": WIDTH, "order": 3, "classes": 3, "inputs": 2}
    with pytest.raises(SequenceError, match="towers is 2"):
        Stream(SequenceClassifier(LRU, **sizes, towers=2))
    for batch in (0, True, 1.0, "1"):
        with pytest.raises(SequenceError, match="batch is"):
            Stream(LRU(2, order=2), batch)
    broken = LRU(2, order=2)
    with torch.no_grad():
        broken.nu_log[0] = torch.nan
    with pytest.raises(SequenceError, match="nu_log holds 1 entries that are not finite"):
        Stream(broken)
