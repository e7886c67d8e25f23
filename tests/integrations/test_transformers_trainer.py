"""The Trainer of transformers with the callback: it cuts, saves and resumes at any order, and ends with small files."""

import copy
import json
import math
import warnings

import pytest
import torch
from torch import nn

import compressm as cs
from compressm.compression import CompressionError, Rollback

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import MambaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from compressm.integrations.transformers_trainer import CompressionCallback
from tests.adapters.transformers_models import make, mixers
from tests.integrations.processes import alike, found_by_two

DATA = torch.randint(1, 20, (24, 12), generator=torch.Generator().manual_seed(0))
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    # Said by save_pretrained while the layers have other orders; `uniform=True` gives them one.
    pytest.mark.filterwarnings("ignore:the layers have .* states, and from_pretrained"),
]


class Letters(nn.Module):
    """A language model of ours that returns its loss, as the Trainer wants it."""

    def __init__(self, layer=cs.layers.LRU):
        super().__init__()
        torch.manual_seed(0)
        self.model = cs.models.LanguageModel(layer, vocabulary=20, depth=2, width=8, order=12)

    def forward(self, input_ids, labels=None):
        logits, _ = self.model(input_ids)
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())}


def orders(model):
    own = [module.order for module in model.modules() if isinstance(module, cs.layers.LRU)]
    return own or [mixer.ssm_state_size for mixer in mixers(model)]


def runs(model):
    model(DATA[:4])


def ours():
    return Letters(), {"keep": cs.KeepFraction(0.6), "gate": 1.0}


def mamba():
    return make(), {"keep": cs.KeepFraction(0.6), "calibrate": runs, "gate": 1.0}


def channels():
    """A cut that adds parameters, which the optimizer gets at the end of its groups."""
    options = {"keep": cs.KeepFraction(0.6), "calibrate": runs, "gate": 1.0}
    torch.manual_seed(0)
    model = Letters(cs.layers.Mamba)
    return model, options | {"selective": cs.PerChannel("measured")}


MODELS = {"ours": ours, "mamba": mamba}


def trainer_of(path, make, callbacks=(), when=(4, 8), steps=12, options=None, **arguments):
    model, given = make()
    callback = CompressionCallback(when=when, **given | (options or {}))
    defaults = {"max_steps": steps, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "report_to": []}
    settings = {"per_device_train_batch_size": 4, "use_cpu": True, "disable_tqdm": True, "seed": 1}
    data = [{"input_ids": row, "labels": row} for row in DATA]
    trainer = Trainer(
        model,
        TrainingArguments(str(path), **defaults | settings | {"save_total_limit": None} | arguments),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=[*callbacks, callback],
    )
    return trainer, callback


