"""What an unknown optimizer keeps is found in a trial, when the compressor is made; nothing of the user's is touched.

The optimizers are stand-ins, with the states of well-known packages.
"""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from compressm.compression import CompressionError, Compressor, Restart, Slice, TargetOrder, Transport, compress_, trial
from compressm.layers import LRU
from compressm.models import SequenceClassifier

optim = torch.optim
X, Y = torch.randn(4, 20, 3, generator=torch.Generator().manual_seed(1)), torch.arange(4)


class Keeping(optim.Optimizer):
    """An optimizer whose `entries` make the state of a parameter; it steps along the gradient."""

    entries = staticmethod(lambda p: {})

    def __init__(self, params, lr=1e-3, **options):
        super().__init__(params, {"lr": lr})
        self.options = options  # lost by copy.deepcopy, which asks an optimizer for its groups and state only

    @torch.no_grad()
    def step(self, closure=None):
        _ = self.options
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state[p]:
                        self.state[p].update(self.entries(p))
                    p.sub_(group["lr"] * p.grad)


def keeping(name, **entries):
    """A class of this name that keeps these entries of every parameter."""
    made = staticmethod(lambda p: {key: make(p) for key, make in entries.items()})
    return type(name, (Keeping,), {"entries": made})


zeros, ones, clone = torch.zeros_like, torch.ones_like, torch.clone


def codes(p):
    return torch.zeros(p.shape, dtype=torch.uint8)


FOLLOW = {
    "Lion": keeping("Lion", exp_avg=zeros),
    "FusedAdam": keeping("FusedAdam", exp_avg=zeros, exp_avg_sq=zeros),
    "Muon": keeping("SingleDeviceMuon", momentum_buffer=zeros),
    "StableAdamW": keeping("StableAdamW", exp_avg=zeros, exp_avg_sq=zeros, step=lambda p: 0),
    "nothing": keeping("SignSGD"),
}
# Those that Restart() and Slice() may carry, though Transport() does not know what their entries are.
UNKNOWN = {
    "Sophia": (keeping("SophiaG", exp_avg=zeros, hessian=zeros), "SophiaG keeps 'hessian', whose meaning Transport"),
    "Adan": (keeping("Adan", exp_avg=zeros, exp_avg_diff=zeros), "Adan keeps 'exp_avg_diff'"),
    "small 8-bit": (keeping("AdamW8bit", state1=zeros, state2=zeros), "AdamW8bit keeps 'state1', 'state2'"),
}
REFUSED = {
    "schedule-free AdamW": (keeping("AdamWScheduleFree", z=clone, exp_avg_sq=zeros), "keeps weights in 'z'.*AdamW"),
    "Prodigy": (keeping("Prodigy", s=zeros, p0=clone), "Prodigy keeps weights in 'p0'.*then a new optimizer"),
    "Lookahead": (keeping("Lookahead", slow_buffer=clone), "keeps weights in 'slow_buffer'"),
    "an anchor": (keeping("Anchored", exp_avg=zeros, anchor=clone), "Anchored keeps weights in 'anchor'"),
    "8-bit": (keeping("AdamW8bit", state1=codes), "AdamW8bit's 'state1' of blocks.0.ssm.* is torch.uint8, expected"),
    "factored": (keeping("Factored", row=lambda p: p.new_zeros(99)), r"'row' of blocks.* has shape \(99,\).*factored"),
    "a list": (keeping("Listing", history=lambda p: [p]), "'history' of blocks.* is a list"),
    "SOAP": (keeping("SOAP", exp_avg=zeros), "SOAP mixes the entries"),
}


def make():
    torch.manual_seed(0)
    return SequenceClassifier(LRU, depth=2, width=4, order=12, inputs=3, classes=5)


def step(model, optimizer):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(X), Y).backward()
    optimizer.step()


def compressor_for(model, optimizer, moments=None):
    return Compressor(model, optimizer, when=[1], keep=TargetOrder(4), moments=moments or Transport())


@pytest.mark.parametrize("name", FOLLOW)
def test_what_can_follow_is_taken_and_trains_on(name):
    model = make()
    optimizer = FOLLOW[name](model.parameters())
    compressor = compressor_for(model, optimizer)
    step(model, optimizer)
    assert len(compressor.step(1)) == 2
    step(model, optimizer)


@pytest.mark.parametrize("name", UNKNOWN)
def test_entries_of_unknown_meaning_are_refused_when_the_compressor_is_made(name):
    kind, said = UNKNOWN[name]
    model = make()
    with pytest.raises(CompressionError, match=rf"{said}.*moments=Restart\(\) or Slice\(\)"):
        compressor_for(model, kind(model.parameters()))
    for moments in (Restart(), Slice()):
        model = make()
        optimizer = kind(model.parameters())
        compressor = compressor_for(model, optimizer, moments)
        step(model, optimizer)
        assert len(compressor.step(1)) == 2
        step(model, optimizer)


