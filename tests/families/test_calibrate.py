"""Whatever `calibrate` does, the model is as before afterwards; changed weights are put back and refused."""

import copy
import gc
import random
from functools import partial
from operator import itemgetter

import numpy as np
import pytest
import torch
from torch import nn

from compressm.compression import CompressionError, Compressor, KeepFraction, Rollback, TargetOrder, compress_, inspect
from compressm.layers import LRU, S4, S4D, Mamba
from compressm.models import SequenceClassifier
from tests import unhooked
from tests.compression.faults import stopped

X = torch.linspace(-1, 1, 2 * 20 * 3).reshape(2, 20, 3)


class Counting(nn.Module):
    """Statistics in three kinds of buffers: BatchNorm's, a persistent one, and one outside the state dict."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)

    def forward(self, x):
        if self.training:
            self.seen += 1
            self.hidden = self.hidden + x.mean()
        return self.norm(x.mT).mT


def make(layer=LRU):
    torch.manual_seed(0)
    classifier = SequenceClassifier(layer, depth=2, width=4, order=6, inputs=3, classes=2)
    model = nn.Sequential(Counting(), classifier, nn.Linear(2, 2))
    model[1].blocks[0].eval()
    model[2].weight.requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5) if parameter.requires_grad else None
    return model


def everything(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "tensors": {name: (id(value), value.requires_grad, value.tolist()) for name, value in tensors},
        "gradients": {
            name: None if p.grad is None else (id(p.grad), p.grad.tolist()) for name, p in model.named_parameters()
        },
        "modes": [module.training for module in model.modules()],
        "random": (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()),  # noqa: NPY002
        "grad mode": torch.is_grad_enabled(),
    }


def trains(model):
    model.train()
    with torch.enable_grad():
        model(X).square().sum().backward()


def draws(model):
    random.random(), torch.rand(3), np.random.rand()  # noqa: NPY002
    torch.manual_seed(7)
    model(X)


def freezes(model):
    model.requires_grad_(False)
    model[2].weight.requires_grad_(True)
    model(X)


def forgets_gradients(model):
    model.zero_grad()
    model(X)


def zeroes_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    model(X)


def replaces_a_buffer(model):
    model(X)
    model[0].seen = torch.ones(5)
    model[0].register_buffer("another", torch.ones(1))


def turns_gradients_on(model):
    torch.set_grad_enabled(True)
    model(X)


HARMLESS = [*(trains, draws, freezes, forgets_gradients, zeroes_gradients, replaces_a_buffer, turns_gradients_on)]


@pytest.mark.parametrize("calibrate", HARMLESS, ids=lambda calibrate: calibrate.__name__)
def test_everything_beside_the_cut_is_as_before(calibrate):
    model = make()
    before = everything(model)
    inspect(model, calibrate=calibrate)
    assert everything(model) == before
    assert len(compress_(model, keep=TargetOrder(3), calibrate=calibrate)) == 2
    after = everything(model)
    assert {part: after[part] for part in ("modes", "random", "grad mode")} == {
        part: before[part] for part in ("modes", "random", "grad mode")
    }
    assert after["tensors"]["0.seen"] == before["tensors"]["0.seen"]


def test_random_numbers_of_python_are_as_before():
    """In a process without the tests' type checker, which draws from `random` itself."""
    script = """
import random, torch
from compressm.compression import inspect
from compressm.layers import LRU

random.seed(3)
before = random.getstate()
inspect(LRU(2, 4), calibrate=lambda model: (random.seed(5), random.random(), model(torch.randn(2, 9, 2))))
print("as before" if random.getstate() == before else "changed")
"""
    assert unhooked.run(script) == "as before\n"


@pytest.mark.parametrize("calibrate", HARMLESS, ids=lambda calibrate: calibrate.__name__)
def test_everything_is_as_before_after_an_error_in_calibrate(calibrate):
    model = make()
    before = everything(model)

    def fails(model):
        calibrate(model)
        model[2].bias.data.add_(1)
        raise OSError("no more data")

    with pytest.raises(OSError, match="no more data"):
        compress_(model, keep=TargetOrder(3), calibrate=fails)
    assert everything(model) == before


def assigned(model):
    model[2].bias = nn.Parameter(torch.zeros(2))


def halved(model):
    model[2].half()


def added(model):
    model[2].register_parameter("more", nn.Parameter(torch.zeros(1)))


