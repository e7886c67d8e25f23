"""Every bad command of `commands.txt` ends with exit code 2, names what is wrong and writes nothing."""

from pathlib import Path

import pytest

from tests import unhooked
from tests.bad_calls.test_calls import rows

PREAMBLE = """
import os
import pathlib
import shlex
import tempfile

import torch
from typer.testing import CliRunner

import compressm as cs
from compressm.cli.app import app
from compressm.layers import LRU, Mamba
from compressm.models import SequenceClassifier

folder = pathlib.Path(tempfile.mkdtemp())
os.chdir(folder)
os.environ |= {"COMPRESSM_DATA": str(folder / "data"), "COMPRESSM_COMMIT": "tests"}
sizes = dict(depth=1, width=4, order=8, inputs=3, classes=5)
cs.save_model(SequenceClassifier(LRU, **sizes), "model")
cs.save_model(SequenceClassifier(Mamba, **sizes), "mamba")
cs.save_model(torch.nn.Linear(2, 2), "linear")
(folder / "empty").mkdir()
(folder / "theirs/runs/mine").mkdir(parents=True)
for name, text in {
    "text.txt": "x",
    "bad.yaml": "name: [",
    "list.yaml": "- 1",
    "unknown.yaml": "name: a\\nfoo: 3",
    "bad.json": "{",
    "other.json": "{}",
    "mine.yaml": '''
name: mine
task: {name: delayed_copy, symbols: 4, copied: 4, delay: 2, examples: 64, held_out: 16}
model: {depth: 1, width: 4, order: 6, pooling: steps}
training: {steps: 9, batch: 8, learning_rate: 0.01, evaluate_every: 3, checkpoint_every: 4}
compression: {rho: 0.5, gate: 1.0, when: {steps: [5]}}
''',
    "lti.yaml": '''
name: lti
task: {name: lti_teacher, order: 2, length: 12, largest_radius: 0.9, examples: 64, held_out: 16}
model: {depth: 1, width: 4, order: 6, pooling: steps}
training: {steps: 9, batch: 8, learning_rate: 0.01}
''',
}.items():
    (folder / name).write_text(text)
(folder / "half.safetensors").write_bytes((folder / "model/model.safetensors").read_bytes()[:100])
files = sorted(folder.rglob("*"))


class Refused(Exception):
    pass


def command(line):
    done = CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "250"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 2, f"exit code {done.exit_code}: {done.output}"
    assert "Traceback" not in done.output
    assert sorted(folder.rglob("*")) == files, "the command has written files"
    raise Refused(" ".join(done.output.replace("│", " ").split()))
"""

COMMANDS = rows(Path(__file__).with_name("commands.txt"))


@pytest.fixture(scope="module")
def outcomes():
    return unhooked.outcomes(PREAMBLE, {line: f"command({line!r})" for line in COMMANDS})


@pytest.mark.parametrize("line", COMMANDS)
def test_a_bad_command_is_refused_by_name_and_writes_nothing(line, outcomes):
    kinds, message = outcomes[line]
    assert kinds[:1] == ["Refused"], f"compressm {line}: {kinds[:1]} {message}"
    assert all(part in message for part in COMMANDS[line]), f"compressm {line}: {COMMANDS[line]} not in {message!r}"


def test_every_command_is_called_badly():
    wanted = {"inspect", "compress", "train", "report", "reproduce", "data", "bench", "demo"}
    assert wanted <= {line.split()[0] for line in COMMANDS}
    assert len(COMMANDS) >= 140
