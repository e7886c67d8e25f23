"""Users' functions that do more than they should, and snapshots that were damaged."""

import copy
import warnings

import pytest
import torch

from compressm.compression import (
    CompressionError,
    Compressor,
    KeepFraction,
    LossTolerance,
    Rollback,
    TargetOrder,
    compress_,
    inspect,
)
from compressm.families.choices import Measured, WhiteNoise
from compressm.families.selective.methods import PerChannel
from compressm.layers import LRU, S5, Mamba
from compressm.models import SequenceClassifier
from compressm.saving import load_checkpoint, save_checkpoint
from tests import unhooked


def make():
    torch.manual_seed(0)
    return SequenceClassifier(LRU, depth=2, width=4, order=8, inputs=3, classes=5)


X = torch.randn(6, 20, 3, generator=torch.Generator().manual_seed(0))


def orders(model):
    return [block.ssm.order for block in model.blocks]


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9])
def test_a_snapshot_with_a_flipped_bit_is_refused_and_nothing_changes(place, tmp_path):
    model, values = make(), iter([1.0, 0.1])
    guard = Rollback(lambda: next(values), settle=1, folder=tmp_path)
    compressor = Compressor(model, when=[1], keep=TargetOrder(4), guard=guard)
    compressor.step(1)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 64
    file.write_bytes(content)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CompressionError, match="is damaged"):
        compressor.step(2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["a layer", "a block", "the head"])
def test_calibrate_cannot_replace_parts_of_the_model(how):
    model = make()
    parts = dict(model.named_modules())

    def calibrate(model):
        model(X)
        if how == "a layer":
            model.blocks[0].ssm = copy.deepcopy(model.blocks[0].ssm)
        elif how == "a block":
            del model.blocks[1]
        else:
            model.head = torch.nn.Sequential(model.head)

    with pytest.raises(CompressionError, match=r"calibrate changed (blocks|head)"):
        compress_(model, keep=TargetOrder(4), calibrate=calibrate)
    assert dict(model.named_modules()) == parts
    assert orders(model) == [8, 8]


def test_a_policy_gets_copies_of_the_spectra():
    def keep(spectra):
        for sigma in spectra.values():
            sigma.zero_()
        return dict.fromkeys(spectra, 4)

    expected = compress_(make(), keep=TargetOrder(4))
    assert [cut.energy_lost for cut in compress_(make(), keep=keep)] == [cut.energy_lost for cut in expected]


def test_a_step_inside_a_step_is_refused_and_the_next_one_works():
    model, again = make(), []

    def evaluate():
        if not again:
            again.append(1)
            compressor.step(1)
        return 1.0

    compressor = Compressor(model, when=[1], keep=TargetOrder(4), guard=Rollback(evaluate))
    with pytest.raises(CompressionError, match=r"step\(1\) was called inside Compressor.step\(1\), by evaluate"):
        compressor.step(1)
    assert orders(model) == [8, 8]
    assert len(compressor.step(1)) == len(compressor.history) == 2


def snapshot_of(*parts):
    return copy.deepcopy([part.state_dict() for part in parts])


def same(left, right):
    return str(left) == str(right)


def change_in_place(model, optimizer, folder):
    with torch.no_grad():
        model.head.weight.mul_(2)


def change_data(model, optimizer, folder):
    model.blocks[0].ssm.D.data = torch.zeros_like(model.blocks[0].ssm.D)


def train(model, optimizer, folder):
    with torch.enable_grad():
        model(X).square().mean().backward()
    optimizer.step()


def cut(model, optimizer, folder):
    compress_(model, optimizer=optimizer, keep=KeepFraction(0.5))


def cut_a_part(model, optimizer, folder):
    compress_(model.blocks[1], keep=KeepFraction(0.5))


def another_compressor(model, optimizer, folder):
    Compressor(model, optimizer, when=[1], keep=KeepFraction(0.5)).step(1)


