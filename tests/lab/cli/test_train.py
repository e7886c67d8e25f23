"""`compressm train` as a person meets it; what a run does is in tests/lab/training."""

import json
import os
import shutil

import pytest
import torch
from typer.testing import CliRunner

from compressm.cli.app import app
from compressm.compression import save_model
from compressm.layers import LRU
from compressm.models import SequenceClassifier
from compressm_lab.cli.train import listing
from compressm_lab.experiments.recipes import find_recipe, recipe_names
from compressm_lab.runs.directory import RunDirectory, Status
from compressm_lab.runs.run import read_run
from compressm_lab.training.steps import Learner
from tests import unhooked

RECIPE = """
name: mine
task: {name: delayed_copy, symbols: 4, copied: 4, delay: 2, examples: 64, held_out: 16}
model: {depth: 1, width: 4, order: 6, pooling: steps}
training: {steps: 9, batch: 8, learning_rate: 0.01, evaluate_every: 3, checkpoint_every: 4}
compression: {rho: 0.5, gate: 1.0, when: {steps: [5]}}
"""
BUDGET = ("--set", "compression.rho=null", "--set")


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.setenv("COMPRESSM_COMMIT", "tests")
    monkeypatch.setenv("COMPRESSM_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)


def run(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)], env={"COLUMNS": "250"})


def plain(done):
    return " ".join(done.output.replace("│", " ").split())


def test_a_recipe_is_trained_and_says_what_it_does(tmp_path):
    done = run("mine.yaml", "--seed", "3", "--order", "8", "--device", "cpu")
    assert done.exit_code == 0, done.output
    folder = RunDirectory("out/runs/mine/compressed-n8/seed-3")
    assert (folder.config()["seed"], folder.config()["model"]["order"]) == (3, 8)
    assert folder.status().state == "finished"
    said = plain(done)
    assert "mine, compressed, seed 3 9 steps cuts tried: 1, at 5" in said
    assert "step 5: blocks.0.ssm: 8 -> 4 states, error <= " in said
    assert "step 9: train " in said
    assert f"run: {folder.path}; `compressm report {folder.path}` shows it" in said


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (("--order", "4", "--set", "model.order=8"), "model.order"),
        (("--set", "seed=4", "--seed", "5"), "seed"),
        (("--set", "training.steps=60", "--set", "training.steps = 70"), "training.steps"),
    ],
)
def test_a_key_that_is_set_twice_is_refused(options, key):
    done = run("mine.yaml", *options)
    assert done.exit_code == 2
    assert f"both set {key}: leave one of them out" in plain(done)
    assert not RunDirectory("out/runs").path.exists()


def test_a_task_that_does_not_fit_into_memory_is_refused():
    done = run("digits", "--set", "task.side=1000000")
    assert done.exit_code == 2
    assert "the data of Digits(side=1000000, time=False) do not fit into memory" in plain(done)


def test_an_edited_run_and_lost_files_are_named():
    folder = RunDirectory("out/runs/mine/compressed-n6/seed-0")
    assert run("mine.yaml").exit_code == 0
    weights = folder.model / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(b"")
    done = run(folder.path, "--resume")
    assert done.exit_code == 2
    assert "is finished, but its model cannot be read" in plain(done)
    weights.write_bytes(kept)
    shutil.rmtree(folder.model)
    config = folder.path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"batch": 8', '"batch": 4'))
    done = run(folder.path, "--resume")
    assert done.exit_code == 2
    assert "was trained by another recipe than config.json says: training.batch" in plain(done)
    config.write_text(text)
    shutil.rmtree(folder.checkpoints)
    done = run(folder.path, "--resume")
    assert done.exit_code == 0, done.output
    assert "has no checkpoint: training begins anew" in plain(done)


def test_a_baseline_is_not_cut_and_has_a_folder_of_its_own():
    done = run("mine.yaml", "--baseline", "--set", "training.steps=2", "--set", "label=plain", "--threads", "1")
    assert done.exit_code == 0, done.output
    assert RunDirectory("out/runs/mine/plain-n6/seed-0").config()["compression"] is None
    assert "cuts tried" not in done.output


