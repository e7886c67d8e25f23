"""The commands of the page on deploying run as they stand, one after the other."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compressm.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


@pytest.mark.slow
def test_the_way_from_a_run_to_a_runtime_can_be_walked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPRESSM_COMMIT", "tests")
    section = PAGE.read_text().split("## From a run to a runtime")[1]
    commands = re.search(r"```sh\n(.*?)```", section, re.DOTALL)[1].splitlines()
    assert len(commands) == 4
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command)[1:], env={"COLUMNS": "200"})
        assert done.exit_code == 0, f"{command}: {done.output}"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"digits", "small", "small.onnx", "small.pte"}
