"""Files that cannot be read say which, where in them, and what to do."""

import gzip
import os

import numpy as np
import pytest

from compressm_lab.data import DataError, Store, cells, make, table
from tests.lab.data.tables import steps, write_ford, write_long, write_turbofan

SIGNALS = np.arange(60.0).reshape(20, 3, 1)
LONG = {"sequence": "series", "step": "step", "target": "label"}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refused(train, **options):
    with pytest.raises(DataError) as error:
        make("table", train=str(train), **options).load(Store(offline=True))
    return str(error.value)


def changed(tmp_path, row, column, text):
    """The usual table with another text in one cell; the header is line 1."""
    rows = [list(map(str, cells)) for cells in steps()]
    rows[row - 2][column] = text
    return write_long(tmp_path / "a.csv", rows)


@pytest.mark.parametrize(
    ("row", "column", "text", "said"),
    [
        (4, 2, "abc", "a.csv, line 4, column a: 'abc' is not a number"),
        (4, 2, "1,5", "line 4: 6 cells, expected 5 as in the header"),
        (4, 2, '"1,5"', "line 4, column a: '1,5' is not a number; write a point in decimal numbers"),
        (4, 2, "inf", "line 4, column a: an infinite number"),
        (4, 2, "", "a.csv, line 4, column a: a value is missing; set missing: last"),
        (4, 2, "NaN", "a.csv, line 4, column a: a value is missing"),
        (4, 0, "", "line 4, column series: it is empty, expected the name of a sequence"),
        (4, 1, "", "line 4, column step: it is empty"),
        (4, 1, "0", "line 4, column step: step 0 is there twice in one sequence"),
        (4, 1, "x", "line 4, column step: 'x' gives no order; expected numbers in the whole sequence, or dates"),
        (4, 2, "1_000", "line 4, column a: '1_000' is not a number"),
        (4, 4, "other", "a.csv: the target label holds"),
        (4, 4, '"open', "is a quotation mark left open?"),
    ],
)
def test_a_cell_is_named_by_file_line_and_column(tmp_path, row, column, text, said):
    path = changed(tmp_path, row, column, text)
    options = LONG | ({"every_step": False} if column == 4 else {})
    message = refused(path, **options)
    if text == "other":  # within a sequence
        assert "a.csv, line 4, column label: another answer than at the first step of its sequence" in message
    else:
        assert said in message
    assert "a.csv" in message


BAD_OPTIONS = [
    ({"target": "lable"}, "has no column 'lable'; its columns: series, step, a, b, label; did you mean 'label'?"),
    ({"sequence": "unit"}, "has no column 'unit'"),
    ({"inputs": ["a", "label"]}, "inputs has 'label', which is target, sequence, step or left out"),
    ({"leave_out": ["a", "b"]}, "no column left for inputs"),
    ({"target": None}, "target is missing, the column of answers: a.csv has series, step, a, b, label"),
    ({"kind": "classify"}, "kind is 'classify', expected classification or regression"),
    ({"missing": "zero"}, "missing is 'zero', expected refuse or last or mean"),
    ({"kind": "regression"}, "a.csv, line 2, sequence s0: the answer 'no' is not a finite number"),
    ({"remaining": 5}, "remaining is for tables with sequence, and stands in the place of target"),
    ({"remaining": -5, "target": None}, "remaining is -5, expected true, or the largest number of steps"),
    ({"delimiter": "semicolon"}, "a.csv has no column 'label'; its columns: series,step,a,b,label"),
    ({"delimiter": "dots"}, "delimiter is 'dots', expected tab, comma, semicolon, bar, space or one character"),
    ({"header": False}, "a.csv has no column 'label'; its columns: 1, 2, 3, 4, 5"),
    ({"test": "b.csv"}, "test: b.csv is not there in the current folder"),
    ({"test_targets": "a.csv"}, "test_targets is given without test"),
    ({"trian": "b.csv"}, "table has no option 'trian'"),
    ({"normalise": 1}, "normalise of table is 1, expected bool"),
]


@pytest.mark.parametrize(("options", "said"), BAD_OPTIONS, ids=[said[:40] for _, said in BAD_OPTIONS])
def test_a_bad_option_says_what_is_allowed(tmp_path, options, said):
    write_long(tmp_path / "a.csv", steps())
    given = {name: value for name, value in (LONG | options).items() if value is not None}
    assert said in refused("a.csv", **given)


def test_a_table_needs_its_file():
    with pytest.raises(DataError, match=r"table has no train: expected .name: table, train: …."):
        make("table")