def test_all_recipes_are_listed_a_line_each_where_nobody_looks_on():
    done = run("--list")
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.output.splitlines()] == recipe_names()
    for name, line in zip(recipe_names(), done.output.splitlines(), strict=True):
        assert line.endswith(find_recipe(name).description)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_list_fits_a_terminal_and_loses_no_word(width):
    recipes = {name: find_recipe(name) for name in recipe_names()}
    lines = listing(recipes, width)
    assert max(map(len, lines)) <= width
    said = " ".join(" ".join(lines).split())
    for name, recipe in recipes.items():
        words = f"{recipe.model.order} states, width {recipe.model.width}, {recipe.training.steps} steps"
        assert name in said
        assert f"{words} {recipe.description}" in said


def test_a_list_takes_no_other_options():
    done = run("--list", "digits", "--seed", "1")
    assert done.exit_code == 2
    assert "--list only shows the recipes: leave recipe, --seed out" in plain(done)


def test_a_folder_with_other_files_is_not_filled_with_a_run(tmp_path):
    before = sorted(tmp_path.iterdir())
    done = run("mine.yaml", "--out", ".")
    assert done.exit_code == 2
    assert ". holds other files (mine.yaml): --out takes a new or an empty folder" in plain(done)
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_is_not_trained_over_but_goes_on_when_asked_to():
    small = ("mine.yaml", "--out", "mine", "--set", "training.steps=5")
    assert run(*small).exit_code == 0
    before = {path.name: path.read_bytes() for path in RunDirectory("mine").path.iterdir() if path.is_file()}
    again = run(*small)
    assert again.exit_code == 2
    assert "mine already holds a run: --resume goes on with it, --out takes another folder" in plain(again)
    assert {path.name: path.read_bytes() for path in RunDirectory("mine").path.iterdir() if path.is_file()} == before
    changed = run("mine.yaml", "--out", "mine", "--set", "training.steps=6", "--resume")
    assert changed.exit_code == 2
    assert "mine is a run of another recipe: training.steps was 5 and is 6" in plain(changed)
    for option in (("--seed", "1"), ("--baseline",), ("--set", "seed=1"), ("--order", "3")):
        refused = run("mine", "--resume", *option)
        assert refused.exit_code == 2
        assert "mine goes on as it began" in plain(refused)
    assert "--out is not for" in plain(run("mine", "--resume", "--out", "other"))


