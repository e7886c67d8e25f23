"""Examples run as a user runs them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_ends_with_what_it_shows_and_where_the_picture_is(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "reduce_a_layer.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reduction.png").read_bytes().startswith(b"\x89PNG")
    assert "true error" in done.stdout
    assert "reduction.png" in done.stdout.splitlines()[-1]