BAD_FILES = [
    ("a.csv", b"", "a.csv is empty: it has no bytes"),
    ("a.csv", b"\n\n", "a.csv is empty, expected rows of cells"),
    ("a.csv", b"x,y,label\n", "a.csv has a header and no rows"),
    ("a.csv", "x,label\n1,ä\n".encode("latin-1"), "a.csv is not UTF-8 text, but of another encoding"),
    ("a.csv", "x,label\n1,b\n".encode("utf-16"), "a.csv is not UTF-8 text, but UTF-16"),
    ("a.csv", b"x,x,label\n1,2,b\n", "a.csv, line 1: the header has 'x' twice"),
    ("a.csv", b"x,y,label\n1,2,a\n1,2\n", "a.csv, line 3: 2 cells, expected 3 as in the header"),
    ("a.csv", b"x,y,label\n1,2,a,4\n", "a.csv, line 2: 4 cells, expected 3"),
    ("a.tsv", b"1\t2\t3\n0\t2\n", "a.tsv, line 2: 2 cells, expected 3 as in the first row, with tab between cells;"),
    ("a.csv", b"x,y,label\n1,2,a\n1,3,a\n", "expected at least two classes in label, and all are 'a'"),
    ("a.csv", b"x,y,label\n1,2,\n1,3,\n", "the target label is empty in every row"),
    ("a.csv", b"x,y,label\n1,2,a\n1,3,5\n", "label holds texts, such as 'a', and numbers, such as 5: set kind"),
    ("a.csv", b"x,y,label\n1,2,4\n1,3,5\n", "label holds 2 different whole numbers: set kind: classification if they"),
    ("a.csv", b"x,y,label\n1,2,a\n,,b\n", "a.csv, line 3: a sequence without a value"),
    (
        "a.csv",
        b"x,y,label\n1,2,a\n1,3,b\n",
        "a.csv has 2 sequences of 2 classes, of which none can be held out: give a file for test",
    ),
    ("a.csv", b"\x00\x01\x02\x00", "a.csv is not a text file: it holds null characters"),
    ("a.tsv", b"0.5\t2\t3\n0.1\t2\t3\n", "the target 1 is the first column, as in the UCR archive, but holds numbers"),
    ("a.docx", b"PK", "a.docx ends in '.docx', expected one of .csv, .tsv"),
    ("a.npz", b"PK", "a.npz cannot be read as .npz"),
    ("a.csv.gz", b"x,y\n1,2\n", "a.csv.gz cannot be read: Not a gzipped file"),
    ("a.ts", b"@problemName x\n1,2:a\n", "a.ts has no line @data"),
    ("a.ts", b"@classLabel true a b\n@data\n", "a.ts has a header and no sequences after @data"),
    ("a.ts", b"@timeStamps true\n@data\n(0,1):a\n", "a.ts, line 1: it has time stamps"),
    ("a.ts", b"@classLabel false\n@data\n1,2\n", "a.ts, line 1: it has no answers"),
    ("a.ts", b"@classLabel true a b\n@data\n1,2:3,4:a\n1,2:b\n", "a.ts, line 4: 1 channels, expected 2"),
    ("a.ts", b"@classLabel true a b\n@data\n1,2:3:a\n", "a.ts, line 3: its channels have 1 and 2 steps"),
    ("a.ts", b"@classLabel true a b\n@data\n1,x:3,4:a\n", "a.ts, line 3, step 2 of channel 1: 'x' is not a number"),
    ("a.ts", b"@classLabel true a b\n@data\n1,2\n", "a.ts, line 3: no colon"),
    ("a.arff", b"@relation x\n@data\n1,2\n", "a.arff has no line @attribute"),
    ("a.arff", b"@attribute a numeric\n@attribute c {a,b}\n@data\n1,2,a\n", "a.arff, line 4: 3 cells, expected 2"),
    ("a.arff", b"@attribute a numeric\n@attribute c {a,b}\n@data\n{0 1,1 a}\n", "a.arff, line 4: a sparse row"),
    ("a.ts", b"@classLabel true yes no\n@data\n1,2:yes\n1,2:nos\n", "a.ts, line 4: class 'nos' is not in the header"),
    ("a.arff", b"@attribute a numeric\n@attribute c {yes,no}\n@data\n1,nos\n", "which has yes, no; correct the line"),
]


@pytest.mark.parametrize(("name", "contents", "said"), BAD_FILES, ids=[said[:50] for _, _, said in BAD_FILES])
def test_a_file_that_cannot_be_read_is_named_with_what_is_wrong(tmp_path, name, contents, said):
    (tmp_path / name).write_bytes(contents)
    options = {"target": "label"} if name.startswith("a.csv") else {}
    assert said in refused(name, **options)


