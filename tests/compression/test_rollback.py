"""What was before a cut comes back bit for bit: weights, statistics, optimizer, scheduler, also from other orders."""

import copy
import math
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from compressm.adapters import find
from compressm.compression import TargetOrder, compress_
from compressm.compression.optimizer import Transport
from compressm.compression.rollback import Rollback, Snapshot, Subject, Watch
from compressm.compression.surgery import apply_cuts, prepare_cut
from compressm.errors import CompressionError
from compressm.layers import LRU, S4, S4D, Mamba
from compressm.models import SequenceClassifier
from tests import unhooked
from tests.compression.test_optimizer_state import OPTIMIZERS
from tests.compression.trained import change_of
from tests.marks import later


class Training:
    """A model with normalisation statistics, an optimizer, a scheduler, and batches by number."""

    def __init__(self, layer=LRU, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2)):
        torch.manual_seed(0)
        self.model = SequenceClassifier(layer, depth=2, width=4, order=8, inputs=3, classes=5)
        self.optimizer = optimizer(self.model.parameters())
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 50)

    @property
    def subject(self):
        return Subject((self.model,), self.optimizer, self.scheduler)

    def train(self, first, last):
        for k in range(first, last):
            g = torch.Generator().manual_seed(k)
            torch.manual_seed(k)  # dropout
            x, y = torch.randn(4, 12, 3, generator=g), torch.randint(0, 5, (4,), generator=g)
            self.model.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.scheduler.step()
        return self

    def cut(self, order=4):
        changes = {name: change_of(module, order) for name, (module, _) in find(self.model).items()}
        cuts = [prepare_cut(name, change, self.optimizer, Transport()) for name, change in changes.items()]
        apply_cuts(cuts, self.optimizer)
        return self

    def picture(self):
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return copy.deepcopy(
            [self.model.state_dict(), optimizer.state_dict(), self.scheduler.state_dict(), self.orders()]
        )

    def orders(self):
        return {name: module.order for name, (module, _) in find(self.model).items()}


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize(
    ("name", "where"),
    later(
        [*((name, "memory") for name in OPTIMIZERS), ("AdamW, amsgrad", "disk"), ("Adam, fused", "disk")],
        *(("Adam", "memory"), ("AdamW", "memory"), ("RMSprop", "memory"), ("AdamW, amsgrad", "disk")),
    ),
)
def test_what_comes_back_is_what_was_and_trains_on_as_if_nothing_had_been(name, where, tmp_path):
    run, twin = (Training(optimizer=OPTIMIZERS[name]).train(0, 3) for _ in range(2))
    before = run.picture()
    objects = [id(p) for p in run.model.parameters()]
    snapshot = Snapshot.of(run.subject, tmp_path / "before.pt" if where == "disk" else None)
    run.cut().train(3, 6)
    assert not same(run.picture(), before)
    snapshot.restore_(run.subject)
    assert same(run.picture(), before)
    assert [id(p) for p in run.model.parameters()] == objects
    assert all(p.grad is None for p in run.model.parameters())
    assert same(run.train(3, 6).picture(), twin.train(3, 6).picture())


def test_it_can_be_restored_twice_and_from_a_bank():
    run = Training(S4D).train(0, 2)
    before, snapshot = run.picture(), Snapshot.of(run.subject)
    for order in (4, 2):
        run.cut(order).train(2, 4)
        snapshot.restore_(run.subject)
        assert same(run.picture(), before)


def test_before_the_first_step_there_was_no_state():
    run = Training()
    before, snapshot = run.picture(), Snapshot.of(run.subject)
    run.train(0, 2)
    snapshot.restore_(run.subject)
    assert same(run.picture(), before)
    assert not run.optimizer.state


def test_values_of_the_same_size_stay_in_their_memory():
    """What a captured graph reads."""
    run = Training().train(0, 2)
    snapshot = Snapshot.of(run.subject)
    places = [p.data_ptr() for p in run.model.parameters()] + [b.data_ptr() for b in run.model.buffers()]
    moments = [value.data_ptr() for p in run.model.parameters() for value in run.optimizer.state[p].values()]
    run.train(2, 4)
    snapshot.restore_(run.subject)
    assert [p.data_ptr() for p in run.model.parameters()] + [b.data_ptr() for b in run.model.buffers()] == places
    assert [value.data_ptr() for p in run.model.parameters() for value in run.optimizer.state[p].values()] == moments


def test_frozen_parameters_and_learning_rates_come_back():
    run = Training(optimizer=lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)))
    run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda k: 1 / (k + 1))
    run.train(0, 2)
    first = next(run.model.parameters())
    first.requires_grad_(False)
    rate = run.optimizer.param_groups[0]["lr"].clone()
    snapshot = Snapshot.of(run.subject)
    first.requires_grad_(True)
    run.train(2, 5)
    run.optimizer.param_groups[0]["extra"] = 1
    snapshot.restore_(run.subject)
    assert not first.requires_grad
    assert torch.equal(run.optimizer.param_groups[0]["lr"], rate)
    assert "extra" not in run.optimizer.param_groups[0]


