"""Tasks from files without code: what is read from each layout."""

import gzip
import math

import numpy as np
import pytest
import torch

from compressm_lab.data import IGNORED, Store, TaskKind, make
from tests.lab.data.tables import steps, write_ford, write_long, write_turbofan


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def loaded(train, **options):
        task = make("table", train=str(train), **options).load(Store(tmp_path / "store", offline=True))
        task.require_sound()
        return task

    return loaded


def everything(task, field="targets"):
    """Of the whole training file, from which splits were held out."""
    return torch.cat([getattr(getattr(task, which), field) for which in ("train", "validation", "test")])


def test_a_file_of_the_ucr_archive_has_a_sequence_a_row_and_the_class_first(load, tmp_path):
    folder = write_ford(tmp_path / "ford")
    task = load(folder / "FordA_TRAIN.tsv", test=str(folder / "FordA_TEST.tsv"))
    assert (task.kind, task.labels, task.channels, task.length) == (TaskKind.CLASSIFY, ("-1", "1"), 1, 40)
    assert (len(task.train), len(task.validation), len(task.test)) == (43, 5, 16)
    assert task.test.targets.tolist() == [0, 1] * 8
    assert task.train.lengths is None


def test_signals_have_mean_0_and_variance_1_by_the_training_split_alone(load, tmp_path):
    folder = write_ford(tmp_path / "ford")
    task = load(folder / "FordA_TRAIN.tsv", test=str(folder / "FordA_TEST.tsv"))
    assert float(task.train.inputs.mean()) == pytest.approx(0, abs=1e-6)
    assert float(task.train.inputs.std(correction=0)) == pytest.approx(1, abs=1e-6)
    first = [float(cell) for cell in (folder / "FordA_TEST.tsv").read_text().split("\n")[0].split("\t")[1:]]
    by = task.about["normalised by"]
    expected = (torch.tensor(first) - by["mean"][0]) * by["scale"][0]
    torch.testing.assert_close(task.test.inputs[0, :, 0], expected)
    raw = load(folder / "FordA_TRAIN.tsv", test=str(folder / "FordA_TEST.tsv"), normalise=False)
    torch.testing.assert_close(raw.test.inputs[0, :, 0], torch.tensor(first))


def test_short_rows_end_in_missing_cells(load, tmp_path):
    rows = [
        f"{k % 2},{','.join(['1', '2', *(['3'] if k % 3 else ['NaN'])])},{'4' if k % 3 == 1 else ''}" for k in range(12)
    ]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    task = load("a.csv", normalise=False)
    assert sorted(everything(task, "lengths").tolist()) == [2] * 4 + [3] * 4 + [4] * 4
    short = task.train.inputs[task.train.lengths == 2][0]
    assert short[:2, 0].tolist() == [1, 2]
    assert not short[2:].any()


def test_rows_of_turbofan_are_steps_and_answers_count_down_to_the_failure(load, tmp_path):
    folder = write_turbofan(tmp_path)
    files = {"test": "test_FD001.txt", "test_targets": "RUL_FD001.txt"}
    task = load("train_FD001.txt", **files, sequence=1, step=2, remaining=15)
    assert (task.kind, task.channels, task.classes) == (TaskKind.REGRESS, 24, 1)
    length = int(task.train.lengths[0])
    assert task.train.targets[0, :length, 0].tolist() == [float(min(15, k)) for k in reversed(range(length))]
    assert task.train.targets[0, length:].isnan().all()
    # In the test only the last cycle is asked for, and its answer is that of the file, whatever the cap.
    left = [float(line) for line in (folder / "RUL_FD001.txt").read_text().split()]
    asked = task.test.targets.isfinite()
    assert asked.sum() == len(left)
    assert task.test.targets[asked].tolist() == left
    assert [int(row[:, 0].nonzero()) for row in asked] == [int(length) - 1 for length in task.test.lengths]
    # A sensor that never changes is 0, not noise or NaN.
    assert not task.train.inputs[..., -1].any()
    counted = torch.cat([load("train_FD001.txt", sequence=1, remaining=True).train.targets.flatten()])
    assert counted[counted.isfinite()].max() >= 19


