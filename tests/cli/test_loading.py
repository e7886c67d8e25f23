"""Commands are listed without being loaded, come by entry points, and do without the laboratory."""

import inspect
import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer

from compressm.cli import commands, saved
from compressm.cli.app import app
from compressm.cli.commands import OWN, Command, known_commands
from compressm.compression import save_model
from compressm.errors import SavingError
from compressm.layers import LRU
from compressm.models import SequenceClassifier
from compressm_lab.cli import COMMANDS
from tests import unhooked

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "numpy", "scipy", "matplotlib", "pydantic", "yaml", "transformers", "jinja2", "pooch", "sklearn"}
MAIN = "import sys; sys.argv[0] = 'compressm'; from compressm.cli import main; main()"
ALONE = f"import sys; sys.modules['compressm_lab'] = None; {MAIN}"


def process(*arguments, script=MAIN, path=(), **variables):
    """A process of its own: in forks of `unhooked` torch is there already."""
    environment = os.environ | variables
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT / "src", *path)))
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, env=environment)


def forked(*arguments, **variables):
    """What the command prints, and the modules that are loaded then, in a fork that begins with torch alone."""
    script = f"""
import os, sys
os.environ.update({variables!r})
try:
    {MAIN}
finally:
    print("LOADED", *sys.modules)
"""
    said, _, loaded = unhooked.run(script, *arguments, loaded=False).partition("LOADED")
    return said, loaded.split()


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ()])
def test_help_and_version_load_nothing_heavy(arguments):
    script = f"import atexit, sys; atexit.register(lambda: print('LOADED', *sys.modules)); {MAIN}"
    said, _, loaded = process(*arguments, script=script).stdout.partition("LOADED")
    assert {name.split(".")[0] for name in loaded.split()} & HEAVY == set()
    assert {"typer", "compressm.cli.app"} <= set(loaded.split())
    if "--version" not in arguments:
        assert all(name in said for name in ("inspect", "compress", "train", "bench"))


@pytest.mark.parametrize("command", [*OWN, *COMMANDS], ids=lambda command: command.name)
def test_a_line_in_the_list_is_the_first_paragraph_of_the_commands_help(command):
    loaded = typer.main.get_command(app).commands[command.name]
    assert inspect.cleandoc(loaded.help).split("\n\n")[0].replace("\n", " ") == command.help


def test_only_the_command_that_is_called_is_loaded():
    _, loaded = forked("inspect", "--help")
    assert "compressm.cli.inspect" in loaded
    assert not {name.split(".")[0] for name in loaded} & {"yaml", "matplotlib"}
    assert not [name for name in loaded if name.startswith("compressm_lab.cli.")]


@pytest.mark.parametrize(
    ("words", "completed"), [("compressm tr", {"train"}), ("compressm bench re", {"reduction", "regulariser"})]
)
def test_names_are_completed_by_the_shell(words, completed):
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    said, _ = forked(_COMPRESSM_COMPLETE="complete_bash", **asked)
    assert set(said.split()) == completed


def test_the_entry_points_of_the_package_name_what_is_there():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(groups) == {"compressm.commands", "compressm.openers"}
    for group, entries in groups.items():
        assert set(entries) == {commands.LABORATORY}
        loaded = EntryPoint(commands.LABORATORY, entries["lab"], group).load()
        assert loaded is COMMANDS or loaded.__name__ == "open_run"


@pytest.fixture
def plugin(tmp_path):
    """A package with a command, as pip would install it, and one that is broken."""
    (tmp_path / "plugin.py").write_text(
        "from compressm.cli.commands import Command\n"
        "COMMANDS = [Command('greet', 'plugin:greet', 'Say hello.')]\n"
        "def greet(name: str) -> None:\n    '''Say hello.'''\n    print('hello', name)\n"
    )
    notes = tmp_path / "plugin-1.0.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (notes / "entry_points.txt").write_text("[compressm.commands]\nplugin = plugin:COMMANDS\nbroken = gone:COMMANDS\n")
    return tmp_path


def test_another_package_adds_a_command_by_an_entry_point(plugin):
    done = process("greet", "you", path=[plugin])
    assert (done.returncode, done.stdout) == (0, "hello you\n")
    assert "compressm: broken cannot be loaded from gone:COMMANDS: No module named 'gone'" in done.stderr
    listed = process("--help", path=[plugin]).stdout
    assert all(name in listed for name in ("greet", "Say hello.", "inspect", "train", "bench"))


def test_an_installed_laboratory_is_listed_once(plugin):
    (plugin / "plugin-1.0.dist-info" / "entry_points.txt").write_text(
        "[compressm.commands]\nlab = compressm_lab.cli:COMMANDS\n"
    )
    listed = process("--help", path=[plugin])
    assert listed.stdout == process("--help").stdout
    assert listed.stderr == ""


def test_a_command_has_one_name():
    names = [command.name for command in (*OWN, *COMMANDS)]
    assert len(set(names)) == len(names)
    assert set(names) <= set(known_commands())
    assert all(isinstance(command, Command) for command in known_commands().values())


@pytest.fixture
def model(tmp_path):
    save_model(SequenceClassifier(LRU, depth=1, width=2, order=3, inputs=1, classes=2), tmp_path / "model")
    return tmp_path / "model"


def test_saved_models_are_inspected_and_cut_without_the_laboratory(model, tmp_path):
    assert "blocks.0.ssm" in unhooked.run(ALONE, "inspect", str(model))
    assert "3 -> 2 states" in unhooked.run(ALONE, "compress", str(model), "--order", "2", "--out", str(tmp_path / "a"))
    assert (tmp_path / "a" / "model.safetensors").is_file()
    said = unhooked.run(ALONE, "--help")
    assert "inspect" in said
    assert "train" not in said.replace("they train", "").replace("trained", "")


@pytest.mark.parametrize("command", [("inspect",), ("compress", "--order", "1", "--out", "small")])
@pytest.mark.parametrize("options", [(), ("--measured",)])
def test_a_run_without_the_laboratory_says_how_to_install_it(command, options, tmp_path):
    (tmp_path / "status.json").write_text("{}")
    done = unhooked.finished(ALONE, command[0], str(tmp_path), *command[1:], *options, code=2)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert "is the folder of a run, which the laboratory opens" in said
    assert "pip install 'compressm[lab]'" in said


def test_a_run_without_a_package_of_the_laboratory_says_which(tmp_path, monkeypatch):
    def opener(path, **options):
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    (tmp_path / "status.json").write_text("{}")
    monkeypatch.setattr(saved, "registered", lambda *_: iter([opener]))
    with pytest.raises(SavingError, match=r"opens and needs the package yaml: pip install 'compressm\[lab\]'"):
        saved.open_saved(tmp_path, with_data=False, data=None, offline=True)


def test_a_folder_of_transformers_without_it_says_how_to_install_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    script = f"import sys; sys.modules['transformers'] = None; {MAIN}"
    said = unhooked.finished(script, "inspect", str(tmp_path), code=2).stderr
    assert "is a folder of transformers: pip install 'compressm[huggingface]'" in " ".join(
        said.replace("│", " ").split()
    )
