"""What stands around a model: compilers, mixed precision, ties, frozen and computed weights, gradients, averages."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from compressm import inspect
from compressm.adapters import check_adapter
from compressm.compression import Random, Rollback, Smallest, load_checkpoint, save_checkpoint
from compressm.compression.compressor import Compressor, compress_
from compressm.compression.policies import KeepFraction, TargetOrder
from compressm.errors import CompressionError
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba
from compressm.models import SequenceClassifier
from compressm.running import Stream
from tests import unhooked

X, TARGETS = torch.randn(4, 20, 3, generator=torch.Generator().manual_seed(1)), torch.arange(4)


def make(kind=LRU, order=12, depth=2):
    torch.manual_seed(0)
    return SequenceClassifier(kind, depth=depth, width=4, order=order, inputs=3, classes=5)


def orders(model):
    return [block.ssm.order for block in model.blocks]


def step(model, optimizer):
    optimizer.zero_grad()
    loss = cross_entropy(model(X), TARGETS)
    loss.backward()
    optimizer.step()
    return loss.item()


COMPILED = """
import json, torch
import compressm as cs

x = torch.ones(4, 20, 3).cumsum(1) / 20

def run(wrap):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = cs.models.SequenceClassifier(
        cs.layers.LRU, depth=2, width=4, order=12, inputs=3, classes=5, dropout=cs.models.PerElement(0.0)
    )
    compiled = wrap(model)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    compressor = cs.Compressor(
        compiled, optimizer, when=[2, 3], keep=cs.KeepFraction(0.5), calibrate=lambda model: model(torch.rand(4, 20, 3))
    )
    losses, cuts = [], []
    for step in range(1, 6):
        optimizer.zero_grad()
        loss = compiled(x).logsumexp(1).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        torch.manual_seed(step)
        cuts += [str(cut) for cut in compressor.step(step)]
    return {"losses": losses, "cuts": cuts, "orders": [block.ssm.order for block in model.blocks]}

def in_place(model):
    model.compile(backend="eager")
    return model

def wrapped(model):
    return torch.compile(model, backend="eager")