@pytest.mark.parametrize("moments", [Transport(), Restart(), Slice()], ids=repr)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_follow_is_refused_when_the_compressor_is_made(name, moments):
    """Zeros for a copy of the weights would pull them to 0; a slice of it would be in other coordinates."""
    kind, said = REFUSED[name]
    model = make()
    with pytest.raises(CompressionError, match=said):
        compressor_for(model, kind(model.parameters()), moments)


@pytest.mark.parametrize("name", ["Sophia", "schedule-free AdamW"])
def test_a_state_that_is_there_is_judged_at_once_too(name):
    kind, said = (UNKNOWN | REFUSED)[name]
    model = make()
    optimizer = kind(model.parameters())
    step(model, optimizer)
    with pytest.raises(CompressionError, match=said):
        compressor_for(model, optimizer)


@pytest.mark.parametrize("steps", [0, 1])
def test_the_average_of_asgd_is_refused(steps):
    model = make()
    optimizer = optim.ASGD(model.parameters())
    for _ in range(steps):
        step(model, optimizer)
    with pytest.raises(CompressionError, match="ASGD keeps weights in 'ax'"):
        compressor_for(model, optimizer, Restart())


def test_one_of_several_is_tried_and_named():
    model = make()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    with pytest.raises(CompressionError, match="Anchored keeps weights in 'anchor'"):
        compressor_for(model, [optim.AdamW(matrices), REFUSED["an anchor"][0](rest)])
    inside = {id(p) for block in model.blocks for p in block.ssm.parameters()}
    inner = [p for p in model.parameters() if id(p) in inside]
    outer = [p for p in model.parameters() if id(p) not in inside]
    compressor_for(model, [optim.AdamW(inner), REFUSED["an anchor"][0](outer)])


class Restless(Keeping):
    """An optimizer that draws random numbers, counts its steps and changes what it was given."""

    drawn = 0

    def __init__(self, params, seen):
        super().__init__(params)
        self.seen, self.buffers = seen, {"count": torch.zeros(1)}
        self.register_step_pre_hook(lambda *args: seen.append("hook"))

    def step(self, closure=None):
        Restless.drawn += 1
        torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
        self.buffers["count"] += 1
        self.param_groups[0]["lr"] *= 2
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                p.data.fill_(7.0)
                p.grad.zero_()


def test_the_trial_touches_nothing_of_the_users():
    model, seen = make(), []
    optimizer = Restless(model.parameters(), seen)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)  # binds optimizer.step to this optimizer
    nn.functional.cross_entropy(model(X), Y).backward()
    model.blocks[0].ssm.nu_log.register_hook(lambda gradient: seen.append("gradient"))
    values = copy.deepcopy(model.state_dict())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    groups = copy.deepcopy(optimizer.state_dict())
    numbers = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    before = Restless.drawn
    compressor_for(model, optimizer)
    assert Restless.drawn == before + 1  # the trial took place
    assert not optimizer.state
    assert optimizer.state_dict() == groups
    assert optimizer.buffers["count"].item() == 0
    assert seen == []
    assert scheduler.last_epoch == 0
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert (np.random.get_state()[1] == numbers[1]).all()  # noqa: NPY002


def test_pythons_random_numbers_are_restored_after_the_trial():
    """Alone, because the checks of types in these tests draw from them too."""
    with trial._undisturbed({}):
        before = random.getstate()
        random.random()
        assert random.getstate() != before
    assert random.getstate() == before


class NeedsAClosure(REFUSED["an anchor"][0]):
    def step(self, closure):
        closure()
        super().step()


class NeedsItsOwn(REFUSED["an anchor"][0]):
    def __init__(self, params):
        super().__init__(params)
        self.lock = (number for number in range(3))  # cannot be copied


@pytest.mark.parametrize("kind", [NeedsAClosure, NeedsItsOwn])
def test_an_optimizer_that_cannot_be_tried_is_judged_at_the_first_cut(kind):
    model = make()
    optimizer = kind(model.parameters())
    compressor = compressor_for(model, optimizer)
    nn.functional.cross_entropy(model(X), Y).backward()
    optimizer.step(*([lambda: None] if kind is NeedsAClosure else []))
    values = copy.deepcopy(model.state_dict())
    with pytest.raises(CompressionError, match="keeps 'anchor', whose meaning"):
        compressor.step(1)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