@pytest.mark.parametrize("given", [("mine",), ("mine.yaml", "--out", "mine", "--set", "training.steps=5")])
def test_a_finished_run_says_so_and_nothing_is_changed(tmp_path, given):
    assert run("mine.yaml", "--out", "mine", "--set", "training.steps=5").exit_code == 0
    shutil.rmtree(tmp_path / "data")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    done = run(*given, "--resume", "--offline")
    assert done.exit_code == 0, done.output
    assert plain(done) == (
        "mine is finished: all 5 steps are trained, nothing is left to do "
        "model: mine/model; `compressm report mine` shows the run"
    )
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "missing; expected one of aan"),
        (("mnist",), "'mnist' is not a recipe; expected one of aan"),
        (("mnist",), "or a .yaml file; did you mean 'smnist'?"),
        (("gone.yaml",), "gone.yaml: No such file or directory; expected a recipe"),
        (("mine.yaml", "--set", "model.order=0"), "--set 'model.order=0': model: order is 0, expected at least 1"),
        (
            ("mine.yaml", "--set", "colour=red"),
            "--set 'colour=red': colour is not a key of a recipe, expected one of name",
        ),
        (("mine.yaml", "--set", "modle.order=4"), "modle is not a key of a recipe"),
        (("mine.yaml", "--set", "modle.order=4"), "did you mean 'model'?"),
        (("mine.yaml", "--order", "0"), "--order 0: model: order is 0, expected at least 1"),
        (("mine.yaml", "--set", "model.layer_options.r_mx=0.9"), "LRU has no option 'r_mx'; its options: r_min, r_max"),
        (("mine.yaml", "--set", "model.layer_options.r_mx=0.9"), "did you mean 'r_max'?"),
        (("mine.yaml", "--set", "model.norm_options.momentun=0.9"), "BatchNorm has no option 'momentun'"),
        (("mine.yaml", "--set", "seed"), "--set 'seed': expected key=value"),
        (("mine.yaml", "--set", "task.symbols=1"), "symbols is 1, expected an integer of at least 2"),
        (("mine.yaml", "--set", "task.colour=red"), "delayed_copy has no option 'colour'"),
        (("mine.yaml", "--set", "task.symbol=5"), "did you mean 'symbols'?"),
        (("mine.yaml", "--set", "task.name=mnist"), "no data set is called 'mnist'"),
        (("mine.yaml", "--set", "task.name=mnist"), "did you mean 'smnist'?"),
        (("mine.yaml", "--set", "training.batch=65"), "64 examples are fewer than a batch of 65"),
        (("mine.yaml", "--set", "compression.when={warmup_cuts: 4}"), "cuts is 4, but a warm-up of 0.1 of 9 steps"),
        (("mine.yaml", *BUDGET, "compression.state_bytes=1"), "state_bytes is 1, but one state in every layer"),
        (("mine.yaml", *BUDGET, "compression.parameters=5"), "parameters is 5, but one state in every layer"),
        (("mine.yaml", "--set", "compression.when.steps=[10]"), "cuts at step 10, after the last step, 9"),
        (("mine.yaml", "--seed", "-1"), "--seed -1: seed is -1, expected an integer from 0"),
        (("mine.yaml", "--order", "many"), "'many' is not an integer"),
        (("mine.yaml", "--threads", "0"), "0 is too small, expected at least 1"),
        (("mine.yaml", "--device", "tpu"), "'tpu' is not one of"),
        (("mine.yaml", "--resume"), "holds no run to go on with"),
        (("gone", "--resume"), "'gone' is not a recipe"),
        (("mine.yaml", "--out", "mine.yaml"), "mine.yaml: Not a directory; expected a folder"),
        (("mine.yaml", "--out", "/proc/nope"), "/proc/nope: No such file or directory; expected a folder"),
    ],
)
def test_a_bad_value_says_what_was_given_and_exits_2(arguments, said, tmp_path):
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert said in plain(done)
    # Of a task that is refused late the data may be there.
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.yaml", "data"}


@pytest.mark.parametrize("setting", ["model.pooling=mean", "model.norm_options.momentun=1", "task.symbols=1"])
def test_nothing_is_fetched_for_a_model_that_does_not_fit_the_task(setting, tmp_path):
    assert run("mine.yaml", "--set", setting).exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_cut_that_training_made_impossible_exits_1_with_the_words_of_recipes():
    done = run("mine.yaml", "--set", "training.learning_rate=300", "--set", "spectra.every=1")
    assert done.exit_code == 1, done.output
    assert "no spectrum can be made at step " in plain(done)
    assert "Usage" not in done.output


def test_the_folder_of_a_process_that_fell_silent_before_its_run_began_is_taken_over(tmp_path):
    with RunDirectory("mine").locked():
        (path,) = (tmp_path / "mine" / "lock").iterdir()
        owner = json.loads(path.read_text())
    path.parent.mkdir()
    path.write_text(
        json.dumps(owner | {"host": "elsewhere", "machine": "other", "heartbeat": "2020-01-01T00:00:00+00:00"})
    )
    assert "--take-over" in plain(run("mine.yaml", "--out", "mine"))
    done = run("mine.yaml", "--out", "mine", "--take-over")
    assert done.exit_code == 0, done.output
    assert "took over the lock" in plain(done)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error():
    done = run("mine.yaml", "--device", "cuda")
    assert done.exit_code == 2
    assert "no CUDA device here; allowed: auto, cpu" in plain(done)


def test_checkpoints_that_cannot_be_read_are_named():
    assert run("mine.yaml", "--out", "mine", "--set", "training.steps=5").exit_code == 0
    stopped = RunDirectory("mine")
    stopped.write_status(Status("interrupted", 4, 5))
    for path in stopped.checkpoints.iterdir():
        path.write_bytes(b"nothing")
    done = run("mine", "--resume")
    assert done.exit_code == 2
    assert "no checkpoint of mine can be read" in plain(done)