WAYS = {"eager": lambda model: model, "wrapped": wrapped, "in place": in_place}
print(json.dumps({name: run(wrap) for name, wrap in WAYS.items()}))
"""


def test_a_compiled_model_is_cut_as_an_eager_one_and_goes_on():
    """Also calibrated: hooks are seen though the model was compiled without them."""
    found = json.loads(unhooked.run(COMPILED))
    for way in ("wrapped", "in place"):
        assert found[way]["orders"] == [3, 3]
        assert found[way]["cuts"] == found["eager"]["cuts"]
        assert found[way]["losses"] == pytest.approx(found["eager"]["losses"], rel=1e-4)


@pytest.mark.parametrize("kind", [LRU, S5, S4, S4D, LinOSS])
def test_mixed_precision_with_a_scaler_goes_on(kind):
    model = make(kind)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu")
    compressor = Compressor(model, optimizer, when=[2], keep=KeepFraction(0.5), calibrate=lambda model: model(X))
    for number in range(1, 5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(X), TARGETS)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        compressor.step(number)
    assert orders(model) == [6, 6]
    assert loss.isfinite()
    assert scaler.get_scale() == 2.0**16  # no step was skipped


def test_a_cut_is_computed_in_double_precision_under_autocast_too():
    one, other = make(), make()
    cuts = compress_(one, keep=TargetOrder(5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same = compress_(other, keep=TargetOrder(5))
    assert [cut.error_bound for cut in cuts] == [cut.error_bound for cut in same]
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_a_model_cut_in_inference_mode_can_be_trained():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    with torch.inference_mode():
        compress_(model, keep=TargetOrder(5), optimizer=optimizer, calibrate=lambda model: model(X))
    step(model, optimizer)
    assert not any(p.is_inference() for p in model.parameters())


class Twice(nn.Module):
    """One layer in two places."""

    def __init__(self):
        super().__init__()
        self.first = self.second = LRU(3, order=8)

    def forward(self, x):
        return self.second(self.first(x)[0])[0]


def test_a_layer_used_twice_is_cut_once_and_stays_one():
    torch.manual_seed(0)
    model = Twice()
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).square().sum().backward()
    optimizer.step()
    cuts = compress_(model, keep=TargetOrder(4), optimizer=optimizer, calibrate=lambda model: model(X))
    assert [(cut.module, cut.rank) for cut in cuts] == [("first", 4)]
    assert model.first is model.second
    model(X).square().sum().backward()
    optimizer.step()


def shared_by_layers():
    model = make()
    model.blocks[1].ssm.C_re = model.blocks[0].ssm.C_re
    return model


def shared_with_something_else():
    model = make()
    model.readout = nn.Linear(12, 4)
    model.readout.weight = model.blocks[0].ssm.C_im
    return model


def parametrised():
    model = make()
    nn.utils.parametrize.register_parametrization(model.blocks[0].ssm, "B_re", nn.Tanh())
    return model


def normalised():
    model = make()
    parametrizations.weight_norm(model.blocks[0].ssm, "B_re")
    return model


def pruned():
    model = make()
    prune.random_unstructured(model.blocks[0].ssm, "C_re", amount=0.3)
    return model


REFUSED = {
    shared_by_layers: r"blocks\.0\.ssm\.C_re is also blocks\.1\.ssm\.C_re.*two modules share",
    shared_with_something_else: r"blocks\.0\.ssm\.C_im is also readout\.weight.*two modules share",
    parametrised: r"blocks\.0\.ssm\.B_re is not a parameter but computed.*parametrizations\.B_re\.original",
    normalised: r"blocks\.0\.ssm\.B_re is not a parameter but computed.*first remove that",
    pruned: r"blocks\.0\.ssm\.C_re is not a parameter but computed.*C_re_orig",
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_weights_that_are_not_the_layer_s_own_are_refused_by_name(case):
    model = case()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CompressionError, match=REFUSED[case]):
        compress_(model, keep=TargetOrder(5))
    with pytest.raises(CompressionError, match=REFUSED[case]):
        Compressor(model, torch.optim.Adam(model.parameters()), when=[1], keep=TargetOrder(5))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_does_not_grow_with_the_order_may_be_shared_or_computed():
    model = make()
    model.blocks[1].ssm.D = model.blocks[0].ssm.D
    parametrizations.weight_norm(model.encoder.linear)
    compress_(model, keep=TargetOrder(5))
    assert orders(model) == [5, 5]
    assert model.blocks[0].ssm.D is model.blocks[1].ssm.D


@pytest.mark.parametrize("held", [True, False], ids=["in the optimizer", "not in it"])
@pytest.mark.parametrize("kind", [LRU, S5, S4, S4D, LinOSS])
def test_frozen_parameters_stay_frozen(kind, held):
    model = make(kind)
    frozen = {next(reversed(kind.STATE_AXES)), next(iter(kind.STATE_AXES))}
    for block in model.blocks:
        for name in frozen:
            block.ssm.get_parameter(name).requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if held or p.requires_grad])
    step(model, optimizer)
    compress_(model, keep=TargetOrder(5), optimizer=optimizer)
    now = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model, optimizer)
    for name, parameter in model.named_parameters():
        still = ".ssm." in name and name.rpartition(".")[2] in frozen
        if name.rpartition(".")[2] in {"p_re", "p_im"}:
            assert not parameter.any()
            continue
        assert parameter.requires_grad is not still
        assert torch.equal(parameter, now[name]) is still, name


def test_gradients_of_cut_parameters_are_dropped_and_accumulate_anew():
    """They belong to the old coordinates: an optimizer that steps without new ones leaves these parameters alone."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    compress_(model, keep=TargetOrder(5), optimizer=optimizer)
    resized = {p for block in model.blocks for name, p in block.ssm.named_parameters() if name != "D"}
    assert all((p.grad is None) == (p in resized) for p in model.parameters())
    before = {p: p.detach().clone() for p in resized}
    optimizer.step()
    assert all(torch.equal(p, value) for p, value in before.items())
    for _ in range(2):
        cross_entropy(model(X), TARGETS).backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())
    optimizer.step()
    assert not any(torch.equal(p, value) for p, value in before.items())


