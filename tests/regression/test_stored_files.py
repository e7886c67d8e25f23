"""Files that an earlier version wrote are read as they are: models, checkpoints, trackers, runs and results.

`make_stored` says what they hold. Models are evaluated, and checkpoints trained on, in float64, so that the tolerance
of 1e-6 leaves machines no room to differ; runs of the command line go on in float32 for four steps.
"""

import json
import lzma
import math
import pickletools
import shutil
import zipfile

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import compressm as cs
from compressm.layers import Bilinear
from compressm.ops import Path
from tests.regression.stored_cases import (
    CHECKPOINTS,
    STORED,
    TRACKED_STEPS,
    TRAINING_STEPS,
    Training,
    move,
    orders,
    outputs,
    tracked,
)
from tests.regression.trainings import ROOT, command_line, leaves, lines

EXPECTED = json.loads((STORED / "expected.json").read_text())
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """All files, checkpoints as they were before they were packed."""
    folder = tmp_path_factory.mktemp("stored") / "stored"
    shutil.copytree(STORED, folder)
    for path in folder.rglob("*.xz"):
        path.with_suffix("").write_bytes(lzma.decompress(path.read_bytes()))
        path.unlink()
    return folder


def check_close(found, wanted):
    """The largest difference is below 1e-6 of the largest number."""
    found, wanted = (torch.as_tensor(value, dtype=torch.float64) for value in (found, wanted))
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE * wanted.abs().max().item())


def check_same(found, wanted):
    """Text, steps and orders are equal, numbers to 1e-6."""
    here, there = dict(leaves(found)), dict(leaves(wanted))
    assert here.keys() == there.keys()
    numbers = [path for path, value in there.items() if isinstance(value, float)]
    assert {path: here[path] for path in numbers} == pytest.approx({p: there[p] for p in numbers}, rel=TOLERANCE)
    assert {p: v for p, v in here.items() if p not in numbers} == {p: v for p, v in there.items() if p not in numbers}


@pytest.mark.parametrize("name", EXPECTED["models"])
def test_a_model_is_loaded_with_its_orders_and_says_the_same(name):
    expected = EXPECTED["models"][name]
    model = cs.load_model(STORED / "models" / f"{name}.safetensors")
    assert orders(model) == expected["orders"]
    check_close(outputs(model), expected["outputs"])


def test_what_is_special_about_a_model_is_loaded():
    def loaded(name):
        return cs.load_model(STORED / "models" / f"{name}.safetensors")

    replaced = loaded("replaced").head
    assert [type(module).__name__ for module in replaced] == ["Linear", "ReLU", "Linear"]
    assert [parameter.requires_grad for parameter in replaced.parameters()] == [False, True, True]
    assert loaded("mamba-per-channel").blocks[0].ssm.B_map is not None
    assert loaded("mamba-complex-rates").blocks[0].ssm.A_imag is not None
    assert loaded("lru-language-model").head is None
    layer = loaded("options").blocks[0].ssm
    assert (layer.discretisation, layer.path) == (Bilinear(), Path.LOOP)


@pytest.mark.parametrize("name", EXPECTED["models"])
def test_a_loaded_model_is_saved_in_the_same_words(name, tmp_path):
    """A file of this version and one of that hold the same config and the same tensors."""
    old, new = STORED / "models" / f"{name}.safetensors", tmp_path / "again.safetensors"
    cs.save_model(cs.load_model(old), new)
    with safe_open(old, "pt") as before, safe_open(new, "pt") as after:
        assert json.loads(after.metadata()["compressm"]) == json.loads(before.metadata()["compressm"])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_training_goes_on_from_a_checkpoint_to_the_same_end(name, unpacked):
    expected, (step, guarded) = EXPECTED["checkpoints"][name], CHECKPOINTS[name]
    training = Training(guarded)
    checkpoint = training.load(unpacked / "checkpoints" / f"{name}.pt")
    assert (checkpoint.step, checkpoint.extra) == (step, {"note": ["anything", step]})
    check_same(training.summary(), expected["then"])
    check_close(training.train(step + 1, TRAINING_STEPS), expected["losses"])
    check_same(training.summary(), expected["in the end"])


def test_a_pending_rollback_is_judged_and_the_model_restored():
    ends = {name: EXPECTED["checkpoints"][name]["in the end"] for name in CHECKPOINTS}
    assert ends["after-cut"]["orders"] == {"blocks.0.ssm": 2, "blocks.1.ssm": 3}
    assert ends["pending-rollback"]["orders"] == {"blocks.0.ssm": 5, "blocks.1.ssm": 5}
    assert ends["pending-rollback"]["history"][-1]["step"] == 6


