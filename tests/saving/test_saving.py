import copy
import json
from collections import OrderedDict

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.optim.swa_utils import AveragedModel

from compressm import PerChannel, TargetOrder, compress_, load_model, save_model
from compressm.adapters import write
from compressm.compression import SavingError, savable, save_checkpoint
from compressm.layers import LRU, S4D, S5, ZOH, Bilinear, Inv, Legs, Mamba
from compressm.models import (
    BatchNorm,
    Block,
    LanguageModel,
    LastStep,
    LayerNorm,
    MeanPooling,
    NoNorm,
    OneMask,
    PerElement,
    RunningNorm,
    SequenceClassifier,
)
from compressm.ops import Path

OPTIONS = {
    LRU: [{}, {"r_min": 0.5, "r_max": 0.7, "max_phase": 1.0, "path": Path.SCAN}],
    S5: [{}, {"discretisation": Bilinear(), "step_min": 0.01, "path": Path.CHUNKED}],
    S4D: [{"initialisation": Legs()}, {"initialisation": Inv(), "discretisation": Bilinear()}, {"step_max": 0.5}],
}


def cut(layer, order):
    """As a cut leaves it: smaller values in the same parameters."""
    other = type(layer)(layer.width, order)
    write(layer, {name: getattr(other, name).detach().double() for name in layer.STATE_AXES})


def classifier(layer=LRU, **options):
    given = {"depth": 2, "width": 4, "order": 6, "inputs": 2, "classes": 3} | options
    return SequenceClassifier(layer, **given)


def inputs_of(model):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, (2, 7), generator=generator)
    if isinstance(model, LanguageModel):
        return tokens
    if isinstance(model, SequenceClassifier):
        x = tokens if model.encoder.__class__.__name__ == "EmbeddingEncoder" else None
        x = torch.randn(2, 7, 2, generator=generator) if x is None else x
        return x if model.towers == 1 else torch.stack([x, x.flip(1)], dim=1)
    return torch.randn(2, 7, model.width, generator=generator)


def output(model):
    x = inputs_of(model)
    dtype = next(model.parameters()).dtype
    y = copy.deepcopy(model).eval()(x.to(dtype) if x.is_floating_point() else x)
    return y[0] if isinstance(y, tuple) else y


def check_round_trip(model, path):
    save_model(model, path)
    loaded = load_model(path)
    check_same_state(loaded, model)
    assert torch.equal(output(loaded), output(model))
    return loaded


def check_same_state(one, other):
    here, there = one.state_dict(), other.state_dict()
    assert list(here) == list(there)
    for name, value in here.items():
        assert value.dtype == there[name].dtype
        assert torch.equal(value, there[name]), name
    assert [p.requires_grad for p in one.parameters()] == [p.requires_grad for p in other.parameters()]
    assert repr(one) == repr(other)


@st.composite
def models(draw):
    """Any model of ours, its layers at orders of their own."""
    kind = draw(st.sampled_from(list(OPTIONS)))
    given = {
        "depth": draw(st.integers(1, 3)),
        "width": draw(st.integers(1, 4)),
        "order": draw(st.integers(1, 5)),
        "norm": draw(st.sampled_from([BatchNorm(), BatchNorm(0.3, affine=False), LayerNorm(affine=False), NoNorm()])),
        "dropout": draw(st.sampled_from([PerElement(0.0), PerElement(0.25), OneMask(0.1)])),
        "layer_options": draw(st.sampled_from([None, *OPTIONS[kind]])),
    }
    if draw(st.booleans()):
        model = LanguageModel(kind, vocabulary=5, tied=draw(st.booleans()), **given)
    else:
        reads = draw(st.sampled_from([{"inputs": 2}, {"vocabulary": 5}]))
        pooling = draw(st.sampled_from([MeanPooling(), LastStep()]))
        model = SequenceClassifier(kind, classes=2, towers=draw(st.integers(1, 2)), pooling=pooling, **reads, **given)
    for block in model.blocks:
        cut(block.ssm, draw(st.integers(1, 9)))
    return model.to(draw(st.sampled_from([torch.float32, torch.float64])))


