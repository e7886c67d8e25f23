"""A small version of the study of kills: real trainings, killed and resumed."""

import subprocess
import sys
from pathlib import Path

import pytest

from compressm_lab.reports.measurements import markdown
from compressm_lab.runs.measurement import Measurement
from kills import GUARDS, recipe_of

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.mark.slow
def test_killed_trainings_resume_bit_for_bit(tmp_path):
    command = [sys.executable, str(STUDIES / "kills.py"), "--seeds", "3", "--quick", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    found = Measurement.read(tmp_path / "kills.json")
    assert {row["training"] for row in found.rows} == {0, 1, 2}
    assert {row["guard"] for row in found.rows} == set(GUARDS)
    assert [row["differs"] for row in found.rows] == [""] * len(found.rows)


def test_most_trainings_of_the_study_have_a_guard_and_all_have_cuts():
    guards = [recipe_of(guard, 0).compression.rollback for guard in GUARDS]
    assert [guard is None for guard in guards] == [True, False, False]


def test_the_table_counts_kills_and_names_their_phases():
    def row(training, guard, phase, same=1):
        return {"training": training, "guard": guard, "kill": 1, "phase": phase, "same": same, "differs": ""}

    rows = [row(0, "files", "cut"), row(0, "files", "snapshot"), row(1, "files", "cut", 0), row(2, "none", "steps")]
    table = markdown(Measurement("kills", "Kills", 3, rows))
    assert "| in files | 3 | cut 2, snapshot 1 | 1 of 2 |" in table
    assert "| no guard | 1 | steps 1 | 1 of 1 |" in table
