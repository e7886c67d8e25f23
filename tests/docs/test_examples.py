"""Examples run as a user runs them."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "reduce_a_layer.py"


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
