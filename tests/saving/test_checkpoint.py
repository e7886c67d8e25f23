import random
from collections import OrderedDict

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from compressm.adapters import SSMAdapter, adapts, write
from compressm.compression import Compressor, KeepFraction, PerChannel, TargetOrder, load_checkpoint, save_checkpoint
from compressm.control import DiagonalSystem
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba
from compressm.models import PerElement, SequenceClassifier
from tests.marks import later

CUTS = {3: (4, 5), 6: (2, 5)}
STEPS = 9


class Shrinker:
    """Stands for a compressor: at its steps it cuts layers and the optimizer's state, and remembers what it did."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.history = model, optimizer, []

    def step(self, step):
        for block, order in zip(self.model.blocks, CUTS.get(step, ()), strict=False):
            self.cut(block.ssm, order)
            self.history.append({"step": step, "order": order, "was": block.ssm.D.detach().clone()})

    def cut(self, layer, order):
        axes = {name: axis for name, axis in layer.STATE_AXES.items() if getattr(layer, name) is not None}
        values = {name: getattr(layer, name).detach().narrow(axis, 0, order).double() for name, axis in axes.items()}
        write(layer, values)
        for name, axis in axes.items():
            state = self.optimizer.state[getattr(layer, name)]
            for key, value in state.items():
                if torch.is_tensor(value) and value.ndim > axis:
                    state[key] = value.narrow(axis, 0, order).contiguous()  # as fused kernels expect it

    def state_dict(self):
        return {"history": self.history}

    def load_state_dict(self, state):
        self.history = state["history"]


class Run:
    """One training from its beginning, with random numbers of every kind."""

    def __init__(self, layer=LRU, optimizer=torch.optim.Adam, scheduler=None, seed=0):
        torch.manual_seed(seed)
        self.model = SequenceClassifier(layer, depth=2, width=3, order=6, inputs=2, classes=2, dropout=PerElement(0.2))
        groups = [{"params": self.model.encoder.parameters(), "lr": 0.02}, {"params": self.model.blocks.parameters()}]
        self.optimizer = optimizer([*groups, {"params": self.model.head.parameters()}], lr=0.01)
        make = scheduler or (lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5))
        self.scheduler = make(self.optimizer)
        self.compressor = Shrinker(self.model, self.optimizer)
        self.losses = []

    @property
    def parts(self):
        names = ("model", "optimizer", "scheduler", "compressor")
        return {name: getattr(self, name) for name in names}

    def train(self, first, last=STEPS, *, path):
        for step in range(first, last + 1):
            x = torch.randn(4, 5, 2) + random.random() + np.random.default_rng(0).normal() + np.random.rand()  # noqa: NPY002
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), torch.tensor([0, 1, 1, 0]))
            loss.backward()
            self.optimizer.step()
            plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*[loss.item()] * plateau)
            self.losses.append(loss.item())
            self.compressor.step(step)
            self.save(path, step)
        return self

    def save(self, path, step):
        save_checkpoint(path / str(step), step=step, extra={"losses": list(self.losses)}, **self.parts)
        return self


def check_same(one, other):
    assert one.losses == other.losses
    here, there = one.model.state_dict(), other.model.state_dict()
    assert {name: value.tolist() for name, value in here.items()} == {n: v.tolist() for n, v in there.items()}
    mine, yours = one.optimizer.state_dict(), other.optimizer.state_dict()
    torch.testing.assert_close(mine["state"], yours["state"], rtol=0, atol=0)
    assert mine["param_groups"] == yours["param_groups"]
    assert [entry["order"] for entry in one.compressor.history] == [e["order"] for e in other.compressor.history]


def resumed(path, **options):
    """As after a restart: everything built anew, at the orders of the beginning."""
    run = Run(seed=7, **options)
    random.seed(1)
    identity = [id(parameter) for parameter in run.model.parameters()]
    checkpoint = load_checkpoint(path, **run.parts)
    assert [id(parameter) for parameter in run.model.parameters()] == identity
    run.losses = checkpoint.extra["losses"]
    # Saving on both sides: the tests' type checker draws from `random`, so that a call more would be a difference.
    return run.train(checkpoint.step + 1, path=path.parent / "again")


@pytest.mark.parametrize("layer", [LRU, S5, S4, S4D, LinOSS])
def test_training_goes_on_bit_for_bit_before_between_and_after_cuts(layer, tmp_path):
    whole = Run(layer).save(tmp_path, 0).train(1, path=tmp_path)
    assert [block.ssm.order for block in whole.model.blocks] == [2, 5]
    # After every step of one kind of layer; of the others before, between and after the cuts.
    for step in range(STEPS) if layer is LRU else (0, 4, STEPS - 1):
        check_same(resumed(tmp_path / str(step), layer=layer), whole)


OPTIMIZERS = {
    "sgd": lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9, nesterov=True),
    "adamw": lambda groups, lr: torch.optim.AdamW(groups, lr, amsgrad=True, foreach=True),
    "fused": lambda groups, lr: torch.optim.AdamW(groups, lr, fused=True),
    "rate in a tensor": lambda groups, lr: torch.optim.Adam(
        [{**group, "lr": torch.tensor(0.02)} for group in groups], torch.tensor(lr), foreach=False
    ),
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda groups, lr: torch.optim.RMSprop(groups, lr, centered=True, momentum=0.5),
    "adadelta": torch.optim.Adadelta,
}


@pytest.mark.parametrize("name", later(OPTIMIZERS, "adamw", "sgd", "fused"))
def test_every_optimizer_goes_on_bit_for_bit(name, tmp_path):
    whole = Run(optimizer=OPTIMIZERS[name]).train(1, path=tmp_path)
    check_same(resumed(tmp_path / "5", optimizer=OPTIMIZERS[name]), whole)


class WideMomentum(torch.optim.Optimizer):
    """Momentum in float32 for weights in bfloat16."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self.state[parameter]
                own.setdefault("momentum_buffer", torch.zeros_like(parameter, dtype=torch.float32))
                own["momentum_buffer"].mul_(0.9).add_(parameter.grad)
                parameter.add_(own["momentum_buffer"].to(parameter.dtype), alpha=-group["lr"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [WideMomentum, torch.optim.NAdam])
def test_states_keep_the_precision_in_which_they_were_saved(kind, dtype, tmp_path):
    # torch's own `load_state_dict` gives all of them that of the weights.
    def begin():
        torch.manual_seed(0)
        model = SequenceClassifier(LRU, depth=1, width=4, order=6, inputs=2, classes=3).to(dtype)
        optimizer = kind(model.parameters(), lr=0.01)
        return {
            "model": model,
            "optimizer": optimizer,
            "compressor": Compressor(model, optimizer, when=[2, 5], keep=KeepFraction(0.5)),
        }

    def train(parts, steps):
        for step in steps:
            parts["optimizer"].zero_grad()
            parts["model"](torch.randn(3, 8, 2).to(dtype)).logsumexp(-1).sum().backward()
            parts["optimizer"].step()
            parts["compressor"].step(step)
        return [value for own in parts["optimizer"].state.values() for value in own.values()]

    whole, path = begin(), tmp_path / "3"
    train(whole, range(1, 4))
    save_checkpoint(path, **whole)
    expected = train(whole, range(4, 8))
    again = begin()
    load_checkpoint(path, **again)
    for mine, yours in zip(train(again, range(4, 8)), expected, strict=True):
        assert mine.dtype == yours.dtype
        assert torch.equal(mine, yours)
    for mine, yours in zip(again["model"].parameters(), whole["model"].parameters(), strict=True):
        assert torch.equal(mine, yours)


SCHEDULERS = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5]),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [np.float64(0.1), 0.2, 0.3], total_steps=20),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.8)], milestones=[4]
    ),
}


