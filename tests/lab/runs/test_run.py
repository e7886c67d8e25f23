import json
from math import isclose
from statistics import mean, stdev
from typing import get_args

import pytest

from compressm_lab.runs.directory import RunDirectory, Status, find_runs
from compressm_lab.runs.groups import Statistic, group_runs, reference, speed_up, speed_ups, time_kind
from compressm_lab.runs.paper import UNCUT, Compared, Exhibit
from compressm_lab.runs.records import CutRecord, Evaluation, RestoredRecord, RunError, SplitName, Timing
from compressm_lab.runs.run import read_run

CONFIG = {
    "name": "task",
    "label": "compressed",
    "seed": 0,
    "model": {"layer": "LRU", "depth": 1, "width": 2, "order": 8},
    "training": {"steps": 100, "batch": 4, "evaluate_every": 100},
    "compression": {"tau": 0.1},
}
BASELINE = {"label": "baseline", "compression": None}


def evaluated(step, split, accuracy, *, loss=1.0, seconds=None):
    return Evaluation(step, split, loss, accuracy, 1e-3, float(step if seconds is None else seconds), 0.0)


def cut(step, order, rank, *, module="ssm", bound=0.5):
    return CutRecord(step, module, order, rank, bound, None, 0.1, 0.01)


def made(folder, *records, state="finished", **changes):
    directory = RunDirectory(folder)
    directory.begin({**CONFIG, **changes})
    if state == "finished":  # the last step is always evaluated, and every evaluation has all splits
        there = {(record.step, record.split) for record in records if isinstance(record, Evaluation)}
        wanted = ((step, split) for step in {100, *(step for step, _ in there)} for split in get_args(SplitName))
        records += tuple(evaluated(*pair, None, seconds=0) for pair in wanted if pair not in there)
    directory.append(*sorted(records, key=lambda record: record.step))
    directory.write_status(Status(state, 100, 100))
    return read_run(directory)


def scores(*pairs, step=100, seconds=None):
    return [
        evaluated(step, split, value, seconds=seconds)
        for pair in pairs
        for split, value in zip(("validation", "test"), pair, strict=True)
    ]


def test_the_score_is_the_test_value_at_the_best_validation(tmp_path):
    run = made(tmp_path / "a", *scores((0.8, 0.7), step=10), *scores((0.9, 0.6), step=20), *scores((0.85, 0.95)))
    assert (run.score.step, run.score.validation, run.score.test) == (20, 0.9, 0.6)


def test_the_score_is_of_a_model_with_the_reported_order(tmp_path):
    """The best validation was before the cut: that model had more states than is reported."""
    run = made(tmp_path / "a", *scores((0.99, 0.99), step=10), cut(20, 8, 3), *scores((0.8, 0.7)))
    assert (run.score.step, run.score.test, run.mean_order) == (100, 0.7, 3)


def test_an_evaluation_at_the_step_of_a_cut_is_of_the_model_after_it(tmp_path):
    run = made(tmp_path / "a", cut(20, 8, 3), *scores((0.9, 0.8), step=20), *scores((0.8, 0.7)))
    assert (run.score.step, run.score.test) == (20, 0.8)


def test_a_regression_is_scored_by_its_loss(tmp_path):
    records = [
        evaluated(step, split, None, loss=loss)
        for step, losses in ((10, (0.3, 0.4)), (20, (0.2, 0.5)), (30, (float("nan"), 0.1)))
        for split, loss in zip(("validation", "test"), losses, strict=True)
    ]
    run = made(tmp_path / "a", *records)
    assert (run.score.metric, run.score.step, run.score.test) == ("loss", 20, 0.5)


def test_without_validation_the_last_test_value_counts(tmp_path):
    run = made(tmp_path / "a", evaluated(10, "test", 0.9), evaluated(20, "test", 0.8))
    assert (run.score.step, run.score.validation, run.score.test) == (20, None, 0.8)


def test_where_the_test_split_is_evaluated_less_often_only_steps_with_both_count(tmp_path):
    run = made(tmp_path / "a", evaluated(10, "validation", 0.99), *scores((0.9, 0.8), step=20))
    assert (run.score.step, run.score.test) == (20, 0.8)


def test_a_run_without_records_has_no_score(tmp_path):
    run = made(tmp_path / "a", state="running")
    assert (run.score, run.seconds, run.modules, run.final_orders) == (None, None, (), {})
    assert run.mean_order == 8


