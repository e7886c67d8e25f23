import json
import re
import shlex
from dataclasses import replace
from html import unescape
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from compressm_lab.reports import run_report
from compressm_lab.reports.answer_chart import answers
from compressm_lab.reports.grid import clock, file_name, listed, number, order, percent, plus_minus, rounded, steps
from compressm_lab.reports.run_report import (
    command,
    cut_grid,
    machine_grid,
    recipe_grid,
    result_grid,
    run_grid,
    write_report,
)
from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.groups import Statistic, group_runs
from compressm_lab.runs.records import RunError
from compressm_lab.runs.run import read_run
from tests.lab.reports.made_runs import Made, write


def columns(grid):
    return {head: [row[k] for row in grid.rows] for k, head in enumerate(grid.heads)}


def test_results_are_those_of_the_groups(shallow):
    found = columns(result_grid(shallow))
    assert found["runs"] == ["baseline, order 24", "baseline, order 6", "compressed"]
    assert found["speed-up by wall time"][0] == "reference"
    assert found["seeds"] == ["3", "3", "3"]
    compressed = shallow[-1]
    assert found["layers × order"][-1] == f"1 × 24 → {order(compressed.order)}"
    assert found["test, %"][-1] == plus_minus(compressed.top(), factor=100.0)
    assert "top 3" not in found  # of three seeds it would be the mean again
    parts = found["error bound"][-1].split("\n")[1].split(" + ")
    assert len(parts) == 4
    assert sum(map(float, parts)) == pytest.approx(sum(compressed.bounds_by_cut), rel=0.1)


def test_more_than_three_seeds_are_also_counted_as_the_paper_counts(shallow, tmp_path):
    assert "top 3 by test" not in result_grid(shallow).heads
    made = [Made(name="several", seed=k, best=0.9 + 0.01 * k, spectra=False) for k in range(5)]
    (group,) = group_runs(read_run(RunDirectory(write(one, tmp_path))) for one in made)
    found = columns(result_grid([*shallow, group]))
    tests = sorted((group.score(run).test for run in group.runs), reverse=True)
    assert found["top 3 by test"][-1] == plus_minus(Statistic.of(tests[:3]), factor=100.0)
    assert found["top 3 by test"][:3] == ["–"] * 3
    assert group.best(5).centre == pytest.approx(group.top().centre)
    assert group.best(6) is None


def test_recipes_say_their_penalty_and_teacher_where_any_has_one(shallow):
    assert recipe_grid(shallow).heads == ("runs", "model", "training", "compression")
    large, small = shallow[:2]
    ways = {"regulariser": {"kind": "modal-l1", "beta": 0.1, "hold": True}, "distillation": {"teacher": "runs/a_b"}}
    taught = replace(small, runs=tuple(replace(run, config={**run.config, **ways}) for run in small.runs))
    found = columns(recipe_grid([large, taught]))
    assert found["penalty"] == ["none", "kind modal-l1, beta 0.1, hold on"]
    assert found["teacher"] == ["none", "teacher runs/a_b"]
    assert "cut once after training" not in found


def test_losses_and_accuracies_may_share_a_table(odd):
    found = columns(result_grid(list(odd.values())))
    values = dict(zip(found["runs"], found["test"], strict=True))
    assert values["regression, one seed"].startswith("0.1")
    assert values["restored, guarded"].startswith("95.")


def test_runs_that_did_not_finish_are_shown_as_such(odd):
    found = columns(run_grid(list(odd.values())))
    states = dict(zip(found["run"], found["state"], strict=True))
    assert states["broken, diverged"] == "failed: loss is NaN at step 2600"
    assert states["broken, stopped"] == "interrupted"
    assert states["broken, going on"] == "running"
    assert {"0 of 1"} == {row[-1] for row in result_grid([odd["broken", "stopped"]]).rows}


def test_a_cut_that_was_undone_is_marked(odd):
    run = odd["restored", "guarded"].shown
    orders = columns(cut_grid(run))["order"]
    assert [row.split(", ")[-1] for row in orders][1:] == ["undone", f"back to {run.cut_records[0].rank}"]


def test_runs_of_one_machine_are_one_row(shallow):
    grid = machine_grid(run for group in shallow for run in group.runs)
    assert [row[-1] for row in grid.rows] == ["9"]


def test_the_page_needs_nothing_else_and_has_every_part(page):
    text = page.read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text.replace("xlink:href", "href"))
    assert "<link" not in text.replace('<link rel="icon" href="data:,">', "")
    for key in ("trained", "results", "accuracy", "training", "orders", "hankel", "time", "runs", "again"):
        assert f'<section id="{key}">' in text
        assert f'<a href="#{key}">' in text
    assert text.count('role="img"') > 20
    assert re.search(r"compressm train \S+/config.json --out \S+-again", text)


def test_the_page_escapes_what_runs_say(page):
    text = page.read_text()
    assert "<b>only</b>" not in text
    assert escape("<b>only</b> begun & nothing more") in text


def test_the_page_says_what_did_not_finish(page):
    assert "Of 9 runs, 2 running, or ended without a word." in unescape(page.read_text())


