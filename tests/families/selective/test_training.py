"""Models with selective layers that shrink while they train: schedules, guards, followers, files, other layers."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import compressm as cs
from compressm.compression import CompressionError, load_checkpoint, save_checkpoint
from compressm.compression.planning import Options, found_layers, plan_cuts
from tests.families.selective.mixers import Mixer, data, make

TOKENS = torch.randint(0, 11, (6, 24), generator=torch.Generator().manual_seed(0))
METHODS = [cs.Baked(), cs.SharedIndex()]


def runs(model):
    return model(TOKENS)


class Training:
    def __init__(self, order=8, **options):
        torch.manual_seed(0)
        self.model = cs.models.LanguageModel(cs.layers.Mamba, vocabulary=11, depth=2, width=8, order=order)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        options = {"when": [2, 4], "keep": cs.KeepFraction(0.5), "calibrate": runs, **options}
        self.compressor = cs.Compressor(self.model, self.optimizer, **options)

    def train(self, steps, first=1):
        events = []
        for step in range(first, first + steps):
            logits, _ = self.model(TOKENS[:, :-1], keep_state=False)
            self.optimizer.zero_grad()
            cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
            self.optimizer.step()
            events += self.compressor.step(step)
        return events

    @property
    def orders(self):
        return [block.ssm.order for block in self.model.blocks]

    def picture(self):
        state = copy.deepcopy(self.optimizer.state_dict())
        return [value.clone() for value in self.model.state_dict().values()], state


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_model_shrinks_while_it_trains(method):
    run = Training(selective=method)
    objects = [id(p) for p in run.model.parameters()]
    events = run.train(1)
    previews = [str(cut) for cut in run.compressor.preview()]
    events += run.train(5, first=2)
    assert [(cut.step, cut.module, cut.order, cut.rank) for cut in events] == [
        (2, "blocks.0.ssm", 8, 4),
        (2, "blocks.1.ssm", 8, 4),
        (4, "blocks.0.ssm", 4, 2),
        (4, "blocks.1.ssm", 4, 2),
    ]
    assert all(cut.error_bound is None and 0 < cut.measured_error < 1 for cut in events)
    assert len(previews) == 2
    assert previews[0].startswith("blocks.0.ssm: 8 -> 4 states, measured 0.")
    assert [id(p) for p in run.model.parameters()] == objects
    assert run.orders == [2, 2]


def test_rounding_gates_and_overrides_hold_for_selective_layers():
    run = Training(round_to=3, overrides={"blocks.1.*": cs.KeepFraction(1.0)})
    run.train(2)
    assert run.orders == [6, 8]
    with pytest.warns(UserWarning, match=r"nothing will be cut: with keep=TargetOrder\(n=7\), gate=0.8 every layer"):
        assert Training(keep=cs.TargetOrder(7), gate=0.8).train(2) == []
    assert [cut.rank for cut in Training(keep=cs.Budget(9), gate=1.0).train(2)] != [8, 8]


def test_an_order_above_what_there_is_is_refused():
    run = Training(keep=lambda spectra: dict.fromkeys(spectra, 9))
    before = run.picture()
    with pytest.raises(CompressionError, match=r"the order of 'blocks.0.ssm' is 9, expected an integer from 1 to 8"):
        run.compressor.step(2)
    torch.testing.assert_close(run.picture(), before, rtol=0, atol=0)
    with pytest.warns(UserWarning, match="nothing will be cut"):
        assert Training(keep=cs.TargetOrder(9)).train(2) == []


def test_a_cut_that_does_harm_is_undone_bit_for_bit():
    scores = iter([1.0, 0.5])
    run = Training(guard=cs.Rollback(lambda: next(scores), settle=0), when=[2])
    run.train(1)
    before = run.picture()
    run.compressor.step(2)
    assert run.orders == [4, 4]
    (restored,) = run.compressor.step(3)
    assert restored.orders == {"blocks.0.ssm": 8, "blocks.1.ssm": 8}
    torch.testing.assert_close(run.picture(), before, rtol=0, atol=0)
    run.train(2, first=4)


@pytest.mark.parametrize("fails", [None, 5])
def test_attributes_go_with_the_order_come_back_with_it_and_change_with_all_or_nothing(fails, monkeypatch):
    model = nn.Sequential(make(kind=Mixer), make(kind=Mixer, seed=1))
    scores, calls = iter([1.0, 0.5]), []
    if fails:
        from compressm.compression import surgery

        replace_data = surgery.replace_data

        def failing(parameter, value):
            calls.append(parameter)
            if len(calls) == 3:
                raise MemoryError("no more")
            replace_data(parameter, value)

        monkeypatch.setattr(surgery, "replace_data", failing)
    compressor = cs.Compressor(
        model,
        when=[1],
        keep=cs.TargetOrder(2),
        calibrate=lambda model: model(data()),
        guard=cs.Rollback(lambda: next(scores), settle=1),
    )

    def sizes():
        places = ((m.ssm_state_size, m.config.state_size, (m.x_proj.out_features - 2) // 2) for m in model)
        return [(*place, m.A_log.shape[1]) for place, m in zip(places, model, strict=True)]

    if fails:
        with pytest.raises(MemoryError):
            compressor.step(1)
    else:
        compressor.step(1)
        assert sizes() == [(2, 2, 2, 2)] * 2
        model(data())
        compressor.step(2)
    assert sizes() == [(6, 6, 6, 6)] * 2
    model(data())


@pytest.mark.filterwarnings("ignore:a Compressor with an optimizer holds this model")
@pytest.mark.parametrize("method", [cs.Baked(), cs.Baked(refit=True), cs.SharedIndex(refit=True)], ids=str)
def test_an_average_of_the_weights_follows_in_the_same_coordinates(method):
    """The cut of a mean is the mean of the cuts, but for A_log, whose logarithm is no mean."""
    run = Training(selective=method)
    average = copy.deepcopy(run.model)
    other = copy.deepcopy(run.model)
    for parameter in other.parameters():
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    for parameter, there in zip(average.parameters(), other.parameters(), strict=True):
        parameter.data = (parameter.data + there.data) / 2
    cs.compress_(run.model, keep=cs.TargetOrder(3), calibrate=runs, selective=method, follow=[average, other])
    for cut, mean, there in zip(run.model.parameters(), average.parameters(), other.parameters(), strict=True):
        assert mean.shape == cut.shape
        torch.testing.assert_close(mean, (cut + there) / 2, rtol=1e-3, atol=2e-4)


def test_linear_and_selective_layers_are_cut_in_one_model():
    torch.manual_seed(0)
    model = nn.ModuleList([cs.layers.LRU(4, 8), make(order=8), cs.layers.S4D(4, 8), make(kind=Mixer, order=8)]).double()

    def calibrate(model):
        x = data()
        for layer in model:
            y = layer(x)
            x = y[0] if isinstance(y, tuple) else y

    optimizer = torch.optim.Adam(model.parameters())
    found = cs.inspect(model, calibrate, gramian=cs.WhiteNoise())
    assert {name for name, bound in found.bounds[0.05].items() if bound is None} == {"1", "3"}
    compressor = cs.Compressor(
        model, optimizer, when=[1], keep=cs.Budget(18), calibrate=calibrate, gramian=cs.WhiteNoise(), gate=1.0
    )
    cuts = compressor.step(1)
    assert sum(found.orders.values()) == 32
    assert sum(layer.order for layer in (model[0], model[1], model[2])) + model[3].A_log.shape[1] <= 18
    assert {cut.module: cut.error_bound is None for cut in cuts if cut.module in "13"} == dict.fromkeys(
        [cut.module for cut in cuts if cut.module in "13"], True
    )
    assert all(cut.measured_error is not None for cut in cuts)
    calibrate(model)


def test_spectra_are_tracked_through_a_cut():
    run = Training(when=[3])
    tracker = cs.HankelTracker(run.model, every=1, calibrate=runs, changes=True, selective=cs.SharedIndex())
    for step in range(1, 5):
        run.train(1, first=step)
        tracker.step(step)
    assert [len(record["blocks.0.ssm"]) for record in tracker.spectra] == [8, 8, 4, 4]
    assert tracker.bounds[1] == {"blocks.0.ssm": None, "blocks.1.ssm": None}
    assert tracker.trajectories("blocks.1.ssm").values.shape == (4, 8)
    again = cs.HankelTracker(run.model, every=1, calibrate=runs)
    again.load_state_dict(tracker.state_dict())
    assert again.steps == [1, 2, 3, 4]


def test_a_cut_model_is_saved_and_loaded(tmp_path):
    run = Training()
    run.train(3)
    cs.save_model(run.model, tmp_path / "model")
    loaded = cs.load_model(tmp_path / "model")
    assert [block.ssm.order for block in loaded.blocks] == [4, 4]
    torch.testing.assert_close(loaded(TOKENS)[0], run.model.eval()(TOKENS)[0], rtol=0, atol=0)


@pytest.mark.parametrize("method", [cs.Baked(), cs.PerChannel(), cs.PerChannel("measured", two_sided=False)], ids=str)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(method, tmp_path):
    run, other = Training(selective=method), Training(selective=method)
    run.train(3)
    saved = {"model": run.model, "optimizer": run.optimizer, "compressor": run.compressor}
    save_checkpoint(tmp_path / "c.pt", step=3, **saved)
    load_checkpoint(tmp_path / "c.pt", model=other.model, optimizer=other.optimizer, compressor=other.compressor)
    for which in (run, other):
        which.train(3, first=4)
    assert run.orders == other.orders
    assert all(1 <= order <= 2 for order in run.orders)
    torch.testing.assert_close(run.picture(), other.picture(), rtol=0, atol=0)


@pytest.mark.parametrize("method", [cs.PerChannel(), cs.PerChannel("mean"), cs.PerChannel("measured")], ids=str)
def test_what_a_cut_writes_lies_in_memory_as_what_a_file_gives(method):
    """Strides of views would choose other kernels, and other bits, than those after a restart."""
    run = Training(selective=method, keep=cs.EnergyTolerance(0.05))
    run.train(5)
    layer = run.model.blocks[1].ssm
    assert layer.B_map is not None
    moments = [value for state in run.optimizer.state.values() for value in state.values()]
    assert all(value.is_contiguous() for value in (*run.model.state_dict().values(), *moments))
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in (layer.B_map, layer.C_map, layer.orders))


@pytest.mark.parametrize("method", [cs.Baked(), cs.SharedIndex(refit=True)], ids=str)
def test_a_rehearsal_needs_no_data(method):
    model = nn.ModuleList([make(order=8), cs.layers.LRU(4, 8)])
    options = Options(cs.KeepFraction(0.5), calibrate=lambda model: pytest.fail("ran"), selective=method, gate=1.0)
    layers = {name: layer.imagined() for name, layer in found_layers(model, options).items()}
    assert [cut.rank for cut in plan_cuts(layers, dataclasses.replace(options, calibrate=None))] == [4, 4]


@pytest.mark.filterwarnings("ignore:a Compressor with an optimizer holds this model")
@pytest.mark.parametrize("shape", [(3, 40), (1, 300)])
def test_half_precision_models_are_cut(shape):
    run = Training()
    model = run.model.bfloat16()
    tokens = torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(2))
    cuts = cs.compress_(model, keep=cs.TargetOrder(4), calibrate=lambda model: model(tokens))
    assert run.orders == [4, 4]
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(cut.measured_error < 1 for cut in cuts)
    assert model(tokens)[0].isfinite().all()