def test_orders_follow_cuts_and_restorations(tmp_path):
    events = [cut(10, 8, 6), cut(20, 6, 2), RestoredRecord(30, {"ssm": 6}, "worse")]
    timings = [Timing(10, 10, {"ssm": 8}, {}), Timing(20, 10, {"ssm": 6}, {}), Timing(100, 80, {"ssm": 6}, {})]
    run = made(tmp_path / "a", *events, *timings)
    assert run.order_paths == {"ssm": [(0, 8), (10, 6), (20, 2), (30, 6)]}
    assert [event.rank for event in run.lasting_cuts] == [6]
    assert run.mean_order == 6


def test_blocks_are_in_the_order_of_their_numbers(tmp_path):
    names = ["blocks.10.ssm", "blocks.9.ssm", "blocks.0.ssm"]
    run = made(tmp_path / "a", *(cut(10, 8, 4, module=name) for name in names))
    assert run.modules == ("blocks.0.ssm", "blocks.9.ssm", "blocks.10.ssm")


def test_runs_that_differ_in_their_seed_are_one_group(tmp_path):
    runs = [made(tmp_path / str(seed), seed=seed) for seed in (2, 0, 1)]
    (group,) = group_runs(runs)
    assert [run.seed for run in group.runs] == [0, 1, 2]


@pytest.mark.parametrize("teachers", [(0, 0, 0), (0, 1, 10), (7, 7, 7)])
def test_students_of_one_teacher_and_of_one_for_each_seed_are_one_group(tmp_path, teachers):
    runs = [
        made(tmp_path / str(seed), seed=seed, **BASELINE, distillation={"teacher": f"runs/seed-{number}"})
        for seed, number in zip((0, 1, 10), teachers, strict=True)
    ]
    (group,) = group_runs(runs)
    assert [run.seed for run in group.runs] == [0, 1, 10]


def test_a_seed_with_two_teachers_is_in_two_groups(tmp_path):
    pairs = ((0, 0), (1, 0), (1, 1))
    runs = [
        made(tmp_path / f"{seed}-{number}", seed=seed, **BASELINE, distillation={"teacher": f"runs/seed-{number}"})
        for seed, number in pairs
    ]
    assert sorted([run.seed for run in group.runs] for group in group_runs(runs)) == [[0, 1], [1]]


def test_groups_that_share_a_label_are_told_apart_by_their_settings(tmp_path):
    runs = [made(tmp_path / str(tau), compression={"tau": tau}) for tau in (0.1, 0.2)]
    runs += [made(tmp_path / "b", **BASELINE)]
    assert [group.label for group in group_runs(runs)] == ["baseline", "compressed, tau 0.1", "compressed, tau 0.2"]


def test_how_often_a_checkpoint_is_written_does_not_part_seeds(tmp_path):
    runs = [
        made(tmp_path / str(k), seed=k, training={**CONFIG["training"], "checkpoint_every": k}, spectra={"every": k})
        for k in (1, 2)
    ]
    assert len(group_runs(runs)) == 1


def seeds(tmp_path, values, **changes):
    return group_runs(
        made(tmp_path / str(seed), *scores(pair), seed=seed, **changes) for seed, pair in enumerate(values)
    )[0]


def test_top_runs_are_chosen_by_validation_not_by_test(tmp_path):
    group = seeds(tmp_path, [(0.5, 0.99), (0.9, 0.7), (0.8, 0.6), (0.7, 0.5)])
    assert group.top(1) == Statistic(0.7, None, 1)
    assert isclose(group.top(3).centre, mean([0.7, 0.6, 0.5]))
    assert isclose(group.top(3).spread, stdev([0.7, 0.6, 0.5]))
    assert isclose(group.top().centre, mean([0.99, 0.7, 0.6, 0.5]))


def test_top_runs_of_a_regression_have_the_smallest_loss(tmp_path):
    runs = [
        made(
            tmp_path / str(k),
            evaluated(5, "validation", None, loss=loss),
            evaluated(5, "test", None, loss=10 * loss),
            seed=k,
        )
        for k, loss in enumerate((0.3, 0.1, 0.2))
    ]
    assert group_runs(runs)[0].top(1).centre == 1.0


def test_there_is_no_top_three_of_two(tmp_path):
    group = seeds(tmp_path, [(0.9, 0.7), (0.8, 0.6)])
    assert group.top(3) is None
    assert group.top().count == 2


def test_runs_that_did_not_finish_are_in_no_mean(tmp_path):
    done = made(tmp_path / "0", *scores((0.9, 0.8)))
    failed = made(tmp_path / "1", *scores((0.99, 0.99)), seed=1, state="failed")
    (group,) = group_runs([done, failed])
    assert (group.top().centre, group.top().count, len(group.runs)) == (0.8, 1, 2)


