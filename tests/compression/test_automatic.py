"""Schedules that decide as training goes: Automatic by its own rule, somebody's own, and the compressor's promises."""

import copy
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from compressm.compression import (
    Automatic,
    CompressionError,
    Compressor,
    Cut,
    Decision,
    LossTolerance,
    Rollback,
    Schedule,
    TargetOrder,
    Try,
    during_warmup,
    load_checkpoint,
    save_checkpoint,
)
from compressm.compression.schedule import Look, Steps
from compressm.integrations.training import schedule_of
from compressm.layers import LRU, Mamba
from compressm.models import SequenceClassifier

INPUTS = torch.randn(16, 24, 3, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(5, (16,), generator=torch.Generator().manual_seed(1))


def loss(model):
    return cross_entropy(model(INPUTS), TARGETS)


def calibrate(model):
    return model(INPUTS)


def make(kind=LRU, order=16):
    torch.manual_seed(0)
    return SequenceClassifier(kind, depth=2, width=4, order=order, inputs=3, classes=5)


def looks(schedule, spectra, tries=(), orders=None, spent=(), trials=5):
    """The answers of a schedule at its looks, which get these spectra in turn; a try cuts if its step is in `tries`."""
    step, memory, made, answers = schedule.first(0), {}, [], []
    for k in range(200):
        if step is None:
            break
        wanted = spectra[min(k, len(spectra) - 1)] if schedule.wants_spectra(memory) else None
        look = Look(step, orders or {"a": 8}, step in spent, wanted, tuple(made), memory)
        answer = schedule.decide(look)
        answers.append((step, answer))
        memory, cut = answer.memory, step in tries
        if answer.tries:
            made.append(Try(step, cut, trials))
        step = answer.again if cut or not answer.tries else answer.otherwise
    return answers


def steady(n=8):
    return {"a": 0.5 ** torch.arange(n, dtype=torch.float64)}


def tried(answers):
    return [step for step, answer in answers if answer.tries]


def test_tries_begin_when_three_looks_agree_and_stop_before_the_last_quarter():
    schedule = Automatic(400)
    steps = tried(looks(schedule, [steady()], tries=range(1000)))
    assert steps == list(range(30, 301, 10))
    assert (schedule.earliest, schedule.latest, schedule.most_tries) == (30, 300, len(steps))


def test_tries_that_cut_nothing_become_rare():
    answers = looks(Automatic(400), [steady()])
    assert tried(answers) == [30, 50, 90, 170, 300]  # the last one is at the end of the window


def test_tries_that_caution_ended_do_not_become_rare():
    assert tried(looks(Automatic(400), [steady()], trials=1)) == list(range(30, 301, 10))


def test_once_something_was_cut_a_single_trial_is_no_caution():
    """Of a layer with two states one trial is all there is."""
    answers = looks(Automatic(400), [steady()], tries=(30,), trials=1)
    assert tried(answers) == [30, 40, 60, 100, 180, 300]


def test_a_try_that_cuts_sets_the_interval_back():
    assert tried(looks(Automatic(400), [steady()], tries={90})) == [30, 50, 90, 100, 120, 160, 240, 300]


def test_energy_that_moves_is_waited_for_up_to_a_quarter_of_training():
    moving = [{"a": (0.3 + 0.4 * (k % 2)) ** torch.arange(8, dtype=torch.float64)} for k in range(100)]
    answers = looks(Automatic(400), moving)
    assert tried(answers)[0] == 100
    assert "though" in dict(answers)[100].reason
    assert all("have not settled" in answer.reason for step, answer in answers if step < 100)


def test_the_rule_of_settled_spectra_is_the_documented_one():
    schedule, base = Automatic(400), torch.tensor([4.0, 3.0, 2.0, 1.0])
    moved = base + torch.tensor([0.5, 0.0, 0.0, -0.5])  # ½ (0.5 + 0.5) / 10 of the energy
    assert schedule.has_settled([{"a": base}] * 3) == (True, "0 % of the energy moved and 0 % of pairs crossed in a")
    assert schedule.has_settled([{"a": base}, {"a": base}, {"a": moved}])[0] is True
    assert schedule.has_settled([{"a": base}, {"a": base}, {"a": base + 2 * (moved - base)}])[0] is False
    assert Automatic(400, settled=0.04).has_settled([{"a": base}, {"a": base}, {"a": moved}])[0] is False
    assert schedule.has_settled([{"a": base}] * 2)[0] is False
    assert schedule.has_settled([{"a": base[:3]}, {"a": base}, {"a": base}])[0] is False  # somebody has cut it
    # Two values that run towards each other have crossed, though the sorted spectrum moves by less than 5 %.
    crossing = [torch.tensor([10.0, first, second, 1.0]) for first, second in ((6.0, 5.6), (5.86, 5.74), (5.88, 5.72))]
    settled, said = schedule.has_settled([{"a": sigma} for sigma in crossing])
    assert settled is False
    assert "17 % of pairs crossed" in said
    # The worst layer counts.
    assert schedule.has_settled([{"a": base, "b": base}] * 2 + [{"a": base, "b": base.flip(0).cumsum(0).flip(0)}])[
        0
    ] is (False)


def test_a_model_without_states_to_lose_ends_the_schedule():
    answers = looks(Automatic(400), [steady()], tries=range(1000), spent={60})
    assert answers[-1][0] == 60
    assert answers[-1][1].again is None
    assert "no layer lose a state" in answers[-1][1].reason


def test_tries_are_gentle_and_cautious_until_the_first_cut():
    answers = dict(looks(Automatic(400, share=0.7), [steady()], tries={50, 60}))
    assert {answer.share for answer in answers.values() if answer.tries} == {0.7}
    assert [answers[step].cautious for step in (30, 50, 60, 70)] == [True, True, False, False]


@pytest.mark.parametrize("total", [2, 7, 40, 41, 399, 1500, 200_000])
def test_the_plan_holds_for_every_length(total):
    schedule = Automatic(total)
    for spectra, cut in (([steady()], range(10**6)), ([steady()], ())):
        answers = looks(schedule, spectra, tries=cut)
        steps = tried(answers)
        assert len(steps) <= schedule.most_tries
        assert all(schedule.earliest <= step <= schedule.latest for step in steps)
    assert str(schedule.latest) in schedule.plan()


def test_bad_arguments_are_refused():
    for arguments in ({"total_steps": 0}, {"recover": 1.0}, {"settled": -0.1}, {"every": 0}, {"share": 1.0}):
        with pytest.raises(CompressionError, match="Automatic"):
            Automatic(**{"total_steps": 100, **arguments})
    for arguments, first, last in (((100, 90), 90, 75), ((1, None), 1, 0)):
        with pytest.raises(CompressionError, match=rf"first look is at step {first}, after the latest try, {last}"):
            Automatic(arguments[0], every=arguments[1])


def train(model, optimizer, compressor, first, last):
    events = []
    for step in range(first, last + 1):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        events += compressor.step(step)
    return events


@pytest.mark.parametrize(("kind", "order", "increase"), [(LRU, 16, 0.03), (Mamba, 6, 0.001)])
def test_a_training_cuts_by_itself_and_says_why(kind, order, increase):
    model = make(kind, order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keep = LossTolerance(increase, loss=loss)
    compressor = Compressor(model, optimizer, when=Automatic(80, every=4), keep=keep, calibrate=calibrate)
    assert compressor.plan.startswith("at most 13 tries, from step 12")
    assert compressor.plan.endswith(f"at most 12 trials a cut, for a loss that rises by at most {100 * increase:g} %")
    events = train(model, optimizer, compressor, 1, 80)
    assert events == compressor.history
    cuts, decisions = ([e for e in events if isinstance(e, kind_)] for kind_ in (Cut, Decision))
    assert cuts
    assert max(cut.step for cut in cuts) <= 60
    assert all(cut.rank >= cut.order / 2 for cut in cuts)
    assert {d.action for d in decisions} <= {"wait", "cut", "keep", "stop"}
    assert {cut.step for cut in cuts} == {d.step for d in decisions if d.action == "cut"}
    assert all(d.reason for d in decisions)
    assert all(cut.loss_after <= cut.loss_before * (1 + increase) + 1e-9 for cut in cuts)
    assert min(block.ssm.order for block in model.blocks) < order


def bits(model, optimizer):
    states = [value.clone() for state in optimizer.state.values() for value in state.values()]
    return [value.clone() for value in model.state_dict().values()] + states


def parts():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"when": Automatic(80, every=4), "keep": LossTolerance(0.03, loss=loss), "calibrate": calibrate}
    return model, optimizer, Compressor(model, optimizer, **options)


STOPS, END = [10, 14, 24, 39], 48


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A training without a pause, and the folder of its checkpoints."""
    folder, whole, before = tmp_path_factory.mktemp("checkpoints"), parts(), 0
    for stop in STOPS:
        train(*whole, before + 1, stop)
        model, optimizer, compressor = whole
        save_checkpoint(folder / f"{stop}.pt", model=model, optimizer=optimizer, compressor=compressor, step=stop)
        before = stop
    train(*whole, before + 1, END)
    return whole, folder


@pytest.mark.parametrize("stop", STOPS)
def test_a_training_that_is_resumed_has_the_same_bits(stop, stopped):
    (whole, folder), again = stopped, parts()
    load_checkpoint(folder / f"{stop}.pt", model=again[0], optimizer=again[1], compressor=again[2])
    train(*again, stop + 1, END)
    assert all(torch.equal(a, b) for a, b in zip(bits(*whole[:2]), bits(*again[:2]), strict=True))
    assert [e for e in again[2].history if not isinstance(e, Cut)] == [
        e for e in whole[2].history if not isinstance(e, Cut)
    ]
    assert [(e.step, e.module, e.rank) for e in again[2].history if isinstance(e, Cut)] == [
        (e.step, e.module, e.rank) for e in whole[2].history if isinstance(e, Cut)
    ]


class WhenFlat(Schedule):
    """Somebody's own schedule: it looks every third step and tries while fewer than two tries have cut."""

    def first(self, after):
        return after + 3 - after % 3

    def decide(self, look):
        assert look.spectra.keys() == look.orders.keys()
        seen = look.memory.get("seen", 0) + 1
        if sum(one.cut for one in look.tries) == 2:
            return look.stop("twice is enough")
        if seen < 2:
            return look.wait(look.step + 3, memory={"seen": seen})
        return look.attempt(f"look {seen}", again=look.step + 3, share=0.5, memory={"seen": seen})

    def wants_spectra(self, memory):
        return True

    def plan(self):
        return "every third step, twice"


def test_somebodys_own_schedule_decides():
    model = make()
    compressor = Compressor(model, when=WhenFlat(), keep=TargetOrder(2))
    events = [str(event) for step in range(1, 16) for event in compressor.step(step)]
    assert compressor.plan == "every third step, twice"
    assert compressor.schedule == []
    assert [e for e in events if "states" not in e] == [
        "cuts: look 2; looks again at step 9",
        "cuts: look 3; looks again at step 12",
        "cuts no more: twice is enough",
    ]
    assert [b.ssm.order for b in model.blocks] == [4, 4]  # each try leaves half


def test_due_is_the_step_up_to_which_nothing_happens():
    compressor = Compressor(make(), when=WhenFlat(), keep=TargetOrder(2))
    seen = []
    for step in range(1, 16):
        due = compressor.due
        events = compressor.step(step)
        seen += [(step, due)] if due is not None and due <= step else []
        assert not events or due == step
    assert [step for step, _ in seen] == [3, 6, 9, 12]
    assert compressor.due is None
    assert Compressor(make(), when=[4, 9], keep=TargetOrder(2)).due == 4


def test_between_looks_a_schedule_is_not_asked():
    asked = []

    class Counting(WhenFlat):
        def first(self, after):
            asked.append(after)
            return super().first(after)

        def decide(self, look):
            asked.append(look.step)
            return look.wait(look.step + 1000)

    compressor = Compressor(make(), when=Counting(), keep=TargetOrder(2))
    for step in range(1, 1004):
        compressor.step(step)
    begun = len(asked)
    for step in range(1004, 2003):
        compressor.step(step)
    assert asked[begun:] == []
    compressor.step(2003)
    assert asked[begun:] == [2003]


def test_a_first_call_after_the_first_look_waits_for_the_next():
    compressor = Compressor(make(), when=WhenFlat(), keep=TargetOrder(2))
    assert compressor.step(7) == []
    assert compressor.due == 9
    steps = Compressor(make(), when=[4, 9], keep=TargetOrder(2))
    with pytest.warns(UserWarning, match="the first call of step is at step 7"):
        steps.step(7)
    assert steps.due == 9


def test_a_look_that_was_passed_over_comes_at_the_next_call():
    compressor = Compressor(make(), when=WhenFlat(), keep=TargetOrder(2))
    compressor.step(1)
    compressor.step(8)
    assert compressor.due == 11
    assert [type(e).__name__ for e in compressor.step(20)] == ["Decision", "Cut", "Cut"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda look: None, "decide returned None"),
        (lambda look: look.wait(look.step), "the step of the next look is 3"),
        (lambda look: look.attempt("now", share=1.0), "share is 1.0"),
    ],
)
def test_bad_answers_are_refused_and_change_nothing(answer, said):
    class Odd(Schedule):
        def first(self, after):
            return 3

        def plan(self):
            return ""

        def decide(self, look):
            return answer(look)

    model = make()
    compressor = Compressor(model, when=Odd(), keep=TargetOrder(2))
    compressor.step(2)
    state = compressor.state_dict()
    for _ in range(2):
        with pytest.raises(CompressionError, match=said):
            compressor.step(3)
        assert compressor.state_dict() == state


