"""Recipes name layers and tasks of one's own as package.module:Name."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from compressm.cli.app import app
from compressm.compression import load_model
from compressm_lab.data import CATALOGUE, DataError, make
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.records import CutRecord, Spectrum
from compressm_lab.training import ConfigError, Interrupted, ModelConfig, train
from compressm_lab.training.model_config import LAYERS, layer_class, needs_data
from compressm_lab.training.reading import make_recipe
from tests import unhooked
from tests.lab.training import own
from tests.lab.training.tiny import CUTS, Sending, check_same_run, from_dataset, recipe

OWN = "tests.lab.training.own"
RECIPE = f"""
name: mine
task: {{name: "{OWN}:Signs", length: 6}}
model: {{layer: "{OWN}:Spirals", layer_options: {{turns: 0.25}}, depth: 1, width: 4, order: 6}}
training: {{steps: 8, batch: 8, learning_rate: 0.01, evaluate_every: 4, checkpoint_every: 3}}
compression: {{order: 3, gate: 1.0, when: {{steps: [5]}}}}
spectra: {{every: 4}}
"""


@pytest.fixture
def run_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPRESSM_COMMIT", "tests")
    monkeypatch.setenv("COMPRESSM_DATA", str(tmp_path / "data"))
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "250"})


def test_a_layer_and_a_task_of_ones_own_are_trained_cut_saved_and_looked_at(run_in):
    done = run_in("train", "mine.yaml", "--out", "mine", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "step 5: blocks.0.ssm: 6 -> 3 states, error <= " in done.output
    run = RunDirectory("mine")
    assert [(cut.step, cut.order, cut.rank) for cut in run.records(CutRecord)] == [(5, 6, 3)]
    assert [spectrum.step for spectrum in run.records(Spectrum)] == [0, 4, 8]
    layer = load_model(run.model).blocks[0].ssm
    assert (type(layer), layer.order) == (own.Spirals, 3)
    for path in ("mine", "mine/model"):
        assert "blocks.0.ssm" in run_in("inspect", path).output
    done = run_in("compress", "mine", "--measured", "--order", "2", "--out", "small")
    assert done.exit_code == 0, done.output
    assert "test accuracy" in done.output
    assert load_model("small").blocks[0].ssm.order == 2


def test_a_run_of_ones_own_layer_goes_on_with_the_same_bits(tmp_path):
    found, task = make_recipe(yaml.safe_load(RECIPE)), from_dataset(own.Signs(length=6))
    whole = train(found, task, tmp_path / "whole").path
    with pytest.raises(Interrupted):
        train(found, task, tmp_path / "stopped", objective=Sending(task.kind, 6))
    check_same_run(whole, train(found, task, tmp_path / "stopped", resume=True).path)


def test_classes_may_stand_in_the_folder_where_the_command_is_given(tmp_path):
    """As the installed command is started: without that folder on Python's path."""
    (tmp_path / "mine.py").write_text(
        "from compressm.layers import LRU\n\n\nclass Mine(LRU):\n    def __init__(self, width, order):\n"
        "        super().__init__(width, order, r_max=0.95)\n"
    )
    (tmp_path / "mine.yaml").write_text(RECIPE.replace(f"{OWN}:Spirals", "mine:Mine").replace("{turns: 0.25}", "{}"))
    script = f"""
import os, sys
os.chdir({str(tmp_path)!r})
sys.path[:] = [{str(Path(__file__).parents[3])!r}, *filter(None, sys.path)]
from compressm.cli import main
main()
"""
    assert "6 -> 3 states" in unhooked.run(script, "train", "mine.yaml", "--out", "run", "--data", "data")


def test_classes_are_asked_what_they_are():
    assert [name for name in LAYERS if needs_data(name)] == ["Mamba"]
    assert not needs_data(f"{OWN}:Spirals")
    assert needs_data("compressm.layers.mamba:Mamba")
    assert layer_class("compressm.layers:LRU") is layer_class("LRU")


