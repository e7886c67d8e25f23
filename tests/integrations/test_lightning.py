"""The Trainer of Lightning with the callback: it cuts, logs, saves and resumes at any order."""

import copy
import csv
import json
import re

import pytest
import torch
from torch import nn

import compressm as cs
from compressm.compression import CompressionError, accept_orders_
from tests import unhooked

pytest.importorskip("lightning")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger

from compressm.integrations.lightning import CompressionCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]
DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(48, 10, 3, generator=DRAW), torch.randint(5, (48,), generator=DRAW)


class Classifier(pl.LightningModule):
    def __init__(self, layer=cs.layers.LRU, order=12):
        super().__init__()
        torch.manual_seed(0)
        self.model = cs.models.SequenceClassifier(
            layer, depth=2, width=4, order=order, inputs=3, classes=5, dropout=0.0
        )

    def training_step(self, batch, index):
        x, target = self.rows()
        return nn.functional.cross_entropy(self.model(x), target)

    def validation_step(self, batch, index):
        self.log("orders", float(sum(orders(self))))

    def rows(self):
        """The data of this step: Lightning begins an interrupted epoch with its first batch again."""
        first = 4 * (self.global_step // len(self.trainer.optimizers)) % 48
        return X[first : first + 4], Y[first : first + 4]

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


class Two(Classifier):
    """Muon for matrices, AdamW for the rest."""

    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim == 2]
        return torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(
            [p for p in self.parameters() if p.ndim != 2], lr=1e-2
        )

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class FromTransformers(pl.LightningModule):
    """A Mamba of transformers: `accept_orders_` lets `load_from_checkpoint` take other orders."""

    def __init__(self):
        super().__init__()
        from tests.adapters.transformers_models import make

        self.model = make()
        accept_orders_(self)

    def training_step(self, batch, index):
        ids = batch[1][None].clamp(max=19)
        return self.model(ids, labels=ids).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4)


def trained(
    path, kind=Classifier, when=(4, 8), resume=None, logger=False, options=None, steps=12, others=(), **arguments
):
    callback = CompressionCallback(when=when, **{"keep": cs.KeepFraction(0.6), "gate": 1.0, **(options or {})})
    save = ModelCheckpoint(path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    settings = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, **arguments}
    callbacks = [*others, callback, save]
    trainer = pl.Trainer(max_steps=steps, callbacks=callbacks, logger=logger, log_every_n_steps=1, **settings)
    module = kind()
    trainer.fit(module, loader(), ckpt_path=resume)
    return trainer, module, callback


def orders(module):
    return [block.ssm.order for block in module.model.blocks]


