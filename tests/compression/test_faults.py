"""An error or Ctrl-C at any line of a cut: everything is as it was, or the cut is made, recorded and restorable."""

import pytest

from tests.compression.faults import SCENARIOS, inject


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_fault_at_any_line_changes_nothing_or_is_recorded(name, tmp_path):
    outcomes = inject(name, tmp_path, shares=(25, 700))
    assert outcomes["unchanged"] > 6


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_fault_at_every_line_that_writes_changes_nothing_or_is_recorded(name, tmp_path):
    outcomes = inject(name, tmp_path, shares=(1, 20))
    assert outcomes["unchanged"] > 150
