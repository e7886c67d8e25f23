"""Recipes with Mamba layers: cut by what their inputs choose, recorded, stopped and gone on with like others."""

import itertools

import pytest
import torch

from compressm.compression import Baked, Measured, PerChannel, SharedIndex, WhiteNoise, load_model
from compressm_lab.data import Digits, Store
from compressm_lab.experiments.recipes import find_recipe
from compressm_lab.runs.records import CutRecord, Evaluation, Spectrum, TruncationRecord
from compressm_lab.training import ConfigError, Interrupted, SelectiveConfig, train
from compressm_lab.training.building import build_compressor, build_method, build_model, build_tracker
from tests.lab.training.tiny import CUTS, SPECTRA, Sending, check_same_run, copies, lines, pairs, recipe, tokens
from tests.marks import later

MAMBA = ("model.layer=Mamba", "model.norm=rms")
METHODS = {
    "{}": Baked(),
    "{kind: baked, two_sided: true, refit: true}": Baked(two_sided=True, refit=True),
    "{kind: per-channel}": PerChannel(),
    "{kind: per-channel, surrogate: mean}": PerChannel(surrogate="mean"),
    "{kind: per-channel, surrogate: measured, two_sided: false}": PerChannel("measured", two_sided=False),
    "{kind: shared-index}": SharedIndex(),
    "{kind: shared-index, refit: true}": SharedIndex(refit=True),
}


@pytest.mark.parametrize("text", METHODS)
def test_every_kind_of_cut_can_be_named_in_a_recipe(text):
    found = recipe(*MAMBA, CUTS, f"compression.selective={text}").compression.selective
    assert build_method(found) == METHODS[text]
    assert build_method(None) == Baked()


BAD = [
    (MAMBA, "compression.selective={kind: roasted}", "compression.selective.kind is 'roasted', expected 'baked'"),
    (MAMBA, "compression.selective={kind: bakd}", "did you mean 'baked'?"),
    (MAMBA, "compression.selective={colour: red}", "selective.colour is not a key of a recipe, expected one of kind"),
    (MAMBA, "compression.selective={kind: shared-index, two_sided: true}", "shared-index has no two_sided"),
    (MAMBA, "compression.selective={refit: 1}", "compression.selective.refit is 1: expected true or false"),
    (MAMBA, "compression={bound: 0.1, when: {steps: [5]}}", "bound is 0.1 with layer Mamba, whose cuts have no error"),
    ((), "compression.selective={kind: baked}", "selective is for layer Mamba, and layer is LRU"),
]


@pytest.mark.parametrize(("layer", "setting", "said"), BAD, ids=[setting for _, setting, _ in BAD])
def test_a_way_to_cut_that_makes_no_sense_is_refused(layer, setting, said):
    with pytest.raises(ConfigError) as error:
        recipe(*layer, CUTS, setting)
    assert said in str(error.value)


GRAMIANS = ("white_noise", "measured")


@pytest.mark.parametrize(
    ("text", "gramian"),
    later(itertools.product(METHODS, GRAMIANS), *zip(METHODS, itertools.cycle(GRAMIANS), strict=False)),
)
def test_a_run_of_mamba_layers_is_cut_and_recorded(text, gramian, tmp_path):
    settings = (CUTS, SPECTRA, f"compression.selective={text}", f"compression.gramian={gramian}")
    run = train(recipe(*MAMBA, *settings), tokens(), tmp_path / "run")
    cuts = run.records(CutRecord)
    assert [(cut.step, cut.order) for cut in cuts] == [(5, 6), (11, cuts[0].rank)]
    # Two modes of a channel that are conjugates are kept as one.
    assert [cut.rank for cut in cuts] == [4, 3] or ("mean" in text and cuts[-1].rank <= 3)
    # The paper's means may lose more than there is.
    assert all(cut.error_bound is None and 0 < cut.measured_error < (3 if "mean" in text else 1) for cut in cuts)
    spectra = {record.step: record for record in run.records(Spectrum)}
    assert [len(spectra[step].sigma) for step in (0, 3, 6, 12)] == [6, 6, cuts[0].rank, cuts[1].rank]
    assert all(record.weyl_bound is None for record in spectra.values())
    layer = load_model(run.path / "model").blocks[0].ssm
    rows = 6 if "per-channel" in text else 3
    assert (layer.order, layer.x_proj.weight.shape[0]) == (cuts[1].rank, layer.dt_rank + 2 * rows)
    assert (layer.orders is not None) is ("per-channel" in text)


