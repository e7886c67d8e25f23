"""The command line as a person meets it: real processes, real files."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import compressm
from compressm.cli.app import app

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "reduction-cpu.json"


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "compressm.cli", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"compressm {compressm.__version__}")


def test_without_the_extra_the_command_says_how_to_install_it():
    script = "import sys; sys.modules['typer'] = None; from compressm.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'compressm[cli]'" in done.stderr


def test_a_benchmark_writes_its_result_and_its_picture(tmp_path):
    done = run("bench", "reduction", "--order", "2", "--order", "4", "--repeats", "1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reduction-cpu.json", "reduction-cpu.png"]
    assert "2 → 1" in done.output


def test_a_committed_result_can_be_drawn_and_printed_again(tmp_path):
    picture = tmp_path / "cost.png"
    assert run("bench", "draw", str(RESULT), "--picture", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    done = run("bench", "table", str(RESULT))
    assert "| 256 → 64 |" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "reduction", "--order", "0"), "0 is too small, expected at least 1"),
        (("bench", "reduction", "--device", "tpu"), "'tpu' is not one of"),
        (("bench", "draw", "nowhere.json"), "nowhere.json: no such file"),
        (("bench", "table", "pyproject.toml"), "is not a result"),
        (("bench", "unknown"), "No such command"),
    ],
)
def test_a_bad_value_says_what_was_given_and_exits_2(arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2
    plain = " ".join(done.output.replace("│", " ").split())
    assert said in plain