def test_a_test_with_a_class_that_was_never_seen_is_refused_with_its_line(tmp_path):
    write_long(tmp_path / "a.csv", steps())
    write_long(tmp_path / "b.csv", steps(labels=("no", "maybe")))
    message = refused("a.csv", test="b.csv", **LONG)
    assert "b.csv, line 5, sequence s1: class 'maybe' is not in the training data, which have no, yes" in message


def test_a_test_with_other_columns_or_another_width_is_refused(tmp_path):
    write_long(tmp_path / "a.csv", steps())
    write_long(tmp_path / "b.csv", steps(), "series,step,a,c,label")
    assert "b.csv has no column 'b'" in refused("a.csv", test="b.csv", **LONG)
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 4, 2)) + 1, y=np.arange(9) % 2)
    np.savez(tmp_path / "b.npz", x=np.zeros((9, 4, 3)) + 1, y=np.arange(9) % 2)
    assert "b.npz has the channels 1, 2, 3, and a.npz 1, 2: expected the same" in refused("a.npz", test="b.npz")


def test_many_different_texts_are_no_classes_unless_they_are_said_to_be(tmp_path):
    path = write_long(tmp_path / "a.csv", [(f"s{k}", 0, k, 1, f"name {k % 30}") for k in range(45)])
    options = {"sequence": "series", "target": "label"}
    assert "30 classes in 45 answers of label: is it the right column?" in refused(path, **options)
    assert make("table", train=str(path), kind="classification", **options).load(Store(offline=True)).classes == 30


def test_answers_of_another_file_must_be_those_of_the_sequences(tmp_path):
    write_turbofan(tmp_path)
    (tmp_path / "few.txt").write_text("1\n2\n")
    files = {"test": "test_FD001.txt", "sequence": 1, "step": 2, "remaining": 9}
    message = refused("train_FD001.txt", **files, test_targets="few.txt")
    assert "few.txt has 2 rows, expected 12, one for each sequence of" in message
    write_long(tmp_path / "x.csv", [row[:4] for row in steps()], "series,step,a,b")
    write_long(tmp_path / "y.csv", [("s0", "a"), ("s1", "b")], "series,label")
    message = refused("x.csv", train_targets="y.csv", sequence="series", target="label")
    assert "y.csv has no row for sequence s2 of" in message
    write_long(tmp_path / "y.csv", [("s0", "a"), ("s0", "b")], "series,label")
    assert "line 3: the second answer of sequence s0" in refused("x.csv", train_targets="y.csv", sequence="series")


BAD_ARRAYS = [
    ({"x": np.ones((4, 3)), "z": np.ones(4)}, "has the arrays x, z, expected 'targets' or 'target' or 'y'"),
    ({"x": np.ones((4, 3)), "y": np.ones(5)}, "4 inputs and targets of shape (5,)"),
    ({"x": np.ones(4), "y": np.ones(4)}, "the inputs are float64 of shape (4,), expected numbers as"),
    ({"x": np.array([["a"]]), "y": np.ones(1)}, "the inputs are <U1 of shape (1, 1)"),
    ({"x": np.array([[1], [2, 3]], dtype=object), "y": np.ones(2)}, "holds Python objects"),
    ({"x": np.ones((2, 3)), "y": np.ones(2), "lengths": np.array([1, 4])}, "example 2: lengths is 4, expected 1 to 3"),
    ({"x": np.ones((2, 3)), "y": np.ones(2), "lengths": np.ones(3)}, "expected 2 integers"),
    ({"x": np.ones((2, 3, 1)), "y": np.ones((2, 3, 1, 1))}, "targets of shape (2, 3, 1, 1)"),
    ({"x": np.full((2, 3), np.inf), "y": np.ones(2)}, "example 1, step 1, channel 1: an infinite number"),
    ({"x_train": np.ones((2, 3)), "y_train": [0, 1], "test_x": [1]}, "a.npz has the array test_x too: set test: a.npz"),
    ({"x": np.ones((0, 3)), "y": np.ones(0)}, "a.npz has no examples"),
    ({"x": [[1, np.nan, 2]] * 9, "y": [0.5, 1.5, 2] * 3}, "a.npz, example 1, step 2, channel 1: a value is missing"),
]


@pytest.mark.parametrize(("arrays", "said"), BAD_ARRAYS, ids=[said[:50] for _, said in BAD_ARRAYS])
def test_bad_arrays_are_named(tmp_path, arrays, said):
    np.savez(tmp_path / "a.npz", **arrays)
    assert said in refused("a.npz")
    assert "a.npz" in refused("a.npz")


