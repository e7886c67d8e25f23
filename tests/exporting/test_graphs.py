"""The graphs that are exported compute what the models do: steps from any state, sequences of any length."""

import pytest
import torch

import compressm as cs
from compressm.exporting import ExportError, Loaded, TorchExport
from compressm.exporting.graphs import require_exportable
from compressm.exporting.recurrences import CHUNK, in_chunks, in_one
from compressm.exporting.writing import Case
from compressm.layers import LRU, S4D, S5, Bilinear, DampedIMEX, Mamba, SequenceError
from compressm.models import (
    BatchNorm,
    Block,
    Blocks,
    EveryStep,
    LastStep,
    LayerNorm,
    MeanPooling,
    MixerBlock,
    NoNorm,
    RMSNorm,
    RunningNorm,
    SequenceClassifier,
)
from tests.exporting.models import INPUTS, LAYERS, MODELS, build


def difference(model, what, steps=40):
    """Of the graph, run by torch itself, from the model."""
    case = Case(model, what, None, steps)
    with torch.no_grad():
        run = Loaded(
            lambda given: list(found) if isinstance(found := case.graph(*given), tuple) else [found], case.metadata()
        )
        return case.difference(run, TorchExport())


@pytest.mark.parametrize("what", ["step", "forward"])
@pytest.mark.parametrize("cut", [None, cs.Baked()], ids=["whole", "cut"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layer", LAYERS)
def test_graphs_of_all_layers_and_models_compute_what_the_model_does(layer, model, cut, what):
    assert difference(build(layer, model, cut=cut), what) < 5e-6


@pytest.mark.parametrize("what", ["step", "forward"])
@pytest.mark.parametrize(
    ("cut", "rates"), [(cs.PerChannel("mean"), "complex"), (cs.PerChannel(two_sided=False), "real")], ids=str
)
def test_graphs_have_the_maps_of_a_cut_by_channel(cut, rates, what):
    model = build("Mamba", "language", cut=cut)
    assert f"own {rates} states a channel" in str(model.blocks[0].ssm)
    assert difference(model, what) < 5e-6


@pytest.mark.parametrize("what", ["step", "forward"])
@pytest.mark.parametrize("pooling", [MeanPooling(), LastStep(), EveryStep()], ids=str)
@pytest.mark.parametrize("norm", [BatchNorm(), RunningNorm(affine=True), LayerNorm(), RMSNorm(), NoNorm()], ids=str)
def test_graphs_have_every_norm_and_pooling(norm, pooling, what):
    assert difference(build("LRU", "classifier", norm=norm, pooling=pooling, depth=1), what) < 5e-6


@pytest.mark.parametrize("what", ["step", "forward"])
def test_graphs_have_the_gelu_of_the_model(what):
    assert difference(build("LRU", "classifier", gelu="tanh", depth=1), what) < 5e-6


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("what", ["step", "forward"])
def test_an_order_of_one_is_no_special_case(layer, what):
    assert difference(build(layer, "language", order=1, depth=1, tied=False), what) < 5e-6


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("steps", [1, 2, 31, 32, 33, 64, 300])
def test_sequences_of_any_length_are_read_to_their_ends(layer, steps):
    assert difference(build(layer, "language", depth=1, order=2), "forward", steps) < 5e-6


@pytest.mark.parametrize("layer", ["LRU", "S4D"])
def test_slow_poles_are_carried_over_thousands_of_steps(layer):
    model = build(layer, "classifier", depth=1, order=2, pooling=LastStep())
    with torch.no_grad():
        if layer == "LRU":
            model.blocks[0].ssm.nu_log.fill_(-9.0)
            model.blocks[0].ssm.theta_log.fill_(-6.0)  # the layer's own phases are rounded to float32
        else:
            model.blocks[0].ssm.log_step.fill_(-9.0)
    assert difference(model, "forward", 5000) < 2e-5


def test_pairs_of_sequences_are_read_but_not_stepped():
    model = SequenceClassifier(LRU, depth=1, width=4, order=3, inputs=INPUTS, classes=2, towers=2)
    assert difference(model, "forward") < 5e-6
    with pytest.raises(SequenceError, match="a pair of sequences cannot be streamed"):
        Case(model, "step", None, 4)


@pytest.mark.parametrize("what", ["step", "forward"])
def test_parts_of_models_have_graphs_too(what):
    torch.manual_seed(0)
    kinds = [LRU(4, 3), S5(4, 3, discretisation=Bilinear()), S4D(4, 3), Mamba(4, 3, bias=True, conv_bias=False)]
    blocks = [Block(LRU(4, 3)), MixerBlock(Mamba(4, 3)), Blocks([Block(S5(4, 2)), MixerBlock(LRU(4, 3))])]
    for part in (*kinds, *blocks):
        assert difference(part, what) < 5e-6, type(part)


def test_a_skip_of_zero_divides_nothing():
    model = build("S5", "language")
    with torch.no_grad():
        model.blocks[0].ssm.D[:3] = 0
    assert difference(model, "step") < 5e-6


def test_a_forward_pass_ends_where_steps_can_go_on():
    model = build("Mamba", "classifier").eval()
    step, forward = (Case(model, what, None, 4).graph for what in ("step", "forward"))
    x, lengths = torch.randn(2, 9, INPUTS), torch.tensor([5, 9])
    with torch.no_grad():
        _, state = forward(x, lengths)
        y, _ = step(x[:, 0], state)
        expected = [model(torch.cat([x[k, :n], x[k, :1]])[None])[0] for k, n in enumerate((5, 9))]
    torch.testing.assert_close(y, torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_what_stands_in_padding_is_never_read():
    model = build("LRU", "classifier").eval()
    graph, x = Case(model, "forward", None, 4).graph, torch.randn(2, 9, INPUTS)
    lengths = torch.tensor([4, 9])
    spoilt = x.clone()
    spoilt[0, 4:] = torch.nan
    with torch.no_grad():
        torch.testing.assert_close(graph(spoilt, lengths), graph(x, lengths), rtol=0, atol=0)


def test_chunks_are_put_together_again():
    for length in (1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK):
        x = torch.randn(2, length, 3)
        assert in_chunks(x).shape == (2, length // CHUNK + 2, CHUNK, 3)
        torch.testing.assert_close(in_one(in_chunks(x), length), x, rtol=0, atol=0)


def test_a_layer_of_somebody_else_is_traced_as_it_is():
    class Lora(torch.nn.Linear):
        pass

    model = build("Mamba", "language", depth=1)
    own = model.blocks[0].ssm
    own.in_proj.__class__ = Lora
    assert difference(model, "step") < 5e-6


def test_numbers_that_are_not_finite_are_refused_by_name():
    model = build("LRU", "language")
    with torch.no_grad():
        model.blocks[1].ssm.nu_log[0] = torch.nan
    with pytest.raises(SequenceError, match=r"blocks\.1\.ssm\.nu_log holds 1 entries that are not finite"):
        Case(model, "step", None, 4)


def test_other_poolings_are_refused():
    model = build("LRU", "classifier")
    model.pooling = torch.nn.Identity()
    with pytest.raises(ExportError, match="expected one of MeanPooling, LastStep, EveryStep"):
        Case(model, "step", None, 4)


def without_averages(model):
    model.blocks[0].norm.running_mean = model.blocks[0].norm.running_var = None


def with_other(name, part):
    return lambda model: model.set_submodule(name, part)


@pytest.mark.parametrize(
    ("model", "change", "says"),
    [
        (
            "language",
            with_other("head", torch.nn.Identity()),
            r"the head is Identity\(\), expected the language model's",
        ),
        ("classifier", with_other("head", torch.nn.Identity()), r"the head is Identity\(\), expected the classifier's"),
        ("classifier", with_other("encoder", torch.nn.Identity()), "the encoder is a Identity, expected the model's"),
        ("classifier", without_averages, "a PaddedBatchNorm has no running averages, .*: build the model with them"),
        ("language", with_other("blocks.1", torch.nn.Identity()), "a block is a Identity, expected a Block or"),
        (
            "language",
            with_other("blocks.1.ssm", torch.nn.Linear(6, 6)),
            "the layer of a block is a Linear, expected an",
        ),
        ("classifier", with_other("blocks.0.norm", torch.nn.LayerNorm(6)), "a norm is a LayerNorm, expected one of"),
    ],
)
@pytest.mark.parametrize("what", ["step", "forward"])
def test_parts_that_no_graph_has_are_refused_by_name(model, change, says, what):
    model = build("LRU", model, **{"tied": False} if model == "language" else {})
    change(model)
    with pytest.raises((ExportError, SequenceError), match=says):
        Case(model, what, None, 4)


@pytest.mark.parametrize("what", ["step", "forward"])
def test_graphs_have_damped_oscillators(what):
    options = {"layer_options": {"scheme": DampedIMEX()}}
    for cut in (None, cs.Baked()):
        assert difference(build("LinOSS", "classifier", cut=cut, **options), what) < 5e-6


@pytest.mark.parametrize("what", ["step", "forward"])
@pytest.mark.parametrize("layer", LAYERS)
def test_graphs_have_the_zero_states_of_padding(layer, what):
    model = build(layer, "language", norm=RMSNorm(), cut=cs.Baked())
    cs.pad_orders_(model, 8)
    assert difference(model, what) < 5e-6


@pytest.mark.parametrize("what", ["step", "forward"])
@pytest.mark.parametrize("layer", LAYERS)
def test_graphs_in_float64_are_exact(layer, what):
    assert difference(build(layer, "classifier", gelu="exact" if layer == "Mamba" else "tanh").double(), what) < 1e-12


@pytest.mark.parametrize("what", ["step", "forward"])
def test_graphs_have_one_output_and_norms_that_gradients_go_through(what):
    torch.manual_seed(0)
    model = SequenceClassifier(S4D, depth=1, width=6, order=5, inputs=INPUTS, classes=1, norm=RunningNorm(through=True))
    model(torch.randn(3, 20, INPUTS))
    assert difference(model, what) < 5e-6


def test_a_model_without_values_is_refused():
    with pytest.raises(
        ExportError, match=r"encoder\.embedding\.weight is torch\.float32 on meta, expected floats with values"
    ):
        Case(build("LRU", "language").to("meta"), "step", None, 4)


def test_a_compiled_model_is_the_model_inside():
    model = build("LRU", "language")
    assert require_exportable(torch.compile(model)) is model