def load(model, optimizer, folder):
    load_checkpoint(folder / "before.pt", model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    "act",
    [change_in_place, change_data, train, cut, cut_a_part, another_compressor, load],
    ids=lambda act: act.__name__,
)
@pytest.mark.parametrize("place", ["evaluate", "evaluate later", "policy", "calibrate"])
def test_a_function_that_does_more_than_run_the_model_is_refused(act, place, tmp_path):
    model, calls = make(), []
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, tmp_path)
    save_checkpoint(tmp_path / "before.pt", model=model, optimizer=optimizer, step=0)

    def evaluate():
        calls.append(1)
        if len(calls) == {"evaluate": 1, "evaluate later": 2}.get(place):
            act(model, optimizer, tmp_path)
        return 1.0

    def calibrate(model):
        model(X)
        if place == "calibrate":
            act(model, optimizer, tmp_path)

    def policy(spectra):
        if place == "policy":
            act(model, optimizer, tmp_path)
        return dict.fromkeys(spectra, 4)

    guard = Rollback(evaluate, settle=1)
    compressor = Compressor(model, optimizer, when=[1], keep=policy, calibrate=calibrate, guard=guard)
    due = 1
    if place == "evaluate later":
        compressor.step(1)
        due = 2
    before = snapshot_of(model, optimizer, compressor)
    with pytest.raises(CompressionError, match=f"inside Compressor.step|{place.split()[0]} (changed|called step)"):
        compressor.step(due)
    assert same(snapshot_of(model, optimizer, compressor), before)
    calls.append(1)  # the function behaves from now on
    place = "nowhere"
    compressor.step(due)
    assert orders(model) == [4, 4]


def with_functions(act, place, optimizer=None):
    """A model whose cut calls `act` in one of the user's functions, and what makes that cut."""
    model, acting = make(), [True]

    def loss(model):
        return model(X).square().mean()

    def given(name, value):
        if name == place and acting:
            act()
        return value

    keep, calibrate, guard = TargetOrder(4), None, None
    if place == "a policy":
        keep = lambda spectra: given(place, dict.fromkeys(spectra, 4))  # noqa: E731
    elif place == "loss":
        keep = LossTolerance(10.0, lambda model: given(place, loss(model)))
    elif place == "calibrate":
        calibrate = lambda model: given(place, model(X))  # noqa: E731
    else:
        guard = Rollback(lambda: given(place, 1.0))
    optimizer = None if optimizer is None else optimizer(model)
    compressor = Compressor(model, optimizer, when=[1, 2], keep=keep, calibrate=calibrate, guard=guard)
    return compressor, optimizer, acting.clear


PLACES = ["calibrate", "a policy", "loss", "evaluate"]


def settings():
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return (
        torch.get_default_dtype(),
        getattr(context, "device", None),
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
        torch.get_deterministic_debug_mode(),
    )


SETTINGS = {
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("meta"),
    "gradients": lambda: torch.set_grad_enabled(False),
    "random": lambda: torch.manual_seed(5),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
}


@pytest.fixture
def kept_settings():
    """Put back what a library that fails these tests leaves behind."""
    dtype, *_, deterministic = settings()
    yield
    torch.set_default_dtype(dtype)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_deterministic_debug_mode(deterministic)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", SETTINGS)
@pytest.mark.usefixtures("kept_settings")
def test_settings_of_torch_are_as_before_after_a_user_s_function(what, place):
    compressor, _, _ = with_functions(SETTINGS[what], place)
    before = settings()
    cuts = compressor.step(1)
    assert settings() == before
    assert cuts
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in compressor.model.parameters())


@pytest.mark.parametrize("default", [None, "cpu"])
@pytest.mark.usefixtures("kept_settings")
def test_a_default_device_that_a_loss_changes_is_the_one_before_again_after_an_error_too(default):
    def fails():
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float16)
        raise OSError("no more data")

    torch.set_default_device(default)
    before = settings()
    model = make()
    with pytest.raises(OSError, match="no more data"):
        inspect(model, loss=lambda model: fails())
    assert settings() == before