def test_rows_are_grouped_by_sequence_and_ordered_by_step(load, tmp_path):
    rows = steps()
    mixed = write_long(tmp_path / "mixed.csv", rows[::-1])
    plain = write_long(tmp_path / "plain.csv", rows)
    one = load(mixed, sequence="series", step="step", target="label", normalise=False)
    other = load(plain, sequence="series", target="label", normalise=False)
    assert one.channels == 2
    assert one.labels == ("no", "yes")
    assert sorted(everything(one, "lengths").tolist()) == sorted(everything(other, "lengths").tolist())
    for row, length in zip(one.train.inputs, one.train.lengths, strict=True):
        assert row[:length, 0].diff().tolist() == pytest.approx([1.0] * (int(length) - 1))
        assert row[0, 1] == round(10 * float(row[0, 0]))  # a and b are of the same series


@pytest.mark.parametrize(
    "said", ["{0}", "{0}.0", "2024-01-31 {0:02d}:00", "2024-01-{1:02d}", "2024-01-31T{0:02d}:00+02:00"]
)
def test_steps_are_numbers_dates_or_times_and_not_texts_of_which_10_comes_before_2(load, tmp_path, said):
    rows = [(f"s{one}", said.format(step, step + 1), step, one % 2) for one in range(8) for step in range(12)]
    path = write_long(tmp_path / "a.csv", rows[::-1], "series,step,a,label")
    task = load(path, sequence="series", step="step", target="label", kind="classification", normalise=False)
    assert (task.train.inputs[..., 0].diff(dim=1) == 1).all()


@pytest.mark.parametrize("said", ["t{0}", "{0}:00", "{1}/1/2024", "{0} h"])
def test_steps_that_give_no_order_are_refused_and_the_cure_works(load, tmp_path, said):
    rows = [
        (f"s{one}", said.format(step, step + 1), step, ("no", "yes")[one % 2]) for one in range(8) for step in range(12)
    ]
    path = write_long(tmp_path / "a.csv", rows, "series,step,a,label")
    with pytest.raises(ValueError, match=r"gives no order; .* if rows are in order, leave step out"):
        load(path, sequence="series", step="step", target="label")
    task = load(path, sequence="series", leave_out="step", target="label", normalise=False)
    assert (task.train.inputs[..., 0].diff(dim=1) == 1).all()


def test_classes_that_are_no_equal_numbers_stay_apart(load, tmp_path):
    names = ["1_2", "12", "12.0", "90071992547409930", "90071992547409931"]
    rows = [(f"s{one}", step, step, names[one % len(names)]) for one in range(20) for step in range(3)]
    path = write_long(tmp_path / "a.csv", rows, "series,step,a,label")
    task = load(path, sequence="series", step="step", target="label", kind="classification")
    assert set(task.labels) == {"1_2", "12", "90071992547409930", "90071992547409931"}


def test_answers_that_change_within_a_sequence_are_asked_at_every_step(load, tmp_path):
    rows = [(*row[:4], "up" if row[1] % 2 else "down") for row in steps(series=10)]
    task = load(write_long(tmp_path / "a.csv", rows), sequence="series", step="step", target="label")
    assert (task.kind, task.labels) == (TaskKind.LABEL_STEPS, ("down", "up"))
    assert task.train.targets[0].tolist()[:3] == [0, 1, 0]
    assert set(task.train.targets[task.train.inputs.shape[1] - 1].tolist()) <= {0, 1, IGNORED}


def test_a_step_without_an_answer_is_not_asked(load, tmp_path):
    rows = [(*row[:4], "" if row[1] == 1 else row[1] / 2) for row in steps(series=10)]
    task = load(write_long(tmp_path / "a.csv", rows), sequence="series", step="step", target="label", normalise=False)
    assert task.kind is TaskKind.REGRESS
    asked = task.train.targets[0, :3, 0]
    assert asked[1].isnan()
    assert asked[[0, 2]].tolist() == [0.0, 1.0]