def test_speed_up_is_against_the_uncompressed_run_at_the_first_order(tmp_path):
    large = made(tmp_path / "large", *scores((1.0, 1.0), seconds=60), **BASELINE)
    small = made(tmp_path / "small", *scores((1.0, 1.0), seconds=20), **BASELINE, model={**CONFIG["model"], "order": 2})
    fast = made(tmp_path / "fast", cut(1, 8, 2), *scores((1.0, 1.0), seconds=30))
    groups = group_runs([large, small, fast])
    by_label = {group.label: speed_ups(group, groups) for group in groups}
    assert by_label == {"baseline, order 8": [1.0], "baseline, order 2": [3.0], "compressed": [2.0]}


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "another"},
        {"training": {**CONFIG["training"], "batch": 8}},
        {"model": {**CONFIG["model"], "order": 16}},
        {"model": {**CONFIG["model"], "width": 4}},
    ],
)
def test_without_the_same_model_uncompressed_there_is_no_speed_up(tmp_path, changes):
    other = made(tmp_path / "other", *scores((1.0, 1.0)), **{**BASELINE, **changes})
    fast = made(tmp_path / "fast", cut(1, 8, 2), *scores((1.0, 1.0)))
    groups = group_runs([other, fast])
    compressed = next(group for group in groups if group.compressed)
    assert reference(compressed, groups) is None
    assert speed_ups(compressed, groups) == []


def test_bounds_are_summed_over_layers_and_cuts_that_last(tmp_path):
    events = [cut(10, 8, 6, bound=0.25), cut(10, 8, 5, module="other", bound=0.5), cut(20, 6, 2, bound=1.0)]
    (group,) = group_runs([made(tmp_path / "a", *events, RestoredRecord(30, {"ssm": 6}, "worse"))])
    assert group.bounds_by_cut == [0.75]
    assert group.summed_bound.centre == 0.75


def test_a_sum_with_an_unknown_bound_is_unknown(tmp_path):
    (group,) = group_runs([made(tmp_path / "a", cut(10, 8, 6), cut(20, 6, 2, bound=None))])
    assert group.summed_bound is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("name", 3, "name is 3, expected str"),
        ("model", {}, "model.order is None, expected an integer"),
        ("compression", "yes", "compression is 'yes', expected an object or null"),
    ],
)
def test_a_recipe_that_is_none_is_refused_by_name(tmp_path, key, value, said):
    with pytest.raises(RunError, match=said) as caught:
        made(tmp_path / "a", **{key: value})
    assert str(tmp_path / "a" / "config.json") in str(caught.value)


def test_an_environment_that_is_none_is_refused_by_name(tmp_path):
    made(tmp_path / "a")
    (tmp_path / "a" / "environment.json").write_text(json.dumps({"date": "today"}))
    with pytest.raises(RunError, match=r"environment\.json: environment holds date, expected date, commit, processor"):
        read_run(*find_runs([tmp_path]))


@pytest.mark.parametrize(
    ("file", "contents", "said"),
    [
        ("config.json", b"{", r"config\.json cannot be read: it is not JSON at line 1, column 2$"),
        ("config.json", b"\xff", r"config\.json cannot be read: it is not text in UTF-8$"),
        ("metrics.jsonl", b"{\n", r"metrics\.jsonl, line 1: it is not JSON$"),
        ("metrics.jsonl", b'{"step": 1}\n', r"metrics\.jsonl, line 1: it holds step; expected accuracy, learning_rate"),
        ("metrics.jsonl", b"\xff\n", r"metrics\.jsonl cannot be read: it is not text in UTF-8$"),
    ],
)
def test_a_damaged_file_is_named_in_plain_words(tmp_path, file, contents, said):
    made(tmp_path / "a")
    (tmp_path / "a" / file).write_bytes(contents)
    with pytest.raises(RunError, match=said):
        read_run(*find_runs([tmp_path]))


def test_a_folder_with_too_many_folders_is_not_searched_to_its_end(tmp_path):
    """Such as the root of a disk."""
    for number in range(12):
        (tmp_path / "others" / str(number)).mkdir(parents=True)
    with pytest.raises(RunError, match=rf"^{tmp_path} has more than 9 folders, too many .*: expected the fo"):
        find_runs([tmp_path], most=9)
    with pytest.raises(RunError, match="holds no run"):
        find_runs([tmp_path], most=14)
    run = tmp_path / "a" / "run"
    made(run)
    with pytest.raises(RunError, match=f"; the first run in it is {run}$"):
        find_runs([tmp_path], most=9)
    assert [found.path for found in find_runs([tmp_path / "a", tmp_path], most=100)] == [run]


