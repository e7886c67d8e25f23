import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from compressm.cli.app import app
from compressm.compression import load_model, save_model
from compressm.layers import LRU
from compressm.models import SequenceClassifier
from compressm_lab.data import Store, make
from compressm_lab.training import Interrupted, train
from compressm_lab.training.evaluation import score
from tests import unhooked
from tests.lab.training.tiny import Sending, copies, recipe, teacher

TASK = {"name": "delayed_copy", "symbols": 4, "copied": 4, "delay": 2, "examples": 64, "held_out": 16}
FOUND = recipe(f"task={TASK}", "model.pooling=steps", "training.checkpoint_every=3")


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("COMPRESSM_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train(FOUND, copies(), tmp_path_factory.mktemp("runs") / "finished").path


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "unfinished"
    with pytest.raises(Interrupted):
        train(FOUND, copies(), folder, objective=Sending(copies().kind, 5))
    return folder


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "250"})


def plain(done):
    return " ".join(done.output.replace("│", " ").split())


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("options", "order"),
    [
        (("--order", "3", "--round-to", "2"), 4),
        (("--order", "3", "--round-to", "4,5"), 4),
        (("--order", "3", "--round-to", "powers-of-two"), 4),
        (("--order", "3", "--uniform", "--round-to", "5"), 5),
        (("--state-bytes", "24"), 3),
        (("--tau", "0.5", "--uniform", "--round-to", "2,4"), (2, 4)),
    ],
    ids=str,
)
def test_allowed_orders_and_budgets_on_the_command_line(finished, tmp_path, options, order):
    done = run("compress", finished / "model", *options, "--out", "small")
    assert done.exit_code == 0, done.output
    found = load_model(tmp_path / "small").blocks[0].ssm.order
    assert found == order or found in (order if isinstance(order, tuple) else ())


def test_a_budget_of_parameters_holds_for_the_whole_model(finished, tmp_path):
    whole = sum(parameter.numel() for parameter in load_model(finished / "model").parameters())
    done = run("compress", finished / "model", "--parameters", whole - 30, "--out", "small")
    assert done.exit_code == 0, done.output
    assert (
        whole - 90 < sum(parameter.numel() for parameter in load_model(tmp_path / "small").parameters()) <= whole - 30
    )


def test_a_saved_model_is_cut_and_saved(finished, tmp_path):
    done = run("compress", finished / "model", "--order", "3", "--out", "small")
    assert done.exit_code == 0, done.output
    assert load_model(tmp_path / "small").blocks[0].ssm.order == 3
    assert "blocks.0.ssm: 6 -> 3 states, error <= " in done.output
    assert "model: small" in done.output
    assert "test" not in done.output


@pytest.mark.parametrize(
    ("option", "order"), [(("--rho", "0.5"), 3), (("--total-states", "2"), 2), (("--tau", "0"), 6), (("--bound", 0), 6)]
)
def test_every_policy_has_its_option(option, order, finished, tmp_path):
    done = run("compress", finished, *option, "--out", "small")
    assert done.exit_code == 0, done.output
    assert load_model(tmp_path / "small").blocks[0].ssm.order == order
    assert ("nothing to cut: all states stay" in done.output) is (order == 6)


@pytest.mark.parametrize("way", [("--measured",), ()])
def test_a_run_is_cut_and_tested_before_and_after(finished, tmp_path, way):
    done = run("compress", finished, *way, "--rho", "0.5", "--out", "small", "--no-fold")
    assert done.exit_code == 0, done.output
    small, task = load_model(tmp_path / "small"), make(**TASK).load(Store(tmp_path / "data"))
    before, after = (score(model, task, task.test).accuracy for model in (load_model(finished / "model"), small))
    assert f"test accuracy {100 * before:.2f} % before, accuracy {100 * after:.2f} % after" in plain(done)
    assert ("measured 0." in done.output) is bool(way)
    assert ("error <= " in done.output) is not bool(way)


