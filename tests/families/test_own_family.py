"""A family from outside the package, as docs/adding_a_family.md has it: cuts, moments, files, errors."""

import re
from pathlib import Path

import pytest
import torch

import compressm as cs
from compressm.adapters import Adapter, AdapterError
from compressm.adapters.base import _ADAPTERS
from compressm.families import AxisChange, Family, family_of, reads
from compressm.families.base import _FAMILIES
from tests import unhooked

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_family.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page():
    before = dict(_ADAPTERS), dict(_FAMILIES)
    names = {}
    exec(compile("\n".join(BLOCKS[:2]), PAGE.name, "exec"), names)
    yield names
    for registry, then in zip((_ADAPTERS, _FAMILIES), before, strict=True):
        registry.clear()
        registry.update(then)


def layer(page, order=6):
    torch.manual_seed(0)
    return page["ScalarDecay"](4, order).double()


def loss_of(module, x):
    return module(x).square().sum()


def test_it_takes_at_most_a_hundred_lines():
    assert sum(bool(line.strip()) for block in BLOCKS for line in block.splitlines()) <= 100


def test_a_cut_to_the_rank_of_the_data_changes_nothing(page):
    """Three directions of input drive three states, whatever the order: a scalar decay commutes with the projection."""
    model = layer(page)
    x = torch.randn(5, 20, 2, dtype=torch.float64) @ torch.randn(2, 4, dtype=torch.float64)
    before = model(x)
    (cut,) = cs.compress_(model, keep=cs.TargetOrder(2), calibrate=lambda model: model(x))
    assert (cut.order, cut.rank, cut.error_bound) == (6, 2, None)
    assert torch.allclose(model(x), before, rtol=1e-4)
    assert (model.q.out_features, model.k.out_features) == (2, 2)


def test_moments_of_gradients_go_as_the_gradients_of_the_new_model(page):
    """With as many states as before the function stays, and so gradients are those of autograd."""
    model, x = layer(page), torch.randn(5, 20, 4, dtype=torch.float64)
    loss_of(model, x).backward()
    W = torch.randn(6, 6, dtype=torch.float64)
    T = torch.linalg.inv(W)
    change = AxisChange.of(model, family_adapter(model), {"k.weight": (0, W, T), "q.weight": (0, T.mT, W.mT)})
    carried = change.gradient({name: model.get_parameter(name).grad for name in change.resized})
    other = layer(page)
    for name, value in change.values.items():
        other.get_parameter(name).data.copy_(value)
    loss_of(other, x).backward()
    for name in change.resized:
        assert torch.allclose(carried[name], other.get_parameter(name).grad, rtol=1e-8)


def test_updates_go_where_the_parameters_go(page):
    model = layer(page)
    W = torch.randn(2, 6, dtype=torch.float64)
    change = AxisChange.of(model, family_adapter(model), {"k.weight": (0, W, torch.linalg.pinv(W))})
    step = torch.randn(6, 4, dtype=torch.float64)
    model.k.weight.data += step
    moved = AxisChange.of(model, family_adapter(model), change.maps)
    assert torch.allclose(
        change.update({"k.weight": step})["k.weight"], moved.values["k.weight"] - change.values["k.weight"]
    )
    assert torch.allclose(change.update_squares({"k.weight": step**2})["k.weight"], W**2 @ step**2)
    assert torch.allclose(
        change.gradient_squares({"k.weight": step**2})["k.weight"], change.maps["k.weight"][2].mT ** 2 @ step**2
    )
    assert torch.equal(change.first("k.weight", step), step[:2])


def test_adam_goes_on_with_the_moments_of_the_states_that_stay(page):
    model, x = torch.nn.Sequential(layer(page)), torch.randn(5, 20, 4, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compressor = cs.Compressor(
        model, optimizer, when=[3], keep=cs.TargetOrder(2), calibrate=lambda model: model(x), moments=cs.Transport()
    )
    for step in range(1, 7):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        compressor.step(step)
    assert optimizer.state[model[0].q.weight]["exp_avg"].shape == (2, 4)
    assert [event.rank for event in compressor.history] == [2]


def test_it_asks_for_data(page):
    with pytest.raises(cs.compression.CompressionError, match=r"the model: scalar-decay layers .*pass calibrate"):
        cs.compress_(layer(page), keep=cs.TargetOrder(2))


def test_a_policy_by_a_bound_is_refused(page):
    with pytest.raises(cs.compression.CompressionError, match="which scalar-decay layers never have"):
        cs.compress_(layer(page), keep=cs.ErrorBound(0.1), gramian=cs.WhiteNoise(), calibrate=lambda model: None)


def test_an_adapter_without_a_family_is_refused_by_name():
    class Lonely(Adapter):
        def read(self, module): ...
        def encode(self, module, system): ...
        def order(self, module): ...

    with pytest.raises(AdapterError, match=r"no family reads Lonely\(\): expected a subclass of SSMAdapter"):
        family_of(Lonely())
    with pytest.raises(AdapterError, match="@reads takes a class of adapters, got <class 'int'>"):
        reads(int)


def test_what_is_no_family_is_refused_where_it_is_registered():
    class Half(Family):
        called = "halves"

    script = "from compressm.adapters import Adapter\nfrom compressm.families import reads\nreads(Adapter)(dict)"
    said = unhooked.finished(script, code=1).stderr
    assert "AdapterError: @reads(Adapter) decorates a subclass of Family, got <class 'dict'>" in said
    with pytest.raises(AdapterError, match="Half has no plan and no read and no spectra: define what is missing"):
        reads(Adapter)(Half)


def test_a_family_that_keeps_more_or_forgets_a_spectrum_is_refused_before_anything_changes(page, monkeypatch):
    model, x = layer(page), torch.randn(5, 20, 4, dtype=torch.float64)
    family, keep = page["DecayFamily"], page["DecayFamily"].plan
    monkeypatch.setattr(family, "plan", lambda self, layers, orders, *rest: keep(self, layers, {"": 5}, *rest))
    with pytest.raises(cs.compression.CompressionError, match="the cut keeps 5 states, expected at most 2"):
        cs.compress_(model, keep=cs.TargetOrder(2), calibrate=lambda model: model(x))
    monkeypatch.setattr(family, "spectra", lambda self, layers, choices: {})
    with pytest.raises(cs.compression.CompressionError, match=r"DecayFamily.spectra gave no spectrum for ''"):
        cs.compress_(model, keep=cs.TargetOrder(2), calibrate=lambda model: model(x))
    assert model.q.weight.shape == (6, 4)


def family_adapter(model):
    return cs.adapters.adapter_for(model)