@pytest.mark.parametrize("name", later(SCHEDULERS, "cosine", "plateau"))
def test_every_scheduler_goes_on_bit_for_bit(name, tmp_path):
    whole = Run(scheduler=SCHEDULERS[name]).train(1, path=tmp_path)
    check_same(resumed(tmp_path / "4", scheduler=SCHEDULERS[name]), whole)


def test_a_checkpoint_loads_into_the_model_that_wrote_it_while_an_old_loss_is_alive(tmp_path):
    run = Run().train(1, 4, path=tmp_path)
    held = run.model(torch.ones(2, 3, 2)).sum()
    held.backward()
    load_checkpoint(tmp_path / "1", **run.parts)
    assert [block.ssm.order for block in run.model.blocks] == [6, 6]
    run.losses = run.losses[:1]
    run.train(2, path=tmp_path)
    check_same(resumed(tmp_path / "1"), run)
    assert held.isfinite()


@pytest.mark.parametrize("step", [2, 3])
def test_a_checkpoint_that_is_loaded_in_inference_mode_trains_on(step, tmp_path):
    whole = Run().train(1, 5, path=tmp_path)
    run = Run(seed=7)
    with torch.inference_mode():
        run.losses = load_checkpoint(tmp_path / str(step), **run.parts).extra["losses"]
        built_there = Run().model
        load_checkpoint(tmp_path / str(step), model=built_there)
    assert torch.equal(built_there.head.weight, run.model.head.weight)
    check_same(run.train(step + 1, 5, path=tmp_path), whole)