def test_an_average_of_torch_follows_and_goes_on_averaging():
    model = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compressor = Compressor(model, optimizer, when=[2], keep=TargetOrder(5), follow=[average])
    for number in range(1, 5):
        step(model, optimizer)
        average.update_parameters(model)
        compressor.step(number)
    assert orders(average.module) == orders(model) == [5, 5]
    assert average(X).isfinite().all()


def test_hooks_on_parameters_see_gradients_of_the_new_shape():
    model, seen = make(), []
    model.blocks[0].ssm.C_re.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.grad.shape)))
    compress_(model, keep=TargetOrder(5))
    cross_entropy(model(X), TARGETS).backward()
    assert seen == [(4, 5)]


LAYERS = (LRU, S5, S4, S4D, LinOSS, Mamba)
# Which states stay is chosen in one place for all layers; full matrices keep the largest values.
ON_DEVICES = [
    *((kind, options) for kind in LAYERS for options in ({}, {"calibrate": lambda model: model(X)})),
    *((kind, {"select": select}) for kind in (LRU, Mamba) for select in (Random(seed=1), Smallest())),
]


@pytest.mark.parametrize(("kind", "options"), ON_DEVICES)
def test_a_cut_does_not_depend_on_the_default_device(kind, options, tmp_path):
    """`torch.device("meta")` and `torch.set_default_device` say where new tensors are made."""
    if kind is Mamba:
        options = {"calibrate": lambda model: model(X), **options}
    results = []
    for default in ("cpu", "meta"):
        model = make(kind, order=8, depth=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer)
        with torch.device(default):
            inspect(model, **{key: value for key, value in options.items() if key == "calibrate"})
            guard = Rollback(lambda: 1.0, settle=1, folder=tmp_path)
            compressor = Compressor(model, optimizer, when=[1], keep=KeepFraction(0.5), guard=guard, **options)
            compressor.step(1)
            compressor.step(2)
            compress_(model, keep=TargetOrder(3), optimizer=optimizer, **options)
            save_checkpoint(tmp_path / "c.pt", model=model, optimizer=optimizer, compressor=compressor)
            load_checkpoint(tmp_path / "c.pt", model=model, optimizer=optimizer, compressor=compressor)
        step(model, optimizer)
        results.append(model.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
    assert results[0][next(iter(results[0]))].device.type == "cpu"
    assert orders(model) == [3]


@pytest.mark.parametrize("kind", [LRU, S5, S4, S4D, LinOSS, Mamba])
def test_conformance_and_streams_do_not_depend_on_the_default_device(kind):
    model = make(kind, depth=1).eval()
    with torch.device("meta"):
        stream = Stream(model, 4)
        for x in X.unbind(1):
            y = stream(x)
        stream.reset([0])
        check_adapter(lambda: copy.deepcopy(model.blocks[0].ssm))
    torch.testing.assert_close(y, model(X))


class Odd(nn.Module):
    """A model whose children have the names that wrappers give to what they wrap."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self._orig_mod = make(LRU, order=8)
        self.module = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([LRU(5, 6)])

    def forward(self, x):
        return self.blocks[0](self.module(self._orig_mod(x))[:, None])[0][:, 0]


@pytest.mark.parametrize("wrap", [nn.Module.eval, torch.compile], ids=["bare", "compiled"])
def test_a_model_s_own_children_keep_names_that_wrappers_use(wrap, tmp_path):
    model, names = Odd(), ["_orig_mod.blocks.0.ssm", "_orig_mod.blocks.1.ssm", "blocks.0"]
    before = copy.deepcopy(model)
    assert list(inspect(wrap(model)).orders) == names
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    compressor = Compressor(wrap(model), optimizer, when=[1], keep=KeepFraction(0.5))
    assert [cut.module for cut in compressor.step(1)] == names
    step(model, optimizer)
    save_checkpoint(tmp_path / "c", model=wrap(model), optimizer=optimizer)
    load_checkpoint(tmp_path / "c", model=wrap(before))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.state_dict().items())


def test_an_average_is_compared_by_the_names_of_the_model():
    model = Odd()
    average = AveragedModel(model)
    compress_(model, keep=TargetOrder(3))
    with pytest.raises(CompressionError, match=r"_orig_mod\.blocks\.0\.ssm\.nu_log has the shape \(8,\) in it"):
        average.update_parameters(model)
