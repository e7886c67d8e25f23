"""Every way to cut is tried on copies of one model, which stays as it was, and is trained on from the same moment."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import selective_cuts
from compressm_lab.data import DelayedCopy
from compressm_lab.reports.measurements import grids
from compressm_lab.runs.measurement import Measurement
from selective_cuts import (
    QUICK,
    SHARES,
    TrainedModel,
    _copied,
    cut,
    cut_in_every_way,
    load,
    measure_selective_cuts,
    trained,
    ways,
)

DATA = DelayedCopy(symbols=4, copied=3, delay=2, examples=16, held_out=8)
SETTING = TrainedModel("tiny", DATA, "steps", steps=3, more=1, depth=1, width=4, order=8, batch=8)


@pytest.fixture(scope="module")
def learner():
    return trained(SETTING, load(DATA), seed=0)


def test_every_way_is_measured_at_every_order_and_the_model_stays_as_it_was(learner):
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    said = []
    rows = cut_in_every_way(SETTING, learner, 0, said.append)
    cells = {(row["way"], row["rank"]) for row in rows}
    refused = {tuple(line.split(": ")[1].split(" refused")[0].rsplit(" to ", 1)) for line in said if "refused" in line}
    wanted = set(itertools.product(ways(0), [8 // share for share in SHARES]))
    assert cells == wanted - {(way, int(rank)) for way, rank in refused}
    assert {way for way, _ in refused} <= {"baked, two-sided"}
    assert all(row["error"] >= 0 and 0 <= row["accuracy_later"] <= 1 for row in rows)
    assert len({row["full_later"] for row in rows}) == 1
    assert all(torch.equal(value, before[name]) for name, value in learner.model.state_dict().items())


def test_a_cut_goes_by_training_data_and_leaves_fewer_states(learner):
    other = _copied(learner)
    assert 0 < cut(other, 2, ways(0)["baked"]) < 1
    assert other.model.blocks[0].ssm.order == 2
    moments = [
        state["exp_avg"].shape for p, state in other.optimizer.state.items() if p is other.model.blocks[0].ssm.A_log
    ]
    assert moments == [(8, 2)]


def test_the_same_seed_trains_the_same_model(learner):
    again = trained(SETTING, load(DATA), seed=0)
    state = learner.model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.model.state_dict().items())
    assert QUICK[0].order // max(SHARES) >= 1


@pytest.mark.parametrize("processes", [1, 2])
def test_every_model_is_measured_with_every_seed_however_many_at_once(processes, monkeypatch):
    """Threads in the place of processes, which take 10 s of loading: `make slow` starts those."""

    class Threads(ThreadPoolExecutor):
        def __init__(self, processes, **_):
            super().__init__(processes)

    monkeypatch.setattr(selective_cuts, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(selective_cuts, "measure_model", lambda *model: [{"seed": model[1], "setting": model[0].name}])
    found = measure_selective_cuts(seeds=2, settings=[SETTING, QUICK[0]], processes=processes)
    names = [SETTING.name, QUICK[0].name]
    assert found.rows == [{"seed": seed, "setting": name} for name in names for seed in (0, 1)]


@pytest.mark.slow
def test_models_are_measured_one_after_the_other_or_side_by_side():
    alone = measure_selective_cuts(seeds=2, settings=[SETTING])
    beside = measure_selective_cuts(seeds=2, settings=[SETTING], processes=2)
    assert alone.rows == beside.rows
    assert {row["seed"] for row in alone.rows} == {0, 1}


def row(way, seed, rank, error, now=0.5, later=0.9):
    common = {"setting": "a task", "order": 8, "full_accuracy": 0.9, "full_later": 0.95, "more": 200, "device": "cpu"}
    return {**common, "way": way, "seed": seed, "rank": rank, "error": error, "accuracy": now, "accuracy_later": later}


def test_tables_have_a_row_a_way_and_say_where_a_way_refused():
    rows = [row("one", 0, 4, 0.1), row("one", 1, 4, 0.3), row("two", 0, 4, 0.2), row("one", 0, 2, 0.5)]
    error, now, later = grids(Measurement("selective_cuts", "t", 2, [*rows, row("one", 1, 2, 0.5)]))
    assert error.heads == ("way", "8 → 4", "8 → 2")
    assert error.rows == (("one", "0.200 ± 0.141", "0.500 ± 0.000"), ("two", "refused 1×", "refused 2×"))
    assert now.caption == "before it 0.900 ± 0.000"
    assert (later.title, later.caption) == ("A task: test accuracy 200 steps later", "without a cut 0.950 ± 0.000")
