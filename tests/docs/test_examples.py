"""Examples run as a user runs them."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO, MAMBA = EXAMPLES / "reduce_a_layer.py", EXAMPLES / "huggingface_mamba.py"


def check_demo(printed, folder):
    assert (folder / "reduction.png").read_bytes().startswith(b"\x89PNG")
    assert "true error" in printed
    assert "reduction.png" in printed.splitlines()[-1]


def test_the_demo_on_small_layers_ends_with_what_it_shows_and_where_the_picture_is(tmp_path, monkeypatch, capsys):
    main = runpy.run_path(str(DEMO))["main"]
    monkeypatch.setitem(main.__globals__, "ORDER", 24)
    monkeypatch.setitem(main.__globals__, "SHOWN", (3, 12))
    monkeypatch.setattr(sys, "argv", [str(DEMO), "--out", str(tmp_path)])
    main()
    printed = capsys.readouterr().out
    assert "of 24 states hold 95 %" in printed
    check_demo(printed, tmp_path)


@pytest.mark.slow
def test_the_demo_ends_with_what_it_shows_and_where_the_picture_is(tmp_path):
    done = subprocess.run([sys.executable, str(DEMO), "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_demo(done.stdout, tmp_path)


def check_mamba(printed, folder, states):
    assert (folder / "config.json").is_file()
    assert printed.count("before the cut") == 2
    assert "measured 0." in printed
    assert f"has {states} states a channel and writes the same." in printed


def test_a_small_mamba_of_transformers_shrinks_and_writes_the_same_when_it_is_read_again(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", [str(MAMBA), "--quick", "--out", str(tmp_path)])
    runpy.run_path(str(MAMBA))["main"]()
    check_mamba(capsys.readouterr().out, tmp_path, states=2)


@pytest.mark.slow
def test_a_mamba_of_transformers_learns_a_text_while_it_shrinks(tmp_path):
    done = subprocess.run([sys.executable, str(MAMBA), "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check_mamba(done.stdout, tmp_path, states=4)
    losses = [float(line.split("loss ")[1].split()[0]) for line in done.stdout.splitlines() if ": loss" in line]
    assert losses[-1] < 1.2 < 1.7 < losses[0]