def test_several_targets_are_outputs_in_their_own_units(load, tmp_path):
    rows = [(f"s{k}", step, step, k / 7, 100.0 + k) for k in range(20) for step in range(3)]
    path = write_long(tmp_path / "a.csv", rows, "series,step,a,b,label")
    task = load(path, sequence="series", step="step", target=["b", "label"], kind="regression")
    assert (task.kind, task.classes, task.channels) == (TaskKind.PREDICT, 2, 1)
    assert task.about["outputs"] == ["b", "label"]
    batch = task.batch(task.train, torch.arange(len(task.train)))
    assert batch.targets.mean(0).tolist() == pytest.approx([0, 0], abs=1e-5)
    assert task.train.targets[:, 1].min() >= 100


def test_numbers_with_a_fraction_are_amounts_and_texts_are_classes(load, tmp_path):
    rows = [(f"s{k}", 0, k, 1, k / 3) for k in range(12)]
    assert load(write_long(tmp_path / "a.csv", rows), sequence="series", target="label").kind is TaskKind.PREDICT
    rows = [(f"s{k}", 0, k, 1, f"c{k % 2}") for k in range(12)]
    assert load(write_long(tmp_path / "b.csv", rows), sequence="series", target="label").kind is TaskKind.CLASSIFY


def test_whole_numbers_are_what_kind_says(load, tmp_path):
    path = write_long(tmp_path / "a.csv", [(f"s{k}", 0, k, 1, f"{k % 3}.0") for k in range(12)])
    classes = load(path, sequence="series", target="label", kind="classification")
    assert classes.labels == ("0", "1", "2")
    assert load(path, sequence="series", target="label", kind="regression").classes == 1


def test_answers_may_be_in_a_file_of_their_own_by_order_or_by_name(load, tmp_path):
    write_long(tmp_path / "x.csv", [row[:4] for row in steps(series=10)], "series,step,a,b")
    (tmp_path / "y.csv").write_text("\n".join(f"c{k % 2}" for k in range(10)))
    by_order = load("x.csv", train_targets="y.csv", sequence="series", step="step", normalise=False)
    named = [f"s{k},{k},c{k % 2}" for k in reversed(range(10))]
    (tmp_path / "named.csv").write_text("\n".join(["series,other,label", *named]))
    by_name = load("x.csv", train_targets="named.csv", sequence="series", step="step", target="label", normalise=False)
    assert by_order.labels == by_name.labels == ("c0", "c1")
    for task in (by_order, by_name):
        assert torch.equal(task.train.targets, task.train.inputs[:, 0, 1].long() % 2)


def test_columns_are_named_by_patterns_ranges_and_what_is_left_out(load, tmp_path):
    path = write_long(tmp_path / "a.csv", steps())
    both = {"sequence": "series", "target": "label"}
    assert load(path, **both, leave_out=["step"]).about["channels"] == ["a", "b"]
    assert load(path, **both, inputs="[ab]").about["channels"] == ["a", "b"]
    assert load(path, **both, inputs="b").channels == 1
    write_turbofan(tmp_path)
    task = load("train_FD001.txt", sequence=1, remaining=9, inputs=["3-5", 26])
    assert task.about["channels"] == ["3", "4", "5", "26"]


def test_the_index_that_pandas_writes_is_no_channel(load, tmp_path):
    rows = [(k, *row) for k, row in enumerate(steps())]
    path = write_long(tmp_path / "a.csv", rows, ",series,step,a,b,label")
    assert load(path, sequence="series", step="step", target="label").about["channels"] == ["a", "b"]
    (tmp_path / "b.csv").write_text("0,1,2,3,label\n" + "".join(f"{k},2,3,4,{'xy'[k % 2]}\n" for k in range(12)))
    task = load("b.csv", target="label")
    assert (task.length, task.labels) == (4, ("x", "y"))


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiters_quotes_marks_and_line_ends_are_seen(load, tmp_path, delimiter):
    text = write_long(tmp_path / "a.csv", steps(), delimiter=delimiter).read_text()
    text = text.replace("no\n", '"no"\n').replace("\n", "\r\n")
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    with gzip.open(tmp_path / "b.csv.gz", "wt") as file:
        file.write(text)
    for name in ("a.csv", "b.csv.gz"):
        task = load(name, sequence="series", step="step", target="label")
        assert (task.labels, task.channels) == (("no", "yes"), 2)


