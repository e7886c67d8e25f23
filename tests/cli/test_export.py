"""`compressm export`: a saved model or a run becomes a checked file, or the command says why not."""

import json

import pytest
import torch
from typer.testing import CliRunner

import compressm as cs
from compressm.cli.app import app
from compressm.exporting import TorchExport
from compressm.layers import LRU
from compressm.models import SequenceClassifier


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    cs.save_model(SequenceClassifier(LRU, depth=1, width=4, order=3, inputs=2, classes=2), tmp_path / "model")
    return str(tmp_path / "model")


def run(*arguments):
    return CliRunner().invoke(app, ["export", *arguments])


def test_a_saved_model_is_exported_and_the_check_is_shown(model, tmp_path):
    done = run(model, str(tmp_path / "new" / "step.pt2"), "--check", "5")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert f"torch {torch.__version__} ran 5 steps of 3 sequences, the largest relative difference is" in said
    assert "(allowed: 1e-04)" in said
    assert TorchExport().load(tmp_path / "new" / "step.pt2").metadata["what"] == "step"


def test_the_commit_of_a_run_is_in_the_file_also_after_cuts(model, tmp_path, monkeypatch):
    monkeypatch.setenv("COMPRESSM_COMMIT", "0123abc")
    recipe = {
        "name": "tiny",
        "task": {"name": "delayed_copy", "symbols": 4, "copied": 4, "delay": 2, "examples": 32, "held_out": 8},
        "model": {"depth": 1, "width": 4, "order": 3, "pooling": "steps"},
        "training": {"steps": 2, "batch": 8, "learning_rate": 0.01},
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(recipe))
    trained = CliRunner().invoke(app, ["train", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "runs")])
    assert trained.exit_code == 0, trained.output
    folder = next(path.parent for path in (tmp_path / "runs").rglob("status.json"))
    done = run(str(folder), str(tmp_path / "run.pt2"), "--check", "3")
    assert done.exit_code == 0, done.output
    assert TorchExport().load(tmp_path / "run.pt2").metadata["commit"] == "0123abc"
    monkeypatch.setenv("COMPRESSM_COMMIT", "another")
    given = str(folder)
    for order, out in ((2, tmp_path / "small"), (1, tmp_path / "smaller.safetensors")):
        cut = CliRunner().invoke(app, ["compress", given, "--order", str(order), "--out", str(out)])
        assert cut.exit_code == 0, cut.output
        assert run(str(out), str(tmp_path / "small.pt2"), "--check", "3").exit_code == 0
        metadata = TorchExport().load(tmp_path / "small.pt2").metadata
        assert (metadata["commit"], metadata["orders"]) == ("0123abc", {"blocks.0.ssm": order})
        given = str(out)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("a.bin", [], "a.bin ends in '.bin', expected .onnx"),
        ("a.pt2", ["--check", "0"], "0 is too small"),
        ("a.pt2", ["--what", "steps"], "'steps' is not one of 'step', 'forward'"),
        ("a.pt2", ["--opset", "18"], "--opset is not for .pt2 files"),
        ("a.onnx", ["--aot"], "--aot is not for .onnx files"),
        ("a.PT2", ["--aot", "--opset", "18"], "--opset is not for .PT2 files"),
        ("a.onnx", ["--backend", "xnnpack"], "--backend is not for .onnx files"),
        ("a.onnx", ["--opset", "3"], "opset is 3, expected at least 18"),
        ("a.pte", ["--what", "forward"], "ExecuTorch takes 'step' only"),
    ],
)
def test_options_that_do_not_fit_are_refused(model, name, options, says, tmp_path):
    done = run(model, str(tmp_path / name), *options)
    assert done.exit_code == 2
    assert says in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / name).exists()


def test_a_folder_without_a_model_is_refused(tmp_path):
    done = run(str(tmp_path / "nowhere"), str(tmp_path / "a.pt2"))
    assert done.exit_code == 2
    assert "does not exist: give the folder of a saved model, or of a run" in " ".join(
        done.output.replace("│", " ").split()
    )