GROUPS = {
    "lr": lambda optimizer: optimizer.param_groups[1].update(lr=1.0),
    "a rate that is a tensor": lambda optimizer: optimizer.param_groups[0]["lr"].mul_(0.5),
    "betas": lambda optimizer: optimizer.param_groups[0].__setitem__("betas", (0.5, 0.9)),
    "a new option": lambda optimizer: optimizer.param_groups[0].update(mine=1),
    "an option less": lambda optimizer: optimizer.param_groups[0].pop("weight_decay"),
    "a group more": lambda optimizer: optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]}),
    "a group less": lambda optimizer: optimizer.param_groups.pop(),
    "a parameter less": lambda optimizer: optimizer.param_groups[0]["params"].pop(),
    "other groups": lambda optimizer: setattr(optimizer, "param_groups", [{}]),
}
CHANGED = {
    "lr": r"lr of param_groups\[1\] of AdamW, from 0.01 to 1.0",
    "a rate that is a tensor": r"lr of param_groups\[0\] of AdamW, from tensor\(0.0010\) to tensor\(0.0005\)",
    "betas": r"betas of param_groups\[0\] of AdamW, from \(0.9, 0.999\) to \(0.5, 0.9\)",
    "a new option": r"mine of param_groups\[0\] of AdamW, which was not there",
    "an option less": r"weight_decay of param_groups\[0\] of AdamW, which is gone",
    "a group more": r"the number of param_groups of AdamW, from 2 to 3",
    "a group less": r"the number of param_groups of AdamW, from 2 to 1",
    "a parameter less": r"params of param_groups\[0\] of AdamW",
    "other groups": r"the number of param_groups of AdamW, from 2 to 1",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", GROUPS)
def test_an_optimizer_s_groups_that_a_user_s_function_edits_are_put_back_and_it_is_refused(what, place):
    def two_groups(model):
        head = list(model.head.parameters())
        others = [p for p in model.parameters() if not any(p is own for own in head)]
        groups = [{"params": others, "lr": torch.tensor(1e-3), "capturable": True}, {"params": head, "lr": 0.01}]
        made.append(torch.optim.AdamW(groups))
        return made[0]

    made = []
    compressor, optimizer, behave = with_functions(lambda: GROUPS[what](made[0]), place, two_groups)
    groups, before = optimizer.param_groups, snapshot_of(compressor.model, optimizer, compressor)
    with pytest.raises(CompressionError, match=f"{place} changed {CHANGED[what]}.*put back"):
        compressor.step(1)
    assert optimizer.param_groups is groups
    assert same(snapshot_of(compressor.model, optimizer, compressor), before)
    behave()
    assert compressor.step(1)


def test_evaluate_leaves_mode_gradients_and_random_numbers():
    model = make().train()
    model(X).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]

    def evaluate():
        model.eval()
        model.zero_grad()
        return torch.rand(())

    compressor = Compressor(model, when=[1], keep=lambda spectra: dict.fromkeys(spectra, 8), guard=Rollback(evaluate))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    compressor.step(1)
    compressor = Compressor(model, when=[1], keep=TargetOrder(4), guard=Rollback(evaluate))
    compressor.step(1)
    assert torch.equal(torch.rand(2), expected)
    assert model.training
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True) if p.grad is not None)


@pytest.mark.parametrize("value", ["1", True, 10**400, None, [1.0], torch.ones(2), 1j])
def test_evaluate_must_return_a_number(value):
    model = make()
    compressor = Compressor(model, when=[1], keep=TargetOrder(4), guard=Rollback(lambda: value))
    with pytest.raises(CompressionError, match=r"evaluate returned .* expected a number"):
        compressor.step(1)
    assert orders(model) == [8, 8]


def guarded(tmp_path, **options):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    values = iter([1.0, 0.1, 0.1])
    guard = Rollback(lambda: next(values), settle=2, folder=tmp_path)
    given = dict.fromkeys(options.pop("give", ()), scheduler)
    return (
        model,
        optimizer,
        scheduler,
        Compressor(model, optimizer, when=[1], keep=TargetOrder(4), guard=guard, **given),
    )


@pytest.mark.parametrize(("give", "rates"), [(("scheduler",), [1.0, 0.5]), ((), [0.25, 0.125])])
def test_a_rollback_leaves_rate_and_scheduler_in_agreement(give, rates, tmp_path):
    model, optimizer, scheduler, compressor = guarded(tmp_path, give=give)
    compressor.step(1)
    for step in (2, 3):
        optimizer.step()
        scheduler.step()
        compressor.step(step)
    assert orders(model) == [8, 8]
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == rates[0]
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == rates[1]


