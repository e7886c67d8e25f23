from dataclasses import replace

import pytest
import torch

from compressm.compression.planning import STAGES
from compressm_lab.bench.cut import (
    VARIANTS,
    CutCase,
    Stopwatch,
    cut_cases,
    cut_once,
    default_cases,
    default_models,
    default_rank,
    measure_cut,
)
from compressm_lab.bench.train_step import paper_case
from compressm_lab.reports.bench_tables import cut_grids
from compressm_lab.runs.measurement import Measurement

from .test_train_step import tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize(("gramian", "moments"), VARIANTS)
def test_the_stages_of_a_cut_are_timed_apart_and_add_up(gramian, moments):
    case = CutCase(model=tiny(depth=2, order=6), rank=2, gramian=gramian, moments=moments)
    times = cut_once(case, CPU)
    spent = {name: times[f"{name}_s"] for name in STAGES}
    assert (spent.pop("calibrate") > 0) == (gramian == "measured")
    assert all(seconds > 0 for seconds in spent.values())
    assert sum(times[f"{name}_s"] for name in STAGES) <= times["cut_s"]
    assert times["total_s"] == times["cut_s"] + times["first_step_s"]
    assert min(times["step_before_s"], times["step_after_s"], times["first_step_s"]) > 0


def test_a_step_between_cuts_takes_next_to_nothing():
    times = cut_once(CutCase(model=tiny(depth=2, order=6), rank=2), CPU)
    assert 0 < times["between_s"] < times["cut_s"] / 100


def test_on_a_cpu_a_bank_is_cut_too_and_calibrated_on_several_batches():
    white, measured = [case for case in default_cases("cpu") if case.model.layer == "S4D"]
    assert not any(case.model.layer == "S4D" for case in default_cases("cuda"))
    assert (measured.model.width, measured.model.order, measured.rank, measured.calibration) == (16, 64, 32, (4, 50))
    assert white.gramian == "white noise"
    small = replace(measured.model, width=2, order=8, length=20, batch=4)
    times = cut_once(replace(measured, model=small, rank=3, calibration=(2, 3)), CPU)
    assert times["calibrate_s"] > 0


def test_the_table_names_the_layer_and_shows_steps_between_cuts():
    bank = replace(tiny(order=6), layer="S4D")
    rows = [row for model in (tiny(order=5), bank) for row in measure_cut(CutCase(model=model, rank=2), "cpu", 1)]
    one, other = cut_grids(Measurement("cut", "", 1, rows))
    assert "S4D" not in one.title
    assert other.title.endswith("6 → 2 states, S4D")
    assert [row[0] for row in other.rows][-2:] == ["all", "step between cuts"]
    assert other.rows[-1][1].split()[1] in ("µs", "ns", "ms")


def test_layers_may_fall_to_unequal_orders():
    case = CutCase(model=tiny(depth=3, order=6), rank=2, unequal=True)
    assert case.ranks == [2, 1, 1]
    assert cut_once(case, CPU)["reduce_s"] > 0


@pytest.mark.slow
def test_the_first_cut_of_a_process_and_later_ones_are_two_rows():
    case = CutCase(model=tiny(), rank=1)
    cold, warm = measure_cut(case, "cpu", repeats=2)
    assert (cold["run"], warm["run"]) == ("cold", "warm")
    assert cold.keys() == warm.keys()
    assert (cold["task"], cold["order"], cold["rank"], cold["layers"]) == ("tiny", 3, 1, 1)


def test_the_default_cases_are_those_of_the_targets():
    assert {(case.model.task, case.model.order, case.rank) for case in cut_cases(default_models("cpu"))} == {
        ("smnist", 256, 28)
    }
    on_gpu = {(c.model.task, c.model.order, c.rank, c.model.precision) for c in cut_cases(default_models("cuda"))}
    assert ("scifar", 384, 161, "bfloat16") in on_gpu
    assert default_rank(paper_case("imdb")) == 48
    assert default_rank(paper_case("smnist", 16)) == 16


def test_a_stopwatch_adds_up_what_is_called_the_same():
    watch = Stopwatch(CPU)
    for _ in range(2):
        with watch("work"):
            pass
    assert list(watch.seconds) == ["work"]
    assert watch.seconds["work"] > 0


@pytest.mark.gpu
def test_a_cut_on_a_gpu_is_timed_with_the_graph_recorded_again():
    times = cut_once(CutCase(model=tiny(depth=2, order=6), rank=2), torch.device("cuda"))
    assert times["first_step_s"] > times["step_after_s"] > 0