def test_a_run_whose_task_has_no_accuracy_shows_its_errors(tmp_path):
    task = {"name": "lti_teacher", "order": 2, "length": 12, "largest_radius": 0.9, "examples": 64, "held_out": 16}
    train(recipe(f"task={task}", "model.pooling=steps"), teacher(), tmp_path / "run")
    done = run("compress", "run", "--order", "2", "--out", "small")
    assert done.exit_code == 0, done.output
    assert re.search(r"test MSE \d\.\d{4}, MAE \d\.\d{4} before, MSE \d\.\d{4}, MAE \d\.\d{4} after", plain(done))


@pytest.mark.parametrize("option", [(), ("--offline",)])
def test_a_run_without_its_data_is_cut_and_says_that_it_was_not_tested(tmp_path, monkeypatch, finished, option):
    monkeypatch.setattr("urllib.request.urlopen", lambda *_: pytest.fail("fetched"))
    shutil.copytree(finished, tmp_path / "run")
    config = json.loads((finished / "config.json").read_text()) | {"task": {"name": "smnist"}}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    done = run("compress", "run", "--order", "2", "--out", "small", *option)
    assert done.exit_code == 0, done.output
    assert load_model(tmp_path / "small").blocks[0].ssm.order == 2
    (line,) = (line for line in done.output.splitlines() if "not tested: " in line)
    assert "nothing is fetched offline" in line


@pytest.fixture(scope="module", params=["{}", "{kind: per-channel}"])
def mamba(request, tmp_path_factory):
    cuts = f"compression={{order: 4, gate: 1.0, when: {{steps: [5]}}, selective: {request.param}}}"
    found = recipe(f"task={TASK}", "model.pooling=steps", "model.layer=Mamba", "model.norm=rms", cuts)
    return train(found, copies(), tmp_path_factory.mktemp("runs") / "mamba").path


@pytest.mark.parametrize("command", [("inspect",), ("compress", "--order", "2", "--out", "small")])
def test_selective_layers_are_looked_at_and_cut_by_the_data_of_their_run(command, mamba, tmp_path):
    for path in (mamba, mamba / "model"):
        done = run(command[0], path, *command[1:])
        assert done.exit_code == 2
        assert "blocks.0.ssm: selective layers can only be" in plain(done)
        assert "give the folder of a run, and --measured" in plain(done)
    done = run(command[0], mamba, "--measured", *command[1:])
    assert done.exit_code == 0, done.output
    assert "blocks.0.ssm" in done.output
    if command[0] == "compress":
        assert load_model(tmp_path / "small").blocks[0].ssm.order <= 2


def test_a_run_that_has_not_ended_is_cut_from_its_last_whole_checkpoint(unfinished, tmp_path):
    before = files(unfinished)
    assert run("compress", unfinished, "--order", "2", "--out", "small", "--offline").exit_code == 0
    assert load_model(tmp_path / "small").blocks[0].ssm.order == 2
    assert files(unfinished) == before
    newest = unfinished / "checkpoints" / "step-00000005.pt"
    newest.write_bytes(before[newest][:100])
    assert run("compress", unfinished, "--order", "2", "--out", "again").exit_code == 0
    newest.write_bytes(before[newest])


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_is_there_already_is_not_written_over(kind, finished, tmp_path):
    there = tmp_path / "there"
    if kind == "folder":
        there.mkdir()
        (there / "notes.txt").write_text("mine")
    else:
        there.write_text("mine")
    before = files(tmp_path)
    done = run("compress", finished, "--order", "3", "--out", there)
    assert done.exit_code == 2
    assert "there exists already; expected a new folder" in plain(done)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing given, expected one of --tau, --rho, --order, --bound, --total-states"),
        (("--tau", "0.1", "--rho", "0.5"), "--tau and --rho given, expected one of"),
        (("--tau", "2"), "--tau is 2.0"),
        (("--rho", "0"), "--rho is 0.0"),
        (("--order", "0"), "--order is 0"),
        (("--bound", "0.1", "--measured"), "--bound needs an error bound"),
        (("--order", "few"), "'few' is not an integer"),
        (("--tau", "some"), "'some' is not a number"),
        (("--order", "3", "--out", "/proc/nope"), "/proc/nope"),
    ],
)
def test_a_bad_value_says_what_was_given_and_exits_2(arguments, said, finished):
    done = run("compress", finished / "model", "--out", "small", *arguments)
    assert done.exit_code == 2, done.output
    assert said in plain(done)
    assert not Path("small").exists()


