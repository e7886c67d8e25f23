"""Models that Accelerate prepared: cuts, accumulation, and states that are loaded at other orders."""

import weakref

import pytest
import torch
from torch import nn

import compressm as cs
from compressm.compression import CompressionError
from tests.integrations.processes import alike, found_by_two

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from compressm.integrations.accelerate import AcceleratedCompressor

DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(96, 10, 3, generator=DRAW), torch.randint(5, (96,), generator=DRAW)


@pytest.fixture(autouse=True)
def one_accelerator_a_test():
    yield
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()


def build(layer=cs.layers.LRU):
    torch.manual_seed(0)
    return cs.models.SequenceClassifier(layer, depth=2, width=4, order=12, inputs=3, classes=5, dropout=0.0)


class Training:
    def __init__(self, layer=cs.layers.LRU, when=(4, 8), options=None, accelerator=None, model=None, **arguments):
        self.accelerator = accelerator or Accelerator(cpu=True, **arguments)
        model = build(layer) if model is None else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        defaults = {"keep": cs.KeepFraction(0.6), "gate": 1.0}
        self.compressor = AcceleratedCompressor(
            self.accelerator, self.model, self.optimizer, when=when, **defaults | (options or {})
        )
        self.batch = 0

    def train(self, steps, path=None):
        while self.compressor.count < steps:
            rows = slice(4 * self.batch % 96, 4 * self.batch % 96 + 4)
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(X[rows]), Y[rows])
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.compressor.step()
            self.batch += 1
            if path is not None and self.accelerator.sync_gradients and self.compressor.count % 2 == 0:
                self.accelerator.save_state(str(path / f"{self.compressor.count}"))
        return self

    def orders(self):
        return [block.ssm.order for block in self.accelerator.unwrap_model(self.model).blocks]

    def state(self):
        model = self.accelerator.unwrap_model(self.model)
        named = {id(parameter): name for name, parameter in model.named_parameters()}
        states = self.optimizer.optimizer.state.items()
        moments = {f"{named[id(p)]}.{key}": value for p, state in states for key, value in state.items()}
        return {**model.state_dict(), **moments}