def test_missing_values_are_filled_as_asked(load, tmp_path):
    rows = [(f"s{k}", step, "" if step == 1 else 10 * step, k, "ny"[k % 2]) for k in range(10) for step in range(3)]
    path = write_long(tmp_path / "a.csv", rows)
    both = {"sequence": "series", "step": "step", "target": "label", "inputs": "a", "normalise": False}
    assert load(path, **both, missing="last").train.inputs[0, :, 0].tolist() == [0, 0, 20]
    assert load(path, **both, missing="mean").train.inputs[0, :, 0].tolist() == [0, 10, 20]
    assert load(path, **both, missing="mean").about["missing values"]["train"] == 8
    begin = [(*row[:2], "" if row[1] == 0 else 4, *row[3:]) for row in rows]
    assert load(write_long(tmp_path / "b.csv", begin), **both, missing="last").train.inputs[0, 0, 0] == 4


def arrays(tmp_path, **more):
    x = np.arange(12 * 5 * 2, dtype=np.float32).reshape(12, 5, 2)
    np.savez(tmp_path / "a.npz", **{"x": x, "y": np.arange(12) % 3, **more})
    return tmp_path / "a.npz"


def test_arrays_are_examples_steps_and_channels_with_lengths(load, tmp_path):
    task = load(arrays(tmp_path, lengths=np.array([5, 3] * 6)), normalise=False)
    assert (task.kind, task.labels, task.channels) == (TaskKind.CLASSIFY, ("0", "1", "2"), 2)
    assert sorted(everything(task, "lengths").tolist()) == [3] * 6 + [5] * 6
    short = task.train.inputs[task.train.lengths == 3][0]
    assert short[2, 1] == short[0, 0] + 5
    assert not short[3:].any()


