"""Penalties over training and models cut once: panels, tables, and nothing where there are no such records."""

import pytest
from matplotlib import pyplot as plt

from compressm_lab.reports import run_report
from compressm_lab.reports.penalty_charts import penalty_chart, penalty_grid, truncation_grid
from compressm_lab.reports.run_report import write_report
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.groups import group_runs
from compressm_lab.runs.records import PenaltyRecord, TruncationRecord
from compressm_lab.runs.run import read_run
from tests.lab.reports.made_runs import Made, write

ORDERS = (16, 8)


def penalised(folder, seed):
    run = RunDirectory(write(Made(label="penalised", seed=seed, order=32, every=1000, spectra=False), folder))
    for step in range(1000, 10_001, 1000):
        value = 100.0 / step * 1000 + seed
        run.append(PenaltyRecord(step, "hankel-nuclear-norm", value, 0.1, step - 9, step // 10, step * 1e-4))
    for order in ORDERS:
        for split in ("validation", "test"):
            accuracy = 0.9 - 0.8 / order - 0.01 * seed
            run.append(TruncationRecord(10_000, "white_noise", order, float(order), 2.0 / order, split, 0.3, accuracy))
    return read_run(run)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("penalised")
    plain = [
        read_run(RunDirectory(write(Made(label="baseline", order=n, every=1000, spectra=False), folder)))
        for n in (32, 8)
    ]
    return [*(penalised(folder, seed) for seed in (0, 1)), *plain]


def lines(panel):
    figure, axes = plt.subplots()
    try:
        panel.draw(axes)
        return [[(float(x), float(y)) for x, y in line.get_xydata()] for line in axes.lines]
    finally:
        plt.close(figure)


def test_a_line_a_seed_shows_the_penalty_and_points_the_model_at_every_order(runs):
    (penalty, cut) = penalty_chart(group_runs(runs)).rows[0]
    assert [line[0] for line in lines(penalty)] == [(1000, 100.0), (1000, 101.0)]
    assert "100 at first" in penalty.words
    drawn = lines(cut)
    assert [x for x, _ in drawn[0]] == [8, 32]  # trained at that order, with nothing added
    assert drawn[1] == [(8, pytest.approx(79.5)), (16, pytest.approx(84.5))]
    assert cut.words == "penalised: 84.5 at order 16; penalised: 79.5 at order 8"


def test_a_penalty_that_was_recorded_once_is_a_point(tmp_path):
    run = RunDirectory(write(Made(label="penalised", order=32, every=10_000, spectra=False), tmp_path))
    run.append(PenaltyRecord(10_000, "modal-l1", 31.0, 0.1, 9991, 1000, 1.0))
    ((panel,),) = penalty_chart(group_runs([read_run(run)])).rows
    figure, axes = plt.subplots()
    panel.draw(axes)
    assert [(line.get_marker(), line.get_ydata().tolist()) for line in axes.lines] == [("o", [31.0])]
    plt.close(figure)


def test_the_tables_say_what_it_cost_and_what_a_cut_lost(runs):
    groups = group_runs(runs)
    (row,) = penalty_grid(groups).rows
    assert row[:6] == ("penalised", "hankel nuclear norm", "0.1", "100", "10.5", "1000 times")
    assert row[6] == "1.00 ± 0.00 ms"
    whole, *cuts = truncation_grid(groups).rows
    assert [line[1] for line in (whole, *cuts)] == ["32", "16", "8"]
    assert [line[2] for line in cuts] == ["84.50 ± 0.71", "79.50 ± 0.71"]
    assert [line[4] for line in cuts] == ["0.125 ± 0.000", "0.250 ± 0.000"]
    assert all(line[3].startswith("−") for line in cuts)


def test_a_page_has_the_section_where_there_is_something_to_show(runs, tmp_path, monkeypatch):
    # Other pictures have tests of their own.
    write = run_report.write_files
    monkeypatch.setattr(run_report, "write_files", lambda chart, *to: chart.name == "penalty" and write(chart, *to))
    monkeypatch.setattr(run_report, "inline_svg", lambda *_, **__: "")
    page = write_report(runs, tmp_path / "with", formats=["png"]).read_text()
    assert "Penalties, and one cut after training" in page
    assert (tmp_path / "with" / "figures" / "penalty.png").is_file()
    plain = write_report(runs[2:], tmp_path / "without", formats=[]).read_text()
    assert "Penalties" not in plain
    assert penalty_chart(group_runs(runs[2:])) is None


def test_a_penalty_that_reaches_zero_and_a_run_that_has_just_begun_are_shown(tmp_path):
    run = RunDirectory(write(Made(label="odd", order=8, every=5000, spectra=False, state="running"), tmp_path))
    run.append(PenaltyRecord(5000, "modal-l1", 0.0, 0.1, 4999, 1, 0.01))
    groups = group_runs([read_run(run)])
    ((panel,),) = penalty_chart(groups).rows
    assert lines(panel) == [[(5000, 0.0)]]
    assert penalty_grid(groups).rows[0][3] == "0"
    assert truncation_grid(groups) is None