def state_of(trainer, module):
    """Weights and moments, these by the name of the parameter."""
    named = {id(parameter): name for name, parameter in module.named_parameters()}
    moments = {
        f"{named[id(parameter)]}.{key}": torch.as_tensor(value)
        for optimizer in trainer.optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    return {**module.state_dict(), **moments}


def same(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


class PerChannel(Classifier):
    def __init__(self):
        super().__init__(layer=cs.layers.Mamba)


CHANNELS = {"selective": cs.PerChannel("measured"), "calibrate": lambda module: module.model(X[:8])}
KINDS = {"one optimizer": (Classifier, {}), "two optimizers": (Two, {}), "added parameters": (PerChannel, CHANNELS)}


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory):
    path, (kind, options) = tmp_path_factory.mktemp("whole"), KINDS[request.param]
    return path, kind, options, *trained(path, kind, options=options, logger=CSVLogger(path))


def test_the_callback_finds_the_optimizers_and_cuts_at_the_steps(whole):
    _, _, _, trainer, module, callback = whole
    assert {event.step for event in callback.history} == {4, 8}
    assert all(order < 7 for order in orders(module))
    moments = state_of(trainer, module)
    for name, parameter in module.named_parameters():
        kept = [value for key, value in moments.items() if key.startswith(f"{name}.") and value.ndim > 0]
        assert kept
        assert all(value.shape == parameter.shape for value in kept)


def test_the_loggers_get_the_cuts(whole):
    path, _, _, _, module, _ = whole
    with next(path.rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row["states"]]
    assert [int(float(row["step"])) for row in rows] == [4, 8]
    assert float(rows[-1]["states"]) == sum(orders(module))
    assert float(rows[-1]["states/model.blocks.0.ssm"]) == orders(module)[0]


@pytest.mark.parametrize("step", [2, 4, 6, 10], ids=["before", "at", "between", "after"])
def test_a_training_resumed_at_any_orders_ends_bit_for_bit_as_the_whole_one(whole, step, tmp_path):
    path, kind, options, trainer, module, callback = whole
    again, resumed, back = trained(tmp_path, kind, resume=path / f"step={step}.ckpt", options=options)
    assert same(state_of(again, resumed), state_of(trainer, module))
    assert [str(event) for event in back.history] == [str(event) for event in callback.history]


def test_a_cut_model_is_loaded_from_its_checkpoint(whole):
    path, kind, _, _, module, _ = whole
    loaded = kind.load_from_checkpoint(path / "step=12.ckpt")
    assert orders(loaded) == orders(module)
    assert same(loaded.state_dict(), module.state_dict())


def test_a_cut_mamba_of_transformers_is_loaded_from_its_checkpoint(tmp_path):
    pytest.importorskip("transformers")
    options = {"calibrate": lambda module: module.model(torch.arange(1, 17)[None])}
    _, module, callback = trained(tmp_path, FromTransformers, when=[2], options=options, steps=4)
    assert callback.history
    loaded = FromTransformers.load_from_checkpoint(tmp_path / "step=4.ckpt")
    assert loaded.model.backbone.layers[0].mixer.ssm_state_size == 3
    assert same(loaded.state_dict(), module.state_dict())


def test_the_progress_bar_shows_the_states_and_prints_the_cuts(tmp_path, capsys):
    trainer, _, callback = trained(tmp_path, when=[2], steps=3, enable_progress_bar=True)
    printed = "".join(capsys.readouterr())
    assert all(str(event) in printed for event in callback.history)
    assert trainer.progress_bar_metrics["states"] == 14


def test_accumulation_counts_steps_of_the_optimizer(tmp_path):
    _, module, callback = trained(tmp_path, when=[2], steps=3, accumulate_grad_batches=2)
    assert {event.step for event in callback.history} == {2}
    assert orders(module) == [7, 7]


def test_a_schedule_may_be_a_function_of_the_number_of_steps(tmp_path):
    _, _, callback = trained(tmp_path, when=lambda total: [total // 3], steps=6)
    assert {event.step for event in callback.history} == {2}
    _, _, callback = trained(tmp_path, when=lambda total: [total // 3], steps=-1, max_epochs=1)
    assert {event.step for event in callback.history} == {4}
    with pytest.raises(CompressionError, match="does not know"):
        trained(tmp_path, when=lambda total: [total // 3], steps=-1, max_epochs=-1)


def test_a_longer_training_resumes_by_the_steps_that_the_error_names(tmp_path):
    def thirds(total):
        return [total // 3, 2 * total // 3]

    trained(tmp_path, when=thirds, steps=9)
    resumed = {"resume": tmp_path / "step=4.ckpt", "steps": 15}
    with pytest.raises(CompressionError, match=r"expected the same steps up to step 4.*\(a function of") as refusal:
        trained(tmp_path, when=thirds, **resumed)
    when = re.search(r"pass when=(\[.*?\])", str(refusal.value))[1]
    assert when == "[3, 5, 10]"
    _, _, callback = trained(tmp_path, when=json.loads(when), **resumed)
    assert sorted({event.step for event in callback.history}) == [3, 5, 10]


def test_a_second_training_of_the_same_trainer_begins_anew(tmp_path):
    trainer, module, callback = trained(tmp_path, when=[2], steps=3)
    assert orders(module) == [7, 7]
    other = Classifier()
    trainer.fit_loop.epoch_loop.max_steps = 6
    with pytest.warns(UserWarning, match="resumes at step 3 from a checkpoint without a state"):
        trainer.fit(other, loader())
    assert orders(other) == [12, 12]
    assert callback.history == []


def test_a_checkpoint_of_other_orders_is_tested_when_the_training_is_over(tmp_path):
    trainer, module, _ = trained(tmp_path)
    (found,) = trainer.validate(module, loader(), ckpt_path=tmp_path / "step=2.ckpt", verbose=False)
    assert found["orders"] == 24
    module.load_state_dict(torch.load(tmp_path / "step=12.ckpt")["state_dict"])
    assert orders(module) == [4, 4]
    # Another training goes on with the same module, while the first trainer lives.
    again = pl.Trainer(max_steps=8, callbacks=[CompressionCallback(when=[4, 8], keep=cs.KeepFraction(0.6), gate=1.0)],
                       accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                       enable_model_summary=False)  # fmt: skip
    again.fit(module, loader(), ckpt_path=tmp_path / "step=2.ckpt")
    assert orders(module) == [4, 4]


class Averaged(FromTransformers):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def averaging(kind):
    return EMAWeightAveraging(decay=0.5) if kind == "ema" else StochasticWeightAveraging(1e-2, swa_epoch_start=1)


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("kind", ["ema", "swa"])
@pytest.mark.parametrize("build", [Classifier, Averaged])
def test_averages_of_lightning_s_callbacks_follow_cuts_and_resume(build, kind, place, tmp_path):
    def run(path, resume=None):
        average = averaging(kind)
        options = {"calibrate": lambda module: module.model(torch.arange(1, 17)[None])} if build is Averaged else {}
        callback = CompressionCallback(when=[2, 6], keep=cs.KeepFraction(0.6), gate=1.0, **options)
        save = ModelCheckpoint(path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        both = [average, callback] if place == "before" else [callback, average]
        trainer = pl.Trainer(max_epochs=2, callbacks=[*both, save], logger=False, accelerator="cpu",
                             limit_train_batches=4, enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
        module = build()
        trainer.fit(module, loader(), ckpt_path=resume)
        return module, average, callback

    whole, average, callback = run(tmp_path)
    assert {event.step for event in callback.history} == {2, 6}
    resumed, again, _ = run(tmp_path / "again", tmp_path / "step=4.ckpt")
    if kind == "ema":  # Lightning does not resume the other one bit for bit, without cuts neither
        assert same(average._average_model.module.state_dict(), whole.state_dict())
        assert same(resumed.state_dict(), whole.state_dict())
    shapes = [p.shape for p in whole.parameters()]
    assert all([p.shape for p in model.parameters()] == shapes for model in (resumed, again._average_model))


def test_models_that_follow_are_in_the_checkpoints(tmp_path):
    class Follows(Classifier):
        def optimizer_step(self, *given, **more):
            super().optimizer_step(*given, **more)
            self.averages[0].update_parameters(self)

    def run(path, resume=None):
        made = []

        def build():
            made.append(Follows())
            made[0].averages = averages
            return made[0]

        averages = [torch.optim.swa_utils.AveragedModel(Follows())]
        _, module, _ = trained(path, build, options={"follow": averages}, resume=resume)
        return module, averages[0]

    whole, average = run(tmp_path)
    for step in (2, 6):
        resumed, again = run(tmp_path / f"from {step}", tmp_path / f"step={step}.ckpt")
        assert same(resumed.state_dict(), whole.state_dict())
        assert same(again.state_dict(), average.state_dict())
    plain = tmp_path / "plain"
    trained(plain, steps=2)
    with pytest.warns(UserWarning, match="no weights of the models in follow"):
        run(plain, plain / "step=2.ckpt")


class OwnAverage(Classifier):
    """A module that averages its own model, and has more than the model to train."""

    def __init__(self, make=torch.optim.swa_utils.AveragedModel):
        super().__init__()
        self.average, self.scale = make(self.model).requires_grad_(False), nn.Parameter(torch.ones(()))

    def training_step(self, batch, index):
        x, target = self.rows()
        return nn.functional.cross_entropy(self.scale * self.model(x), target)

    def on_before_zero_grad(self, optimizer):
        own = self.average.module if hasattr(self.average, "module") else self.average
        with torch.no_grad():
            for kept, new in zip(own.parameters(), self.model.parameters(), strict=True):
                kept.lerp_(new, 0.1)


class OwnCopy(OwnAverage):
    def __init__(self):
        super().__init__(copy.deepcopy)


PART = {"part": "model", "follow": ["average"], "calibrate": lambda model: model(X[:8])}


@pytest.mark.parametrize("kind", [OwnAverage, OwnCopy])
def test_a_module_that_averages_its_own_model_trains_resumes_and_loads(kind, tmp_path):
    with pytest.raises(CompressionError, match=r"average.*part='\.\.\.', follow=\['average"):
        trained(tmp_path / "refused", kind)
    trainer, whole, callback = trained(tmp_path, kind, options=PART, logger=CSVLogger(tmp_path))
    assert [event.module for event in callback.history] == ["blocks.0.ssm", "blocks.1.ssm"] * 2
    assert orders(whole) == [4, 4]
    for step in (2, 4, 6, 10):
        again, resumed, back = trained(tmp_path / str(step), kind, options=PART, resume=tmp_path / f"step={step}.ckpt")
        assert same(state_of(again, resumed), state_of(trainer, whole))
        assert list(map(str, back.history)) == list(map(str, callback.history))
    loaded = kind.load_from_checkpoint(tmp_path / "step=12.ckpt")
    assert same(loaded.state_dict(), whole.state_dict())
    kept = loaded.average.module if kind is OwnAverage else loaded.average
    gap = (kept(X[:8]) - loaded.model(X[:8])).norm() / loaded.model(X[:8]).norm()
    assert gap < 0.5  # an average in other coordinates gives anything


def test_averages_of_callbacks_and_of_the_module_follow_cuts_of_a_part(tmp_path):
    average = EMAWeightAveraging(decay=0.5)
    _, whole, _ = trained(tmp_path, OwnAverage, options=PART, others=[average])
    (own, inside) = (dict(model.named_parameters()) for model in (whole, average._average_model.module))
    assert {name: p.shape for name, p in own.items()} == {name: p.shape for name, p in inside.items()}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"part": "net"}, r"part is 'net', which Classifier does not have; it has model"),
        ({"part": 3}, "part is 3, expected text"),
        ({"follow": ["average"]}, r"follow\[0\] is 'average', which Classifier does not have"),
        ({"follow": "average"}, "follow is 'average', expected a list of models, or of their paths"),
        ({"part": "model", "follow": ["model"]}, "is the model's own layer"),
    ],
)
def test_paths_that_lead_nowhere_are_refused(wrong, said, tmp_path):
    with pytest.raises(CompressionError, match=said):
        trained(tmp_path, options=wrong, steps=1)


def test_several_callbacks_with_names_resume_each_its_own_cuts(tmp_path):
    def second():
        only = {"filter_fn": lambda module, name: name.endswith("blocks.1.ssm")}
        return CompressionCallback(when=[3, 9], keep=cs.KeepFraction(0.5), name="second", **only)

    def run(path, resume=None):
        other = second()
        only = {"filter_fn": lambda module, name: name.endswith("blocks.0.ssm")}
        trainer, module, callback = trained(path, options=only, others=[other], resume=resume)
        return state_of(trainer, module), [str(event) for event in callback.history + other.history]

    state, said = run(tmp_path)
    assert len(said) == 4
    for step in (2, 6, 10):
        again, same_said = run(tmp_path / f"from {step}", tmp_path / f"step={step}.ckpt")
        assert same_said == said
        assert same(again, state)
    with pytest.raises(CompressionError, match="name is 3, expected text"):
        CompressionCallback(when=[1], keep=cs.TargetOrder(2), name=3)


TWO_PROCESSES = """
import copy, json, sys, warnings
warnings.simplefilter("ignore")
import torch
import compressm as cs
import lightning.pytorch as pl
from compressm.integrations.lightning import CompressionCallback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
path, resume = sys.argv[1], sys.argv[2] or None

class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"depth": 1, "width": 4, "order": 12, "inputs": 3, "classes": 5, "dropout": 0.0}
        self.model = cs.models.SequenceClassifier(cs.layers.LRU, **sizes)
    def training_step(self, batch, index):
        first = 4 * (2 * self.global_step + self.global_rank)
        return torch.nn.functional.cross_entropy(self.model(X[first : first + 4]), Y[first : first + 4])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
    def on_train_end(self):
        own = torch.cat([p.detach().flatten() for p in self.parameters()])
        rows = self.all_gather(own)
        same = bool((rows == rows[0]).all())
        found = {"orders": self.model.blocks[0].ssm.order, "same": same, "sum": own.double().sum().item()}
        print(json.dumps(found), file=open(f"{path}/found-{self.global_rank}.json", "w"))

draw = torch.Generator().manual_seed(0)
X, Y = torch.randn(48, 10, 3, generator=draw), torch.randint(5, (48,), generator=draw)
data = TensorDataset(X, Y)
callback = CompressionCallback(when=[2, 4], keep=cs.KeepFraction(0.6), gate=1.0)
save = ModelCheckpoint(path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
trainer = pl.Trainer(
    max_steps=6, accelerator="cpu", devices=2, strategy="ddp_fork", callbacks=[callback, save], logger=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Classifier(), DataLoader(data, batch_size=4), ckpt_path=resume)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", ', part="model", follow=["average"]'], ids=["the module", "a part of it"])
def test_two_processes_cut_alike_and_resume_between_cuts(options, tmp_path):
    found, script = {}, TWO_PROCESSES.replace("gate=1.0", f"gate=1.0{options}")
    if options:
        copied = "    self.average = copy.deepcopy(self.model).requires_grad_(False)\n    def training_step"
        script = script.replace("def training_step", copied)
    for name, resume in (("whole", ""), ("resumed", str(tmp_path / "whole" / "step=3.ckpt"))):
        (tmp_path / name).mkdir()
        unhooked.run(script, str(tmp_path / name), resume)
        found[name] = [json.loads((tmp_path / name / f"found-{rank}.json").read_text()) for rank in range(2)]
    assert found["whole"] == found["resumed"]
    assert all(one["same"] and one["orders"] == 4 for one in found["whole"])


def test_a_strategy_that_shards_is_refused_by_name(tmp_path):
    class ShardingFSDPLike(pl.strategies.SingleDeviceStrategy):
        pass

    with pytest.raises(CompressionError, match="ShardingFSDPLike shards the model"):
        trained(tmp_path, strategy=ShardingFSDPLike(), steps=1)