def test_everything_but_the_model_may_be_left_out(tmp_path):
    run = Run().train(1, 4, path=tmp_path)
    save_checkpoint(tmp_path / "all", **run.parts)
    save_checkpoint(tmp_path / "model", model=run.model)
    for name in ("all", "model"):
        other = Run(seed=3).model
        checkpoint = load_checkpoint(tmp_path / name, model=other)
        assert (checkpoint.step, checkpoint.extra) == (0, None)
        assert all(torch.equal(value, run.model.state_dict()[key]) for key, value in other.state_dict().items())


def test_wrapped_and_bare_models_load_each_others_checkpoints(tmp_path):
    bare = Run(seed=1).model
    wrapped = nn.DataParallel(Run(seed=2).model)
    compiled = Run(seed=3).model
    compiled.blocks[0] = torch.compile(compiled.blocks[0])
    for source in (bare, wrapped, compiled):
        save_checkpoint(tmp_path / "model", model=source)
        for target in (Run(seed=4).model, nn.DataParallel(Run(seed=5).model), torch.compile(Run(seed=6).model)):
            load_checkpoint(tmp_path / "model", model=target)
            assert [p.tolist() for p in target.parameters()] == [p.tolist() for p in source.parameters()]


def test_an_average_keeps_its_count(tmp_path):
    average = AveragedModel(Run().model)
    average.update_parameters(Run(seed=1).model)
    save_checkpoint(tmp_path / "average", model=average)
    other = AveragedModel(Run(seed=2).model)
    load_checkpoint(tmp_path / "average", model=other)
    assert other.n_averaged == 1


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=30)
@given(extra=PLAIN)
def test_anything_plain_comes_back(extra, tmp_path_factory):
    path = tmp_path_factory.mktemp("extra") / "checkpoint"
    model = LRU(1, 1)
    save_checkpoint(path, model=model, step=3, extra=extra)
    checkpoint = load_checkpoint(path, model=model)
    assert checkpoint.step == 3
    assert checkpoint.extra == extra


def test_tensors_and_numbers_of_numpy_come_back(tmp_path):
    extra = {
        "n": np.int64(3),
        "x": np.float32(0.5),
        "ordered": OrderedDict(a=1),
        "mask": torch.tensor([True]),
        "d": {1},
    }
    save_checkpoint(tmp_path / "c", model=LRU(1, 1), extra=extra)
    got = load_checkpoint(tmp_path / "c", model=LRU(1, 1)).extra
    assert (got["n"], got["x"], got["ordered"], got["mask"].tolist(), got["d"]) == (3, 0.5, {"a": 1}, [True], {1})