def test_checkpoints_name_no_class_of_ours(unpacked):
    files = sorted(unpacked.rglob("*.pt"))
    assert len(files) == 6
    for path in files:
        torch.load(path, weights_only=True)
        with zipfile.ZipFile(path) as archive:
            (pickled,) = (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
        named = {argument for code, argument, _ in pickletools.genops(pickled) if code.name == "GLOBAL"}
        assert named
        assert {name.split()[0].split(".")[0] for name in named} <= {"torch", "collections"}


def test_a_tracker_goes_on_from_its_state(unpacked):
    expected, (model, tracker) = EXPECTED["tracker"], tracked()
    for step in range(TRACKED_STEPS - 1):
        move(model, step)
    tracker.load_state_dict(torch.load(unpacked / "tracker.pt", weights_only=True))
    tracker.step(TRACKED_STEPS - 1)
    assert tracker.steps == expected["steps"]
    for found, wanted in zip(tracker.spectra, expected["spectra"], strict=True):
        assert found.keys() == wanted.keys()
        for layer in wanted:
            check_close(found[layer], wanted[layer])
    check_same(tracker.bounds, expected["bounds"])


@pytest.mark.parametrize("name", EXPECTED["transformers"])
def test_a_model_of_transformers_is_loaded_with_its_orders(name):
    pytest.importorskip("transformers").logging.set_verbosity_error()
    model = cs.load_model(STORED / "transformers" / name)
    assert [layer.mixer.ssm_state_size for layer in model.backbone.layers] == EXPECTED["transformers"][name]["orders"]
    check_close(outputs(model), EXPECTED["transformers"][name]["outputs"])


def compressm(*arguments):
    """What the command line prints, without an error."""
    app = command_line(ROOT / "src", ".app").app
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def run(unpacked, tmp_path, monkeypatch):
    """A copy of a stored run, by name."""
    monkeypatch.setenv("COMPRESSM_DATA", str(tmp_path / "data"))
    return lambda name: shutil.copytree(unpacked / name, tmp_path / name)


def test_a_finished_run_is_left_as_it_is(run):
    folder = run("finished")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert "is finished: all 10 steps are trained" in compressm("train", folder, "--resume")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_an_interrupted_run_ends_where_the_other_ended(run, monkeypatch):
    # The version that stored these runs rounded shares half up: 0.7 of 4 states were 3, now they are 2.
    monkeypatch.setattr(cs.KeepFraction, "least", lambda self, n: max(1, math.floor(self.rho * n + 0.5)))
    whole, folder = run("finished"), run("interrupted")
    compressm("train", folder, "--resume", "--device", "cpu")
    ended, wanted = (json.loads((each / "status.json").read_text()) for each in (folder, whole))
    del ended["recipe"], ended["model"], ended["records"]  # the version that stored these runs wrote no digests
    assert ended == wanted
    for name in ("metrics", "cuts", "penalties", "truncations"):
        check_same(lines(folder / f"{name}.jsonl"), lines(whole / f"{name}.jsonl"))
    for found, wanted in zip(lines(folder / "spectra.jsonl"), lines(whole / "spectra.jsonl"), strict=True):
        assert (found["step"], found["module"]) == (wanted["step"], wanted["module"])
        check_close(found["sigma"], wanted["sigma"])
    here, there = (load_file(each / "model" / "model.safetensors") for each in (folder, whole))
    # Adam makes steps of full length of gradients that are next to nothing: 1e-4 between two sets of kernels, while
    # the losses above agree to 1e-6.
    torch.testing.assert_close(here, there, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("name", "order"), [("finished", 3), ("interrupted", 4)])
def test_a_run_is_inspected_and_cut_finished_or_not(name, order, run, tmp_path):
    folder = run(name)
    for option in ((), ("--measured",)):
        assert "blocks.0.ssm" in compressm("inspect", folder, *option)
    said = compressm("compress", folder, "--order", "2", "--out", tmp_path / "small")
    assert f"blocks.0.ssm: {order} -> 2 states" in said
    assert orders(cs.load_model(tmp_path / "small")) == {"blocks.0.ssm": 2}


def test_a_restored_run_is_read_with_its_history(run):
    folder = run("restored")
    assert [(row["step"], row.get("rank")) for row in lines(folder / "cuts.jsonl")] == [(7, 6), (12, 3), (14, None)]
    assert "blocks.0.ssm" in compressm("inspect", folder)
    assert orders(cs.load_model(folder / "model")) == {"blocks.0.ssm": 6}


def test_all_runs_are_on_one_report(run, tmp_path):
    folders = [run(name) for name in ("finished", "interrupted", "restored")]
    # Two of them are of one recipe and seed, which counts once.
    recipe = folders[1] / "config.json"
    recipe.write_text(json.dumps(json.loads(recipe.read_text()) | {"seed": 1}))
    said = compressm("report", *folders, "--out", tmp_path / "report", "--formats", "svg")
    assert "left out" not in said
    page = (tmp_path / "report" / "report.html").read_text()
    assert all(word in page for word in ("s5-rollback", "compressed and regularised"))
    assert list((tmp_path / "report" / "figures").glob("*.svg"))


def test_a_result_is_printed_and_reproduced(unpacked, tmp_path):
    result = unpacked / "result" / "reduction-cpu.json"
    assert "| 4 → 1 |" in compressm("bench", "table", result)
    folder = tmp_path / "reduction-complexity"
    folder.mkdir()
    shutil.copy(result, folder)
    compressm("reproduce", "reduction-complexity", "--only-report", "--quick", "--out", tmp_path)
    assert "4" in (folder / "report.md").read_text()
