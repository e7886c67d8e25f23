"""The counts of a floor against counters that know nothing of them."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from compressm.ops import Path
from compressm_lab.bench.timing import Ceilings, measure_ceilings
from compressm_lab.bench.train_step import Work, around_work, build_batch, build_model, eager_step, floor, states_work

from .test_train_step import tiny, tokens

CASES = [tiny(depth=2, order=5), tokens(order=2, batch=3), tokens(depth=3, towers=2)]


@pytest.mark.parametrize("case", CASES, ids=["real inputs", "tokens", "two towers"])
def test_the_flops_are_those_torch_counts_in_a_step(case):
    case = type(case)(**{**vars(case), "path": Path.LOOP})
    model, (x, target) = build_model(case), build_batch(case, torch.device("cpu"))
    step = eager_step(model, x, target, case)
    with FlopCounterMode(display=False) as counter:
        step()
    assert counter.get_total_flops() == (states_work(case)["kept"] + around_work(case, parameters=0)).flops


def test_half_the_precision_moves_half_the_activations():
    full, half = (floor(tiny(precision=name), 0, Ceilings(1e30, 1.0, 0.0)).work for name in ("float32", "bfloat16"))
    inputs = 2 * 2 * 12 * 4  # read forward and backward in float32 in both
    assert (full.bytes - inputs) == 2 * (half.bytes - inputs)


def test_the_cheapest_form_of_the_states_depends_on_the_device_and_the_sizes():
    narrow, wide = tiny(width=2, order=64, length=256), tiny(width=64, order=4, length=256)
    assert floor(narrow, 0, Ceilings(1.0, 1e30, 0.0)).form == "convolution"
    assert floor(wide, 0, Ceilings(1.0, 1e30, 0.0)).form == "kept"
    assert floor(wide, 0, Ceilings(1e30, 1.0, 0.0)).form == "recomputed"


def test_a_floor_is_the_longer_of_multiplying_and_moving():
    assert Work(6, 8).seconds(Ceilings(flops=2.0, bytes=4.0, launch=1.0)) == 3.0
    assert Work(6, 80).seconds(Ceilings(flops=2.0, bytes=4.0, launch=1.0)) == 20.0


def test_ceilings_are_measured_on_this_machine():
    ceilings = measure_ceilings(torch.device("cpu"), "float32", repeats=1)
    assert 1e8 < ceilings.flops < 1e15
    assert 1e7 < ceilings.bytes < 1e14
    assert ceilings.launch == 0


@pytest.mark.gpu
def test_ceilings_of_a_gpu_include_a_launch():
    ceilings = measure_ceilings(torch.device("cuda"), "bfloat16", repeats=1)
    assert ceilings.flops > 1e12
    assert 1e-8 < ceilings.launch < 1e-4