@pytest.mark.parametrize("command", [("inspect",), ("compress", "--order", "1", "--out", "small")])
def test_a_path_without_a_model_is_named(command, tmp_path, finished):
    for path, said in (("nowhere", "nowhere"), (finished / "checkpoints", "checkpoints")):
        done = run(command[0], path, *command[1:])
        assert done.exit_code == 2
        assert said in plain(done)
    done = run(command[0], finished / "model", "--measured", *command[1:])
    assert done.exit_code == 2
    assert "is a saved model without its data: give the folder of a run" in plain(done)


def test_a_model_that_is_not_finite_is_refused(tmp_path, monkeypatch):
    model = SequenceClassifier(LRU, depth=1, width=2, order=3, inputs=1, classes=2)
    with torch.no_grad():
        model.blocks[0].ssm.nu_log.fill_(torch.nan)
    # As an earlier version saved it.
    monkeypatch.setattr("compressm.saving.models.require_usable_weights", lambda model: None)
    save_model(model, tmp_path / "broken")
    for command in (("inspect", "broken"), ("compress", "broken", "--order", "1", "--out", "small")):
        done = run(*command)
        assert done.exit_code == 2, done.output
        assert "nan" in plain(done).lower() or "finite" in plain(done)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("command", [("inspect",), ("compress", "--order", "2", "--out", "small")])
def test_a_model_that_is_not_the_final_one_is_called_so(command, finished, unfinished):
    note = "has not finished: this is its model of step 5 of 16"
    assert f"{unfinished} {note}" in plain(run(command[0], unfinished, *command[1:]))
    shutil.rmtree("small", ignore_errors=True)
    assert "has not finished" not in plain(run(command[0], finished, *command[1:]))


def test_a_run_is_inspected_finished_or_not(finished, unfinished):
    for path in (finished, finished / "model", unfinished):
        done = run("inspect", path, "--offline")
        assert done.exit_code == 0, done.output
        assert "blocks.0.ssm" in done.output
    assert run("inspect", finished).output == run("inspect", finished / "model").output


def test_data_give_another_spectrum_than_white_noise(finished, tmp_path):
    noise, measured = run("inspect", finished), run("inspect", finished, "--measured", "--data", tmp_path / "other")
    assert measured.exit_code == 0, measured.output
    assert measured.output != noise.output
    assert list((tmp_path / "other").rglob("*.safetensors"))


def test_a_folder_of_data_that_nothing_reads_is_refused(finished, tmp_path):
    done = run("inspect", finished, "--data", tmp_path / "elsewhere")
    assert done.exit_code == 2
    assert "Invalid value for --data: it is for --measured and --loss, without which no data are read" in plain(done)
    assert run("inspect", finished, "--measured", "--data", tmp_path / "elsewhere").exit_code == 0


def test_a_run_without_a_checkpoint_says_so(unfinished, tmp_path):
    folder = tmp_path / "young"
    folder.mkdir()
    for name in ("config.json", "status.json"):
        (folder / name).write_bytes((unfinished / name).read_bytes())
    done = run("inspect", folder)
    assert done.exit_code == 2
    assert "young holds neither a model nor a checkpoint yet" in plain(done)


@pytest.mark.parametrize("command", [("inspect",), ("compress", "--order", "2", "--out", "small")])
def test_a_folder_of_transformers_is_opened_without_importing_it_first(command, tmp_path):
    """In a process that has not imported transformers: its mixers are found, and asked for data like ours."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "state_size": 6, "num_hidden_layers": 1, "time_step_rank": 2}
    transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).save_pretrained(tmp_path / "theirs")
    script = "from compressm.cli import main; main()"
    done = unhooked.finished(script, command[0], str(tmp_path / "theirs"), *command[1:], code=2)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert "backbone.layers.0.mixer: selective layers can only be" in said
