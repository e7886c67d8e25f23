"""An error or Ctrl-C at any line of a cut: everything is as it was, or the cut is made, recorded and restorable."""

import pytest

from tests.compression.faults import SCENARIOS, inject

BETWEEN = "a step between cuts"
CUTS = [name for name in SCENARIOS if name != BETWEEN]


@pytest.mark.parametrize("name", CUTS)
def test_a_fault_at_any_line_changes_nothing_or_is_recorded(name, tmp_path):
    outcomes = inject(name, tmp_path, shares=(25, 700))
    assert outcomes["unchanged"] > 6


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_a_fault_at_every_line_that_writes_changes_nothing_or_is_recorded(name, tmp_path):
    outcomes = inject(name, tmp_path, shares=(1, 20))
    assert outcomes["unchanged"] > 150


def test_a_fault_between_cuts_changes_nothing_or_is_recorded(tmp_path):
    outcomes = inject(BETWEEN, tmp_path)
    assert outcomes["unchanged"] >= 3
    assert sum(outcomes.values()) < 10  # there are few lines between cuts