def test_a_file_larger_than_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    write_ford(tmp_path)
    with (tmp_path / "large.csv").open("wb") as file:
        file.write(b"x,label\n1,a\n")
        file.truncate(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))  # sparse: it takes no room
    assert "bytes of memory, of which a file may take half" in refused("large.csv", target="label")
    monkeypatch.setattr(table, "memory", lambda: 1000)
    assert "FordA_TRAIN.tsv: 38 sequences, filled up to 40 steps, take 6,080 bytes" in refused("FordA_TRAIN.tsv")


def test_a_channel_without_a_value_in_the_training_data_is_refused(tmp_path):
    rows = [(f"s{k}", 0, "", 1, "ny"[k % 2]) for k in range(12)]
    message = refused(write_long(tmp_path / "a.csv", rows), **LONG, missing="mean")
    assert "channel a has no value in the training data" in message


def test_parquet_without_its_package_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert "a.parquet is read by the package pyarrow: pip install 'compressm[data]'" in refused("a.parquet")
    assert cells.is_number("1e-3")


def timed(tmp_path, times):
    """A table of eight sequences with these times of day as steps."""
    rows = [
        (f"s{one}", when, k + one / 8, one, ("no", "yes")[one % 2]) for one in range(8) for k, when in enumerate(times)
    ]
    return write_long(tmp_path / "a.csv", rows)


def test_times_of_day_that_fall_are_refused_since_midnight_may_be_between_them(tmp_path):
    timed(tmp_path, ("23:58", "23:59", "00:00"))
    message = refused("a.csv", **LONG)
    assert "line 4, column step: 00:00 comes after 23:59, which without dates may be a new day; write dates" in message
    timed(tmp_path, ("09:05", "10:05", "23:05"))
    make("table", train="a.csv", **LONG).load(Store(offline=True))
    for zoned in (("09:05", "10:05Z", "23:05"), ("2023-12", "2024-01", "2024-02")):  # 20:23 in the zone -12
        timed(tmp_path, zoned)
        assert "gives no order" in refused("a.csv", **LONG)


@pytest.mark.parametrize("head", ["label,0.0,0.1,0.2", "label,10,20,30", "label,2020,2021,2022"])
def test_a_first_row_that_may_be_a_header_is_no_sequence(tmp_path, head):
    rows = "".join(f"{'ab'[k % 2]},{k}.5,1,2\n" for k in range(20))
    (tmp_path / "a.csv").write_text(f"{head}\n{rows}")
    assert "a.csv, line 1: 'label' is the answer of this row alone: set header: true" in refused("a.csv")
    table = make("table", train="a.csv", header=True, target="label").load(Store(offline=True))
    assert table.labels == ("a", "b")


def test_columns_that_are_counted_from_one_are_a_header(tmp_path):
    (tmp_path / "a.csv").write_text("label,1,2,3\n" + "".join(f"{'ab'[k % 2]},{k}.5,1,2\n" for k in range(20)))
    assert make("table", train="a.csv", target="label").load(Store(offline=True)).labels == ("a", "b")


@pytest.mark.parametrize("word", ["none", "None", "null"])
def test_a_class_called_none_is_not_taken_for_a_step_without_an_answer(tmp_path, word):
    rows = [(f"s{one}", k, k, one, (word, "walk", "run")[k]) for one in range(8) for k in range(3)]
    write_long(tmp_path / "a.csv", rows)
    assert f"sequence s0: the answer {word!r} may be a class, or say that there is none" in refused("a.csv", **LONG)


def test_decimal_commas_in_answers_are_not_classes(tmp_path):
    write_long(tmp_path / "a.csv", steps(labels=("0,5", "1,5")), delimiter=";")
    assert "the target label holds '0,5': write a point in decimal numbers" in refused("a.csv", **LONG)