def test_hankel_values_of_uncut_models_are_folded_away_where_others_were_cut(shallow, monkeypatch, tmp_path):
    monkeypatch.setattr(run_report, "inline_svg", lambda *_, **__: "")

    def folded(groups):
        text = write_report([run for group in groups for run in group.runs], tmp_path, formats=[]).read_text()
        section = text[text.index('<section id="hankel">') :].split("</section>")[0]
        return section.count("<figure"), section.count("<details>")

    assert folded(shallow) == (4, 2)  # and the walk through the spectrum of what was cut
    assert folded(shallow[:2]) == (4, 0)


def test_figures_lie_beside_the_page_and_nothing_half_written(tmp_path):
    run = read_run(RunDirectory(write(Made(spectra=False), tmp_path / "runs")))
    page = write_report([run], tmp_path / "out", formats=["png"])
    names = {path.name for path in (page.parent / "figures").iterdir()}
    assert names == {"answer.png", "accuracy.png", "training.png", "time.png"}
    assert {path.name for path in page.parent.iterdir()} == {"report.html", "figures"}


def test_a_report_of_nothing_is_refused(tmp_path):
    with pytest.raises(RunError, match="no runs given"):
        write_report([], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_trains_the_run_again_from_what_it_wrote_down(shallow):
    run = shallow[0].runs[0]
    words = shlex.split(command(run))
    assert words[:2] == ["compressm", "train"]
    assert json.loads(Path(words[2]).read_text()) == run.config
    assert not Path(words[words.index("--out") + 1]).exists()


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (plus_minus(Statistic(0.97214, 0.0015, 3), factor=100.0), "97.21 ± 0.15"),
        (plus_minus(Statistic(0.5, None, 1)), "0.50"),
        (plus_minus(None), "–"),
        (rounded(Statistic(18.2, 0.04, 3)), "18.20 ± 0.04"),
        (rounded(Statistic(1234.5, 20.0, 3)), "1234 ± 20"),
        (rounded(Statistic(1.2e-5, 3e-6, 3)), "1.20e-05 ± 3.0e-06"),
        (order(Statistic(64.0, 0.0, 3)), "64"),
        (order(Statistic(57.4, 1.52, 3)), "57.4 ± 1.5"),
        (clock(Statistic(0.04, None, 1)), "40.0 ms"),
        (clock(Statistic(44.8, 0.1, 3)), "44.8 ± 0.1 s"),
        (clock(Statistic(600.0, 6.0, 3)), "10.0 ± 0.1 min"),
        (clock(Statistic(36_000.0, 360.0, 3)), "10.0 ± 0.1 h"),
        (number(float("nan")), "no number"),
        (number(None), "–"),
        (percent(0.1234), "12.34 %"),
        (steps(200_000), "200\u202f000"),
        (listed(["a", "b", "c"]), "a, b and c"),
        (listed(["a"]), "a"),
        (file_name("timer", "A task", "tau 0.1, no/where"), "timer-a-task-tau-0-1-no-where"),
    ],
)
def test_numbers_are_printed_with_care(said, text):
    assert said == text


def _on_a_clock(run, *, cpu, load):
    """The run with this much CPU time at this load, both in its first record."""
    first, *others = run.timings
    spent = [replace(timing, cpu={"steps": 0.0}, load=load) for timing in others]
    return replace(run, timings=(replace(first, cpu={"steps": cpu}, load=load), *spent))


def test_speed_ups_do_not_depend_on_what_else_the_machine_did(shallow):
    """A busy machine once showed a speed-up of 5.64 for a model that was cut, and 4.27 for a smaller one."""
    spent = (8.0, 2.0, 4.0)  # CPU seconds; wall times are those of the fixture, whatever they are
    groups = [
        replace(group, runs=tuple(_on_a_clock(run, cpu=cpu, load=7.5) for run in group.runs))
        for group, cpu in zip(shallow, spent, strict=True)
    ]
    found = columns(result_grid(groups))
    assert found["speed-up by CPU time"] == ["reference", "4.00 ± 0.00 ×", "2.00 ± 0.00 ×"]
    assert found["CPU time"] == ["8.00 ± 0.00 s", "2.00 ± 0.00 s", "4.00 ± 0.00 s"]
    assert found["load"] == ["7.5"] * 3
    assert found["wall time"] == columns(result_grid(shallow))["wall time"]
    assert "Training takes 50 % of the CPU time of the large ones" in answers(groups)[0]


def test_groups_with_other_clocks_say_which_beside_each_speed_up(shallow):
    timed = [replace(group, runs=tuple(_on_a_clock(run, cpu=4.0, load=1.0) for run in group.runs)) for group in shallow]
    other = [
        replace(group, runs=tuple(replace(run, config={**run.config, "name": "elsewhere"}) for run in group.runs))
        for group in shallow
    ]
    found = columns(result_grid([*timed, *other]))
    assert found["speed-up"][1] == "1.00 ± 0.00 × by CPU time"
    assert found["speed-up"][-1].endswith("× by wall time")
    assert found["CPU time"][-1] == "–"
