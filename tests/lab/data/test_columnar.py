"""Parquet and Arrow files, with a cell a number or a cell a whole sequence."""

import pytest

from compressm_lab.data import DataError, Store, TaskKind, make
from tests.lab.data.tables import steps

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
ipc = pytest.importorskip("pyarrow.ipc")


def write(path, columns):
    stored = pyarrow.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(stored, path)
    else:
        opened = ipc.new_file if path.name.startswith("file") else ipc.new_stream
        with pyarrow.OSFile(str(path), "wb") as sink, opened(sink, stored.schema) as writer:
            writer.write_table(stored)
    return path


def load(path, **options):
    task = make("table", train=str(path), **options).load(Store(offline=True))
    task.require_sound()
    return task


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow", "file.feather"])
def test_rows_of_steps_are_read_as_from_text(tmp_path, name):
    series, step, a, b, label = zip(*steps(), strict=True)
    columns = {"series": series, "step": step, "a": a, "b": b, "label": label}
    task = load(write(tmp_path / name, columns), sequence="series", step="step", target="label", normalise=False)
    assert (task.kind, task.labels, task.about["channels"]) == (TaskKind.CLASSIFY, ("no", "yes"), ["a", "b"])
    assert task.train.inputs[0, :3, 0].diff().tolist() == pytest.approx([1, 1])


def test_a_cell_may_be_a_whole_sequence(tmp_path):
    lists = [[float(k), 2.0] + [3.0] * (k % 2) for k in range(12)]
    path = write(
        tmp_path / "a.parquet", {"x": lists, "z": [[0.0] * len(one) for one in lists], "y": [k % 2 for k in range(12)]}
    )
    task = load(path, inputs=["x", "z"], target="y", kind="classification", normalise=False)
    assert (task.channels, task.labels, task.about["channels"]) == (2, ("0", "1"), ["x", "z"])
    assert sorted(task.train.lengths.unique().tolist()) == [2, 3]
    nested = write(tmp_path / "b.parquet", {"x": [[[1.0, 2.0, 3.0]] * 4] * 12, "y": ["a", "b"] * 6})
    assert load(nested, target="y").train.inputs.shape[1:] == (4, 3)


def test_empty_cells_are_missing_and_true_and_false_are_numbers(tmp_path):
    columns = {"s": [k // 2 for k in range(24)], "x": [None, 1.5] * 12, "flag": [True, False] * 12}
    path = write(tmp_path / "a.parquet", columns | {"y": [float(k // 2) / 4 for k in range(24)]})
    task = load(path, sequence="s", target="y", missing="mean", normalise=False)
    assert task.train.inputs[0].tolist() == [[1.5, 1.0], [1.5, 0.0]]
    with pytest.raises(DataError, match="row 1, column x: a value is missing"):
        load(path, sequence="s", target="y")


BAD = [
    ({"x": ["a", "b"], "y": ["a", "b"]}, "column x: it holds string, expected numbers"),
    ({"x": [[1.0], [1.0, 2.0]], "z": [[1.0], [1.0]], "y": ["a", "b"]}, "row 2: the lists of x, z have 2, 1 steps"),
    ({"x": [[1.0], None], "z": [[1.0], [1.0]], "y": ["a", "b"]}, "row 2: the lists of x, z have no, 1 steps"),
    ({"x": [[1.0], [2.0]], "z": [1.0, 2.0], "y": ["a", "b"]}, "column x has a list in each cell and z has not"),
    ({"x": [[[1.0]], [[1.0, 2.0]]], "y": ["a", "b"]}, "row 2: 2 channels, expected 1"),
]


@pytest.mark.parametrize(("columns", "said"), BAD, ids=[said[:40] for _, said in BAD])
def test_bad_columns_are_named(tmp_path, columns, said):
    with pytest.raises(DataError) as error:
        load(write(tmp_path / "a.parquet", columns), target="y")
    assert said in str(error.value)
    assert "a.parquet" in str(error.value)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_another_kind_of_file_is_refused(tmp_path, name):
    (tmp_path / name).write_text("x,y\n1,2\n")
    with pytest.raises(DataError, match=rf"{name} cannot be read as {name[2:]}"):
        load(tmp_path / name, target="y")


def test_a_table_without_rows_is_refused(tmp_path):
    empty = {"x": pyarrow.array([], pyarrow.float64()), "y": pyarrow.array([], pyarrow.string())}
    with pytest.raises(DataError, match="has no rows"):
        load(write(tmp_path / "a.parquet", empty), target="y")
