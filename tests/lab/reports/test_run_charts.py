import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from matplotlib import pyplot as plt

from compressm_lab.reports.curve_charts import mark_cuts, order_paths_chart, training_chart
from compressm_lab.reports.hankel_charts import SNAPSHOTS, hankel_chart, histories
from compressm_lab.reports.outcome_charts import outcome_chart
from compressm_lab.reports.panels import (
    Chart,
    Panel,
    inline_svg,
    label_ends,
    legend_below,
    plain_ticks,
    short_names,
    write_files,
)
from compressm_lab.reports.time_charts import cuts_of, phases, stages_of, time_chart, timer_chart
from compressm_lab.runs.directory import RunDirectory, Status
from compressm_lab.runs.groups import group_runs
from compressm_lab.runs.records import Spectrum, Timing
from compressm_lab.runs.run import read_run
from tests.lab.reports.made_runs import Made, write


@pytest.fixture
def axes():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def drawn(panel):
    """The texts of a panel, drawn without a file."""
    figure, axes = plt.subplots()
    try:
        panel.draw(axes)
        return [text.get_text() for text in axes.texts]
    finally:
        plt.close(figure)


def points(panel):
    """The heights at which a panel has points."""
    figure, axes = plt.subplots()
    try:
        panel.draw(axes)
        marked = [line for line in axes.lines if line.get_marker() not in ("", "None", None)]
        return [float(height) for line in marked for height in line.get_ydata()]
    finally:
        plt.close(figure)


def group_of(made, folder):
    return group_runs([read_run(RunDirectory(write(made, folder)))])[0]


def test_a_shallow_model_has_four_hankel_panels_and_a_deep_one_a_row_a_block(shallow, tmp_path):
    assert [len(row) for row in hankel_chart(shallow[-1]).rows] == [2, 2]
    deep = hankel_chart(group_of(Made(depth=6, order=4, cuts=((1000, 0.5),), every=1000), tmp_path))
    assert [len(row) for row in deep.rows] == [4] * 6
    assert [row[0].title for row in deep.rows] == [f"blocks.{k}: values σ" for k in range(6)]


@pytest.mark.parametrize(
    "name", [("regression", "one seed"), ("restored", "guarded"), ("broken", "diverged"), ("broken", "stopped")]
)
def test_every_chart_of_an_odd_run_can_be_drawn(odd, name):
    group = odd[name]
    charts = [chart([group]) for chart in (outcome_chart, training_chart, order_paths_chart, time_chart)]
    charts += [hankel_chart(group), timer_chart(group)]
    panels = [panel for chart in charts if not isinstance(chart, str) for panel in chart.panels]
    assert len(panels) >= 9
    for panel in panels:
        drawn(panel)
        assert panel.words


def test_a_run_without_records_gives_sentences_not_figures(odd):
    (group,) = (found for (name, _), found in odd.items() if name == "empty")
    charts = [chart([group]) for chart in (outcome_chart, training_chart, order_paths_chart, time_chart)]
    charts += [hankel_chart(group), timer_chart(group)]
    assert all(isinstance(chart, str) and chart.endswith(".") for chart in charts)


def test_bounds_that_were_not_recorded_have_no_panel_and_are_said_to_be_missing(odd, shallow):
    chart = hankel_chart(odd["regression", "one seed"])
    assert [[panel.title for panel in row] for row in chart.rows] == [["values σ", "states followed", "bottom share"]]
    assert "were not recorded" in chart.caption
    assert "δH" not in chart.caption
    assert "were not recorded" not in hankel_chart(shallow[-1]).caption


def test_a_single_snapshot_is_drawn_as_points_and_said_to_be_alone(tmp_path):
    """Lines through one point have no length: the panels were empty."""
    made = Made(order=12, every=10_000, cuts=((20_000, 0.5),), state="interrupted")  # stopped before its next snapshot
    chart = hankel_chart(group_of(made, tmp_path))
    values, paths, shares = chart.panels
    assert len(points(paths)) == 12
    assert len(points(shares)) == 4
    assert all(height > 0 for height in points(paths) + points(shares))
    assert "were not recorded" not in chart.caption
    assert values.words.count("at step 0") == 1
    assert "One snapshot" in paths.words
    assert "There is one snapshot: points instead of lines" in chart.caption