class Wrapping:
    """As accelerate wraps an optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


def test_an_optimizer_inside_a_wrapper_is_tried():
    model = make()
    with pytest.raises(CompressionError, match="Wrapping keeps weights in 'z'"):
        compressor_for(model, Wrapping(REFUSED["schedule-free AdamW"][0](model.parameters())))
    compressor_for(model, Wrapping(optim.AdamW(model.parameters())))


def test_a_cut_without_training_needs_no_trial():
    model = make()
    before = Restless.drawn
    compress_(model, keep=TargetOrder(4))
    assert Restless.drawn == before


class Around(optim.Optimizer):
    """An optimizer that leaves the step, and the moments, to others inside, as SAM, Lookahead and containers do."""

    def __init__(self, inside):
        self.inside = inside
        super().__init__([p for one in self.all() for group in one.param_groups for p in group["params"]], {})

    def all(self):
        inside = list(self.inside.values()) if isinstance(self.inside, dict) else self.inside
        return inside if isinstance(inside, list) else [inside]

    def step(self, closure=None):
        for one in self.all():
            one.step()


@pytest.mark.parametrize("moments", [Transport(), Restart(), Slice()], ids=repr)
@pytest.mark.parametrize("way", ["one", "a list", "a dictionary", "inside a wrapper"])
def test_an_optimizer_around_others_is_refused_and_those_inside_are_taken(way, moments):
    """The moments inside kept their sizes, so the next step failed with an error of torch."""
    model = make()
    adamw = optim.AdamW(model.parameters())
    around = Around({"one": adamw, "a list": [adamw], "a dictionary": {"all": adamw}}.get(way, adamw))
    step(model, around)
    given = Wrapping(around) if way == "inside a wrapper" else around
    with pytest.raises(CompressionError, match=r"Around keeps another optimizer, AdamW, in 'inside', .*around\.inside"):
        compressor_for(model, given, moments)
    with pytest.raises(CompressionError, match="Around keeps another optimizer"):
        compress_(model, keep=TargetOrder(4), optimizer=given, moments=moments)
    compressor = compressor_for(model, around.all(), moments)
    assert len(compressor.step(1)) == 2
    step(model, around)


class Apart(optim.Optimizer):
    """An optimizer that keeps its moments in its own attributes, groups or keys, from the start or the first step."""

    def __init__(self, params, way="a list", lazy=False):
        super().__init__(params, {"lr": 1e-3})
        self.way, self.members = way, [p for group in self.param_groups for p in group["params"]]  # no moments
        if not lazy:
            self.make()

    def make(self):
        zeros, self.made = [torch.zeros_like(p) for p in self.members], True
        by_member = dict(zip(self.members, zeros, strict=True))
        if self.way == "a list":
            self.moments = zeros
        elif self.way == "a dictionary of dictionaries":
            self.moments = {p: {"m": value} for p, value in by_member.items()}
        elif self.way == "a group":
            self.param_groups[0]["moments"] = zeros
        elif self.way == "a key":
            self.state["moments"]["m"] = zeros
        else:
            self.moments = torch.cat([value.flatten() for value in zeros])

    def held(self):
        """The moments of every member."""
        if self.way == "a group":
            return self.param_groups[0]["moments"]
        if self.way == "a key":
            return self.state["moments"]["m"]
        if self.way == "a vector":
            parts = self.moments.split([p.numel() for p in self.members])
            return [part.view(p.shape) for part, p in zip(parts, self.members, strict=True)]
        return self.moments if self.way == "a list" else [state["m"] for state in self.moments.values()]

    @torch.no_grad()
    def step(self, closure=None):
        if not hasattr(self, "made"):
            self.make()
        for p, moment in zip(self.members, self.held(), strict=True):
            if p.grad is not None:
                p.sub_(1e-3 * moment.mul_(0.9).add_(p.grad))


@pytest.mark.parametrize("lazy", [False, True], ids=["from the start", "from the first step"])
@pytest.mark.parametrize("way", ["a list", "a dictionary of dictionaries", "a group", "a key", "a vector"])
def test_moments_that_are_not_in_the_state_are_refused(way, lazy):
    """The next step failed with an error of torch."""
    model = make()
    optimizer = Apart(model.parameters(), way, lazy)
    with pytest.raises(CompressionError, match=r"Apart keeps a tensor .*moments.*not in its state.*state\[parameter\]"):
        compressor_for(model, optimizer, Restart())
    step(model, optimizer)
    with pytest.raises(CompressionError, match="Apart keeps a tensor"):
        compress_(model, keep=TargetOrder(4), optimizer=optimizer)
    assert model.blocks[0].ssm.order == 12
    compress_(model, keep=TargetOrder(4))  # the cure
    step(model, Apart(model.parameters(), way, lazy))


def test_moments_of_what_is_not_cut_may_be_anywhere():
    model = make()
    inside = {id(p) for block in model.blocks for p in block.ssm.parameters()}
    optimizers = [
        Keeping([p for p in model.parameters() if id(p) in inside]),
        Apart([p for p in model.parameters() if id(p) not in inside]),
    ]
    optimizers[0].table = torch.zeros(7, 3)
    compressor = compressor_for(model, optimizers)
    for one in optimizers:
        step(model, one)
    assert len(compressor.step(1)) == 2
    for one in optimizers:
        step(model, one)