def state_of(trainer):
    """Weights and moments."""
    optimizer = trainer.optimizer.optimizer
    named = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    moments = {
        f"{named[id(parameter)]}.{key}": torch.as_tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    return {**trainer.model.state_dict(), **moments}


def same(first, second):
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module", params=MODELS)
def whole(request, tmp_path_factory):
    """A training that was not interrupted, with a checkpoint at every second step."""
    path, build = tmp_path_factory.mktemp(request.param), MODELS[request.param]
    trainer, callback = trainer_of(path, build)
    trainer.train()
    return path, build, trainer, callback


def test_the_callback_finds_optimizer_and_scheduler_and_cuts_at_the_steps(whole):
    _, build, trainer, callback = whole
    assert {event.step for event in callback.history} == {4, 8}
    assert orders(trainer.model) == ([1, 1] if build is mamba else [4, 4])
    optimizer = trainer.optimizer.optimizer
    for parameter in trainer.model.parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    assert trainer.lr_scheduler.optimizer.param_groups is optimizer.param_groups


def test_cuts_are_in_the_logs(whole):
    _, _, trainer, callback = whole
    logged = [entry for entry in trainer.state.log_history if "states" in entry]
    assert [entry["step"] for entry in logged] == sorted({event.step for event in callback.history})
    assert logged[-1]["states"] == sum(orders(trainer.model))
    assert [value for key, value in logged[-1].items() if key.startswith("states/")] == orders(trainer.model)


@pytest.mark.parametrize("step", [2, 4, 6, 10], ids=["before", "at", "between", "after"])
def test_a_training_resumed_at_any_orders_ends_bit_for_bit_as_the_whole_one(whole, step, tmp_path):
    path, build, trainer, callback = whole
    resumed, again = trainer_of(tmp_path, build)
    resumed.train(resume_from_checkpoint=str(path / f"checkpoint-{step}"))
    assert same(state_of(resumed), state_of(trainer))
    assert [str(event) for event in again.history] == [str(event) for event in callback.history]


def test_a_callback_that_is_added_later_cuts_but_does_not_resume_after_a_cut(tmp_path):
    def late():
        model, options = mamba()
        like, _ = trainer_of(tmp_path, mamba)
        trainer = Trainer(model, like.args, train_dataset=like.train_dataset, eval_dataset=like.eval_dataset)
        callback = CompressionCallback(when=(4, 8), **options)
        trainer.add_callback(callback)
        return trainer, callback

    first, callback = late()
    with pytest.warns(UserWarning, match=r"added to the trainer later.*Trainer\(\.\.\., callbacks=\[callback\]\)"):
        first.train()
    assert [cut.step for cut in callback.history] == [4, 4, 8, 8]
    again, _ = late()
    with pytest.raises(RuntimeError, match="size mismatch"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_nothing_is_said_of_a_callback_that_is_added_later_where_it_resumes(tmp_path):
    whole, _ = trainer_of(tmp_path, ours)
    whole.train()
    like, _ = trainer_of(tmp_path / "resumed", ours)
    callback = CompressionCallback(when=(4, 8), **ours()[1])  # before the trainer, which seeds the data
    late = Trainer(ours()[0], like.args, train_dataset=like.train_dataset, eval_dataset=like.eval_dataset)
    late.add_callback(callback)
    late.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert same(state_of(late), state_of(whole))


def only(block, **options):
    return {"filter_fn": lambda module, name: name.endswith(f"blocks.{block}.ssm"), **options}


def test_several_callbacks_with_names_resume_each_its_own_cuts(tmp_path):
    def run(path, resume=None):
        other = CompressionCallback(when=[3, 9], name="second", **only(1, keep=cs.KeepFraction(0.5)))
        trainer, callback = trainer_of(path, ours, callbacks=[other], options=only(0))
        trainer.train(resume_from_checkpoint=resume)
        return state_of(trainer), [str(event) for event in callback.history + other.history]

    state, said = run(tmp_path)
    assert len(said) == 4
    for step in (2, 4, 6, 10):  # after 4 the other callback has not acted since this one's cut
        again, same_said = run(tmp_path / f"from {step}", str(tmp_path / f"checkpoint-{step}"))
        assert same_said == said
        assert same(again, state)


def test_several_callbacks_of_one_name_are_refused(tmp_path):
    trainer, _ = trainer_of(tmp_path, ours, callbacks=[CompressionCallback(when=[3], keep=cs.TargetOrder(4))])
    with pytest.raises(CompressionError, match="a name of its own for each"):
        trainer.train()


def test_a_callback_serves_a_second_trainer_while_the_first_lives(tmp_path):
    first, callback = trainer_of(tmp_path, ours, steps=6)
    first.train()
    second = Trainer(ours()[0], first.args, train_dataset=first.train_dataset, callbacks=[callback])
    second.train()
    assert orders(second.model) == orders(first.model) == [7, 7]
    assert [entry["step"] for entry in second.state.log_history if "states" in entry] == [4]


def test_models_that_follow_are_named_where_a_checkpoint_does_not_hold_them(tmp_path):
    class Average(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **rest):
            average.update_parameters(model)
            stored[state.global_step] = copy.deepcopy(average.state_dict())

    def run(path, resume=None):
        nonlocal average
        average = torch.optim.swa_utils.AveragedModel(ours()[0])
        trainer, _ = trainer_of(path, ours, options={"follow": [average]}, save_steps=6)
        trainer.add_callback(Average())  # after the cuts
        if resume is not None:
            average.load_state_dict(stored[6])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.train(resume_from_checkpoint=resume)
        said = " ".join(str(one.message) for one in said)
        assert "does not hold the models in follow" in said
        assert ("no weights of the models in follow" in said) == (resume is not None)
        return state_of(trainer) | average.state_dict()

    average, stored = None, {}
    whole = run(tmp_path)
    assert same(run(tmp_path / "resumed", str(tmp_path / "checkpoint-6")), whole)


def decided():
    """Cuts that a schedule decides: its memory holds tensors, and some of its decisions are no events."""
    keep = cs.LossTolerance(0.001, loss=lambda model: model(DATA[:8], DATA[:8])["loss"])
    return Letters(), {"keep": keep, "calibrate": runs, "gate": 1.0}


class Silent(cs.Schedule):
    """Tries at every third look and says nothing."""

    def first(self, after):
        return after + 1

    def decide(self, look):
        looks = look.memory.get("looks", torch.tensor(0.1, dtype=torch.float64)) + 1
        if looks < 3:
            return look.wait(look.step + 1, memory={"looks": looks})
        return look.attempt(again=look.step + 1, share=0.8, memory={})

    def plan(self):
        return "every third step"


@pytest.mark.parametrize("when", [cs.Automatic(12, every=1), Silent()], ids=["automatic", "silent"])
def test_a_training_whose_cuts_are_decided_as_it_goes_resumes_bit_for_bit(when, tmp_path):
    trainer, callback = trainer_of(tmp_path, decided, when=when, save_steps=1)
    trainer.train()
    assert [event for event in callback.history if isinstance(event, cs.Cut)]
    for step in (2, 4):  # before the first try, and after one
        resumed, again = trainer_of(tmp_path / "again", decided, when=when, save_steps=50)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert same(state_of(resumed), state_of(trainer))
        assert [str(event) for event in again.history] == [str(event) for event in callback.history]


def test_a_memory_of_a_schedule_that_cannot_be_read_is_refused(tmp_path):
    when = cs.Automatic(12, every=1)
    trainer_of(tmp_path, decided, when=when, steps=2)[0].train()
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    stored = json.loads(path.read_text())
    stored["stateful_callbacks"]["compressm"]["compressor"]["decided"]["memory"] = "AAAA"
    path.write_text(json.dumps(stored))
    resumed, _ = trainer_of(tmp_path / "again", decided, when=when)
    with pytest.raises(CompressionError, match="memory of the schedule cannot be read"):
        resumed.train(resume_from_checkpoint=str(path.parent))


def test_what_reports_gets_the_cuts_whatever_its_place(tmp_path):
    class Report(TrainerCallback):
        seen = ()

        def on_log(self, args, state, control, logs=None, **rest):
            self.seen = [*self.seen, logs]

    report = Report()
    trainer, _ = trainer_of(tmp_path, ours, callbacks=[report], when=[2], steps=3, save_strategy="no")
    trainer.train()
    assert [logs["states"] for logs in report.seen if "states" in logs] == [14]


def test_accumulation_counts_steps_of_the_optimizer_and_bf16_trains_on(tmp_path):
    arguments = {"gradient_accumulation_steps": 3, "bf16": True, "save_strategy": "no"}
    trainer, callback = trainer_of(tmp_path, ours, when=[2], steps=4, **arguments)
    trainer.train()
    assert {event.step for event in callback.history} == {2}
    assert orders(trainer.model) == [7, 7]
    assert trainer.state.global_step == 4
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(map(math.isfinite, losses))


def test_a_schedule_may_be_a_function_of_the_number_of_steps(tmp_path):
    trainer, callback = trainer_of(tmp_path, ours, when=lambda total: [total // 2], steps=4, save_strategy="no")
    trainer.train()
    assert {event.step for event in callback.history} == {2}


@pytest.mark.parametrize("build", [ours, mamba])
def test_the_best_model_is_loaded_at_the_end_though_it_is_larger(build, tmp_path):
    arguments = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 10.0}
    trainer, callback = trainer_of(tmp_path, build, when=[5], steps=6, **arguments)
    start = orders(trainer.model)
    trainer.train()
    assert trainer.state.best_global_step in (2, 4)
    assert callback.history
    assert orders(trainer.model) == start
    best = tmp_path / f"checkpoint-{trainer.state.best_global_step}"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)
    assert (best / "model.safetensors").is_file()
    optimizer = trainer.optimizer.optimizer
    assert all(s["exp_avg"].shape == p.shape for p, s in optimizer.state.items())


def test_a_cut_model_that_is_saved_at_the_end_is_loaded_by_plain_transformers(tmp_path):
    def uniform():
        model, options = mamba()
        return model, options | {"uniform": True}

    trainer, _ = trainer_of(tmp_path / "run", uniform, when=[2], steps=4, save_strategy="no")
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = MambaForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.config.state_size == orders(trainer.model)[0] < 6
    trainer.model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(DATA).logits, trainer.model(DATA).logits)


def test_parameters_that_a_cut_added_get_their_own_moments_again(tmp_path):
    whole, _ = trainer_of(tmp_path / "whole", channels, when=[2], steps=6)
    whole.train()
    resumed, _ = trainer_of(tmp_path / "resumed", channels, when=[2], steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert any("A_imag.exp_avg" in name for name in state_of(whole))
    assert same(state_of(resumed), state_of(whole))


def test_a_model_that_the_trainer_makes_anew_is_resumed_after_a_cut(tmp_path):
    first, _ = trainer_of(tmp_path, mamba, when=[2], steps=4)

    def trained(resume=None):
        callback = CompressionCallback(when=[2], **mamba()[1])
        given = {"train_dataset": first.train_dataset, "callbacks": [callback]}
        trainer = Trainer(None, first.args, model_init=lambda: mamba()[0], **given)
        trainer.train(resume_from_checkpoint=resume)
        return state_of(trainer)

    whole = trained()
    assert same(trained(str(tmp_path / "checkpoint-2")), whole)


def test_a_checkpoint_without_our_state_is_resumed_with_a_warning(tmp_path):
    first, _ = trainer_of(tmp_path, ours, when=[2], steps=6)
    first.train()
    file = tmp_path / "checkpoint-4" / "trainer_state.json"
    state = json.loads(file.read_text())
    del state["stateful_callbacks"]["compressm"]
    file.write_text(json.dumps(state))
    resumed, callback = trainer_of(tmp_path, ours, when=[2, 5], steps=6, options={"keep": cs.TargetOrder(3)})
    with pytest.warns(UserWarning, match="resumes at step 4 from a checkpoint without a state"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert {event.step for event in callback.history} == {5}
    assert orders(resumed.model) == [3, 3]


def test_another_past_of_the_schedule_is_refused_when_the_training_resumes(tmp_path):
    first, _ = trainer_of(tmp_path, ours, when=[2], steps=4)
    first.train()
    resumed, _ = trainer_of(tmp_path, ours, when=[1, 3], steps=6)
    with pytest.raises(CompressionError, match="schedule"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_checkpoint_before_the_guard_has_judged_says_what_it_lacks(tmp_path):
    guard = Rollback(evaluate=lambda: 1.0, drop=0.1, settle=2, measures="accuracy")
    trainer, callback = trainer_of(tmp_path, ours, when=[3], steps=6, options={"guard": guard})
    with pytest.warns(UserWarning, match="does not hold what the guard would restore"):
        trainer.train()
    assert callback.compressor.state_dict()["watch"]["snapshot"] is None


def test_what_the_trainer_gives_is_refused_as_an_option():
    with pytest.raises(CompressionError, match="optimizer: the callback takes them from the trainer"):
        CompressionCallback(when=[1], keep=cs.TargetOrder(2), optimizer=None)


def resumed_between_cuts(rank, path):
    arguments = {"ddp_backend": "gloo"}
    whole, callback = trainer_of(path, ours, when=[2, 4], steps=6, **arguments)
    whole.train()
    end = state_of(whole)
    resumed, _ = trainer_of(path, ours, when=[2, 4], steps=6, save_strategy="no", **arguments)
    resumed.train(resume_from_checkpoint=f"{path}/checkpoint-2")
    return {
        "in step": alike(end.values()),
        "wrapped": type(whole.model_wrapped).__name__,
        "orders": orders(whole.model),
        "same": same(state_of(resumed), end),
        "cuts": len(callback.history),
    }


@pytest.mark.slow
def test_two_processes_cut_alike_and_resume_between_cuts(tmp_path):
    expected = {"in step": True, "wrapped": "DistributedDataParallel", "orders": [4, 4], "same": True, "cuts": 4}
    assert found_by_two(resumed_between_cuts, tmp_path) == [expected, expected]


class Averaged(Letters):
    """A model with an average of its own part."""

    def __init__(self):
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(self.model).requires_grad_(False)

    def forward(self, input_ids, labels=None):
        if self.training:
            self.average.update_parameters(self.model)
        return super().forward(input_ids, labels)


def averaged():
    options = {"part": "model", "follow": ["average"], "calibrate": lambda model: model(DATA[:4])}
    return Averaged(), {"keep": cs.KeepFraction(0.6), "gate": 1.0} | options


def test_a_model_that_averages_its_own_part_trains_and_resumes(tmp_path):
    whole, callback = trainer_of(tmp_path, averaged)
    whole.train()
    assert [event.module for event in callback.history] == ["blocks.0.ssm", "blocks.1.ssm"] * 2
    assert orders(whole.model) == [4] * 4
    for step in (2, 4, 10):
        resumed, again = trainer_of(tmp_path, averaged)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert same(state_of(resumed), state_of(whole))
        assert list(map(str, again.history)) == list(map(str, callback.history))
