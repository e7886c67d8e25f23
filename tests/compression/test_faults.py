"""An error or Ctrl-C at any line of a cut: everything is as it was, or the cut is made, recorded and restorable."""

import sys

import pytest
import torch

from compressm.adapters.base import adapter_for, read_with
from compressm.layers import LRU
from tests.compression.faults import SCENARIOS, inject, stopped
from tests.marks import later

BETWEEN = "a step between cuts"
CUTS = [name for name in SCENARIOS if name != BETWEEN]


# The guarded cut by trials passes all lines of the one without a guard.
@pytest.mark.parametrize("name", later(CUTS, *(name for name in CUTS if name != "a cut by trials")))
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


@pytest.mark.parametrize("name", ["a cut", "compress_", "pad_orders_"])
def test_an_interruption_inside_no_grad_itself_leaves_gradients_on(tmp_path, name):
    prepare, call = SCENARIOS[name]
    run = prepare(tmp_path)

    def entered(frame, event, arg):
        # Gradients are off by now, and the `with` statement does not know it yet.
        if event == "return":
            sys.settrace(None)
            raise KeyboardInterrupt
        return entered

    def at_call(frame, event, arg):
        inside = frame.f_code.co_qualname == "no_grad.__enter__"
        return entered if inside and "/compression/" in frame.f_back.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        with pytest.raises(KeyboardInterrupt):
            call(run)
    finally:
        sys.settrace(before)
    assert torch.is_grad_enabled()
    assert run.model.blocks[0].ssm.order == 4


def test_an_interruption_while_torch_swaps_parameters_leaves_the_layer_its_own():
    layer = LRU(2, order=2)
    adapter, values = adapter_for(layer), {name: value.detach() * 0.5 for name, value in layer.named_parameters()}
    own, files = dict(layer.named_parameters()), ("nn/utils/", "functional_call", "contextlib")
    lines = stopped(lambda: read_with(adapter, layer, values), files)
    assert lines > 100
    for number in range(1, lines + 1):
        with pytest.raises(KeyboardInterrupt):
            stopped(lambda: read_with(adapter, layer, values), files, number)
        now = dict(layer.named_parameters())
        assert now.keys() == own.keys()
        assert all(now[name] is own[name] for name in own), f"line {number}"
