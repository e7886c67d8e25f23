"""Whatever goes wrong at a cut: model, optimizer, scheduler, followers and compressor are afterwards as they were."""

import copy
import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from compressm.compression import surgery
from compressm.compression.compressor import Compressor
from compressm.compression.policies import TargetOrder
from compressm.compression.record import Restored
from compressm.compression.rollback import Rollback
from compressm.control import NonFiniteError, UnstableSystemError
from compressm.errors import CompressionError
from compressm.layers import LRU, S5
from compressm.models import SequenceClassifier
from tests.compression.test_rollback import same


class BrokenError(RuntimeError):
    pass


class Run:
    """A training with a guard that keeps its snapshots in a folder, and a model that follows."""

    def __init__(self, folder, scores, when=(3,), settle=2, kind=LRU):
        torch.manual_seed(0)
        self.model = SequenceClassifier(kind, depth=2, width=4, order=8, inputs=3, classes=5)
        self.average, self.folder, self.scores = copy.deepcopy(self.model), folder, list(scores)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.compressor = Compressor(
            self.model,
            self.optimizer,
            when=when,
            keep=TargetOrder(4),
            guard=Rollback(lambda: self.scores.pop(0), settle=settle, folder=folder),
            calibrate=lambda model: model(torch.randn(4, 12, 3)),
            follow=[self.average],
            scheduler=self.scheduler,
        )

    def train(self, first, last):
        events = []
        for step in range(first, last + 1):
            x = torch.randn(4, 12, 3, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            cross_entropy(self.model(x), torch.arange(4)).backward()
            self.optimizer.step()
            self.scheduler.step()
            events += self.compressor.step(step)
        return events

    def picture(self):
        """Values, gradients, state, and which objects hold them."""
        parameters, state = list(self.model.parameters()), self.compressor.state_dict()
        state["watch"]["before"] = str(state["watch"]["before"])  # "nan" is the same as "nan"
        return copy.deepcopy(
            [
                self.model.state_dict(),
                [parameter.grad for parameter in parameters],
                self.average.state_dict(),
                self.optimizer.state_dict(),
                self.scheduler.state_dict(),
                state,
                [id(parameter) for parameter in parameters],
                [module.training for module in self.model.modules()],
                torch.get_rng_state(),
                sorted(str(file) for file in self.folder.rglob("*.pt")),
            ]
        )

    def orders(self):
        return [block.ssm.order for block in self.model.blocks]


def fail_at(monkeypatch, place, call):
    """Break the so-manieth call of a function of `surgery`."""
    calls, real = [], getattr(surgery, place)

    def broken(*args):
        calls.append(args)
        if len(calls) == call:
            raise BrokenError
        return real(*args)

    monkeypatch.setattr(surgery, place, broken)


PLACES = {
    "reading": ("require_plain_parameters", 1),
    "the state of the optimizer": ("require_supported", 1),
    "the first value": ("replace_data", 1),
    "the second layer": ("replace_data", 9),
    "a model that follows": ("replace_data", 16),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_in_the_middle_of_a_cut_leaves_everything_as_it_was(place, tmp_path, monkeypatch):
    run = Run(tmp_path, [1.0, 1.0, 1.0])
    run.train(1, 2)
    before = run.picture()
    fail_at(monkeypatch, *PLACES[place])
    with pytest.raises(BrokenError):
        run.compressor.step(3)
    assert same(run.picture(), before)
    monkeypatch.undo()
    # And all is well when it is tried again.
    assert len(run.compressor.step(3)) == 2
    assert run.orders() == [4, 4]
    assert run.train(4, 6) == []
    assert list(tmp_path.iterdir()) == []


def test_the_judgement_of_an_earlier_cut_survives_a_later_one_that_fails(tmp_path, monkeypatch):
    run = Run(tmp_path, [1.0, 0.5], when=(2, 4), settle=3)
    run.train(1, 1)
    before = run.picture()
    run.compressor.step(2)
    run.train(3, 3)
    run.compressor._cutter = copy.copy(run.compressor._cutter)
    object.__setattr__(run.compressor._cutter.options, "keep", TargetOrder(2))
    fail_at(monkeypatch, "replace_data", 4)
    between = run.picture()
    with pytest.raises(BrokenError):
        run.compressor.step(4)
    assert same(run.picture(), between)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.undo()
    (restored,) = run.compressor.step(5)  # due three steps after the first cut, not after the second
    assert isinstance(restored, Restored)
    assert run.orders() == [8, 8]
    assert same(run.model.state_dict(), before[0])
    assert same(run.optimizer.state_dict(), before[3])


def test_a_value_that_is_no_number_before_the_cut_stops_it(tmp_path):
    run = Run(tmp_path, [float("nan")])
    run.train(1, 2)
    before = run.picture()
    with pytest.raises(CompressionError, match="nan before a cut"):
        run.compressor.step(3)
    assert same(run.picture(), before)


BROKEN_LAYERS = {
    "not finite": (LRU, "C_re", torch.nan, NonFiniteError, r"blocks\.1\.ssm: .*C_re.*1 "),
    "unstable": (LRU, "nu_log", -800.0, UnstableSystemError, r"blocks\.1\.ssm: .* 1\b.*< 1"),
    "an unstable S5": (S5, "log_A_real", -800.0, UnstableSystemError, r"blocks\.1\.ssm: .* 1\b.*< 1"),
}


@pytest.mark.parametrize("case", BROKEN_LAYERS)
def test_a_layer_that_cannot_be_cut_is_named_and_stops_all(case, tmp_path):
    kind, name, value, cause, said = BROKEN_LAYERS[case]
    run = Run(tmp_path, [1.0], kind=kind)
    run.train(1, 2)
    parameter = run.model.blocks[1].ssm.get_parameter(name)
    parameter.data.view(-1)[0] = value
    before = json.dumps(run.compressor.state_dict())
    kept = [p.detach().clone() for p in run.model.parameters()]
    with pytest.raises(CompressionError, match=said) as caught:
        run.compressor.step(3)
    assert isinstance(caught.value.__cause__, cause)
    assert run.orders() == [8, 8]
    assert json.dumps(run.compressor.state_dict()) == before
    assert all(
        torch.equal(p.nan_to_num(), was.nan_to_num()) for p, was in zip(run.model.parameters(), kept, strict=True)
    )
    with pytest.raises(CompressionError, match=said):
        Compressor(run.model, run.optimizer, when=[1], keep=TargetOrder(4))