def test_only_what_is_kept_is_written(tmp_path):
    """Slices of the moments of 1000 states would bring the memory of all of them along."""
    save_checkpoint(tmp_path / "small", model=LRU(1, 1), extra=torch.zeros(3))
    save_checkpoint(tmp_path / "slice", model=LRU(1, 1), extra=torch.zeros(100_000)[:3])
    assert (tmp_path / "slice").stat().st_size < 1.1 * (tmp_path / "small").stat().st_size


@pytest.mark.parametrize("name", ["c.safetensors", "c.pt", "c.pth", "c.tar", "c"])
def test_a_checkpoint_may_have_any_ending(name, tmp_path):
    save_checkpoint(tmp_path / name, model=LRU(1, 2), step=4)
    assert load_checkpoint(tmp_path / name, model=LRU(1, 2)).step == 4


def test_torch_alone_reads_a_checkpoint(tmp_path):
    save_checkpoint(tmp_path / "c", model=LRU(1, 2), step=4)
    contents = torch.load(tmp_path / "c", weights_only=True)
    assert contents["step"] == 4
    assert contents["model"]["nu_log"].shape == (2,)


class Gains(nn.Module):
    """A layer of somebody else: real poles, and torch's own rule for state dicts."""

    def __init__(self, order):
        super().__init__()
        self.rate, self.C = nn.Parameter(torch.linspace(0.5, 2, order)), nn.Parameter(torch.ones(1, order))


@adapts(Gains)
class GainsAdapter(SSMAdapter):
    def read(self, module):
        poles = torch.exp(-module.rate.detach().double()).to(torch.complex128)
        return DiagonalSystem(poles, torch.ones(poles.shape[0], 1).to(poles), module.C.detach().to(poles))

    def encode(self, module, system):
        return {"rate": -system.poles.real.log(), "C": system.C.real}


def test_layers_of_others_take_the_order_of_a_checkpoint_but_not_of_a_state_dict(tmp_path):
    cut, whole = Gains(2), Gains(4)
    with pytest.raises(RuntimeError, match="size mismatch"):
        whole.load_state_dict(cut.state_dict())
    save_checkpoint(tmp_path / "c", model=cut)
    load_checkpoint(tmp_path / "c", model=whole)
    assert torch.equal(whole.rate, cut.rate)


@pytest.mark.parametrize(("layer", "more"), [(LRU, {}), (Mamba, {"selective": PerChannel("measured")})])
@pytest.mark.parametrize("shared", ["layer", "block"])
def test_a_layer_that_is_used_twice_is_saved_and_resumed_after_a_cut(shared, layer, more, tmp_path):
    x = torch.randn(4, 12, 1, generator=torch.Generator().manual_seed(0))

    def parts():
        torch.manual_seed(0)
        model = SequenceClassifier(layer, depth=2, width=4, order=8, inputs=1, classes=2)
        if shared == "layer":
            model.blocks[1].ssm = model.blocks[0].ssm
        else:
            model.blocks[1] = model.blocks[0]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options = {"when": [2], "keep": TargetOrder(4), "gate": 1.0, "calibrate": lambda model: model(x)}
        return model, optimizer, Compressor(model, optimizer, **options, **more)

    def train(model, optimizer, compressor, first, last):
        for step in range(first, last + 1):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            compressor.step(step)

    whole, again = parts(), parts()
    train(*whole, 1, 3)
    save_checkpoint(tmp_path / "c.pt", model=whole[0], optimizer=whole[1], compressor=whole[2], step=3)
    train(*whole, 4, 5)
    load_checkpoint(tmp_path / "c.pt", model=again[0], optimizer=again[1], compressor=again[2])
    assert again[0].blocks[0].ssm is again[0].blocks[1].ssm
    assert again[0].blocks[0].ssm.order == 4
    train(*again, 4, 5)
    pairs = zip(whole[0].state_dict().values(), again[0].state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