@settings(max_examples=15)
@given(model=models())
def test_any_model_comes_back_as_it_was(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    loaded = check_round_trip(model, path)
    orders = {f"blocks.{k}.ssm": block.ssm.order for k, block in enumerate(model.blocks)}
    assert {f"blocks.{k}.ssm": block.ssm.order for k, block in enumerate(loaded.blocks)} == orders
    assert json.loads((path / "config.json").read_text())["orders"] == orders


@pytest.mark.parametrize(("kind", "options"), [(kind, given) for kind in OPTIONS for given in OPTIONS[kind]])
def test_a_bare_layer_comes_back_with_its_options(kind, options, tmp_path):
    layer = kind(3, 8, **options)
    cut(layer, 5)
    loaded = check_round_trip(layer, tmp_path / "layer")
    assert loaded.order == 5
    assert loaded.path is layer.path
    assert getattr(loaded, "discretisation", None) == options.get("discretisation", None if kind is LRU else ZOH())


def test_eigenvectors_to_begin_with_are_not_computed_again(tmp_path, monkeypatch):
    """HiPPO's take seconds a layer at order 384."""
    save_model(classifier(S5), tmp_path)
    eigh = torch.linalg.eigh
    seen = []
    monkeypatch.setattr(torch.linalg, "eigh", lambda A: seen.append(A.device.type) or eigh(A))
    load_model(tmp_path)
    assert set(seen) == {"meta"}


def test_layers_come_back_at_orders_of_their_own(tmp_path):
    model = classifier(LRU, width=8, order=384)
    for block, order in zip(model.blocks, (13, 161), strict=True):
        cut(block.ssm, order)
    loaded = check_round_trip(model, tmp_path)
    assert [block.ssm.order for block in loaded.blocks] == [13, 161]


def test_statistics_of_batch_norm_are_kept(tmp_path):
    model = classifier()
    for _ in range(3):
        model(inputs_of(model))
    loaded = check_round_trip(model, tmp_path)
    assert loaded.blocks[0].norm.num_batches_tracked == 3
    assert (loaded.blocks[0].norm.running_mean != 0).any()


@pytest.mark.parametrize("training", [True, False])
def test_loaded_models_are_ready_to_evaluate_whatever_mode_they_were_saved_in(training, tmp_path):
    save_model(classifier().train(training), tmp_path)
    assert not any(module.training for module in load_model(tmp_path).modules())


def test_a_model_that_is_loaded_in_inference_mode_can_be_trained(tmp_path):
    model = SequenceClassifier(LRU, depth=1, width=3, order=4, inputs=2, classes=2)
    save_model(model, tmp_path)
    with torch.inference_mode():
        loaded = load_model(tmp_path)
    loaded.train()(torch.randn(4, 5, 2)).sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_a_loaded_model_trains_on_as_the_saved_one_would(tmp_path):
    model = classifier(dropout=PerElement(0.3))
    save_model(model, tmp_path)
    loaded = load_model(tmp_path).train()
    for each in (model, loaded):
        torch.manual_seed(3)
        optimizer = torch.optim.Adam(each.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            each(inputs_of(each)).square().sum().backward()
            optimizer.step()
    check_same_state(loaded, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept_also_mixed_ones(dtype, tmp_path):
    model = classifier()
    model.blocks[0].to(dtype)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    check_same_state(loaded, model)
    assert loaded.blocks[0].ssm.B_re.dtype == dtype
    assert loaded.head.weight.dtype == torch.float32


def test_another_dtype_is_that_of_the_model_converted(tmp_path):
    model = classifier()
    save_model(model, tmp_path)
    check_same_state(load_model(tmp_path, device="cpu", dtype=torch.bfloat16), model.bfloat16())


def test_frozen_parameters_stay_frozen(tmp_path):
    model = classifier()
    model.encoder.requires_grad_(False)
    assert not check_round_trip(model, tmp_path).encoder.linear.weight.requires_grad


def test_a_module_used_twice_is_used_twice(tmp_path):
    model = classifier()
    model.blocks[1].ssm = model.blocks[0].ssm
    model.blocks[1].norm = model.blocks[0].norm
    loaded = check_round_trip(model, tmp_path)
    assert loaded.blocks[1].ssm is loaded.blocks[0].ssm
    assert loaded.blocks[1].norm.running_mean is loaded.blocks[0].norm.running_mean
    assert len(list(loaded.parameters())) == len(list(model.parameters()))


def test_a_parameter_in_two_places_is_one_parameter(tmp_path):
    model = LanguageModel(LRU, vocabulary=5, depth=1, width=4, order=3, tied=False)
    model.head.weight = model.encoder.embedding.weight
    loaded = check_round_trip(model, tmp_path)
    assert loaded.head.weight is loaded.encoder.embedding.weight
    assert load_model(tmp_path, dtype=torch.float64).head.weight.dtype == torch.float64


def test_what_was_put_into_the_model_after_it_was_built_is_saved(tmp_path):
    model = classifier(S5)
    model.blocks[1].ssm = LRU(4, 5, r_min=0.3, path=Path.LOOP)
    cut(model.blocks[1].ssm, 3)
    model.head = nn.Linear(4, 9, bias=False)
    model.pooling = LastStep()
    model.blocks[0].dropout.rate = 0.4
    model.blocks[0].ssm.path = Path.CONVOLUTION
    loaded = check_round_trip(model, tmp_path)
    assert isinstance(loaded.blocks[1].ssm, LRU)
    assert loaded.blocks[1].ssm.path is Path.LOOP
    assert loaded.blocks[0].ssm.path is Path.CONVOLUTION
    assert loaded.blocks[0].dropout.rate == 0.4
    check_round_trip(loaded, tmp_path / "again")


HEADS = {
    "a perceptron": lambda: nn.Sequential(
        nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 3)
    ),
    "with names": lambda: nn.Sequential(OrderedDict(second=nn.Linear(4, 4), first=nn.ReLU(inplace=True))),
    "inside another": lambda: nn.Sequential(nn.Sequential(nn.Identity(), nn.Linear(4, 5)), nn.SiLU(), nn.Tanh()),
    "without anything": lambda: nn.Sequential(),
    "norms without weights": lambda: nn.Sequential(nn.LayerNorm(4, bias=False), nn.LayerNorm(4, 0.1, False)),
}


@pytest.mark.parametrize("name", HEADS)
def test_modules_in_a_row_are_saved(name, tmp_path):
    model = classifier()
    model.head = HEADS[name]()
    loaded = check_round_trip(model, tmp_path)
    assert repr(loaded) == repr(model)
    save_model(model.head, tmp_path / "head")
    assert repr(load_model(tmp_path / "head")) == repr(model.head)


@savable
class Convolved(nn.Module):
    """Has modules in a row of which one is not known."""

    def __init__(self):
        super().__init__()
        self.width = 4
        self.row = nn.Sequential(nn.Conv1d(7, 7, 1), nn.Linear(4, 4))

    def forward(self, x):
        return self.row(x)


def test_a_row_may_hold_what_only_its_constructor_knows_and_take_more(tmp_path):
    check_round_trip(Convolved(), tmp_path)
    longer = Convolved()
    longer.row.append(nn.Linear(4, 2))
    assert len(check_round_trip(longer, tmp_path / "longer").row) == 3


def test_a_row_that_became_shorter_or_was_turned_round_is_that(tmp_path):
    model = classifier()
    model.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 5))
    loaded = check_round_trip(model, tmp_path)
    del loaded.head[1]
    check_round_trip(loaded, tmp_path / "shorter")
    loaded.head = nn.Sequential(OrderedDict([("1", loaded.head[1]), ("0", nn.Linear(5, 5))]))
    check_round_trip(loaded, tmp_path / "turned")