def test_a_resumed_run_has_the_threads_it_began_with():
    assert run("mine.yaml", "--out", "mine", "--set", "training.steps=5").exit_code == 0
    directory = RunDirectory("mine")
    directory.write_status(Status("interrupted", 4, 5))
    (directory.checkpoints / "step-00000005.pt").unlink()
    stored = json.loads((directory.path / "environment.json").read_text())
    (directory.path / "environment.json").write_text(json.dumps(stored | {"threads": 2}))
    try:
        with pytest.warns(UserWarning, match="goes on with 1 instead of 2 threads: .*; --threads 2 takes as many"):
            assert run("mine", "--resume", "--threads", "1").exit_code == 0
        directory.write_status(Status("interrupted", 4, 5))
        (directory.checkpoints / "step-00000005.pt").unlink()
        assert run("mine", "--resume").exit_code == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_run_that_diverges_says_so_and_exits_1(monkeypatch):
    learn, steps = Learner.learn, []

    def broken(learner, indices):
        steps.append(indices)
        loss, *rest = learn(learner, indices)
        return loss if len(steps) < 6 else loss * torch.nan, *rest

    monkeypatch.setattr(Learner, "learn", broken)
    done = run("mine.yaml", "--out", "mine")
    assert done.exit_code == 1
    newest = "mine/checkpoints/step-00000004.pt"
    assert f"the loss is not finite at step 6; the last good checkpoint is {newest}" in plain(done)


def test_a_folder_without_a_run_is_named_as_such():
    for name in ("nowhere", "digit"):
        done = run(name, "--resume")
        assert done.exit_code == 2
        assert f"'{name}' is not a recipe, and no run to go on with: it has no config.json" in plain(done)


def test_a_run_that_lost_its_environment_gets_one_when_it_goes_on():
    assert run("mine.yaml", "--out", "mine").exit_code == 0
    folder = RunDirectory("mine")
    folder.write_status(Status("interrupted", 9, 9))
    (folder.path / "environment.json").unlink()
    assert run("mine", "--resume").exit_code == 0
    assert folder.environment().commit == "tests"
    assert read_run(folder).finished


