import pytest
import torch

from compressm.compression.planning import STAGES
from compressm_lab.bench.cut import (
    VARIANTS,
    CutCase,
    Stopwatch,
    cut_cases,
    cut_once,
    default_models,
    default_rank,
    measure_cut,
)
from compressm_lab.bench.train_step import paper_case

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
