"""Commands bear odd terminals, full outputs, lost folders and variables of other programs."""

import json
import os
import sys

import pytest

from tests import unhooked

MAIN = """
import json, os, sys
folder, variables, arguments = json.loads(sys.argv[1])
os.chdir(folder)
os.environ.update(variables, COMPRESSM_COMMIT="tests")
sys.argv = ["compressm", *arguments]
{first}
from compressm.cli import main
main()
"""
RECIPE = """
name: mine
task: {name: delayed_copy, symbols: 4, copied: 4, delay: 2, examples: 64, held_out: 16}
model: {depth: 1, width: 4, order: 6, pooling: steps}
training: {steps: 6, batch: 8, learning_rate: 0.01, evaluate_every: 1, checkpoint_every: 6}
"""
TRAIN = ("train", "mine.yaml", "--out", "mine", "--device", "cpu")


@pytest.fixture
def here(tmp_path):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path


def main(folder, *arguments, first="", code=0, **variables):
    given = json.dumps([str(folder), variables | {"COMPRESSM_DATA": str(folder / "data")}, arguments])
    return unhooked.finished(MAIN.replace("{first}", first), given, code=code)


def state(folder):
    return json.loads((folder / "mine" / "status.json").read_text())["state"]


def test_a_full_output_is_said_and_training_goes_on(here):
    full = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    done = main(here, *TRAIN, first=full)
    assert done.stderr.count("the output cannot be written (No space left on device)") == 1
    assert state(here) == "finished"


def test_a_terminal_without_our_letters_shows_others(here):
    narrow = "sys.stdout.reconfigure(encoding='ascii', errors='strict')"
    done = main(here, *TRAIN, first=narrow)
    assert "evaluations: 6, at 1, 2, 3, ?, 6" in done.stdout
    assert state(here) == "finished"


@pytest.mark.parametrize("columns", ["0", "-3", "wide"])
def test_a_width_in_which_nothing_fits_is_forgotten(here, columns):
    assert "digits" in main(here, "train", "--list", COLUMNS=columns).stdout


def test_a_lost_folder_is_said(here):
    (gone := here / "gone").mkdir()
    done = main(here, "train", "--list", first=f"os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})", code=2)
    assert done.stderr == "compressm: No such file or directory; is the current folder still there?\n"


def test_a_name_that_is_too_long_is_said(here):
    done = main(here, "train", "x" * 300, code=2)
    assert "File name too long" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1"}, "RANK say that several processes train, but LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK and WORLD_SIZE say that several processes train"),
        ({"RANK": "x"}, "the variable RANK is 'x', expected an integer"),
    ],
)
def test_variables_of_half_a_launcher_are_refused(here, variables, said):
    done = main(here, *TRAIN, code=2, COLUMNS="250", **variables)
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert not (here / "mine").exists()


def test_variables_of_a_launcher_of_one_process_do_no_harm(here):
    main(here, *TRAIN, WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    assert state(here) == "finished"


def test_a_report_whose_reader_left_is_written(here):
    main(here, *TRAIN)
    closed = "read, write = os.pipe(); os.close(read); os.dup2(write, 1)"
    main(here, "report", "mine", "--out", "page", first=closed)
    assert (here / "page" / "report.html").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes")
def test_a_pipe_is_no_recipe(here):
    os.mkfifo(here / "pipe.yaml")
    done = main(here, "train", "pipe.yaml", code=2, COLUMNS="250")
    assert "pipe.yaml is not a file; expected a recipe" in done.stderr
