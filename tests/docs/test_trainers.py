"""Every cell of the tables of trainers is a test, and the examples run as a user runs them."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "trainers"
PAGE = (ROOT / "docs" / "trainers.md").read_text()

OWN, HF = "saving/test_checkpoint.py", "integrations/test_transformers_trainer.py"
LIGHTNING, ACCELERATE = "integrations/test_lightning.py", "integrations/test_accelerate.py"
TRL = "integrations/test_peft_and_trl.py"
FSDP, GROUPS = "compression/test_sharding.py", "compression/test_distributed.py"
RESUMED = "test_a_training_resumed_at_any_orders_ends_bit_for_bit_as_the_whole_one"
LOADED = "test_states_are_loaded_at_other_orders_and_the_training_ends_bit_for_bit_alike"
FOUND = "test_the_callback_finds_optimizer_and_scheduler_and_cuts_at_the_steps"
OPTIMIZERS = "test_the_callback_finds_the_optimizers_and_cuts_at_the_steps"
WHOLE = "test_a_sharded_training_with_cuts_is_the_whole_one_to_rounding"
STORED = "test_checkpoints_of_sharded_models_go_on_across_cuts"
REFUSED = "test_models_of_the_first_fsdp_are_refused_before_anything_changes"
GOES_ON = "test_training_goes_on_bit_for_bit_before_between_and_after_cuts"
HERE = "docs/test_trainers.py"
EXAMPLE = "test_an_example_cuts_resumes_and_ends_with_a_smaller_model"

# For each trainer the tests of: train, cut, resume before a cut, resume after a cut, save, load.
CELLS = {
    "your own loop": [(HERE, EXAMPLE)] * 2 + [(OWN, GOES_ON)] * 2 + [(HERE, EXAMPLE)] * 2,
    "`Trainer` of transformers": [
        *[(HF, FOUND)] * 2,
        *[(HF, RESUMED)] * 2,
        *[(HF, "test_a_cut_model_that_is_saved_at_the_end_is_loaded_by_plain_transformers")] * 2,
    ],
    "`SFTTrainer` of TRL": [(TRL, "test_a_fine_tuning_of_trl_is_cut_resumes_with_the_same_bits_and_loads")] * 6,
    "Lightning": [
        *[(LIGHTNING, OPTIMIZERS)] * 2,
        *[(LIGHTNING, RESUMED)] * 2,
        *[(LIGHTNING, "test_a_cut_model_is_loaded_from_its_checkpoint")] * 2,
    ],
    "Accelerate": [(ACCELERATE, LOADED)] * 6,
    "FSDP2 (`fully_shard`)": [(FSDP, WHOLE)] * 2 + [(FSDP, STORED)] * 4,
    "FSDP1 (`FullyShardedDataParallel`)": [(GROUPS, REFUSED)] * 6,
}
REAL = "compression/test_real_optimizers.py"
THEN = {
    "`AveragedModel` (EMA, SWA)": "test_an_average_follows_the_model",
    "`torchao.optim._AdamW`": "test_adamw_of_torchao_with_whole_states_works",
    "`AdamW8bit`, `AdamW4bit`, `AdamWFp8` of torchao": ("test_quantised_states_of_torchao_are_refused_at_construction"),
    "`AdamW8bit` of bitsandbytes": "test_eight_bit_states_of_bitsandbytes_are_refused_at_construction",
    "`AdamW32bit` of bitsandbytes": "test_states_of_unknown_meaning_go_with_restart",
    "schedule-free optimizers": "test_schedule_free_optimizers_are_refused_at_construction_in_either_mode",
    "weights of a layer quantised by torchao": "test_weights_of_a_layer_quantised_by_torchao_are_refused_by_name",
}


def rows(first):
    """The rows of the table whose head begins so, by the entry of their first column."""
    table = re.search(rf"^\| {re.escape(first)} \|.*?(?=^$)", PAGE, re.MULTILINE | re.DOTALL)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]
    return {row[0]: row[1:] for row in cells}


def functions_in(path):
    nodes = ast.walk(ast.parse((ROOT / "tests" / path).read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_every_cell_of_the_trainers_is_a_test():
    found = rows("trainer")
    assert {name: len(cells) for name, cells in found.items()} == {name: len(cells) for name, cells in CELLS.items()}
    for name, cells in CELLS.items():
        for path, test in cells:
            assert test in functions_in(path), (name, path, test)


def test_every_row_of_the_optimizers_is_a_test():
    assert rows("what").keys() == THEN.keys()
    assert set(THEN.values()) <= functions_in(REAL)


SAID = {
    "plain_loop": (None, "saved with"),
    "lightning_module": ("lightning", "loaded with"),
    "transformers_mamba": ("accelerate", "loaded with 2 states"),
    "accelerate_loop": ("accelerate", "saved with"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAID)
def test_an_example_cuts_resumes_and_ends_with_a_smaller_model(name, tmp_path, monkeypatch, capsys):
    package, said = SAID[name]
    if package is not None:
        pytest.importorskip(package)
    if name == "transformers_mamba":
        pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    printed = capsys.readouterr().out
    assert said in printed.splitlines()[-1]
    assert printed.count(" -> ") >= 4


@pytest.mark.slow
def test_the_example_of_fsdp_runs_in_two_processes(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "fsdp2.py"), "--out", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" -> ") == 4
    assert done.stdout.splitlines()[-1].startswith("saved with")
