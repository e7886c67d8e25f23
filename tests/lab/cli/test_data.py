import pytest
import typer
from typer.testing import CliRunner

from compressm_lab.cli.data import data
from tests.lab.data.files import write_mnist

app = typer.Typer()
app.command()(data)


def run(*arguments):
    # Wide enough that a table breaks no word.
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "250"})


def plain(done):
    return " ".join(done.output.replace("│", " ").split())


def test_without_a_name_all_tasks_are_listed_with_what_is_here(tmp_path):
    write_mnist(tmp_path / "mnist")
    done = run("--data", tmp_path)
    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line for line in done.output.replace("│", " ").splitlines() if line.strip()}
    assert lines["smnist"].split()[-1] == "yes"
    assert lines["scifar"].split()[1:] == ["1024", "3", "real", "10", "cifar10/cifar-10-python.tar.gz", "no"]
    assert lines["digits"].split()[-1] == "made"
    assert "2 × 257 tokens" in lines["aan"]


def test_the_earlier_name_of_data_is_still_read_but_not_shown(tmp_path):
    write_mnist(tmp_path / "mnist")
    assert run("--root", tmp_path).output == run("--data", tmp_path).output
    shown = run("--help").output
    assert "--data" in shown
    assert "--root" not in shown


def test_a_task_is_shown_with_its_splits(tmp_path):
    write_mnist(tmp_path / "mnist")
    done = run("smnist", "--data", tmp_path, "--offline")
    assert done.exit_code == 0, done.output
    assert "train 36 uint8 (784, 1) 784 28.5 kB 8.3" in plain(done)


def test_options_are_set_one_by_one(tmp_path):
    done = run(
        "listops", "--data", tmp_path, *["--set", "generated=true", "--set", "examples=9", "--set", "held_out=3"]
    )
    assert done.exit_code == 0, done.output
    assert "train 9 uint8 (2048,)" in plain(done)
    assert "making ListOps" in done.output
    done = run("lti_teacher", "--data", tmp_path, "--set", "examples=4", "--set", "held_out=2", "--set", "noise=0.1")
    assert "regress" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mnist",), "no data set is called 'mnist', expected one of smnist"),
        (("mnist",), "did you mean 'smnist'?"),
        (("imdb", "--set", "lenght=3"), "did you mean 'length'?"),
        (("imdb", "--offline"), "nothing is fetched offline"),
        (("imdb", "--set", "length"), "'length', expected OPTION=VALUE"),
        (("imdb", "--set", "length=long"), "length of imdb is 'long', expected int"),
        (("imdb", "--set", "width=3"), "imdb has no option 'width'; its options: length=4096"),
        (("aan",), "lra_release.gz is not in"),
        (("--set", "length=3"), "'length=3' is an option of no task"),
        (("delayed_copy", "--set", f"delay={10**12}"), "do not fit into memory: set smaller sizes"),
    ],
)
def test_a_bad_value_says_what_is_allowed_and_exits_2(tmp_path, arguments, said):
    done = run(*arguments, "--data", tmp_path)
    assert done.exit_code == 2
    assert said in plain(done)


def test_an_option_that_is_set_twice_is_refused(tmp_path):
    done = run("digits", "--data", tmp_path, "--set", "side=4", "--set", "side=5")
    assert done.exit_code == 2
    assert "side is there twice: leave one of them out" in plain(done)
