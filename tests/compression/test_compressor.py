"""The compressor in a training loop: every layer kind, optimizer and option; events, previews, rollback, resuming."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from compressm.compression.compressor import PAPER, Compressor, compress_
from compressm.compression.optimizer import Restart, Slice, Transport
from compressm.compression.policies import Budget, EnergyTolerance, KeepFraction, TargetOrder
from compressm.compression.record import Cut, Restored
from compressm.compression.rollback import Rollback
from compressm.errors import CompressionError
from compressm.families.choices import Random, Smallest
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba
from compressm.models import SequenceClassifier


def make(kind=LRU, depth=2, order=12, seed=0):
    torch.manual_seed(seed)
    return SequenceClassifier(kind, depth=depth, width=4, order=order, inputs=3, classes=5)


def batches(count, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 24, 3, generator=generator), torch.randint(5, (8,), generator=generator)) for _ in range(count)
    ]


@pytest.mark.parametrize("with_data", [False, True])
@pytest.mark.parametrize("kind", [LRU, S5, S4, S4D, LinOSS, Mamba])
def test_where_libraries_load_late_a_cut_is_rehearsed_that_changes_nothing(kind, with_data, monkeypatch):
    from compressm.compression import planning as rehearsal

    if kind is Mamba and not with_data:
        pytest.skip("Mamba needs data")
    carried, carry = [], rehearsal.rehearse_moments
    monkeypatch.setattr(rehearsal, "_SLOW_TO_LOAD", ("cpu",))
    monkeypatch.setattr(
        rehearsal, "rehearse_moments", lambda changes, *args: carried.append(changes) or carry(changes, *args)
    )
    model, calls = make(kind), []
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    optimizer = torch.optim.AdamW(model.parameters())
    data = {"calibrate": calls.append} if with_data else {}
    Compressor(model, optimizer, when=[1], keep=TargetOrder(12), **data)
    assert [change.module for change in carried[0]] == [block.ssm for block in model.blocks]
    assert not calls
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def train(model, optimizer, compressor, data, first=1):
    events, losses = [], []
    for step, (x, target) in enumerate(data, start=first):
        loss = torch.nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)  # a live graph of the old shapes must not disturb what follows
        events += compressor.step(step)
    return events, [float(loss.detach()) for loss in losses]


def orders(model):
    return [block.ssm.order for block in model.blocks]


@pytest.mark.parametrize("kind", [LRU, S5, S4, S4D, LinOSS])
@pytest.mark.parametrize("moments", [Transport(), Restart(), Slice()], ids=repr)
def test_training_goes_on_through_cuts(kind, moments):
    model = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    compressor = Compressor(model, optimizer, when=[3, 6], keep=KeepFraction(0.5), moments=moments)
    events, losses = train(model, optimizer, compressor, batches(9))
    assert [(event.step, event.module, event.order, event.rank) for event in events] == [
        (3, "blocks.0.ssm", 12, 6),
        (3, "blocks.1.ssm", 12, 6),
        (6, "blocks.0.ssm", 6, 3),
        (6, "blocks.1.ssm", 6, 3),
    ]
    assert orders(model) == [3, 3]
    assert all(loss < 10 for loss in losses)
    assert held == [id(p) for group in optimizer.param_groups for p in group["params"]]
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].shape == parameter.shape
        assert torch.isfinite(state["exp_avg_sq"]).all()
    assert compressor.history == events


@pytest.mark.parametrize("kind", [LRU, S5, S4, S4D, LinOSS])
def test_a_cut_changes_the_output_within_its_bound(kind):
    model = make(kind, depth=1)
    layer, u = model.blocks[0].ssm, torch.randn(6, 400, 4)
    before, _ = layer(u)
    (cut,) = compress_(model, keep=TargetOrder(6))
    after, _ = layer(u)
    gain = (after - before).detach().flatten(1).norm(dim=1) / u.flatten(1).norm(dim=1)
    assert float(gain.max()) <= cut.error_bound * 1.001
    assert "12 -> 6 states" in str(cut)
    assert "12 -> 1 state," in str(replace(cut, rank=1))


def test_with_data_a_cut_says_what_it_changed_there():
    model = make()
    x = torch.randn(4, 30, 3)
    cuts = compress_(model, keep=TargetOrder(6), calibrate=lambda model: model(x))
    assert all(cut.error_bound is None and 0 < cut.measured_error < 1 for cut in cuts)


def test_a_preview_changes_nothing_and_tells_what_will_happen():
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    compressor = Compressor(model, optimizer, when=[1], keep=EnergyTolerance(0.1))
    before = copy.deepcopy(model.state_dict())
    preview = compressor.preview()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    made = compressor.step(1)
    assert [(cut.module, cut.rank) for cut in preview] == [(cut.module, cut.rank) for cut in made]


def test_paper_mode_is_one_word():
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    compressor = Compressor(model, optimizer, when=[2], keep=KeepFraction(0.5), **PAPER)
    events, _ = train(model, optimizer, compressor, batches(3))
    assert orders(model) == [6, 6]
    assert all(event.error_bound is not None for event in events)


@pytest.mark.parametrize("select", [Smallest(), Random(1)], ids=repr)
def test_the_ablations_of_selection_run_and_are_worse_than_the_largest(select):
    best = compress_(make(), keep=TargetOrder(6))
    other = compress_(make(), keep=TargetOrder(6), select=select)
    assert all(one.error_bound < two.error_bound for one, two in zip(best, other, strict=True))


def test_one_budget_is_shared_by_all_layers():
    model = make(depth=3)
    compress_(model, keep=Budget(20))
    assert sum(orders(model)) == 20


def test_a_model_that_follows_shrinks_alongside():
    model = make()
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.add_(1e-4 * torch.randn_like(parameter))
    x = torch.randn(4, 30, 3)
    compress_(model, keep=TargetOrder(6), follow=[average])
    assert orders(average) == orders(model) == [6, 6]
    model.eval(), average.eval()
    assert torch.allclose(model(x), average(x), atol=0.05)
    for one, other in zip(model.parameters(), average.parameters(), strict=True):
        assert torch.allclose(one, other, atol=0.05)


def test_a_harmful_cut_is_taken_back_bit_for_bit_and_ends_cutting():
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scores = iter([1.0, 0.5])
    compressor = Compressor(
        model, optimizer, when=[2, 8], keep=KeepFraction(0.5), guard=Rollback(lambda: next(scores), drop=0.01, settle=2)
    )
    data = batches(9)
    events, _ = train(model, optimizer, compressor, data[:1])
    x, target = data[1]
    torch.nn.functional.cross_entropy(model(x), target).backward()
    optimizer.step()
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    events = compressor.step(2)
    assert orders(model) == [6, 6]
    more, _ = train(model, optimizer, compressor, data[2:3], first=3)
    (restored,) = compressor.step(4)
    assert isinstance(restored, Restored)
    assert restored.orders == {"blocks.0.ssm": 12, "blocks.1.ssm": 12}
    assert all(torch.equal(value, kept[0][name]) for name, value in model.state_dict().items())
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(kept[1]["state"][key][k])) for k, v in state.items())
    assert compressor.step(8) == []
    assert all(isinstance(event, Cut) for event in events + more)


def test_an_error_in_the_middle_leaves_everything_as_it_was(monkeypatch):
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    compressor = Compressor(model, optimizer, when=[9], keep=KeepFraction(0.5))
    train(model, optimizer, compressor, batches(2), first=5)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.blocks[1].ssm.nu_log.data[0] = torch.inf
    with pytest.raises(ValueError, match="nu_log"):
        compressor.step(9)
    model.blocks[1].ssm.nu_log.data[0] = before[0]["blocks.1.ssm.nu_log"][0]
    assert orders(model) == [12, 12]
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())


def test_resuming_between_cuts_is_bit_identical():
    def run(split):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        compressor = Compressor(model, optimizer, when=[2, 5], keep=KeepFraction(0.5))
        data = batches(7)
        train(model, optimizer, compressor, data[:split])
        if split < 7:
            state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), compressor.state_dict()))
            random = torch.get_rng_state()  # dropout draws from it
            model = make(seed=3)
            model.load_state_dict(state[0])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            optimizer.load_state_dict(state[1])
            compressor = Compressor(model, optimizer, when=[2, 5], keep=KeepFraction(0.5))
            compressor.load_state_dict(state[2])
            torch.set_rng_state(random)
            train(model, optimizer, compressor, data[split:], first=split + 1)
        return model.state_dict(), len(compressor.history)

    whole, count = run(7)
    for split in (1, 3, 6):
        state, events = run(split)
        assert events == count == 4
        assert all(torch.equal(value, whole[name]) for name, value in state.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"when": []}, "never"),
        ({"model": torch.nn.Linear(2, 2)}, "no SSM layer"),
        ({"optimizer": torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])}, "does not hold"),
    ],
)
def test_bad_input_is_refused_at_once(change, message):
    model = make()
    given = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "when": [1], "keep": KeepFraction(0.5)}
    with pytest.raises(CompressionError, match=message):
        Compressor(**{**given, **change})


def test_a_schedule_with_another_past_cannot_be_resumed():
    one = Compressor(make(), when=[1, 3], keep=KeepFraction(0.5))
    one.step(0), one.step(2)
    for when in ([3], [1, 2, 3], [2, 3]):
        other = Compressor(make(), when=when, keep=KeepFraction(0.5))
        with pytest.raises(CompressionError, match=r"saved schedule is \[1, 3\].*up to step 2.*may differ"):
            other.load_state_dict(one.state_dict())
        assert other.history == []


@pytest.mark.parametrize("when", [[1, 3, 5], [1, 4], [1]], ids=str)
def test_steps_that_are_still_to_come_may_be_others_when_resuming(when):
    one = Compressor(make(), when=[1, 3], keep=KeepFraction(0.5))
    one.step(1), one.step(2)
    other = Compressor(one.model, when=when, keep=KeepFraction(0.8))
    other.load_state_dict(one.state_dict())
    assert other.schedule == when
    assert [step for step in range(3, 7) if other.step(step)] == when[1:]


def test_a_step_of_the_schedule_cuts_once_however_often_it_is_given():
    compressor = Compressor(make(order=16), when=[2, 4], keep=KeepFraction(0.5))
    orders = [[event.rank for event in compressor.step(step)] for step in (1, 2, 2, 2, 1, 3, 4, 4)]
    assert orders == [[], [8, 8], [], [], [], [], [4, 4], []]


def test_a_step_that_is_left_out_cuts_at_the_next_one_given():
    compressor = Compressor(make(order=16), when=[3, 4, 9], keep=KeepFraction(0.5))
    assert [len(compressor.step(step)) for step in (2, 5, 8, 11)] == [0, 2, 0, 2]


def test_what_was_scheduled_before_the_first_step_given_has_passed():
    compressor = Compressor(make(order=16), when=[3, 9], keep=KeepFraction(0.5))
    with pytest.warns(UserWarning, match="first call of step is at step 5, after 1 cut, at step 3, which will not be"):
        assert compressor.step(5) == []
    assert len(compressor.step(9)) == 2


def test_a_resumed_training_has_missed_nothing():
    one = Compressor(make(order=16), when=[3, 9], keep=KeepFraction(0.5))
    one.step(3)
    again = Compressor(one.model, when=[3, 9], keep=KeepFraction(0.5))
    again.load_state_dict(one.state_dict())
    assert [len(again.step(step)) for step in (5, 9)] == [0, 2]


def test_a_cut_that_failed_can_be_tried_again_at_the_same_step():
    failing = iter([True, False])

    def calibrate(model):
        if next(failing):
            raise OSError("no data yet")
        return model(batches(1)[0][0])

    compressor = Compressor(make(order=12), when=[2], keep=KeepFraction(0.5), calibrate=calibrate)
    with pytest.raises(OSError, match="no data yet"):
        compressor.step(2)
    assert len(compressor.step(2)) == 2


@pytest.mark.parametrize("step", [np.int64(2), torch.tensor(2)], ids=str)
def test_steps_of_any_kind_of_integer_are_taken(step):
    assert len(Compressor(make(), when=[2], keep=KeepFraction(0.5)).step(step)) == 2


def test_what_was_seen_is_resumed():
    first = Compressor(make(order=16), when=[2, 4], keep=KeepFraction(0.5))
    first.step(2)
    second = Compressor(first.model, when=[2, 4], keep=KeepFraction(0.5))
    second.load_state_dict(first.state_dict())
    assert [len(second.step(step)) for step in (2, 3, 5)] == [0, 0, 2]


def test_a_history_of_cuts_that_the_model_does_not_have_is_told():
    first, second = (Compressor(make(order=16), when=[2, 4], keep=KeepFraction(0.5)) for _ in range(2))
    first.step(2)
    with pytest.warns(UserWarning, match=r"blocks.0.ssm has 16, cut to 8, .*load_checkpoint, or the weights") as said:
        second.load_state_dict(first.state_dict())
    assert said[0].filename == __file__
    assert len(second.history) == 2
    second.model.load_state_dict(first.model.state_dict())
    second.load_state_dict(first.state_dict())
    compress_(second.model, keep=TargetOrder(5))  # a cut by hand is in no history
    second.load_state_dict(first.state_dict())


def test_a_history_that_ends_with_restored_orders_fits_the_restored_model():
    first, second = guarded([1.0, 0.1]), guarded([])
    assert [len(first.step(step)) for step in (2, 5)] == [2, 1]
    second.load_state_dict(first.state_dict())
    assert len(second.history) == 3


def guarded(values, **options):
    guard = Rollback(evaluate=iter(values).__next__, settle=3)
    return Compressor(make(order=16), when=[2], keep=KeepFraction(0.5), **{"guard": guard, **options})


def test_cuts_to_be_judged_are_kept_without_a_guard_and_a_warning_says_so():
    first = guarded([1.0])
    first.step(2)
    second = Compressor(first.model, when=[2], keep=KeepFraction(0.5))
    with pytest.warns(UserWarning, match=r"a guard was to judge at step 5.*keeps them.*same guard=Rollback") as said:
        second.load_state_dict(first.state_dict())
    assert said[0].filename == __file__
    assert (second.step(5), len(second.history)) == ([], 2)
    judged = guarded([1.0, 1.0])
    judged.step(2)
    judged.step(5)
    Compressor(judged.model, when=[2], keep=KeepFraction(0.5)).load_state_dict(
        judged.state_dict()
    )  # nothing is pending


def test_a_state_without_a_guard_ends_a_judgement_that_was_to_come():
    pending = guarded([1.0])
    pending.step(2)
    bare = guarded([], guard=None)
    bare.step(1)
    pending.load_state_dict(bare.state_dict())
    assert pending.step(1) == []
    assert pending.state_dict()["watch"]["snapshot"] is None


def test_a_scheduler_that_cannot_come_back_is_refused():
    with pytest.raises(CompressionError, match="scheduler is 3, expected one of torch"):
        Compressor(make(), when=[1], keep=KeepFraction(0.5), scheduler=3)


def test_a_cut_on_the_step_of_a_judgement_asks_once():
    asked = []
    model = make()
    guard = Rollback(evaluate=lambda: asked.append(1) or 1.0, settle=1)
    compressor = Compressor(model, when=[2, 3], keep=KeepFraction(0.5), guard=guard)
    for step in range(1, 6):
        compressor.step(step)
    assert len(asked) == 3  # before the first, after it and before the second, after that


HELD = {
    "at_least=100": {"keep": KeepFraction(0.5), "at_least": 100},
    "round_to=16": {"keep": KeepFraction(0.5), "round_to": 16},
    "keep=TargetOrder(n=16)": {"keep": TargetOrder(16)},
    "keep=Budget(total_states=32)": {"keep": Budget(32)},
    "keep=TargetOrder(n=15), gate=0.9": {"keep": TargetOrder(15), "gate": 0.9},
    "keep=TargetOrder(n=15), gate=0.5, round_to=9, at_least=1": {"keep": TargetOrder(15), "gate": 0.5, "round_to": 9},
}


@pytest.mark.parametrize("named", HELD)
def test_options_that_cannot_cut_this_model_are_named_at_the_first_step(named):
    model = make(order=16)
    compressor = Compressor(model, when=[1, 2], **HELD[named])
    with pytest.warns(UserWarning, match="nothing will be cut") as said:
        assert compressor.step(1) == []
    (warning,) = said
    assert f"nothing will be cut: with {named} every layer keeps its order (blocks.0.ssm 16" in str(warning.message)
    assert warning.filename == __file__
    assert compressor.step(2) == []  # said once
    resumed = Compressor(model, when=[1, 2], **HELD[named])
    resumed.load_state_dict(compressor.state_dict())
    assert resumed.step(3) == []  # after the last cut that is normal


def test_policies_that_cut_no_model_are_refused():
    model = make()
    with pytest.raises(CompressionError, match=r"keep is KeepFraction\(rho=1.0\), with which no layer of any order"):
        Compressor(model, when=[1], keep=KeepFraction(1.0), overrides={"blocks.0.*": KeepFraction(1.0)})
    Compressor(model, when=[1], keep=KeepFraction(1.0), overrides={"blocks.0.*": KeepFraction(0.5)})
    with pytest.warns(UserWarning, match="nothing was cut: with keep"):
        assert compress_(model, keep=KeepFraction(1.0)) == []


def test_between_cuts_a_step_does_nothing_and_later_ones_are_still_made(monkeypatch):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    compressor = Compressor(model, optimizer, when=[3, 10, 20], keep=KeepFraction(0.5), gate=1.0)
    acted, act = [], Compressor._act_
    monkeypatch.setattr(Compressor, "_act_", lambda self, now, undo: acted.append(now) or act(self, now, undo))
    for step in range(1, 22):
        assert bool(compressor.step(step)) == (step in (3, 10, 20)), step
    assert acted == [1, 3, 10, 20]
    assert compressor.state_dict()["seen"] == 21


def test_a_skipped_cut_is_made_and_a_step_that_is_passed_again_is_not_after_quiet_steps():
    model = make()
    compressor = Compressor(model, when=[3, 10], keep=KeepFraction(0.5), gate=1.0)
    for step in (1, 2, 3, 4, 5, 3):
        compressor.step(step)
    assert [event.step for event in compressor.history] == [3, 3]
    assert compressor.step(4) == []
    assert len(compressor.step(np.int64(12))) == 2
    saved = compressor.state_dict()
    other = Compressor(model, when=[3, 10, 13], keep=KeepFraction(0.5), gate=1.0)
    other.step(1)
    other.load_state_dict({**saved, "schedule": [3, 10, 13]})
    assert len(other.step(13)) == 2


def test_a_guard_judges_after_quiet_steps():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    scores = [1.0, 0.1]
    guard = Rollback(lambda: scores.pop(0), settle=3)
    compressor = Compressor(model, optimizer, when=[2], keep=KeepFraction(0.5), gate=1.0, guard=guard)
    events = {step: compressor.step(step) for step in range(1, 9)}
    assert [step for step, found in events.items() if found] == [2, 5]
    assert isinstance(events[5][0], Restored)