def test_a_scheduler_without_use_is_named():
    model = make()
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.warns(UserWarning, match="without effect: scheduler"):
        Compressor(model, optimizer, when=[1], keep=TargetOrder(4), scheduler=scheduler)
    other = make()
    for given, said in ((torch.optim.SGD(other.parameters()), "another optimizer, a SGD"), (None, "no optimizer")):
        with pytest.raises(CompressionError, match=f"ExponentialLR sets the rates of a SGD, but optimizer is {said}"):
            Compressor(other, given, when=[1], keep=TargetOrder(4), scheduler=scheduler, guard=Rollback(lambda: 1.0))


def test_a_training_goes_on_without_its_snapshot(tmp_path):
    model, _, _, compressor = guarded(tmp_path, give=("scheduler",))
    compressor.step(1)
    (file,) = tmp_path.iterdir()
    file.unlink()
    with pytest.warns(UserWarning, match="keeps the cuts that are not judged"):
        save_checkpoint(tmp_path / "2.pt", model=model, compressor=compressor, step=2)
    compressor.step(2)
    with pytest.raises(CompressionError, match=r"fell by 90 %.*cannot be read.*call accept\(\)"):
        compressor.step(3)
    compressor.accept()
    assert compressor.step(4) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint(tmp_path / "4.pt", model=model, compressor=compressor, step=4)
    assert orders(model) == [4, 4]


def test_accept_keeps_cuts_and_removes_the_snapshot(tmp_path):
    model, _, _, compressor = guarded(tmp_path, give=("scheduler",))
    compressor.step(1)
    compressor.accept()
    assert not list(tmp_path.iterdir())
    assert compressor.step(3) == []
    assert orders(model) == [4, 4]


def test_snapshots_of_killed_processes_are_removed(tmp_path):
    writing = f"""
import os, torch
from compressm.compression import Compressor, Rollback, TargetOrder
from compressm.families.choices import Measured, WhiteNoise
from compressm.families.selective.methods import PerChannel
from compressm.layers import LRU, S5, Mamba
model = torch.nn.Sequential(LRU(4, 8))
guard = Rollback(lambda: 1.0, folder={str(tmp_path)!r})
Compressor(model, when=[1], keep=TargetOrder(4), guard=guard).step(1)
os.kill(os.getpid(), 9)
"""
    unhooked.run(writing, code=-9)
    (left,) = tmp_path.iterdir()
    left.with_name(left.name.rpartition("-")[0] + ".pt").touch()  # a name of an earlier version
    compressor = guarded(tmp_path, give=("scheduler",))[-1]
    compressor.step(1)
    (file,) = tmp_path.iterdir()
    assert file != left


def test_an_optimizer_that_is_left_behind_is_named():
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    compressor = Compressor(model, optimizer, when=[9], keep=TargetOrder(4))
    with pytest.warns(UserWarning, match="that optimizer was not passed"):
        compress_(model, keep=TargetOrder(6))
    compress_(model, keep=TargetOrder(5), optimizer=optimizer)  # without a warning
    del compressor
    compress_(model, keep=TargetOrder(4))
    assert orders(model) == [4, 4]


def test_an_override_that_never_counts_is_refused():
    model = make()
    overrides = {"blocks.*": TargetOrder(5), "blocks.1.*": TargetOrder(2)}
    with pytest.raises(CompressionError, match=r"'blocks.1.\*' comes after patterns that match all of its modules"):
        compress_(model, keep=TargetOrder(7), overrides=overrides)
    compress_(model, keep=TargetOrder(7), overrides=dict(reversed(overrides.items())))
    assert orders(model) == [5, 2]


@pytest.mark.parametrize(
    ("surrogate", "gramian"), [("mean", Measured()), ("second_moment", Measured()), ("measured", WhiteNoise())]
)
def test_a_gramian_against_the_method_is_named(surrogate, gramian):
    torch.manual_seed(0)
    model = SequenceClassifier(Mamba, depth=1, width=4, order=4, inputs=3, classes=5)
    options = {"keep": TargetOrder(2), "calibrate": lambda model: model(X), "selective": PerChannel(surrogate)}
    with pytest.warns(UserWarning, match=r"without effect: gramian=.* says itself what is measured"):
        compress_(model, gramian=gramian, **options)
    assert orders(model) == [2]