def test_lines_of_several_snapshots_have_no_points(shallow):
    chart = hankel_chart(shallow[-1])
    assert points(chart.panels[3]) == []
    assert "one snapshot" not in chart.caption


def test_snapshots_after_the_last_status_are_on_the_panel(axes, tmp_path):
    path = write(Made(order=4, cuts=((20_000, 0.5),), every=1000, state="running"), tmp_path)
    RunDirectory(path).write_status(Status("running", 0, 10_000))
    (group,) = group_runs([read_run(RunDirectory(path))])
    hankel_chart(group).panels[2].draw(axes)
    assert axes.get_xlim() == (0, 5000)


def test_a_loss_that_is_no_number_is_said_with_its_step(odd):
    assert "is no number from step 2750 on" in training_chart([odd["broken", "diverged"]]).caption


def test_a_restoration_is_said_with_its_reason_and_marked(odd):
    group = odd["restored", "guarded"]
    chart = order_paths_chart([group])
    assert "accuracy 0.912 is below 0.99 times 0.951" in chart.caption
    assert any(text.startswith("back to") for text in drawn(chart.panels[0]))


def test_without_a_reference_the_chart_says_so_and_has_no_speed_up(odd, shallow):
    alone = outcome_chart([odd["restored", "guarded"]])
    assert "No speed-up for restored (guarded) at order 64" in alone.caption
    assert len(alone.panels) == 1
    assert [panel.title for panel in outcome_chart(shallow).panels] == [
        "smnist: against final order",
        "smnist: against speed-up",
    ]


def test_groups_of_one_order_stand_side_by_side_over_whole_orders(axes, shallow):
    cut = shallow[-1]
    outcome_chart([replace(cut, label=label) for label in "abc"]).panels[0].draw(axes)
    places = [tuple(points.get_offsets()[0]) for points in axes.collections if points.get_label() in tuple("abc")]
    assert len(places) == 3
    assert {round(height, 6) for _, height in places} == {round(100 * cut.top(3).centre, 6)}
    assert [round(order - cut.order.centre, 6) for order, _ in places] == [-0.08, 0, 0.08]
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert ticks
    assert all(tick == round(tick) for tick in ticks)


def test_points_that_differ_stand_at_their_own_orders(axes, shallow):
    outcome_chart(shallow).panels[0].draw(axes)
    places = {points.get_label(): points.get_offsets()[0][0] for points in axes.collections}
    assert places[shallow[-1].label] == shallow[-1].order.centre


def test_many_groups_of_one_order_stay_near_it(axes, shallow):
    names = [f"group {k}" for k in range(20)]
    outcome_chart([*shallow[:2], *(replace(shallow[-1], label=name) for name in names)]).panels[0].draw(axes)
    places = [points.get_offsets()[0][0] for points in axes.collections if points.get_label() in names]
    wide = shallow[0].order.centre / min(shallow[1].order.centre, shallow[-1].order.centre)
    assert max(places) / min(places) == pytest.approx(wide**0.16)


def test_a_long_legend_has_room_below_its_panel_and_no_label_leaves_it(tmp_path, recwarn):
    labels = [f"setting {k}, orders [64, 32, 16, 8, 4], temperature 2.0, fold True" for k in range(12)]

    def draw(axes):
        for label in labels:
            axes.plot([0, 1], [0, 1], label=label)
        legend_below(axes)

    (path,) = write_files(Chart("long", "", "", ((Panel("p", "", draw), Panel("q", "", draw)),)), tmp_path, ["png"])
    height, width, _ = plt.imread(path).shape
    assert (width, height > 2.9 * 200 + 24 * 20) == (1600, True)
    assert 'viewBox="0 0 288 ' in inline_svg(Panel("p", "", draw), key="k", size=(4.0, 2.9))
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("part", ["regulariser", "distillation"])
def test_models_with_a_penalty_or_a_teacher_have_a_name_of_their_own(axes, shallow, part):
    large, small = shallow[:2]
    taught = replace(small, label="taught", runs=tuple(_with(run, part) for run in small.runs))
    for panel in outcome_chart([large, taught]).panels:
        axes.clear()
        panel.draw(axes)
        assert [text.get_text() for text in axes.get_legend().get_texts()] == [large.label, "taught"]