BAD_LAYERS = [
    ("gone.layers:Mine", "no module 'gone' of 'gone.layers:Mine' is found; expected one that is installed, or a file"),
    (f"{OWN}s:Spirals", "no module 'tests.lab.training.owns' of"),
    (f"{OWN}:Spiral", "tests.lab.training.own has no 'Spiral', which"),
    (f"{OWN}:Spiral", "did you mean 'Spirals'?"),
    (f"{OWN}:make_layer", "expected a class of compressm.layers.SSMLayer"),
    ("torch.nn:Linear", "it is <class 'torch.nn.modules.linear.Linear'>, expected a class of compressm.layers"),
    (f"{OWN}:Unfinished", "Unfinished has no dynamics and no forward and no initial_state"),
    (f"{OWN}:Square", "Square(order) is built as (width, order=n): multiple values for argument 'order'"),
    (f"{OWN}.Spirals", f"or a class of your own as package.module:Name; did you mean '{OWN}:Spirals'?"),
    (":Spirals", "':Spirals' names no class, expected package.module:Name"),
    (f"{OWN}:", "names no class, expected package.module:Name"),
    ("compressm.layers.hippo:Legs", "compressm.layers.hippo has moved to compressm.layers.initialisation"),
    (5, "expected 'LRU', 'S5', 'S4', 'S4D', 'LinOSS' or 'Mamba'"),
]


@pytest.mark.parametrize(("layer", "said"), BAD_LAYERS)
def test_a_layer_that_cannot_be_had_is_refused_by_name(layer, said):
    with pytest.raises(ConfigError) as error:
        recipe(f"model.layer={layer!r}")
    assert f"model.layer is {layer!r:.60}" in str(error.value)
    assert said in str(error.value)
    with pytest.raises(ConfigError) as error:
        ModelConfig(depth=1, width=2, order=3, layer=layer)
    assert f"layer is {layer!r}" in str(error.value)
    assert said in str(error.value)


@pytest.mark.parametrize(("key", "name"), [("model.layer", "Mine"), ("task.name", "Task")])
def test_a_module_that_raises_when_it_is_imported_is_named_with_its_key_and_line(
    key, name, tmp_path, monkeypatch, run_in
):
    (tmp_path / "raising.py").write_text("import math\n\nmath.sqrt(-1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = run_in("train", "mine.yaml", "--set", f"{key}=raising:{name}")
    said = " ".join(done.output.replace("│", " ").split())
    assert done.exit_code == 2
    assert f"{key.split('.')[0]}" in said
    assert f"raising of 'raising:{name}' cannot be imported: ValueError: math domain error ({tmp_path}" in said
    assert "raising.py, line 3)" in said
    assert "Traceback" not in said


def test_options_of_ones_own_layer_are_checked_like_others(run_in):
    done = run_in("train", "mine.yaml", "--set", "model.layer_options.turn=1")
    assert done.exit_code == 2
    said = " ".join(done.output.replace("│", " ").split())
    assert "Spirals has no option 'turn'; its options: turns; did you mean 'turns'?" in said


def test_what_selective_layers_cannot_do_is_refused_of_every_name():
    for layer in ("Mamba", "compressm.layers:Mamba"):
        with pytest.raises(ConfigError, match=f"bound is 0.1 with layer {layer}, whose cuts have no error bound"):
            recipe(f"model.layer={layer}", "compression={bound: 0.1, when: {steps: [5]}}")
    with pytest.raises(ConfigError, match=f"selective is for layer Mamba, and layer is {OWN}:Spirals: leave it out"):
        recipe(f"model.layer={OWN}:Spirals", CUTS, "compression.selective={}")


BAD_TASKS = [
    ("gone:Mine", "no module 'gone' of 'gone:Mine' is found"),
    (f"{OWN}:Sings", "did you mean 'Signs'?"),
    (f"{OWN}:Spirals", "expected a class of compressm_lab.data.DataSet"),
    (f"{OWN}:Nameless", "has the name None, expected text"),
    (f"{OWN}:Taken", "has the name 'digits', which is taken"),
    (f"{OWN}:Formless", "has no form: a data set has a form and parses"),
    ("signs", "expected one of smnist"),
    ("signs", "or a class or a function of your own as package.module:Name"),
]


@pytest.mark.parametrize(("name", "said"), BAD_TASKS)
def test_a_task_that_cannot_be_had_is_refused_by_name(name, said):
    with pytest.raises(DataError) as error:
        make(name)
    assert said in str(error.value)


def test_a_task_by_its_place_has_its_options():
    assert make(f"{OWN}:Signs", length=6) == own.Signs(length=6)
    assert make("compressm_lab.data:Digits") == CATALOGUE["digits"]()
    with pytest.raises(DataError, match="has no option 'lenght'; its options: length=8; did you mean 'length'"):
        make(f"{OWN}:Signs", lenght=6)


def test_a_task_of_ones_own_is_shown(run_in):
    done = run_in("data", f"{OWN}:Signs", "--set", "length=5")
    assert done.exit_code == 0, done.output
    assert "float32 (5, 1)" in " ".join(done.output.replace("│", " ").split())