def test_data_that_cuts_go_by_is_asked_for_where_it_is_needed():
    def built(*settings):
        found = recipe(CUTS, SPECTRA, *settings)
        model = build_model(found.model, tokens())
        made = build_compressor(
            found, model, torch.optim.AdamW(model.parameters()), tokens(), lambda: 0.0, lambda model: 0.0
        )
        return made._cutter.options, build_tracker(found, model, tokens()).options

    for settings, gramian, data, spectra_data in [
        ((), WhiteNoise(), False, False),
        (("compression.gramian=measured",), Measured(), True, False),
        (MAMBA, WhiteNoise(), True, True),
        ((*MAMBA, "compression.gramian=measured", "compression.calibration_batches=2"), Measured(2), True, True),
    ]:
        cuts, spectra = built(*settings)
        assert (cuts.gramian, cuts.calibrate is not None, spectra.calibrate is not None) == (
            gramian,
            data,
            spectra_data,
        )
        assert cuts.selective == spectra.selective == Baked()


def test_spectra_of_mamba_layers_that_are_not_cut_are_recorded(tmp_path):
    run = train(recipe(*MAMBA, "spectra={every: 8}"), pairs(), tmp_path / "run")
    assert [(record.step, len(record.sigma)) for record in run.records(Spectrum)] == [(0, 6), (8, 6), (16, 6)]


BY_CHANNEL = [f"{{kind: per-channel, surrogate: {surrogate}}}" for surrogate in ("mean", "second_moment", "measured")]


@pytest.mark.parametrize("text", later(["{}", *BY_CHANNEL], "{}", BY_CHANNEL[0]))
def test_a_run_of_mamba_layers_goes_on_with_the_same_bits(text, tmp_path):
    found = recipe(*MAMBA, CUTS, SPECTRA, f"compression.selective={text}")
    train(found, tokens(), tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(found, tokens(), tmp_path / "run", objective=Sending(tokens().kind, 8))
    train(found, tokens(), tmp_path / "run", resume=True)
    check_same_run(tmp_path / "whole", tmp_path / "run")


def test_random_states_are_others_for_other_seeds(tmp_path):
    def errors(seed):
        settings = (*MAMBA, CUTS, "compression.selective={kind: shared-index}", "compression.select=random")
        train(recipe(*settings, f"seed={seed}"), tokens(), tmp_path / str(seed))
        return [(cut["rank"], cut["measured_error"]) for cut in lines(tmp_path / str(seed), "cuts")]

    first, second = errors(0), errors(1)
    assert [rank for rank, _ in first] == [rank for rank, _ in second] == [4, 3]
    assert first != second


def few(name, *settings):
    steps = ("training.steps=12", "training.evaluate_every=6", "training.batch=8", "spectra.every=6")
    small = ("model.depth=1", "model.width=4", "model.order=6", "compression.when={steps: [4, 8]}")
    return find_recipe(name, (*steps, *small, *settings))


def test_delayed_copies_are_learnt_by_mamba_layers_that_shrink(tmp_path):
    settings = ("model.layer=Mamba", "compression.tau=null", "compression.order=3", "compression.gate=1.0")
    run = train(few("delayed-copy", *settings), copies(), tmp_path / "run")
    assert [cut.rank for cut in run.records(CutRecord)] == [3]
    assert run.status().state == "finished"


def test_the_recipe_of_digits_by_mamba_is_cut_as_it_says(tmp_path):
    run = train(few("digits-mamba"), Digits(side=3).load(Store(tmp_path, offline=True)), tmp_path / "run")
    assert [cut.rank for cut in run.records(CutRecord)] == [3, 1]
    assert [found.step for found in run.records(Evaluation) if found.split == "test"] == [6, 12]


def test_the_recipe_of_the_papers_mamba_has_its_numbers_and_another_policy_takes_one_setting_each():
    found = find_recipe("imdb-mamba")
    assert (found.model.layer, found.model.order, found.compression.tau) == ("Mamba", 128, 1e-3)
    other = find_recipe(
        "imdb-mamba", ("compression.tau=null", "compression.order=16", "compression.selective={kind: shared-index}")
    )
    assert other.compression.order == 16
    assert other.compression.selective == SelectiveConfig(kind="shared-index")
    assert find_recipe("imdb-mamba", ("compression=null", "model.order=16")).label == "baseline"


def test_copies_of_a_model_with_orders_by_channel_are_cut_by_channel(tmp_path):
    """By another method the run would fail after its last step."""
    cut = "compression={rho: 0.5, gate: 1.0, selective: {kind: per-channel}, when: {steps: [3]}}"
    found = recipe(*MAMBA, cut, "truncation={orders: [1]}", "training.steps=4")
    run = train(found, tokens(), tmp_path / "run")
    assert {(record.order, record.mean_order) for record in run.records(TruncationRecord)} == {(1, 1.0)}