def test_a_loss_of_before_does_not_break_training_after_it():
    run = Training().train(0, 2)
    snapshot = Snapshot.of(run.subject)
    run.cut()
    held = run.model(torch.randn(2, 12, 3)).sum()
    snapshot.restore_(run.subject)
    run.train(2, 4)
    assert held.isfinite()


def test_followers_come_back_with_the_model():
    run = Training().train(0, 2)
    average = copy.deepcopy(run.model)
    subject = Subject((run.model, average), run.optimizer, run.scheduler)
    snapshot, before = Snapshot.of(subject), copy.deepcopy(average.state_dict())
    for p in average.parameters():
        p.data += 1
    snapshot.restore_(subject)
    assert same(average.state_dict(), before)


def test_a_snapshot_survives_being_stored_with_a_checkpoint(tmp_path):
    run = Training().train(0, 2)
    before, snapshot = run.picture(), Snapshot.of(run.subject)
    torch.save(snapshot.state_dict(), tmp_path / "state.pt")
    run.cut().train(2, 4)
    Snapshot.from_state_dict(torch.load(tmp_path / "state.pt", weights_only=True)).restore_(run.subject)
    assert same(run.picture(), before)


def grown(run):
    run.model.extra = nn.Parameter(torch.ones(1))
    return run.subject


def regrouped(run):
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    return run.subject


