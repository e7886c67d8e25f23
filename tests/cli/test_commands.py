"""The command line as a person meets it: real processes, real files."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import compressm
from compressm.cli import main
from compressm.cli.app import app
from compressm.cli.options import PICTURES
from compressm_lab.cli import bench
from tests import unhooked

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "reduction-cpu.json"


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_the_module_is_the_command():
    script = "import runpy, sys; sys.argv[0] = 'compressm'; runpy.run_module('compressm.cli', run_name='__main__')"
    assert unhooked.run(script, "--version", loaded=False).strip() == f"compressm {compressm.__version__}"


@pytest.mark.parametrize(
    ("package", "arguments", "extra"),
    [
        ("typer", ("--help",), "commands"),
        ("rich", ("inspect", "nowhere"), "commands"),
        ("yaml", ("train", "digits"), "lab"),
        ("matplotlib", ("bench", "draw", str(RESULT)), "lab"),
    ],
)
def test_without_an_extra_the_command_says_how_to_install_it(package, arguments, extra):
    script = f"import sys; sys.modules[{package!r}] = None; from compressm.cli import main; main()"
    done = unhooked.finished(script, *arguments, loaded=False, code=1)
    assert f"needs the package {package}; install it with: pip install 'compressm[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_benchmark_writes_its_result_and_its_picture(tmp_path):
    done = run("bench", "reduction", "--order", "2", "--order", "4", "--repeats", "1", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reduction-cpu.json", "reduction-cpu.png"]
    assert "2 → 1" in done.output
    assert "medians; repeats per row are in the result file" in " ".join(done.output.split())


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
        (("bench", "reduction", "--order", "abc"), "'abc' is not an integer, expected at least 1"),
        (("bench", "reduction", "--repeats", "2.5"), "'2.5' is not an integer"),
        (("bench", "table", "tests"), "tests: Is a directory"),
        (("bench", "draw", str(RESULT), "--picture", "x.abc"), "x.abc ends in '.abc'; expected one of .png"),
        (("bench", "draw", str(RESULT), "--picture", "x"), "x ends in ''; expected one of .png"),
        (("bench", "draw", str(RESULT), "--picture", "/proc/nope/x.png"), "/proc/nope: No such file"),
        (("bench", "unknown"), "No such command"),
    ],
)
def test_a_bad_value_says_what_was_given_and_exits_2(arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in plain(done)


def plain(done):
    return " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("out", ["/proc/nope", "a file", "a file/below"])
def test_a_folder_that_cannot_be_written_is_refused_before_measuring(tmp_path, monkeypatch, out):
    (tmp_path / "a file").touch()
    monkeypatch.setattr(bench, "measure_reduction", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.chdir(tmp_path)
    done = run("bench", "reduction", "--order", "2", "--out", out)
    assert done.exit_code == 2
    assert f"{out}: " in plain(done)
    assert "expected a folder that can be made and written" in plain(done)


@pytest.mark.parametrize("rows", [[{"a": 1}], [5], 5, [{"order": [1]}], "few"])
@pytest.mark.parametrize("command", ["table", "draw"])
def test_a_result_with_other_rows_is_refused_by_name(tmp_path, command, rows):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**json.loads(RESULT.read_text()), "rows": rows}))
    done = run("bench", command, str(path))
    assert done.exit_code == 2
    assert "r.json" in plain(done).replace(" ", "")


@pytest.mark.parametrize(("column", "value"), [("order", "many"), ("speedup", "fast")])
def test_a_word_where_a_number_belongs_is_refused(tmp_path, column, value):
    stored = json.loads(RESULT.read_text())
    stored["rows"][1][column] = value
    path = tmp_path / "r.json"
    path.write_text(json.dumps(stored))
    done = run("bench", "table", str(path))
    assert done.exit_code == 2
    assert f"row 1 has '{value}' as {column}, expected a number" in plain(done)


def test_ctrl_c_says_so_and_exits_130(tmp_path, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure_reduction", interrupt)
    monkeypatch.setattr(sys, "argv", ["compressm", "bench", "reduction", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


def test_every_suffix_on_offer_can_be_drawn():
    from matplotlib.backend_bases import FigureCanvasBase

    assert {suffix[1:] for suffix in PICTURES} <= set(FigureCanvasBase.get_supported_filetypes())


@pytest.mark.parametrize("option", [("--out", "/proc/nope"), ("--picture", "x.abc")])
def test_the_demo_refuses_a_bad_path_in_one_line(option, monkeypatch, capsys):
    demo = str(Path(__file__).parents[2] / "examples" / "reduce_a_layer.py")
    monkeypatch.setattr(sys, "argv", [demo, *option])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(demo, run_name="__main__")
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (2, "")
    (line,) = said.err.splitlines()
    assert f"error: {option[1]}" in line


def test_an_empty_argument_is_refused():
    """An unset shell variable would mean the present folder."""
    done = unhooked.finished(
        "import sys; from compressm.cli import main; sys.argv[1:] = ['inspect', '']; main()", code=2
    )
    assert "an argument is empty" in done.stderr


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("with keep=KeepFraction(rho=0.5), gate=1.0 all stay", "with rho=0.5, gate=1.0 all stay"),
        ("Budget(total_states=3) is not for PerChannel(surrogate='mean')", "total_states 3 is not for per-channel"),
        ("such as EnergyTolerance(0.05),\n or ErrorBound(eps=0.1, relative=True)", "such as tau 0.05, or bound 0.1"),
    ],
)
def test_a_warning_is_one_plain_line_in_the_words_of_recipes(message, said):
    script = f"""
import warnings
from compressm.cli import app, main
app.app = lambda: warnings.warn({message!r}, stacklevel=2)
main()
"""
    done = unhooked.finished(f"import compressm.cli.app\n{script}")
    assert done.stderr == f"warning: {said}\n"


def test_what_may_not_be_read_is_named_without_a_traceback():
    """The root user, as whom tests may run, may read everything."""
    script = """
import compressm.cli.app
from compressm.cli import app, main
def refused():
    raise PermissionError(13, "Permission denied", "run/config.json")
app.app = refused
main()
"""
    done = unhooked.finished(script, code=2)
    assert done.stderr == "compressm: run/config.json: Permission denied; expected what can be read and written\n"
