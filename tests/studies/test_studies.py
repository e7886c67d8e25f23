"""Small versions of the studies show what the large ones do."""

import itertools

import pytest

import command
from compressm_lab.runs.measurement import Measurement
from digits import DigitsSetting, load_digits
from hidden_system import HiddenSystem, measure_hidden_system
from loss_continuity import QUICK, measure_loss_continuity
from one_shot import cut_in_every_way, measure_one_shot

FEW_POLES = HiddenSystem(
    order=3, states=12, width=2, length=48, batch=8, phases=((80, 1e-2), (80, 1e-4), (80, 1e-6)), more=(5, 0.0)
)


def test_the_bound_finds_the_order_of_a_hidden_system_and_the_student_stays_as_good():
    (row,) = measure_hidden_system(seeds=1, task=FEW_POLES).rows
    assert (row["hidden"], row["states"], row["found"]) == (3, 12, 3)
    assert row["tail"] < 0.01
    assert row["error"] < 1e-5
    assert row["error_cut"] < 1e-5
    assert row["error_more"] <= row["error_cut"]


def test_one_shot_has_every_way_at_every_order():
    setting = DigitsSetting("tiny", side=8, depth=1, width=4, order=32, steps=2, learning_rate=1e-2)
    rows = measure_one_shot(seeds=1, settings=[setting]).rows
    cells = {(row["seed"], row["way"], row["rank"]) for row in rows}
    assert cells == set(itertools.product([0], ("paper", "folded", "measured", "random"), (16, 8)))
    assert len(rows) == len(cells)
    assert all(0 <= row["accuracy"] <= 1 for row in rows)


def test_cutting_in_every_way_leaves_the_model_as_it_was():
    setting = DigitsSetting("tiny", side=8, depth=1, width=4, order=16, steps=2, learning_rate=1e-2)
    model = setting.model()
    rows = cut_in_every_way(setting, model, load_digits(), seed=0)
    assert model.blocks[0].ssm.order == 16
    assert {row["rank"] for row in rows} == {8}
    assert len({row["full_loss"] for row in rows}) == 1


@pytest.fixture(scope="module")
def curves():
    return measure_loss_continuity(seeds=1, plan=QUICK)


def test_before_the_cut_all_ways_are_one_training(curves):
    before = [[row[f"{k:+d}"] for k in range(1 - QUICK.shown, 1)] for row in curves.rows]
    assert [row["way"] for row in curves.rows] == ["uncut", "paper", "restart", "transport", "measured"]
    assert all(curve == before[0] for curve in before)


def test_after_the_cut_ways_that_cut_part_and_the_first_loss_is_near_the_uncut_one(curves):
    rows = {row["way"]: row for row in curves.rows}
    assert rows["uncut"]["kept"] == rows["uncut"]["states"]
    assert rows["measured"]["kept"] < rows["transport"]["kept"] < rows["transport"]["states"]
    assert rows["transport"]["kept"] == rows["restart"]["kept"]
    # The cut itself is the same for both; the first update afterwards is not.
    assert rows["transport"]["+1"] == rows["restart"]["+1"] != rows["uncut"]["+1"]
    assert rows["transport"]["+2"] != rows["restart"]["+2"]
    assert rows["transport"]["+1"] == pytest.approx(rows["uncut"]["+1"], rel=0.02)


def test_the_command_writes_the_result_and_says_where(tmp_path, capsys):
    def study(*, seeds, quick, progress):
        progress("half done")
        return Measurement("study", "t", seeds, [{"quick": quick}])

    path = command.run(study, seeds=3, description="d", arguments=["--out", str(tmp_path), "--seeds", "2", "--quick"])
    assert path == tmp_path / "study.json"
    written = Measurement.read(path)
    assert (written.repeats, written.rows) == (2, [{"quick": True}])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "half done"
    assert str(path) in said[1]


def test_a_study_that_can_is_told_how_many_processes_it_may_have(tmp_path):
    def study(*, seeds, quick, progress, processes):
        return Measurement("study", "t", seeds, [{"processes": processes}])

    out = ["--out", str(tmp_path), "--processes", "2"]
    path = command.run(study, seeds=3, description="d", arguments=out, parallel=True)
    assert Measurement.read(path).rows == [{"processes": 2}]


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5"])
def test_a_number_of_seeds_that_means_nothing_is_refused(given, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.run(measure_one_shot, seeds=3, description="d", arguments=[f"--seeds={given}"])
    assert stopped.value.code == 2
    assert f"{given!r} is not an integer of at least 1" in capsys.readouterr().err