def test_arrays_of_both_splits_may_be_in_one_file(load, tmp_path):
    x, y = np.random.default_rng(0).normal(size=(20, 7)), np.linspace(0, 1, 20)
    np.savez(tmp_path / "both.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    task = load("both.npz", test="both.npz")
    assert (task.kind, len(task.test), task.length) == (TaskKind.PREDICT, 4, 7)
    np.savez(tmp_path / "named.npz", signals=x, temperature=y)
    assert load("named.npz", inputs="signals", target="temperature").kind is TaskKind.PREDICT


def test_arrays_of_answers_may_be_those_of_steps(load, tmp_path):
    task = load(arrays(tmp_path, y=np.ones((12, 5), dtype=np.int64) * [0, 1, 0, 1, 1]))
    assert (task.kind, task.train.targets[0].tolist()) == (TaskKind.LABEL_STEPS, [0, 1, 0, 1, 1])
    task = load(arrays(tmp_path, y=np.random.default_rng(0).normal(size=(12, 5, 3))))
    assert (task.kind, task.classes) == (TaskKind.REGRESS, 3)


TS = """# A comment
@problemName Tiny
@timeStamps false
@univariate false
@equalLength false
@classLabel true a b
@data
"""


def test_a_ts_file_has_channels_between_colons_and_the_class_last(load, tmp_path):
    (tmp_path / "a.ts").write_text(TS + "".join(f"1,2,{k}:4,5,6:{'ab'[k % 2]}\n1,?:3,4:a\n" for k in range(8)))
    task = load("a.ts", missing="last", normalise=False)
    assert (task.kind, task.labels, task.channels) == (TaskKind.CLASSIFY, ("a", "b"), 2)
    assert sorted(set(everything(task, "lengths").tolist())) == [2, 3]
    short = task.train.inputs[task.train.lengths == 2][0]
    assert short[:2].tolist() == [[1, 3], [1, 4]]


def test_a_ts_file_of_a_regression_says_so(load, tmp_path):
    head = TS.replace("@classLabel true a b", "@targetLabel true")
    (tmp_path / "a.ts").write_text(head + "".join(f"1,2,{k}:{k}\n" for k in range(12)))
    task = load("a.ts")
    assert (task.kind, task.channels) == (TaskKind.PREDICT, 1)


def test_arff_files_of_one_channel_and_of_many_are_read(load, tmp_path):
    rows = "".join(f"{k},2,?,'{['no', 'yes'][k % 2]}'\n" for k in range(12))
    head = "% UCR\n@relation T\n@attribute t0 numeric\n@attribute t1 numeric\n@attribute t2 REAL\n"
    (tmp_path / "a.arff").write_text(f"{head}@attribute target {{no,yes}}\n\n@data\n{rows}")
    task = load("a.arff")
    assert (task.kind, task.labels, task.length) == (TaskKind.CLASSIFY, ("no", "yes"), 2)
    inside = "@attribute x relational\n@attribute t0 numeric\n@attribute t1 numeric\n@end x\n"
    rows = "".join(f"'{k},2\\n3,4\\n5,6',{k % 2}\n" for k in range(12))
    (tmp_path / "b.arff").write_text(f"@relation T\n{inside}@attribute c {{0,1}}\n@data\n{rows}")
    task = load("b.arff", normalise=False)
    assert (task.channels, task.length, task.train.inputs[0, 1].tolist()) == (3, 2, [2, 4, 6])


def test_splits_are_held_out_by_class_and_stay_the_same(load, tmp_path):
    rows = [(f"s{k}", 0, k, 1, "rare" if k % 10 == 0 else "often") for k in range(100)]
    path = write_long(tmp_path / "a.csv", rows)
    task = load(path, sequence="series", target="label", normalise=False)
    assert [len(getattr(task, which)) for which in ("train", "validation", "test")] == [80, 10, 10]
    assert [int((getattr(task, which).targets == 1).sum()) for which in ("train", "validation", "test")] == [8, 1, 1]
    again = load(path, sequence="series", target="label", normalise=False)
    assert torch.equal(task.validation.inputs, again.validation.inputs)
    assert len(everything(task, "inputs")[:, 0, 1].unique()) == 100
    assert task.about["held out of train"] == ["test", "validation"]


def test_a_class_of_one_sequence_stays_in_the_training_data(load, tmp_path):
    rows = [(f"s{k}", 0, k, 1, f"only{k}" if k < 4 else "rest") for k in range(12)]
    task = load(write_long(tmp_path / "a.csv", rows), sequence="series", target="label")
    assert set(task.train.targets.tolist()) == {0, 1, 2, 3, 4}


def test_files_are_found_in_the_folder_of_data_sets(tmp_path):
    write_ford(tmp_path / "store" / "ford")
    task = make("table", train="ford/FordA_TRAIN.tsv").load(Store(tmp_path / "store", offline=True))
    assert len(everything(task)) == 48


def test_what_was_read_is_noted(load, tmp_path):
    folder = write_ford(tmp_path / "ford")
    notes = load(folder / "FordA_TRAIN.tsv").notes()
    assert notes["labels"] == ("-1", "1")
    assert notes["examples"] == {"train": 38, "validation": 5, "test": 5}
    assert len(notes["about"]["files"]["train"]["sha256"]) == 64
    assert math.isfinite(notes["about"]["normalised by"]["scale"][0])


def test_classes_that_are_long_numbers_keep_one_order(load, tmp_path):
    labels = [str(9007199254740992 + k) for k in range(2)]
    for _ in range(2):
        write_long(tmp_path / "a.csv", steps(labels=labels))
        options = {"sequence": "series", "step": "step", "target": "label", "kind": "classification"}
        assert load("a.csv", **options).labels == tuple(sorted(labels))
        labels.reverse()
