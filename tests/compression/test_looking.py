"""Spectra without cutting: an inspection, and a tracker during training."""

import copy

import pytest
import torch

from compressm.adapters import adapter_for
from compressm.compression.inspection import HankelTracker, inspect
from compressm.control import fold, hankel_singular_values
from compressm.errors import CompressionError
from compressm.layers import LRU, S4D
from compressm.models import SequenceClassifier


def make(kind=LRU):
    torch.manual_seed(0)
    return SequenceClassifier(kind, depth=2, width=4, order=6, inputs=3, classes=5)


def expected(layer):
    return hankel_singular_values(fold(adapter_for(layer).read(layer).detach()))


def test_an_inspection_names_every_layer_and_prints_a_table():
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = inspect(model)
    text = str(found)
    assert "blocks.0.ssm" in text
    assert "blocks.1.ssm" in text
    assert torch.allclose(found.spectra["blocks.0.ssm"], expected(model.blocks[0].ssm))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_with_data_an_inspection_has_other_spectra_and_no_bound():
    model = make()
    x = torch.randn(3, 30, 3)
    found = inspect(model, lambda model: model(x))
    assert not torch.allclose(found.spectra["blocks.0.ssm"], expected(model.blocks[0].ssm))


@pytest.mark.parametrize("kind", [LRU, S4D])
def test_a_tracker_records_every_so_many_steps_and_follows_the_values(kind):
    model, tracker = make(kind), None
    tracker = HankelTracker(model, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(1, 7):
        model(torch.randn(4, 20, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (tracker.step(step) is not None) == (step % 2 == 0)
    assert tracker.steps == [2, 4, 6]
    assert torch.allclose(tracker.spectra[-1]["blocks.1.ssm"], expected(model.blocks[1].ssm))
    assert tracker.trajectories("blocks.1.ssm").values.shape == (3, 6)
    other = HankelTracker(model, every=2)
    other.load_state_dict(tracker.state_dict())
    assert other.steps == tracker.steps


def test_a_tracker_refuses_what_it_cannot_do():
    with pytest.raises(CompressionError, match="every is 0"):
        HankelTracker(make(), every=0)
    with pytest.raises(CompressionError, match="nothing yet"):
        HankelTracker(make(), every=1).trajectories("blocks.0.ssm")


NAME = "blocks.0.ssm"
DAMAGED = {
    "a negative step": (lambda state: state["steps"].__setitem__(0, -2), "a step is -2, expected"),
    "a step as text": (lambda state: state["steps"].__setitem__(1, "4"), "a step is '4', expected"),
    "a spectrum as a list": (lambda state: state["spectra"][1].update({NAME: [1.0]}), r"is \[1.0\], expected a real"),
    "whole numbers": (lambda state: state["spectra"][0].update({NAME: torch.arange(6)}), "expected a real tensor"),
    "a spectrum with NaN": (lambda state: state["spectra"][1][NAME].__setitem__(0, torch.nan), "not finite"),
    "a negative value": (lambda state: state["spectra"][1][NAME].neg_(), "negative"),
    "no spectra of a step": (lambda state: state["spectra"].__setitem__(0, None), "spectra are None"),
    "a layer without bounds": (lambda state: state["bounds"][0].pop(NAME), "step 2: bounds are .* for every layer"),
    "an infinite bound": (lambda state: state["bounds"][1].update({NAME: torch.inf}), "the bound .* is inf"),
    "a system without B": (lambda state: state["before"][NAME].pop("B"), r"before\['blocks.0.ssm'\] has .* B missing"),
    "a system with NaN": (lambda state: state["before"][NAME]["B"].fill_(torch.nan), r"before\['blocks.0.ssm'\].* B"),
    "an unstable system": (
        lambda state: state["before"][NAME]["log_poles"].neg_(),
        "before.*largest pole modulus is 1.09",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_state_of_a_tracker_is_refused_and_changes_nothing(case):
    model, (damage, said) = make(), DAMAGED[case]
    tracker, other = (HankelTracker(model, every=2, changes=True) for _ in range(2))
    for step in (2, 4):
        tracker.step(step)
    other.step(2)
    before = copy.deepcopy(other.state_dict())
    state = copy.deepcopy(tracker.state_dict())
    damage(state)
    with pytest.raises(CompressionError, match=said):
        other.load_state_dict(state)
    assert str(other.state_dict()) == str(before)
    other.load_state_dict(tracker.state_dict())
    assert str(other.state_dict()) == str(tracker.state_dict())