@pytest.mark.parametrize(
    "norm", [BatchNorm(0.2, affine=False), RunningNorm(through=True), LayerNorm(), NoNorm()], ids=str
)
def test_blocks_that_were_added_are_saved(norm, tmp_path):
    model = classifier(S5, norm=norm, dropout=OneMask(0.3), gelu="tanh")
    model.blocks.append(copy.deepcopy(model.blocks[1]))
    model.blocks.append(Block(LRU(4, 5)))
    cut(model.blocks[2].ssm, 2)
    loaded = check_round_trip(model, tmp_path)
    assert [block.ssm.order for block in loaded.blocks] == [6, 6, 2, 5]
    assert [block.gelu for block in loaded.blocks] == ["tanh"] * 3 + ["exact"]
    assert [vars(block.norm).get("through") for block in loaded.blocks[:3]] == [getattr(norm, "through", None)] * 3
    assert repr(loaded) == repr(model)


def wrapped_by_process_group(model, path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/meet", rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model)


@pytest.mark.parametrize("wrap", ["data_parallel", "distributed", "compile", "compiled_block", "average"])
def test_wrappers_are_looked_through(wrap, tmp_path):
    model = classifier()
    cut(model.blocks[0].ssm, 2)
    before = copy.deepcopy(model)
    if wrap == "compiled_block":
        model.blocks[0] = torch.compile(model.blocks[0])
    wrapped = {
        "data_parallel": nn.DataParallel,
        "distributed": lambda model: wrapped_by_process_group(model, tmp_path),
        "compile": torch.compile,
        "compiled_block": lambda model: model,
        "average": AveragedModel,
    }[wrap](model)
    try:
        save_model(wrapped, tmp_path / "model")
    finally:
        if wrap == "distributed":
            torch.distributed.destroy_process_group()
    check_same_state(load_model(tmp_path / "model"), before)


def test_saving_and_loading_draw_no_random_numbers(tmp_path):
    model = classifier(S5)
    before = torch.get_rng_state()
    save_model(model, tmp_path)
    load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loaded_model_does_not_depend_on_the_file(tmp_path):
    save_model(classifier(), tmp_path)
    loaded = load_model(tmp_path)
    before = copy.deepcopy(loaded.state_dict())
    save_model(classifier(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())


def test_one_file_is_a_whole_model(tmp_path):
    model = classifier()
    check_round_trip(model, tmp_path / "small.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["small.safetensors"]
    save_model(model, tmp_path / "folder")
    check_same_state(load_model(tmp_path / "folder" / "model.safetensors"), model)


def test_loading_needs_no_pickle(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("unpickled")

    save_model(classifier(), tmp_path)
    for name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"):
        monkeypatch.setattr(name, refuse)
    assert load_model(tmp_path).blocks[0].ssm.order == 6


def test_two_loads_and_saves_write_the_same_bytes(tmp_path):
    save_model(classifier(S4D), tmp_path / "one")
    save_model(load_model(tmp_path / "one"), tmp_path / "two")
    assert (tmp_path / "one" / "config.json").read_text() == (tmp_path / "two" / "config.json").read_text()


@pytest.mark.parametrize("shared", ["layer", "block"])
def test_a_layer_that_is_used_twice_is_saved_with_what_a_cut_added_to_it(shared, tmp_path):
    model = classifier(Mamba)
    if shared == "layer":
        model.blocks[1].ssm = model.blocks[0].ssm
    else:
        model.blocks[1] = model.blocks[0]
    options = {"selective": PerChannel(), "calibrate": lambda model: model(inputs_of(model)), "gate": 1.0}
    compress_(model, keep=TargetOrder(3), **options)
    loaded = check_round_trip(model, tmp_path / "m")
    assert loaded.blocks[0].ssm is loaded.blocks[1].ssm
    assert loaded.blocks[0].ssm.B_map is not None


def test_a_tensor_whose_name_without_wrappers_is_that_of_another_is_not_saved(tmp_path):
    model = AveragedModel(AveragedModel(classifier()))
    with pytest.raises(SavingError, match=r"n_averaged and module\.n_averaged have one name, n_averaged"):
        save_checkpoint(tmp_path / "c", model=model)
    assert not (tmp_path / "c").exists()