def test_a_fault_in_a_schedule_leaves_its_memory_as_it_was():
    class Failing(WhenFlat):
        def decide(self, look):
            if look.step >= 9 and not allowed:
                raise OSError("no")
            return super().decide(look)

    allowed, model = [], make()
    compressor = Compressor(model, when=Failing(), keep=TargetOrder(2))
    for step in range(1, 9):
        compressor.step(step)
    state, orders = compressor.state_dict(), [b.ssm.order for b in model.blocks]
    with pytest.raises(OSError, match="no"):
        compressor.step(9)
    assert compressor.state_dict() == state
    assert [b.ssm.order for b in model.blocks] == orders
    allowed.append(1)
    assert len(compressor.step(9)) == 3


def test_states_of_steps_and_of_schedules_are_not_mixed_up():
    steps, found = (
        Compressor(make(), when=when, keep=TargetOrder(2)) for when in (during_warmup(80), Automatic(80, every=4))
    )
    with pytest.raises(CompressionError, match="made with when=a list of steps"):
        found.load_state_dict(steps.state_dict())
    with pytest.raises(CompressionError, match="made with when=a Schedule"):
        steps.load_state_dict(found.state_dict())
    broken = found.state_dict() | {"decided": {"look_at": 3}}
    with pytest.raises(CompressionError, match="decided has look_at"):
        found.load_state_dict(broken)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"decided": {"look_at": 8, "tries": [[1]], "memory": {}}}, r"a try is \[1\], expected \[step"),
        ({"decided": {"look_at": 8, "tries": [["a", True, 1]], "memory": {}}}, "a try is 'a'"),
        ({"decided": {"look_at": -3, "tries": [], "memory": {}}}, "look_at is -3"),
        ({"losses": 3}, "losses is 3"),
        ({"losses": {"best": "low", "added": 0.0}}, "best is 'low'"),
        ({"losses": {"best": math.nan, "added": 0.0}}, "best is nan"),
        ({"losses": {"best": 1.0, "added": [1]}}, r"added is \[1\]"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage, said):
    saved = Compressor(make(), when=Automatic(80, every=4), keep=TargetOrder(2))
    saved.step(5)
    loading = Compressor(make(), when=Automatic(80, every=4), keep=TargetOrder(2))
    loading.step(2)
    before = loading.state_dict()
    with pytest.raises(CompressionError, match=said):
        loading.load_state_dict(saved.state_dict() | damage)
    assert loading.state_dict() == before