def test_a_damaged_gz_file_is_named(tmp_path):
    packed = bytearray(gzip.compress(write_long(tmp_path / "a.csv", steps()).read_bytes()))
    packed[len(packed) // 2] ^= 0xFF
    (tmp_path / "a.csv.gz").write_bytes(packed)
    assert "a.csv.gz" in refused("a.csv.gz", **LONG)
    packed[12] ^= 0xFF
    (tmp_path / "a.csv.gz").write_bytes(packed)
    assert "a.csv.gz cannot be read: Error -3 while decompressing" in refused("a.csv.gz", **LONG)


@pytest.mark.parametrize("head", ["machine,life\n", ""])
def test_names_of_sequences_are_not_answers(tmp_path, head):
    names = "" if not head else "id,value\n"
    (tmp_path / "a.txt").write_text(
        names + "".join(f"{one},{k}.5\n" for one in (3, 1, 2, *range(4, 13)) for k in (0, 1))
    )
    (tmp_path / "t.txt").write_text(head + "".join(f"{one},{one}.25\n" for one in range(1, 13)))
    sequence = "id" if head else 1
    message = refused("a.txt", sequence=sequence, train_targets="t.txt")
    assert (
        f"it has the names of the sequences: give the file a header in which this column is called {sequence}"
        in message
    )


def test_training_data_are_no_test(tmp_path):
    write_long(tmp_path / "a.csv", steps())
    assert "test: a.csv holds the training data: leave test out" in refused("a.csv", test="a.csv", **LONG)
    np.savez(tmp_path / "a.npz", x=SIGNALS, y=np.arange(20) % 2)
    assert "validation: a.npz holds the training data" in refused("a.npz", validation="a.npz")


def test_steps_in_columns_of_another_order_are_refused(tmp_path):
    for name, head in (("a.csv", "y,t1,t2,t3"), ("b.csv", "y,t2,t1,t3")):
        (tmp_path / name).write_text(f"{head}\n" + "".join(f"{'ab'[k % 2]},{k}.5,1,2\n" for k in range(20)))
    assert "b.csv has the steps t2, t1, t3, and a.csv t1, t2, t3: expected columns in the same order" in refused(
        "a.csv", target="y", test="b.csv"
    )


def test_an_answer_that_is_not_the_last_attribute_of_an_arff_file_is_no_step(tmp_path):
    head = "@relation x\n@attribute class {1,2}\n@attribute a real\n@attribute b real\n@data\n"
    (tmp_path / "a.arff").write_text(head + "".join(f"{1 + k % 2},{k}.5,{k}.25\n" for k in range(20)))
    assert "attribute class is {1,2}, expected numeric ones and the answer as the last attribute" in refused("a.arff")


@pytest.mark.parametrize(
    ("arrays", "options", "said"),
    [
        ({"y": np.arange(20) % 2.0}, {}, "holds 2 different whole numbers: set kind: classification"),
        ({"y": np.arange(20) % 2}, {"inputs": ["x"]}, "has no array ['x']; its arrays: x, y"),
        (
            {"y": np.arange(20) % 2},
            {"leave_out": "2"},
            "leave_out is '2', which says nothing of a file .npz: leave it out",
        ),
        ({"y": np.arange(20) % 2}, {"sequence": "id"}, "sequence is 'id', which says nothing of a file .npz"),
        (
            {"y": np.arange(20) % 2, "x": np.full((20, 3, 1), 1e39)},
            {},
            "step 1, channel 1: 1e+39 is larger than numbers",
        ),
        ({"y": np.arange(20) % 2, "x": np.ones((20, 3, 0))}, {}, "a.npz has no examples: the inputs have the shape"),
    ],
)
def test_arrays_that_may_mean_something_else_are_refused(tmp_path, arrays, options, said):
    np.savez(tmp_path / "a.npz", **{"x": SIGNALS, **arrays})
    assert said in refused("a.npz", **options)


@pytest.mark.parametrize("other", ["y", "lengths"])
def test_arrays_of_another_split_are_not_taken(tmp_path, other):
    arrays = {"x": SIGNALS, "y": np.arange(20) % 2, "lengths": np.full(20, 2)}
    names = {f"{name}_{split}": array for split in ("train", "test") for name, array in arrays.items()}
    del names[f"{other}_test"]
    names["x_test"] = SIGNALS + 1
    np.savez(tmp_path / "a.npz", **names, **{other: arrays[other]})
    assert f"a.npz has x_test, but {other} without the name of a split" in refused("a.npz", test="a.npz")


def test_columns_of_another_kind_of_file_are_refused(tmp_path):
    (tmp_path / "a.ts").write_text("@problemName x\n@classLabel true a b\n@data\n" + "1,2:a\n2,3:b\n" * 9)
    assert "a.ts: target is 'label', which says nothing of a file .ts" in refused("a.ts", target="label")


def test_decimal_commas_in_a_file_of_answers_are_not_two_answers(tmp_path):
    (tmp_path / "a.csv").write_text("0.5,1.5,2.5\n" * 12)
    (tmp_path / "t.csv").write_text("112,5\n98,0\n" * 6)
    message = refused("a.csv", train_targets="t.csv", kind="regression")
    assert "t.csv: every row has two whole numbers, as 112,5: write a point if it is one decimal number" in message