REFUSED = {
    "another parameter": (grown, "parameters differ from those.*extra"),
    "another buffer": (lambda run: run.model.register_buffer("late", torch.ones(1)) or run.subject, "buffers.*late"),
    "another group": (regrouped, "parameters differ from those|2 groups"),
    "no optimizer": (lambda run: Subject((run.model,), None, run.scheduler), "taken with optimizer"),
    "no scheduler": (lambda run: Subject((run.model,), run.optimizer), "taken with scheduler"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_as_it_was_is_refused_and_nothing_changed(case):
    change, said = REFUSED[case]
    run = Training().train(0, 2)
    snapshot = Snapshot.of(run.subject)
    run.train(2, 4)
    subject, before = change(run), copy.deepcopy(run.model.state_dict())
    with pytest.raises(CompressionError, match=said):
        snapshot.restore_(subject)
    assert same(run.model.state_dict(), before)


def test_a_broken_file_is_named(tmp_path):
    run = Training().train(0, 2)
    path = tmp_path / "deep" / "before.pt"
    snapshot = Snapshot.of(run.subject, path)
    assert [file.name for file in path.parent.iterdir()] == ["before.pt"]
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CompressionError, match=r"before\.pt is damaged"):
        snapshot.restore_(run.subject)
    snapshot.discard()
    assert not path.exists()
    with pytest.raises(CompressionError, match="cannot be read"):
        snapshot.restore_(run.subject)


def watched(values, layer=LRU, **options):
    """A training whose evaluations give these values one after the other."""
    run, left = Training(layer).train(0, 2), list(values)
    return run, Watch(Rollback(lambda: left.pop(0), **options), run.model, run.optimizer, run.scheduler)


def test_a_cut_that_did_no_harm_stays():
    run, watch = watched([0.9, 0.895], drop=0.01, settle=2)
    watch.begin(2, ExitStack())
    run.cut()
    assert watch.settle(3, ExitStack()) is None
    assert watch.settle(4, ExitStack()) is None
    assert set(run.orders().values()) == {4}
    assert watch.settle(5, ExitStack()) is None  # nothing is pending: not evaluated again


@pytest.mark.parametrize("value", [0.88, math.nan, -math.inf])
def test_a_cut_that_did_harm_is_undone(value):
    run, watch = watched([0.9, value], drop=0.01, settle=2)
    before = run.picture()
    watch.begin(2, ExitStack())
    run.cut().train(2, 4)
    restored = watch.settle(4, ExitStack())
    assert same(run.picture(), before)
    assert restored.orders == run.orders()
    assert set(restored.orders.values()) == {8}
    assert f"from 0.9 to {value} after the cut; 1 % is allowed" in restored.reason


@pytest.mark.parametrize("layer", [LRU, S4D, S4, Mamba])
def test_a_cut_after_which_weights_became_nan_is_undone(layer):
    run, watch = watched([0.9, math.nan], drop=0.01, settle=2, layer=layer)
    before = run.picture()
    watch.begin(2, ExitStack())
    x = torch.randn(2, 12, 3)
    compress_(run.model, keep=TargetOrder(4), optimizer=run.optimizer, calibrate=lambda model: model(x))
    watch.made()
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(math.nan)
    assert set(watch.settle(4, ExitStack()).orders.values()) == {8}
    assert same(run.picture(), before)


def test_negative_values_are_judged_by_their_size():
    """A loss with its sign turned: −2 may become −2.02, no less."""
    guard = Rollback(lambda: 0.0, drop=0.01)
    assert guard.accepts(-2.02, -2.0)
    assert not guard.accepts(-2.03, -2.0)
    assert guard.accepts(0.0, 0.0)


def test_a_loss_may_rise_by_the_share_that_an_accuracy_may_fall():
    guard = Rollback(lambda: 0.0, drop=0.01, lower_is_better=True)
    assert guard.accepts(2.02, 2.0)
    assert guard.accepts(1.0, 2.0)
    assert not guard.accepts(2.03, 2.0)
    assert not guard.accepts(math.nan, 2.0)


@pytest.mark.parametrize(
    ("options", "value", "before", "said"),
    [
        ({}, 0.81, 0.9, "evaluate() fell by 10 %, from 0.9 to 0.81 after the cut; 1 % is allowed"),
        ({"drop": 0.0}, math.nan, 0.9, "evaluate() fell, from 0.9 to nan after the cut; 0 % is allowed"),
        ({}, -0.1, 0.0, "evaluate() fell, from 0 to -0.1 after the cut; 1 % is allowed"),
        (
            {"measures": "validation loss", "lower_is_better": True, "drop": 0.05},
            *(0.3, 0.2, "validation loss rose by 50 %, from 0.2 to 0.3 after the cut; 5 % is allowed"),
        ),
    ],
)
def test_a_verdict_says_what_was_measured_from_where_to_where_and_what_is_allowed(options, value, before, said):
    guard = Rollback(lambda: 0.0, **options)
    assert not guard.accepts(value, before)
    assert guard.verdict(value, before) == said


def test_cuts_in_quick_succession_are_judged_together():
    run, watch = watched([0.9, 0.5], settle=3)
    before = run.picture()
    watch.begin(2, ExitStack())
    run.cut(6).train(2, 4)
    watch.begin(4, ExitStack())
    run.cut(4).train(4, 6)
    assert watch.settle(5, ExitStack()) is None
    assert watch.settle(7, ExitStack()) is not None
    assert same(run.picture(), before)


def test_a_cut_that_was_not_made_is_forgotten(tmp_path):
    _, watch = watched([0.9], settle=0, folder=tmp_path)
    undo = ExitStack()
    watch.begin(2, undo)
    assert len(list(tmp_path.iterdir())) == 1
    undo.close()
    assert list(tmp_path.iterdir()) == []
    assert watch.settle(3, ExitStack()) is None


def test_two_guards_with_one_folder_keep_their_own_snapshots(tmp_path):
    (one, first), (other, second) = (watched([0.9, 0.1], settle=2, folder=tmp_path) for _ in range(2))
    other.train(2, 3)
    before = one.picture(), other.picture()
    for run, watch in ((one, first), (other, second)):
        watch.begin(3, ExitStack())
        run.cut()
    assert len(list(tmp_path.iterdir())) == 2
    for watch in (second, first):
        assert watch.settle(5, ExitStack()) is not None
        watch.tidy()
    assert same((one.picture(), other.picture()), before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", [False, True])
def test_a_pending_judgement_survives_a_checkpoint(tmp_path, folder):
    run, watch = watched([0.9], settle=2, folder=tmp_path / "snapshots" if folder else None)
    before = run.picture()
    watch.begin(2, ExitStack())
    run.cut()
    torch.save(watch.state_dict(), tmp_path / "watch.pt")
    resumed = Watch(Rollback(lambda: 0.1, settle=2), run.model, run.optimizer, run.scheduler)
    resumed.load_state_dict(torch.load(tmp_path / "watch.pt", weights_only=True))
    assert resumed.settle(3, ExitStack()) is None
    assert resumed.settle(4, ExitStack()) is not None
    assert same(run.picture(), before)
    idle = Watch(Rollback(lambda: 0.1), run.model)
    idle.load_state_dict(idle.state_dict())
    assert idle.settle(10_000, ExitStack()) is None


BAD = {
    "Rollback(3)": "evaluate is 3",
    "Rollback(float, drop=1.0)": "drop is 1.0",
    "Rollback(float, drop=-0.1)": "drop is -0.1",
    "Rollback(float, drop=float('nan'))": "drop is nan",
    "Rollback(float, settle=-1)": "settle is -1",
    "Rollback(float, settle=1.5)": "settle is 1.5",
    "Rollback(float, measures=3)": "measures is 3",
    "Rollback(float, lower_is_better=1)": "lower_is_better is 1",
    "Rollback(float, folder=3)": "folder is 3",
    "Rollback(float, folder='/etc/hostname')": "folder is '/etc/hostname'",
}


def test_bad_options_are_refused():
    preamble = "from compressm.compression.rollback import Rollback"
    for case, (kinds, message) in unhooked.outcomes(preamble, {case: case for case in BAD}).items():
        assert "CompressionError" in kinds, case
        assert BAD[case] in message


@pytest.mark.parametrize(("value", "said"), [("good", "returned 'good'"), (math.nan, "nan"), (None, "returned None")])
def test_an_evaluation_must_give_a_number(value, said):
    _, watch = watched([value])
    with pytest.raises(CompressionError, match=said), ExitStack() as undo:
        watch.begin(2, undo)
    assert watch.snapshot is None