def _with(run, part):
    return replace(run, config={**run.config, part: {"beta": 0.1}})


def test_cuts_that_are_near_share_a_label_and_others_have_their_own(axes, shallow):
    run = shallow[-1].shown
    axes.set_xlim(0, 10_000)
    mark_cuts(axes, run)
    assert [text.get_text() for text in axes.texts] == [f"4 cuts → {run.mean_order:.3g}"]
    axes.set_xlim(0, 1100)
    mark_cuts(axes, run)
    assert len(axes.texts) == 1 + 4
    assert len(axes.lines) == 2 * 4


def test_trajectories_start_anew_after_a_restoration(odd):
    (history,) = histories(odd["restored", "guarded"].shown)
    first, second = history.stretches()
    assert first.values.shape[1] == 64
    assert second.values.shape[1] == len(history.snapshots[-1].sigma)
    assert first.steps[-1] < second.steps[0]


def test_long_histories_are_thinned_but_keep_both_sides_of_a_cut(tmp_path):
    run = group_of(Made(order=4, cuts=((3000, 0.5),), every=25), tmp_path).shown
    (history,) = histories(run)
    assert history.recorded == 401
    assert SNAPSHOTS / 2 < len(history.snapshots) <= SNAPSHOTS + 3
    assert {0, 3000, 3025, 10_000} <= set(history.steps)


def recorded(folder, spectra):
    directory = RunDirectory(write(Made(order=len(spectra[0]), spectra=False), folder))
    directory.append(*(Spectrum(k, "blocks.0.ssm", sigma, None) for k, sigma in enumerate(spectra)))
    (history,) = histories(read_run(directory))
    return history.stretches()[0]


def test_states_that_move_slowly_are_followed_through_a_crossing(tmp_path):
    falling = [[1 - 0.01 * k, 0.505 + 0.01 * k] for k in range(50)]
    stretch = recorded(tmp_path, [sorted(sigma, reverse=True) for sigma in falling])
    assert (stretch.resolved, stretch.crossings) == (True, 1)
    assert stretch.values[-1].tolist() == pytest.approx(falling[-1])


def test_states_that_move_further_than_their_distance_are_followed_by_rank(tmp_path):
    moving = [[3.0 + 0.5 * math.sin(5 * k), 2.0 + 0.4 * math.sin(3 * k), 1.0] for k in range(50)]
    spectra = [sorted(sigma, reverse=True) for sigma in moving]
    # A cut that removed the largest.
    stretch = recorded(tmp_path, [*spectra, spectra[-1][1:]])
    assert not stretch.resolved
    assert stretch.values[:-1].tolist() == spectra
    assert stretch.values[-1, 1:].tolist() == spectra[-1][1:]
    assert math.isnan(stretch.values[-1, 0])


def test_phases_and_stages_hold_all_recorded_seconds(shallow):
    group = shallow[-1]
    seconds = sum(sum(timing.seconds.values()) for timing in group.shown.timings)
    assert math.isclose(sum(sum(stage.seconds.values()) for stage in stages_of(group.shown)), seconds)
    assert list(phases(group, "wall time"))[:2] == ["steps", "data"]
    orders = [stage.order for stage in stages_of(group.shown)]
    assert orders == sorted(orders, reverse=True)
    assert len(orders) == 5