CHANGES = {
    "in place": (lambda model: model[2].weight.mul_(2), "2.weight"),
    "behind autograd": (lambda model: model[2].weight.data.mul_(2), "2.weight"),
    "of a layer": (lambda model: model[1].blocks[1].ssm.nu_log.data.add_(0.1), r"1\.blocks\.1\.ssm\.nu_log"),
    "other memory": (lambda model: setattr(model[2].weight, "data", torch.zeros(2, 2)), "2.weight"),
    "another shape": (lambda model: setattr(model[2].weight, "data", torch.zeros(3, 2)), "2.weight"),
    "another object": (assigned, "2.bias"),
    "another dtype": (halved, r"2\.weight, 2\.bias"),
    "one more": (added, r"2\.more"),
    "NaN": (lambda model: model[2].weight.data.fill_(torch.nan), "2.weight"),
    "the sign of a zero": (lambda model: model[1].blocks[0].norm.bias.data.neg_(), r"1\.blocks\.0\.norm\.bias"),
    "a sum that stays": (lambda model: model[2].weight.data.copy_(model[2].weight.data.flip(0)), "2.weight"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changed_weights_are_put_back_and_refused(case):
    model, (change, name) = make(), CHANGES[case]
    before = everything(model)

    def calibrate(model):
        change(model)
        model[1](X)

    with pytest.raises(CompressionError, match=rf"calibrate changed {name}.*only runs the model.*put back"):
        compress_(model, keep=TargetOrder(3), calibrate=calibrate)
    assert everything(model) == before


@pytest.mark.parametrize("is_caught", [False, True], ids=["raised", "caught by calibrate"])
def test_an_optimizer_that_steps_is_refused_before_it_changes_anything(is_caught):
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    before, state = everything(model), copy.deepcopy(optimizer.state_dict())

    def calibrate(model):
        trains(model)
        try:
            optimizer.step()
        except CompressionError:
            if not is_caught:
                raise

    compressor = Compressor(model, optimizer, when=[1], keep=TargetOrder(3), calibrate=calibrate)
    with pytest.raises(CompressionError, match=r"calibrate called step\(\) of Adam.*only runs"):
        compressor.step(1)
    assert everything(model) == before
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    optimizer.step()  # as ever afterwards
    assert everything(model) != before


def test_an_optimizer_of_something_else_may_step():
    model, other = make(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([other], lr=0.1)

    def calibrate(model):
        other.grad = torch.ones(2)
        optimizer.step()
        model(X)

    assert len(compress_(model, keep=TargetOrder(3), calibrate=calibrate)) == 2
    assert other.tolist() == pytest.approx([0.9, 0.9])


def test_a_step_that_torch_does_not_know_is_found_by_its_weights():
    model = make(Mamba)
    before = everything(model)

    def calibrate(model):
        trains(model)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data -= 0.1 * parameter.grad

    with pytest.raises(CompressionError, match=r"calibrate changed .* and \d+ more; .*not what else it changed"):
        compress_(model, keep=TargetOrder(3), calibrate=calibrate)
    assert everything(model) == before


def nothing():
    """Takes no model."""


def two(model, data):
    """Takes more than a model."""


@pytest.mark.parametrize(
    "calibrate", [nothing, two, lambda *, model: None, partial(two, 1, 2)], ids=lambda case: str(case)[:20]
)
def test_a_function_of_another_signature_is_refused_at_once_with_the_right_one(calibrate):
    model = make()
    for call in (
        lambda: Compressor(model, when=[1], keep=KeepFraction(0.5), calibrate=calibrate),
        lambda: compress_(model, keep=KeepFraction(0.5), calibrate=calibrate),
        lambda: inspect(model, calibrate=calibrate),
    ):
        with pytest.raises(CompressionError, match=r"a function of the model, such as lambda model: model\(inputs\)"):
            call()


class Runner:
    def __call__(self, model, times=1):
        return [model(X) for _ in range(times)]

    def run(self, model):
        return model(X)


@pytest.mark.parametrize(
    "calibrate",
    [Runner(), Runner().run, partial(two, data=1), lambda *args: args[0](X), lambda model, **options: model(X)],
    ids=["an object", "a method", "a partial function", "any arguments", "any options"],
)
def test_whatever_takes_a_model_is_taken(calibrate):
    compressor = Compressor(make(), when=[1], keep=KeepFraction(0.5), calibrate=calibrate)
    assert compressor.schedule == [1]


def test_a_function_without_a_signature_is_tried():
    with pytest.raises(CompressionError, match="did not run"):
        compress_(make(), keep=KeepFraction(0.5), calibrate=itemgetter(0))


def test_an_interruption_inside_contextlib_leaves_no_hooks_and_puts_no_weights_back_late():
    """Ctrl-C may come before contextlib calls what cleans up."""
    model = SequenceClassifier(LRU, depth=1, width=2, order=2, inputs=3, classes=2)
    model.head.bias.data.fill_(1)
    before, files = everything(model), ("contextlib.py",)

    def look():
        inspect(model, lambda model: model(X))

    lines = stopped(look, files)
    assert lines > 50
    for number in range(1, lines + 1):
        held = None
        try:
            stopped(look, files, number)
        except KeyboardInterrupt as error:
            held = error
        # Training goes on while somebody, such as a notebook, still holds the exception.
        model.head.bias.data += 1
        del held
        gc.collect()
        model.head.bias.data -= 1
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()), number
        assert everything(model) == before, number


def test_gradients_that_evaluate_or_a_policy_switches_off_are_on_again():
    def off(value):
        torch.set_grad_enabled(False)
        return value

    for options in (
        {"keep": TargetOrder(3), "guard": Rollback(lambda: off(1.0))},
        {"keep": lambda spectra: off(dict.fromkeys(spectra, 3))},
    ):
        compressor = Compressor(make(), when=[1], **options)
        assert len(compressor.step(1)) == 2
        on = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        assert on


@pytest.mark.parametrize("layer", [LRU, S4D, S4, Mamba])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_layer_that_continues_from_a_state_is_refused_because_the_error_would_be_that_of_other_sequences(
    layer, by_name
):
    torch.manual_seed(0)
    mixer, u = layer(3, order=8), torch.randn(2, 40, 3)

    def in_parts(mixer, state):
        for part in u.split(10, dim=1):
            _, state = mixer(part, state=state) if by_name else mixer(part, state)

    before = everything(mixer)
    with pytest.raises(CompressionError, match=r"the model: calibrate continues from a state, .*: let it run .* whole"):
        compress_(mixer, keep=TargetOrder(4), calibrate=lambda mixer: in_parts(mixer, None))
    assert everything(mixer) == before
    # Zeros are no state to continue from.
    (cut,) = compress_(mixer, keep=TargetOrder(4), calibrate=lambda mixer: mixer(u, mixer.initial_state(2)))
    assert cut.rank == 4