def same(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


CHANNELS = {"selective": cs.PerChannel("measured"), "calibrate": lambda model: model(X[:8])}
KINDS = {"plain": {}, "added parameters": {"layer": cs.layers.Mamba, "options": CHANNELS}}


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_loaded_at_other_orders_and_the_training_ends_bit_for_bit_alike(kind, tmp_path):
    whole = Training(**KINDS[kind]).train(12, tmp_path)
    assert {event.step for event in whole.compressor.history} == {4, 8}
    assert all(order < 7 for order in whole.orders())
    for step in (2, 4, 6, 10):
        resumed = Training(**KINDS[kind])
        resumed.accelerator.load_state(str(tmp_path / f"{step}"))
        resumed.batch = step
        resumed.train(12)
        assert same(resumed.state(), whole.state())
        assert [str(e) for e in resumed.compressor.history] == [str(e) for e in whole.compressor.history]


def test_an_earlier_state_is_loaded_in_the_middle_of_a_training(tmp_path):
    run = Training().train(6, tmp_path)
    end = run.state()
    assert run.orders() == [7, 7]
    run.accelerator.load_state(str(tmp_path / "2"))
    assert run.orders() == [12, 12]
    assert run.compressor.count == 2
    run.batch = 2
    assert same(run.train(6).state(), end)


def test_accumulated_batches_count_once_and_bf16_trains_on():
    run = Training(gradient_accumulation_steps=3, mixed_precision="bf16", when=[2]).train(3)
    assert run.batch == 9
    assert [event.step for event in run.compressor.history] == [2, 2]
    assert all(value.isfinite().all() for value in run.state().values())


def test_the_trackers_get_the_cuts():
    from accelerate.tracking import GeneralTracker

    class Listed(GeneralTracker):
        name, requires_logging_directory, rows = "listed", False, []

        @property
        def tracker(self):
            return self

        def store_init_configuration(self, values):
            pass

        def log(self, values, step=None, **rest):
            self.rows.append((step, values))

    listed = Listed()
    run = Training(when=[2], log_with=listed)
    run.accelerator.init_trackers("project")
    run.train(3)
    assert listed.rows == [(2, {"states": 14, "states/blocks.0.ssm": 7, "states/blocks.1.ssm": 7})]


def test_a_state_of_other_orders_than_the_weights_is_refused():
    first, second = Training(when=[1]).train(2), Training(when=[1])
    with pytest.raises(CompressionError, match=r"the model has the orders .*12.*, the checkpoint .*7"):
        second.compressor.load_state_dict(first.compressor.state_dict())


def test_models_that_follow_are_in_the_state(tmp_path):
    class Followed(Training):
        def __init__(self, follow=True):
            torch.manual_seed(0)
            sizes = {"depth": 2, "width": 4, "order": 12, "inputs": 3, "classes": 5, "dropout": 0.0}
            average = torch.optim.swa_utils.AveragedModel(cs.models.SequenceClassifier(cs.layers.LRU, **sizes))
            super().__init__(options={"follow": [average] if follow else []})
            self.average = average
            self.optimizer.optimizer.register_step_post_hook(lambda *_: average.update_parameters(self.model))

        def state(self):
            return super().state() | {f"average.{name}": value for name, value in self.average.state_dict().items()}

    whole = Followed().train(8, tmp_path)
    for step in (2, 6):
        resumed = Followed()
        resumed.accelerator.load_state(str(tmp_path / f"{step}"))
        resumed.batch = step
        assert same(resumed.train(8).state(), whole.state())
    alone = Training()
    with pytest.raises(CompressionError, match="weights of 1 models in follow, the training has 0"):
        alone.accelerator.load_state(str(tmp_path / "2"))
    Training().train(2, tmp_path / "plain")
    with pytest.warns(UserWarning, match="no weights of the models in follow"):
        Followed().accelerator.load_state(str(tmp_path / "plain" / "2"))


class OwnAverage(nn.Module):
    """A model with an average of its own weights."""

    def __init__(self):
        super().__init__()
        self.model = build()
        self.average = torch.optim.swa_utils.AveragedModel(self.model).requires_grad_(False)

    @property
    def blocks(self):
        return self.model.blocks

    def forward(self, x):
        self.average.update_parameters(self.model)
        return self.model(x)


PART = {"part": "model", "follow": ["average"], "calibrate": lambda model: model(X[:8])}


def test_a_part_of_the_model_is_cut_with_its_average_and_resumes(tmp_path):
    whole = Training(model=OwnAverage(), options=PART).train(8, tmp_path)
    assert [event.module for event in whole.compressor.history] == ["blocks.0.ssm", "blocks.1.ssm"] * 2
    assert [block.ssm.order for block in whole.model.average.module.blocks] == whole.orders() == [4, 4]
    for step in (2, 6):
        resumed = Training(model=OwnAverage(), options=PART)
        resumed.accelerator.load_state(str(tmp_path / f"{step}"))
        resumed.batch = step
        assert same(resumed.train(8).state(), whole.state())
    for wrong, said in (({"part": "net"}, "part is 'net', which"), ({"part": 3}, "part is 3, expected text")):
        with pytest.raises(CompressionError, match=said):
            Training(model=OwnAverage(), options=wrong)


def test_an_accelerator_that_frees_its_memory_lets_go_of_the_compressor(tmp_path):
    run = Training(when=[1]).train(2)
    accelerator, model = run.accelerator, weakref.ref(run.model)
    run.model, run.optimizer, run.compressor = accelerator.free_memory(run.model, run.optimizer, run.compressor)
    assert model() is None
    second = Training(accelerator=accelerator, when=[1]).train(2, tmp_path)
    assert [path.name for path in (tmp_path / "2").glob("custom*")] == ["custom_checkpoint_0.pkl"]
    third = Training(when=[1])
    third.accelerator.load_state(str(tmp_path / "2"))
    assert same(third.state(), second.state())


def test_what_shards_is_refused_by_name(monkeypatch):
    run = Training()
    monkeypatch.setattr(
        type(run.accelerator), "distributed_type", property(lambda self: type("", (), {"name": "FSDP"}))
    )
    with pytest.raises(CompressionError, match="distributed type FSDP"):
        AcceleratedCompressor(run.accelerator, run.model, run.optimizer, when=[1], keep=cs.TargetOrder(2))


def an_earlier_state(rank, path):
    run = Training(when=[2, 4])

    def train(steps, save=False):
        while run.compressor.count < steps:
            first = 8 * run.compressor.count + 4 * rank
            loss = nn.functional.cross_entropy(run.model(X[first : first + 4]), Y[first : first + 4])
            run.accelerator.backward(loss)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.compressor.step()
            if save:
                run.accelerator.save_state(f"{path}/{run.compressor.count}")

    train(6, save=True)
    end = run.state()
    # Each process has statistics of its own until the next step.
    found = {"in step": alike(end[name] for name in end if "norm" not in name), "wrapped": type(run.model).__name__}
    run.accelerator.load_state(f"{path}/1")
    found["larger"] = run.orders()
    train(6)
    found |= {"same": same(run.state(), end), "orders": run.orders()}
    part = Training(accelerator=run.accelerator, model=OwnAverage(), when=[1], options=PART).train(3)
    return found | {"part": part.orders(), "part in step": alike(dict(part.model.module.named_parameters()).values())}


@pytest.mark.slow
def test_two_processes_cut_alike_and_load_an_earlier_state(tmp_path):
    expected = {"in step": True, "wrapped": "DistributedDataParallel", "larger": [12, 12], "same": True}
    expected |= {"orders": [4, 4], "part": [7, 7], "part in step": True}
    assert found_by_two(an_earlier_state, tmp_path) == [expected] * 2
