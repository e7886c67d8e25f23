"""A run whose records cannot be true is left out of a report by name, and the others are still reported."""

import json
import os
import re

import pytest

from compressm_lab.runs.directory import RunDirectory
from compressm_lab.runs.groups import gather
from compressm_lab.runs.records import DecisionRecord, RunError, TruncationRecord
from tests.lab.reports.made_runs import Made, write

MADE = Made(order=16, steps=100, every=10, cuts=((20, 0.5), (40, 0.5)), best=0.99)


@pytest.fixture
def runs(tmp_path):
    write(Made(**{**vars(MADE), "seed": 1, "best": 0.9}), tmp_path)
    return tmp_path, write(MADE, tmp_path)


def value(key, new, of=r"[^,}]+"):
    """Put another value behind a key, wherever it is."""
    return lambda text: re.sub(rf'"{key}": {of}', f'"{key}": {new}', text)


def first_line_gone(text):
    return text.split("\n", 1)[1]


def line_gone(*numbers):
    def spoil(text):
        lines = text.splitlines(keepends=True)
        gone = {number % len(lines) for number in numbers}
        return "".join(line for number, line in enumerate(lines) if number not in gone)

    return spoil


DAMAGES = [
    ("metrics.jsonl", value("seconds", "NaN"), r", line 1: seconds is nan, expected a finite number of at least 0"),
    ("metrics.jsonl", value("seconds", "-5.0"), r", line 1: seconds is -5\.0, expected a finite number"),
    ("metrics.jsonl", value("accuracy", "1" + "0" * 400), r", line 1: accuracy is 10+, expected a number from 0 to 1"),
    ("metrics.jsonl", value("accuracy", "1" + "0" * 5000), r", line 1: it is not JSON"),
    ("metrics.jsonl", value("accuracy", "5000"), r", line 1: accuracy is 5000, expected a number from 0 to 1 or null"),
    ("metrics.jsonl", value("step", "9" * 23), r", line 1: step is 9+, expected an integer of at least 0"),
    ("metrics.jsonl", lambda text: text.replace('"step": 100', '"step": 6000'), " has step 6000, and the run has 100"),
    ("metrics.jsonl", lambda text: "", " ends at step 0, and the run finished at step 100"),
    ("metrics.jsonl", lambda text: text[: len(text) // 2], r" ends at step 50, and the run finished at step 100"),
    ("metrics.jsonl", lambda text: text[:-30], " lacks test of step 100: the file is damaged; put it back as it was"),
    ("metrics.jsonl", line_gone(-1), " lacks test of step 100: the file is damaged; put it back as it was, or train"),
    ("metrics.jsonl", line_gone(9), " lacks train of step 40"),
    ("metrics.jsonl", line_gone(10), " lacks validation of step 40"),
    ("metrics.jsonl", line_gone(9, 10), " lacks train and validation of step 40"),
    ("metrics.jsonl", line_gone(9, 10, 11), " lacks step 40, and the recipe evaluates at multiples of 10"),
    ("metrics.jsonl", value("loss", "NaN"), " has the training loss nan at step 10: the file is damaged"),
    ("timings.jsonl", value("evaluation", "NaN"), r", line 1: seconds is .*, expected finite numbers of at least 0 by"),
    ("timings.jsonl", lambda text: text + text, " counts 10 steps up to step 10, after a line of step 100"),
    ("timings.jsonl", lambda text: text.split("\n")[0] + "\n" + text, " counts 10 steps up to step 10, after a line"),
    ("timings.jsonl", lambda text: text[: len(text) // 2], " ends at step .*, and the run finished at step 100"),
    (
        "spectra.jsonl",
        value("sigma", "[-1", r"\[[^,]+"),
        r", line 1: sigma is \[-1, .*, expected finite numbers of at least 0",
    ),
    (
        "spectra.jsonl",
        value("sigma", "[NaN", r"\[[^,]+"),
        r", line 1: sigma is \[nan, .*, expected finite numbers of at least 0",
    ),
    ("spectra.jsonl", value("weyl_bound", "Infinity"), r", line 1: weyl_bound is inf, expected a finite number of at"),
    (
        "spectra.jsonl",
        lambda text: text.replace('"sigma": [', '"sigma": [9.0, '),
        r" has 17 values of blocks\.0\.ssm at step 0, and the layer had 16 states: the file is damaged",
    ),
    (
        "spectra.jsonl",
        lambda text: re.sub(r'("step": 30, .*"sigma": )\[', rf"\1[{'9.0, ' * 8}", text),
        r" has \d+ values of blocks\.0\.ssm at step 30, and the layer had \d+ states",
    ),
    ("spectra.jsonl", value("sigma", "[]", r"\[[^]]+\]"), r" has 0 values of blocks\.0\.ssm at step 0, and the layer"),
    (
        "spectra.jsonl",
        lambda text: text + text,
        r" has 22 lines where 11 belong, step 0 of blocks\.0\.ssm more than once",
    ),
    ("cuts.jsonl", value("rank", "-2"), r", line 1: rank is -2, expected an integer of at least 1"),
    ("cuts.jsonl", value("rank", "900"), r", line 1: rank is 900, expected at most order, 16"),
    (
        "cuts.jsonl",
        lambda text: "",
        r" does not lead blocks\.0\.ssm to \d+ states, which it has at step \d+ of timings",
    ),
    ("cuts.jsonl", first_line_gone, r", step 40: blocks\.0\.ssm is cut from \d+ states, and it had 16"),
    ("cuts.jsonl", lambda text: text.replace("blocks.0", "blocks.7"), r", step 20: 'blocks\.7\.ssm' is no layer of"),
    ("cuts.jsonl", lambda text: f"5\n{text}", r", line 1: it holds 5; expected energy_lost, error_bound"),
    (
        "cuts.jsonl",
        lambda text: text + '{"step": 50, "orders": {"blocks.0.ssm": -3}, "reason": "x"}\n',
        r", line 3: orders is \{'blocks\.0\.ssm': -3\}, expected integers of at least 1 by name",
    ),
    ("config.json", value("steps", '"x"', "100"), r": training\.steps is 'x', expected an integer of at least 1"),
    ("config.json", value("depth", "null"), r": model\.depth is None, expected an integer of at least 1"),
    ("config.json", value("evaluate_every", "0"), r": training\.evaluate_every is 0, expected an integer of"),
    ("config.json", value("seed", "true"), r": seed is True, expected an integer of at least 0"),
    ("environment.json", value("python", "5", '"[^"]*"'), r": environment\.python is 5, expected str"),
    ("status.json", value("step", "-100", "100"), r": step is -100, expected an integer of at least 0"),
    ("status.json", value("step", "6", "100"), r": finished at step 6 of 100, which cannot be"),
    ("status.json", value("message", "5", '""'), r": message is 5, expected text"),
]


@pytest.mark.parametrize(("file", "spoil", "said"), DAMAGES)
def test_a_record_that_cannot_be_true_is_named_and_the_others_are_reported(file, spoil, said, runs):
    folder, run = runs
    text = (run / file).read_text()
    (run / file).write_text(spoil(text))
    assert (run / file).read_text() != text
    found = gather([folder])
    assert [one.seed for one in found.runs] == [1]
    assert re.search(rf"^{run / file}{said}", "".join(found.broken)), found.broken


@pytest.mark.parametrize("given", ["validation", "test"])
def test_a_copy_that_was_not_recorded_is_named(given, runs):
    folder, run = runs
    stored = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(stored | {"truncation": {"orders": [4, 2]}}))
    for order, split in ((4, "validation"), (4, "test"), (2, given)):
        RunDirectory(run).append(TruncationRecord(100, "modal", order, 4.0, None, split, 0.1, 0.9))
    (said,) = gather([folder]).broken
    assert said.startswith(f"{run / 'truncations.jsonl'} lacks copies cut to order 2: the file is damaged; put it")


def decided(run):
    """Put the decisions of a schedule beside the cuts of the run; a try that cut nothing doubles the gap."""
    steps = [*((5, "wait", 10), (10, "wait", 20), (20, "cut", 25), (25, "keep", 30), (35, "wait", 40))]
    steps += [(40, "cut", 45), (45, "keep", 50), (60, "stop", None)]
    RunDirectory(run).append(*(DecisionRecord(at, action, f"why {at}", again) for at, action, again in steps))


def swapped(first, second):
    def spoil(text):
        lines = text.splitlines(keepends=True)
        lines[first], lines[second] = lines[second], lines[first]
        return "".join(lines)

    return spoil


UNDECIDED = [
    (line_gone(1), r", line 2: it is of step 20, and a line of step 10, where line 1 looks again, is missing"),
    (line_gone(3), r", line 4: it is of step 35, and a line of step 25, where line 3 looks again, is missing"),
    (line_gone(5), r", line 6: it is of step 45, and a line of step 40, where line 5 looks again, is missing"),
    (line_gone(4, 5), r" lacks the cut of step 40 of cuts\.jsonl"),
    (line_gone(6), r", line 7: it is of step 60, and a line of step 45, where line 6 looks again, is missing"),
    (line_gone(7, 6), r" ends with line 6, of step 40, which looks again at step 45"),
    (swapped(0, 1), r", line 2: it is of step 5, and line 1 looks again at step 20"),
    (swapped(3, 4), r", line 4: it is of step 35, and a line of step 25"),
    (swapped(4, 5), r", line 6: it is of step 35, and line 5 looks again at step 45"),
    (lambda text: text + text, r", line 9: it is of step 5, and line 8 is of the last look"),
    (swapped(6, 7), r", line 7: it is of step 60, and a line of step 45"),
    (line_gone(0, 1, 2, 3, 4, 5, 6, 7), r" lacks the cut of step 20 of cuts\.jsonl"),
]


@pytest.mark.parametrize(("spoil", "said"), UNDECIDED)
def test_decisions_that_are_missing_or_out_of_order_are_named_by_file_and_line(spoil, said, runs):
    folder, run = runs
    stored = json.loads((run / "config.json").read_text())
    stored["compression"]["when"] = {"automatic": True}
    (run / "config.json").write_text(json.dumps(stored))
    decided(run)
    file = run / "decisions.jsonl"
    assert gather([folder]).broken == ()
    file.write_text(spoil(file.read_text()))
    found = gather([folder])
    assert [one.seed for one in found.runs] == [1]
    assert re.search(rf"^{file}{said}.*: the file is damaged; put it back as it was", "".join(found.broken)), found


def test_a_decision_to_cut_without_a_cut_is_named(runs):
    folder, run = runs
    RunDirectory(run).append(DecisionRecord(20, "cut", "a", 30), DecisionRecord(30, "cut", "b", 40))
    RunDirectory(run).append(DecisionRecord(40, "cut", "c", None))
    (said,) = gather([folder]).broken
    assert said.startswith(f"{run / 'decisions.jsonl'}, line 2: it cuts at step 30, and cuts.jsonl has no cut there")


def test_decisions_of_a_run_that_was_cut_off_or_restored_may_end_early(tmp_path):
    for k, more in enumerate(({"state": "interrupted"}, {"restored": True})):
        run = write(Made(**{**vars(MADE), "seed": k, "cuts": ((20, 0.5),), **more}), tmp_path)
        RunDirectory(run).append(DecisionRecord(20, "cut", "a", 30))
    assert gather([tmp_path]).broken == ()


def test_decisions_that_were_edited_after_the_run_are_named(runs):
    folder, run = runs
    decided(run)
    file = run / "decisions.jsonl"
    text, stored = file.read_text(), json.loads((run / "status.json").read_text())
    digests = {name: digest for name, (_, digest) in RunDirectory(run).digests().items()}
    (run / "status.json").write_text(json.dumps(stored | {"records": digests}))
    assert gather([folder]).broken == ()
    file.write_text(text.replace("why 25", "why not"))
    (said,) = gather([folder]).broken
    assert said.startswith(f"{file} is not the file that the run ended with")


def test_a_run_as_training_leaves_it_is_not_damaged(runs):
    found = gather([runs[0]])
    assert (len(found.runs), found.broken) == (2, ())


def unfinished(run):
    stored = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(stored | {"state": "running", "step": 20}))


def test_files_of_a_run_that_was_cut_off_may_end_at_different_steps(runs):
    folder, run = runs
    unfinished(run)
    (run / "cuts.jsonl").write_text("")
    (run / "metrics.jsonl").write_text("")
    assert gather([folder]).broken == ()


@pytest.mark.parametrize("left", [14, 13, 12, 4])
def test_the_last_evaluation_of_a_run_that_was_cut_off_may_be_half_written(left, runs):
    folder, run = runs
    unfinished(run)
    (run / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(keepends=True)[:left]))
    assert gather([folder]).broken == ()


def test_an_earlier_evaluation_of_a_run_that_was_cut_off_has_all_splits(runs):
    folder, run = runs
    unfinished(run)
    (run / "metrics.jsonl").write_text(line_gone(5)((run / "metrics.jsonl").read_text()))
    (said,) = gather([folder]).broken
    assert said.startswith(f"{run / 'metrics.jsonl'} lacks test of step 20")


def test_a_recipe_that_does_not_say_how_often_is_evaluated_twenty_times(runs):
    folder, run = runs
    stored = json.loads((run / "config.json").read_text())
    del stored["training"]["evaluate_every"]
    (run / "config.json").write_text(json.dumps(stored))
    (said,) = gather([folder]).broken
    assert "lacks step 5, and the recipe evaluates at multiples of 5" in said


@pytest.mark.parametrize("file", ["metrics.jsonl", "cuts.jsonl", "timings.jsonl", "spectra.jsonl", "environment.json"])
def test_a_pipe_in_the_place_of_a_file_is_named(file, runs):
    folder, run = runs
    (run / file).unlink()
    os.mkfifo(run / file)
    (said,) = gather([folder]).broken
    assert said == f"{run / file} is no regular file, expected one of a run: move it away"
    if file.endswith("l"):
        with pytest.raises(RunError, match="is no regular file"):
            RunDirectory(run).rewind(20)