def test_a_cut_took_what_was_recorded_with_it_and_its_capture_after(shallow):
    cuts = cuts_of(shallow[-1].shown)
    assert [(spent["cut"], spent["optimizer"], spent["capture"]) for spent in cuts] == [(0.05, 0.008, 0.05)] * 4
    assert all(spent["spectrum"] > 0 for spent in cuts)
    assert cuts_of(shallow[0].shown) == []


def test_an_inline_panel_is_whole_svg_with_words_and_colours_of_the_page():
    panel = Panel('a "title" <b>', "words & more", lambda axes: axes.set_xticks([0.1251, 0.1252]))
    text = inline_svg(panel, key="k-1", size=(3.0, 2.0))
    root = ElementTree.fromstring(text)
    assert root.attrib["aria-label"] == 'a "title" <b>. words & more'
    assert "var(--ink)" in text
    assert "#1f2328" not in text
    assert all(name.startswith("k-1-") for name in (e.get("id") for e in root.iter()) if name)
    # Coordinates are rounded, numbers that are read are not.
    assert "0.1251" in text


def test_labels_at_the_ends_of_lines_do_not_overlap(axes):
    label_ends(axes, {"a": (0.50, "red"), "b": (0.51, "red"), "c": (0.9, "red")})
    heights = sorted(text.get_position()[1] for text in axes.texts)
    assert heights[1] - heights[0] > 0.08
    assert len(heights) == 3


@pytest.mark.parametrize(("low", "high"), [(76, 162), (110, 180), (0.011, 0.019), (3, 40), (1e-4, 1e4)])
def test_a_logarithmic_axis_has_labels_however_narrow_it_is(axes, low, high):
    axes.plot([0, 1], [low, high])
    axes.set_yscale("log")
    plain_ticks(axes)
    axes.figure.canvas.draw()
    bottom, top = axes.get_ylim()
    inside = [label.get_text() for label in axes.get_yticklabels() if bottom <= label.get_position()[1] <= top]
    assert len([text for text in inside if text]) >= 3


@pytest.mark.parametrize(
    ("modules", "short"),
    [
        (("blocks.0.ssm", "blocks.1.ssm"), ["blocks.0", "blocks.1"]),
        (("blocks.0.ssm",), ["blocks.0.ssm"]),
        (("ssm", "a.ssm"), ["ssm", "a.ssm"]),
    ],
)
def test_what_all_modules_share_at_their_end_is_left_out(modules, short):
    assert list(short_names(modules).values()) == short


def test_files_are_written_whole_in_every_format(shallow, tmp_path):
    files = write_files(order_paths_chart(shallow), tmp_path / "figures", ["png", "pdf"])
    assert [file.read_bytes()[:4] for file in files] == [b"\x89PNG", b"%PDF"]
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["orders.pdf", "orders.png"]


def test_an_evaluation_is_timed_by_itself_and_not_where_there_was_none(shallow):
    timings = (
        Timing(10, 10, {"ssm": 8}, {"steps": 1.0}),
        Timing(20, 10, {"ssm": 4}, {"steps": 0.5, "evaluation": 0.2}),
        Timing(30, 10, {"ssm": 4}, {"steps": 0.5, "evaluation": 0.4}),
    )
    large, small = stages_of(replace(shallow[0].runs[0], timings=timings))
    assert large.per_evaluation is None
    assert small.per_evaluation == pytest.approx(300)


def test_bars_have_air_above_them_and_percentages_inside(axes, shallow):
    timings = tuple(
        Timing(10 * k, 10, {"ssm": 9 - k}, {"steps": 1.0 / k, "checkpoint": 0.1 * (k == 8)}) for k in range(1, 9)
    )
    run = replace(shallow[-1].runs[0], timings=timings)
    timer_chart(replace(shallow[-1], runs=(run,))).panels[3].draw(axes)
    assert axes.get_ylim()[1] >= 1.04 * 100
    bar = axes.patches[0].get_window_extent()
    shares = [text.get_window_extent() for text in axes.texts]
    assert axes.texts[0].get_text() == "100%"
    assert all(share.width < bar.width for share in shares)