def test_a_model_of_another_task_in_a_run_without_a_digest_is_cut_and_not_tested():
    assert run("mine.yaml", "--out", "mine").exit_code == 0
    folder = RunDirectory("mine")
    folder.write_status(Status("finished", 9, 9))  # as earlier versions wrote it
    shutil.rmtree(folder.model)
    save_model(SequenceClassifier(LRU, depth=1, width=4, order=6, inputs=1, classes=4), folder.model)
    done = CliRunner().invoke(app, ["compress", "mine", "--order", "2", "--out", "small"], env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    assert "not tested: the model cannot read delayed_copy, the task of its run" in plain(done)


def test_a_checkpoint_of_another_run_is_not_opened():
    for seed in ("0", "3"):
        assert run("mine.yaml", "--seed", seed, "--out", f"mine-{seed}").exit_code == 0
    mine, other = RunDirectory("mine-0"), RunDirectory("mine-3")
    for folder in (mine.model, mine.checkpoints):
        shutil.rmtree(folder)
    shutil.copytree(other.checkpoints, mine.checkpoints)
    done = CliRunner().invoke(app, ["inspect", "mine-0"], env={"COLUMNS": "250"})
    assert done.exit_code == 2
    assert "was trained by another recipe than config.json says: seed was 3 and is 0" in plain(done)


def test_data_may_be_in_any_folder(tmp_path):
    done = run("mine.yaml", "--data", "elsewhere", "--offline", "--set", "training.steps=5")
    assert done.exit_code == 0, done.output
    assert list((tmp_path / "elsewhere").rglob("*.safetensors"))
    missing = run("imdb", "--data", "elsewhere", "--offline")
    assert missing.exit_code == 2
    assert "nothing is fetched offline" in plain(missing)


# Ctrl-C as soon as a line that begins so has been printed.
INTERRUPTED = """
import os, runpy, signal, sys
os.chdir({folder!r})
os.environ.update({variables!r})
write = sys.stdout.write

def written(text):
    write(text)
    if text.startswith("step 3:"):
        os.kill(os.getpid(), signal.SIGINT)

sys.stdout.write = written
runpy.run_module("compressm.cli", run_name="__main__")
"""


def test_ctrl_c_saves_says_how_to_go_on_and_exits_130(tmp_path):
    """A real process: the signal comes when its first evaluation has been printed."""
    variables = {name: os.environ[name] for name in ("COMPRESSM_COMMIT", "COMPRESSM_DATA")}
    script = INTERRUPTED.format(folder=str(tmp_path), variables=variables)
    long = ["--set", "training.steps=100000", "--out", "a run"]
    done = unhooked.finished(script, "train", "mine.yaml", *long, code=130)
    step = RunDirectory("a run").status().step
    assert f"SIGINT at step {step}: saved in a run" in done.stdout
    assert "to go on: compressm train 'a run' --resume" in done.stdout
    assert RunDirectory("a run").status().state == "interrupted"
    assert (RunDirectory("a run").checkpoints / f"step-{step:08d}.pt").is_file()
    assert done.stderr.strip().endswith("interrupted")
    assert "once more stops now" in done.stderr


# The signal comes while the data are read, from which a teacher learned too, before the run has a folder.
LOADING = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let jobs in the background ignore it
os.chdir({folder!r})
os.environ.update({variables!r})
from compressm.cli import main
from compressm_lab.data import DelayedCopy

def parse(*arguments):
    os.kill(os.getpid(), signal.{which})
    raise AssertionError("the signal was not caught")

DelayedCopy.parse = parse
main()
"""


@pytest.mark.parametrize("which", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_before_training_ends_the_command_with_words(which, tmp_path):
    variables = {name: os.environ[name] for name in ("COMPRESSM_COMMIT", "COMPRESSM_DATA")}
    script = LOADING.format(folder=str(tmp_path), variables=variables, which=which)
    done = unhooked.finished(script, "train", "mine.yaml", "--out", "mine", code=130)
    assert f"{which} before training began: the run is as it was" in done.stdout
    assert done.stderr.strip().endswith("interrupted")
    assert not RunDirectory("mine").exists


def test_output_that_nobody_reads_any_more_stops_a_run_that_can_go_on(tmp_path):
    """As of `compressm train mine.yaml | head`."""
    variables = {name: os.environ[name] for name in ("COMPRESSM_COMMIT", "COMPRESSM_DATA")}
    script = f"""
import os
from compressm.cli import main
os.chdir({str(tmp_path)!r})
os.environ.update({variables!r})
reading, writing = os.pipe()
os.dup2(writing, 1)
os.close(reading)
main()
"""
    done = unhooked.finished(script, "train", "mine.yaml", "--out", "mine", code=130)
    assert done.stderr.endswith("interrupted\n")
    assert RunDirectory("mine").status() == Status("interrupted", 1, 9, "SIGTERM")
    assert run("mine", "--resume").exit_code == 0


def test_auto_finds_steps_and_orders_and_inspect_asks_the_loss():
    done = run("mine.yaml", "--auto", "--set", "training.steps=24", "--set", "compression.loss_tolerance=0.05")
    assert done.exit_code == 0, done.output
    folder = RunDirectory("out/runs/mine/automatic-n6/seed-0")
    found = folder.config()["compression"]
    assert (found["when"]["automatic"], found["loss_tolerance"], found["rho"]) == (True, 0.05, None)
    assert "cuts tried: at most" in plain(done)
    assert (folder.path / "decisions.jsonl").exists()
    done = CliRunner().invoke(app, ["inspect", str(folder.path), "--loss"], env={"COLUMNS": "250"})
    assert done.exit_code == 0, done.output
    assert "loss may rise by" in done.output
    assert done.output.strip().splitlines()[-1].startswith(("Cut to", "Keep all"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mine.yaml", "--auto", "--baseline"), "--auto with --baseline"),
        (("mine.yaml", "--auto", "--set", "compression.tau=0.1"), "tau and loss_tolerance"),
    ],
)
def test_what_auto_leaves_no_room_for_is_refused(arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in plain(done)