def spectra_of(**sigma):
    return [{"a": torch.ones(3), **sigma}]


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ({"spectra": 3}, "memory: spectra is 3, expected list"),
        ({"spectra": [3]}, "memory: spectra holds 3, expected {module: values}"),
        ({"spectra": [None]}, "memory: spectra holds None"),
        ({"spectra": spectra_of(b=[1.0])}, r"memory: spectra of 'b' is \[1.0\], expected a tensor"),
        ({"spectra": spectra_of(b=torch.ones(2, 2))}, r"memory: spectra of 'b' is .*, expected a tensor"),
        ({"spectra": spectra_of(b=torch.tensor([1.0, math.nan]))}, "memory: spectra of 'b' is .*, expected a tensor"),
        ({"spectra": spectra_of(b=torch.tensor([1.0, -1.0]))}, "memory: spectra of 'b' is .*, expected a tensor"),
        (
            {"spectra": spectra_of(b=torch.ones(2, dtype=torch.complex64))},
            "memory: spectra of 'b' is .*, expected a tensor",
        ),
        ({"spectra": [{3: torch.ones(2)}]}, "memory: spectra of 3 is"),
        ({"begun": "yes"}, "memory: begun is 'yes', expected bool"),
        ({"begun": True, "gap": "2"}, "memory: gap is '2', expected"),
        ({"begun": True, "gap": 0}, "memory: gap is 0, expected"),
    ],
)
@pytest.mark.parametrize("tried", [False, True])
def test_a_damaged_memory_of_the_automatic_schedule_is_refused_before_it_is_used(memory, said, tried):
    saved = Compressor(make(), when=Automatic(80, every=4), keep=TargetOrder(2))
    for step in range(1, 13 if tried else 5):
        saved.step(step)
    state = saved.state_dict()
    state["decided"]["memory"] |= memory
    loading = Compressor(make(), when=Automatic(80, every=4), keep=TargetOrder(2))
    before = loading.state_dict()
    with pytest.raises(CompressionError, match=f"(?s)the state of a compressor: decided: {said}"):
        loading.load_state_dict(state)
    assert loading.state_dict() == before


