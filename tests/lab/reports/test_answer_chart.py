"""The first picture and the first sentence of a report say what came out."""

import json
from dataclasses import replace

import pytest
from matplotlib import pyplot as plt

from compressm_lab.reports.answer_chart import Point, answer_chart, answers, draw_demo, states_panel
from compressm_lab.reports.curve_charts import training_chart
from compressm_lab.reports.outcome_charts import best_known, colours_of, outcome_chart
from compressm_lab.reports.run_report import result_grid
from compressm_lab.runs.groups import group_runs
from compressm_lab.runs.measurement import Measurement
from tests.lab.reports import made_runs
from tests.lab.reports.conftest import read
from tests.lab.reports.made_runs import Made


@pytest.fixture
def axes():
    figure, axes = plt.subplots(figsize=(4.6, 3.1))
    yield axes
    plt.close(figure)


def test_the_sentence_compares_cut_models_with_large_and_small_ones(shallow):
    large, small, cut = shallow
    alike = replace(small, runs=tuple(_ending_with(run, cut) for run in small.runs))
    (said,) = answers([large, alike, cut])
    for group, words in ((cut, "while they train reach {}"), (large, "to the end reach {}")):
        assert words.format(f"{100 * best_known(group).centre:.1f}\u00a0%") in said
    assert f"states from the start reach {100 * best_known(small).centre:.1f}\u00a0%" in said
    assert "of the wall time of the large ones" in said
    assert "3 seeds" in said


def _ending_with(run, group):
    """The run with the final order of a group, on paper."""
    changed = replace(run)
    changed.__dict__["final_orders"] = {"blocks.0.ssm": round(group.order.centre)}
    return changed


def test_without_cuts_the_sentence_says_what_each_model_reaches(shallow):
    (said,) = answers(shallow[:2])
    assert said.startswith("smnist, test accuracy: ")
    assert f"{100 * best_known(shallow[0]).centre:.1f}\u00a0% with 24 states (baseline, order 24)" in said


def test_nothing_is_said_of_what_has_not_finished(odd):
    assert answers([odd["broken", "stopped"]]) == []
    assert answer_chart([odd["broken", "stopped"]]) is None


def test_each_point_has_its_label_and_no_legend_or_star(axes, shallow):
    states, shrinking = answer_chart(shallow).panels
    states.draw(axes)
    texts = [text.get_text() for text in axes.texts]
    assert f"cut to {shallow[-1].order.centre:.1f}" in texts
    assert "24 states" in texts
    assert "shrinks while it trains" in texts
    assert axes.get_legend() is None
    assert axes.get_xscale() == "log"
    assert {points.get_sizes()[0] for points in axes.collections if hasattr(points, "get_sizes")} == {52}
    assert "a layer while it trains" in shrinking.title


def test_the_layer_has_one_line_a_state_and_the_number_that_is_left_between_two_cuts(axes, shallow):
    run = shallow[-1].shown
    answer_chart(shallow).panels[1].draw(axes)
    ((_, path),) = run.order_paths.items()
    orders = [text.get_text().removesuffix(" states") for text in axes.texts]
    assert orders == [str(order) for _, order in path]
    lines = [line for line in axes.lines if line.get_linestyle() == "-"]
    wide = [line for line in lines if line.get_linewidth() == 2.0]
    assert (len(lines), len(wide)) == (24, path[-1][1])


def test_labels_of_points_at_one_height_do_not_cover_each_other(axes):
    points = [Point(f"model {k}", 4.0, 95.0 + 0.1 * k, 1.0, "95 %", "black") for k in range(4)]
    states_panel("a task", "test accuracy, %", points, None).draw(axes)
    axes.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 8
    assert not [(a, b) for k, a in enumerate(boxes) for b in boxes[:k] if a.overlaps(b)]


def test_an_accuracy_above_100_per_cent_has_no_tick(axes):
    point = Point("large", 128.0, 99.5, 0.9, "99.5 %", "black")
    states_panel("a task", "test accuracy, %", [point, replace(point, states=4.0)], (point, point)).draw(axes)
    assert axes.get_ylim()[1] > 100
    assert max(axes.get_yticks()) <= 100


def test_a_group_has_one_colour_in_all_pictures(axes, shallow):
    colours = colours_of(shallow)
    assert len(set(colours.values())) == 3
    charts = [answer_chart(shallow).panels[0], outcome_chart(shallow).panels[0], training_chart(shallow).panels[0]]
    for k, panel in enumerate(charts):
        axes.clear()
        panel.draw(axes)
        known = {line.get_color() for line in axes.lines} | {
            plt.matplotlib.colors.to_hex(part.get_facecolor()[0]).upper()
            for part in axes.collections
            if len(part.get_facecolor())
        }
        assert set(colours.values()) <= known, k


def test_the_picture_of_the_readme_is_drawn_from_two_results(tmp_path):
    models = {"large": (128, 98.5), "small": (4, 94.9), "compressed": (4, 98.0), "white noise": (4, 91.9)}
    rows = [
        {"model": model, "seed": seed, "order": order, "accuracy": value + seed}
        for model, (order, value) in models.items()
        for seed in range(2)
    ]
    spectra = [{"seed": 0, "step": step, "order": order, "sigma": "3 2 1"} for step, order in ((0, 3), (60, 2))]
    picture = tmp_path / "demo.png"
    draw_demo(Measurement("demo", "", 1, rows), Measurement("demo-spectra", "", 1, spectra), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_regression_says_which_way_is_better_and_shows_both_errors(tmp_path):
    for seed in range(2):
        made_runs.write(Made("engines", "baseline", seed, regression=True, errors=True), tmp_path)
        made_runs.write(Made("engines", seed=seed, regression=True, errors=True, cuts=made_runs.CUTS), tmp_path)
    groups = group_runs(read(tmp_path))
    (said,) = answers(groups)
    assert "(test MSE, lower is better; 2 seeds)" in said
    assert "%" not in said.split("Training takes")[0]
    table = result_grid(groups)
    cut = dict(zip(table.heads, table.rows[-1], strict=True))
    assert f"{float(cut['test MSE'].split(' ± ')[0]):.3g}" in said
    mse, mae = (float(cut[head].split(" ± ")[0]) for head in ("test MSE", "test MAE"))
    assert mae == pytest.approx(1.5 / 4 * mse, rel=1e-2)


def test_models_that_no_cut_made_smaller_are_not_called_cut(tmp_path):
    made_runs.write(Made(label="baseline", order=24), tmp_path)
    run = made_runs.write(Made(order=24, cuts=made_runs.CUTS), tmp_path)
    (run / "cuts.jsonl").unlink()
    lines = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    for line in lines:
        line["orders"] = dict.fromkeys(line["orders"], 24)
    (run / "timings.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (said,) = answers(group_runs(read(tmp_path)))
    assert "cut to" not in said
    assert "with 24 states (compressed)" in said