def test_groups_that_differ_in_much_get_letters_instead_of_a_list(tmp_path):
    model = {"order": 8, "layer": "LRU", "depth": 1, "width": 4}
    changes = [model, model | {"layer": "S5", "depth": 2, "width": 8, "order": 4}]
    runs = [made(tmp_path / str(k), *scores((0.5, 0.5)), model=change) for k, change in enumerate(changes)]
    assert sorted(group.label for group in group_runs(runs)) == ["compressed A", "compressed B"]


def test_the_reference_has_a_speed_up_of_one_however_its_seeds_differ(tmp_path):
    runs = [made(tmp_path / str(k), *scores((0.5, 0.5), seconds=s), seed=k, **BASELINE) for k, s in enumerate((1, 3))]
    (group,) = group_runs(runs)
    assert speed_up(group, [group]).centre == 1
    assert speed_up(group, [group]).spread > 0


def timed(step, *, wall, load=1.0, **spent):
    return Timing(
        step, step, {"ssm": 8}, {"steps": wall}, load=load, **{kind: {"steps": s} for kind, s in spent.items()}
    )


def pair(folder, large, fast):
    """The groups of a run that is never cut and of one that is, with these timings: large took 60 s, fast 30 s."""
    runs = [
        made(folder / "large", large, *scores((1.0, 1.0), seconds=60), **BASELINE),
        made(folder / "fast", fast, *scores((1.0, 1.0), seconds=30)),
    ]
    groups = group_runs(runs)
    return next(group for group in groups if group.compressed), groups


@pytest.mark.parametrize(
    ("large", "fast", "kind", "factor"),
    [
        ({"cpu": 40.0}, {"cpu": 10.0}, "CPU time", 4.0),
        ({"cpu": 40.0, "gpu": 9.0}, {"cpu": 10.0, "gpu": 3.0}, "GPU time", 3.0),
        ({"cpu": 40.0}, {}, "wall time", 2.0),
        ({"cpu": 40.0, "gpu": 9.0}, {"cpu": 10.0}, "wall time", 2.0),  # one of them on another device
    ],
)
def test_speed_up_is_of_the_finest_clock_that_all_runs_have(tmp_path, large, fast, kind, factor):
    group, groups = pair(tmp_path, timed(100, wall=60.0, **large), timed(100, wall=30.0, **fast))
    assert time_kind(group, groups) == kind
    assert speed_ups(group, groups) == [factor]
    assert speed_up(group, groups).centre == factor


def test_copies_that_are_cut_after_training_count_in_no_time_of_it(tmp_path):
    ended = Timing(100, 0, {"ssm": 8}, {"truncation": 5.0}, {"truncation": 5.0})
    run = made(tmp_path / "a", timed(100, wall=60.0, cpu=40.0), ended, *scores((1.0, 1.0), seconds=60))
    assert run.time("CPU time") == 40.0


def test_the_load_of_a_run_is_the_mean_over_its_time_and_unknown_where_a_record_lacks_it(tmp_path):
    def later(load):
        return Timing(100, 50, {"ssm": 8}, {"steps": 30.0}, load=load)

    run = made(tmp_path / "a", timed(50, wall=10.0, load=4.0), later(2.0), *scores((1.0, 1.0)))
    assert run.load == 2.5
    assert made(tmp_path / "b", timed(50, wall=10.0, load=4.0), later(None), *scores((1.0, 1.0))).load is None


@pytest.mark.parametrize(("clock", "shown"), [({"cpu": 40.0, "gpu": 9.0}, None), ({"cpu": 40.0}, 4.0)])
def test_trainings_that_share_a_gpu_have_no_speed_up(tmp_path, clock, shown):
    part = {name: seconds / 4 for name, seconds in clock.items()}
    large = made(tmp_path / "large", timed(100, wall=60.0, **clock), *scores((1.0, 1.0)), **BASELINE)
    fast = made(tmp_path / "fast", timed(100, wall=30.0, **part), *scores((1.0, 1.0)))

    def speed(*runs):
        cells = (Compared("digits", "CompreSSM", "cut", (runs[1],)), Compared("digits", "baseline", UNCUT, (runs[0],)))
        return Exhibit("results", "made", "outcome", "accuracy", cells).ours(cells[0], "speed-up")

    assert speed(large, fast).centre == 4
    for folder, count in (("large", 16), ("large", 3)):
        RunDirectory(tmp_path / folder).note_together(count)
    assert read_run(RunDirectory(tmp_path / "large")).together == 16, "a run that is resumed keeps the largest"
    found = speed(read_run(RunDirectory(tmp_path / "large")), fast)
    assert (found and found.centre) == shown