def test_a_restoration_that_does_not_fit_says_how_to_go_on(tmp_path):
    model, optimizer, _, compressor = guarded(tmp_path, give=("scheduler",))
    compressor.step(1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(CompressionError, match=r"the (optimizer|parameters) .* call accept\(\)"):
        compressor.step(3)
    compressor.accept()
    assert compressor.step(4) == []
    assert orders(model) == [4, 4]


@pytest.mark.parametrize("others", ["another compressor", "compress_", "one of another layer"])
def test_a_guard_does_not_undo_what_others_cut_later(others):
    """The first compressor's history said 4 states while the guard of the second had put 8 back."""
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    one = {"filter_fn": lambda module, name: name == "blocks.1.ssm"} if others == "one of another layer" else {}
    rest = {"filter_fn": lambda module, name: name == "blocks.0.ssm"} if one else {}
    values = iter([1.0, 0.1, 0.1])
    guard = Rollback(lambda: next(values), drop=0.1, settle=1)
    first = Compressor(model, optimizer, when=[1], keep=KeepFraction(0.5), **one)
    second = Compressor(model, optimizer, when=[1], keep=KeepFraction(0.5), guard=guard, **rest)
    second.step(1)
    if others == "compress_":
        compress_(model, keep=TargetOrder(2), optimizer=optimizer)
    else:
        first.step(1)
    expected = orders(model)
    with pytest.raises(CompressionError, match=r"fell by 90 %.*has cut the model since.*call accept\(\)"):
        second.step(2)
    assert orders(model) == expected
    second.accept()
    assert second.step(3) == []


def test_a_compressor_made_anew_is_guarded_as_the_first_was():
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    Compressor(model, optimizer, when=[1], keep=TargetOrder(6)).step(1)
    values = iter([1.0, 0.1])
    guard = Rollback(lambda: next(values), drop=0.1, settle=1)
    again = Compressor(model, optimizer, when=[2], keep=TargetOrder(4), guard=guard)
    again.step(2)
    assert again.step(3)[0].orders == {"blocks.0.ssm": 6, "blocks.1.ssm": 6}


def test_a_state_whose_loading_warns_is_not_loaded_in_part_where_warnings_are_errors(tmp_path):
    """The history was that of the state, and the snapshot that of the compressor."""
    _, _, _, cut = guarded(tmp_path / "cut", give=("scheduler",))
    cut.step(1)
    state = cut.state_dict()
    model, _, _, compressor = guarded(tmp_path / "whole", give=("scheduler",))
    before = compressor.state_dict()
    with pytest.raises(UserWarning, match="the loaded history does not fit the model"):
        compressor.load_state_dict(state)
    assert compressor.state_dict() == before
    assert len(compressor.step(1)) == 2
    assert orders(model) == [4, 4]


@pytest.mark.parametrize("inside", ["calibrate", "a policy"])
def test_a_preview_inside_of_another_call_is_refused_by_name(inside):
    model = SequenceClassifier(LRU, depth=1, width=4, order=8, inputs=3, classes=5)

    def runs(model):
        model(torch.randn(2, 10, 3))
        return compressor.preview() if inside == "calibrate" else None

    def keep(spectra):
        compressor.preview()
        return dict.fromkeys(spectra, 4)

    options = {"calibrate": runs, "keep": TargetOrder(4)} if inside == "calibrate" else {"keep": keep}
    compressor = Compressor(model, when=[1], **options)
    for call, said in ((compressor.preview, r"preview\(\)"), (lambda: compressor.step(1), r"step\(1\)")):
        with pytest.raises(CompressionError, match=rf"preview\(\) was called inside Compressor\.{said}"):
            call()
    assert compressor.history == []


def test_an_average_too_far_from_the_model_says_so_and_what_to_do():
    model, average = make(), make()
    for seed, one in enumerate((model, average)):
        torch.manual_seed(seed)
        one.blocks[0].ssm = S5(4, 16)
    compressor = Compressor(model, when=[1], keep=TargetOrder(12), follow=[average], gate=1.0)
    with pytest.raises(CompressionError, match=r"follow\[0\]: blocks\.0\.ssm.*too far from the model.*out of follow"):
        compressor.step(1)
    assert (model.blocks[0].ssm.order, average.blocks[0].ssm.order) == (16, 16)
