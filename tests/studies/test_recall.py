"""The study of recall asks what it says, and goes on where it was stopped."""

import time
from dataclasses import replace

import pytest
import torch

import recall
from compressm_lab.reports.measurements import markdown
from compressm_lab.runs.measurement import Measurement
from side_by_side import Job, rows_of, work

pytest.importorskip("transformers")


def drawn(plan, seed=0):
    return recall.sequences(plan, 50, torch.Generator().manual_seed(seed))


def test_every_key_is_asked_once_and_its_value_follows():
    plan = recall.Plan(pairs=5, symbols=9)
    for ids in drawn(plan).tolist():
        pairs = dict(zip(ids[:10:2], ids[1:10:2], strict=True))
        assert len(pairs) == 5
        assert all(key < 9 <= value < 18 for key, value in pairs.items())
        assert sorted(ids[10::2]) == sorted(pairs)
        assert [pairs[key] for key in ids[10::2]] == ids[11::2]
    asked = torch.arange(plan.length - 1)[plan.asked]
    assert asked.tolist() == [10, 12, 14, 16, 18]


def test_parts_of_the_data_differ_and_are_the_same_every_time():
    plan, where = recall.QUICK, torch.device("cpu")
    found = [
        recall.data(plan, seed, part, block, 4, where) for seed in range(2) for part in range(3) for block in range(2)
    ]
    assert len({tuple(ids.flatten().tolist()) for ids in found}) == 12
    assert torch.equal(found[3], recall.data(plan, 0, 1, 1, 4, where))


def test_the_rate_is_chosen_on_validation():
    rows = [{"rate": rate, "validation": v, "accuracy": 1 - v} for rate, v in ((1e-3, 0.2), (4e-3, 0.9), (4e-3, 0.3))]
    assert recall.best_rate(rows) == 4e-3


def test_jobs_wait_for_the_models_that_they_cut():
    found = recall.jobs(recall.QUICK)
    names = [job.name for job in found]
    assert len(set(names)) == len(names)
    assert {"mamba-2-8-whole", "mamba-2-4-whole", "mamba-2-4-maps", "gated-deltanet-4-rows"} <= set(names)
    ways = recall.by_shape(recall.QUICK.shape("Mamba-2", 8))
    assert ways == {"maps": ("Mapped", "PCA"), "rows": ("Fitted", "GHOST", "RRQR", "random")}
    for job in found:
        assert all(names.index(before) < names.index(job.name) for before in job.after)


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recall")
    said = []
    found = recall.jobs(recall.QUICK, ("Mamba-2",))
    work(found, folder, 1, time.time() + 600, lambda job, seconds, text: said.append(text))
    assert not any(said), said
    return recall.collect(recall.QUICK, found, folder)[0]


def test_the_study_has_every_way_at_every_order_and_seed(studied):
    cells = {(row["arm"], row["order"], row["rank"], row["seed"]) for row in studied.rows}
    ways = ("Mapped", "Fitted", "GHOST", "RRQR", "PCA", "random")
    wanted = {(way, 8, 4, seed) for way in ways for seed in (0, 1)}
    assert cells == wanted | {
        ("uncut", 8, 8, 0),
        ("uncut", 8, 8, 1),
        ("from scratch", 4, 4, 0),
        ("from scratch", 4, 4, 1),
    }
    assert all(0 <= row["accuracy"] <= 1 for row in studied.rows)
    # One model is cut in every way.
    before = {(row["seed"], row["accuracy_before"]) for row in studied.rows if row["arm"] in ways}
    assert len(before) == 2


def test_the_balanced_map_changes_the_output_least(studied):
    errors = {}
    for row in studied.rows:
        if "error" in row:
            errors.setdefault(row["arm"], []).append(row["error"])
    assert min(errors, key=lambda arm: sum(errors[arm])) == "Mapped"


def test_its_table_has_a_line_a_way(studied, tmp_path):
    table = markdown(Measurement.read(studied.write(tmp_path / "recall.json")))
    assert table.count("| 8 → 4 |") == 6
    assert table.count("| from scratch | 4 |") == table.count("| uncut | 8 |") == 1


def test_a_training_that_was_stopped_ends_like_one_that_was_not(tmp_path, monkeypatch):
    plan = replace(recall.QUICK, steps=120, seeds=1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    wanted = recall.train_from_scratch(plan, "Mamba-2", 4, whole, time.time() + 600)
    clock = iter([0.0, 9.0])  # the time ends before the second block
    with monkeypatch.context() as patched:
        patched.setattr(recall.time, "time", lambda: next(clock))
        assert recall.train_from_scratch(plan, "Mamba-2", 4, parts, 5.0) is None
    assert torch.load(parts / "mamba-2-4-whole.pt", weights_only=True)["more"] == {"done": 50}
    assert recall.train_from_scratch(plan, "Mamba-2", 4, parts, time.time() + 600) == wanted
    stored = [torch.load(folder / "mamba-2-4-whole.cut", weights_only=True) for folder in (whole, parts)]
    assert torch.equal(stored[0]["values"], stored[1]["values"])
    assert stored[0]["more"] == {"done": 60}


def fails(folder, until):
    raise ValueError("on purpose")


def ends(folder, until):
    return [{"number": 1}]


def waits(folder, until):
    return None


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_failure_stops_only_what_waits_for_it_and_nothing_is_done_twice(processes, tmp_path):
    jobs = [Job("a", fails), Job("b", ends), Job("c", ends, after=("a",)), Job("d", ends, after=("b",), alone=True)]
    jobs += [Job("e", waits), Job("f", ends, least=1000)]
    said = {}

    def ended(job, seconds, text):
        said[job.name] = text

    work(jobs, tmp_path, processes, time.time() + 500, ended)
    assert set(said) == {"a", "b", "d", "e"}
    assert "on purpose" in said["a"]
    assert said["e"] == "no time left"
    assert rows_of("d", tmp_path) == [{"number": 1}]
    said.clear()
    work(jobs, tmp_path, processes, time.time() + 500, ended)
    assert set(said) == {"a", "e"}