def test_the_guard_ends_an_automatic_schedule():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = iter([1.0, 0.1])
    guard = Rollback(lambda: next(values), settle=2)
    when = Automatic(80, every=4)
    compressor = Compressor(model, optimizer, when=when, keep=TargetOrder(2), guard=guard)
    events = train(model, optimizer, compressor, 1, 60)
    assert [type(event).__name__ for event in events][-4:] == ["Decision", "Cut", "Cut", "Restored"]
    assert compressor.due is None
    assert [b.ssm.order for b in model.blocks] == [16, 16]


def test_a_collection_of_steps_is_one_schedule_of_many():
    steps = Steps((2, 5))
    assert [steps.first(after) for after in (0, 1, 2, 5)] == [2, 2, 5, None]
    assert steps.plan() == "2 cuts, at steps 2, 5"
    compressor = Compressor(make(), when=[5, 2], keep=TargetOrder(4))
    assert compressor.schedule == [2, 5]
    assert compressor.plan == "2 cuts, at steps 2, 5"
    assert not [e for step in range(1, 7) for e in compressor.step(step) if isinstance(e, Decision)]


def test_schedules_are_shared_without_a_state():
    when = Automatic(80, every=4)
    one, other = (Compressor(make(), when=when, keep=TargetOrder(2)) for _ in range(2))
    events = [[str(e) for step in range(1, 30) for e in compressor.step(step)] for compressor in (one, other)]
    assert [e for e in events[0] if "states" not in e] == [e for e in events[1] if "states" not in e]
    assert copy.deepcopy(when) == when == Automatic(80, every=4)
    assert repr(when).startswith("Automatic(total_steps=80, every=4")


def test_callbacks_of_trainers_take_a_schedule_or_make_one_of_the_number_of_steps():
    when = Automatic(80)
    assert schedule_of(when, math.inf) is when
    assert schedule_of(Automatic, 80) == when


def test_a_sharded_model_cannot_be_copied_for_trials(monkeypatch):
    monkeypatch.setattr("compressm.compression.cutting.is_sharded", lambda model: True)
    with pytest.raises(CompressionError, match=r"LossTolerance.*sharded by fully_shard cannot be copied"):
        Compressor(make(), when=[1], keep=LossTolerance(0.1, loss=loss))
