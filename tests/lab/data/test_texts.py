import shutil

import pytest
import torch

from compressm_lab.data import AAN, IMDB, DataError, ListOps, Store
from compressm_lab.data import text as imdb
from tests.lab.data.files import write_aan, write_archive, write_imdb, write_listops, write_tsv

REVIEWS = 10


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(imdb, "REVIEWS", REVIEWS)
    return Store(tmp_path, offline=True)


def text_of(tokens, length):
    return bytes((tokens[:length] - 1).tolist()).decode("utf8", "ignore")


@pytest.mark.parametrize("form", ["aclImdb", "imdb/aclImdb", "archive"])
def test_reviews_are_read_from_a_folder_or_the_archive(store, form):
    write_imdb(store.root / ("elsewhere" if form == "archive" else form), REVIEWS)
    if form == "archive":
        write_archive(store.root / "aclImdb_v1.tar.gz", store.root / "elsewhere", "aclImdb")
    task = IMDB(length=100).load(store)
    assert (len(task.train), len(task.validation), len(task.test)) == (18, 2, 20)
    assert (task.length, task.vocabulary, task.classes) == (100, 257, 2)
    assert task.test.targets.bincount().tolist() == [10, 10]
    for split, part in ((task.train, "train"), (task.validation, "train"), (task.test, "test")):
        for tokens, target, length in zip(split.inputs, split.targets, split.lengths, strict=True):
            text = text_of(tokens, length)
            assert text.startswith(f"{part} {'pos' if target else 'neg'} ")
            assert (tokens[length:] == 0).all()
            assert (tokens[:length] > 0).all()


def test_the_validation_reviews_are_of_neither_other_split(store):
    write_imdb(store.root / "aclImdb", REVIEWS)
    task = IMDB(length=60).load(store)
    seen = [{bytes(row.tolist()) for row in split.inputs} for split in (task.train, task.validation, task.test)]
    assert sum(map(len, seen)) == len(seen[0] | seen[1] | seen[2]) == 40


def test_a_folder_with_reviews_missing_is_refused(store):
    write_imdb(store.root / "aclImdb", REVIEWS)
    (store.root / "aclImdb" / "test" / "neg" / "3_2.txt").unlink()
    with pytest.raises(DataError, match="9 reviews in test/neg, expected 10"):
        IMDB().load(store)


def test_half_an_archive_is_refused_by_name(store):
    write_imdb(store.root / "elsewhere", REVIEWS)
    path = store.root / "aclImdb_v1.tar.gz"
    write_archive(path, store.root / "elsewhere", "aclImdb")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match=r"aclImdb_v1\.tar\.gz (is broken|has \d reviews in)"):
        IMDB().load(store)


def test_bytes_that_are_no_text_still_fit_the_vocabulary(store):
    write_imdb(store.root / "aclImdb", REVIEWS)
    (store.root / "aclImdb" / "test" / "neg" / "3_2.txt").write_bytes(b"\xff\xfe\x00")
    (store.root / "aclImdb" / "test" / "neg" / "4_2.txt").write_bytes(b"")
    task = IMDB(length=20).load(store)
    assert task.test.inputs[3].tolist() == [*(byte + 1 for byte in "\ufffd\ufffd\0".encode()), *[0] * 13]
    assert (task.test.lengths[3], task.test.lengths[4]) == (7, 1)


@pytest.mark.parametrize("form", ["tsv_data", "aan", "lra_release/lra_release/tsv_data", "archive"])
def test_pairs_of_papers_are_two_towers(store, form):
    write_aan(store.root / ("elsewhere/tsv_data" if form == "archive" else form))
    if form == "archive":
        write_archive(store.root / "lra_release.tar.gz", store.root / "elsewhere", "lra_release")
    task = AAN(length=40).load(store)
    assert (task.towers, task.length, task.vocabulary) == (2, 40, 257)
    assert task.train.inputs.shape == (2, 2, 40)
    assert task.train.targets.tolist() == [1, 0]
    assert task.train.lengths.tolist() == [[15, 6], [40, 2]]
    assert text_of(task.test.inputs[0, 0], 15) == 'a "quoted"\ttext'
    assert text_of(task.validation.inputs[1, 1], 2) == "é"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("1\tA\tB\tx\ty\n1\tA\tB\tx\n", "line 2: 4 columns, expected 5"),
        ("2\tA\tB\tx\ty\n", "line 1: the label is '2', expected 0 or 1"),
        ('1\tA\tB\tx\t"cut of', "line 1: unexpected end of data; broken or only half there"),
        ("", "holds no examples"),
    ],
)
def test_a_broken_table_is_refused_with_its_line(store, content, said):
    write_aan(store.root / "aan")
    (store.root / "aan" / "new_aan_pairs.eval.tsv").write_text(content)
    with pytest.raises(DataError, match=rf"new_aan_pairs\.eval\.tsv.*{said}"):
        AAN().load(store)


def test_long_papers_are_read(store):
    write_aan(store.root / "aan", [("1", "A", "B", "x" * 200_000, "y")])
    assert AAN().load(store).train.lengths.tolist() == [[4000, 1]]


@pytest.mark.parametrize("form", ["listops-1000", "listops", "lra_release/listops-1000"])
def test_listops_is_read_without_its_parentheses(store, form):
    write_listops(store.root / form)
    task = ListOps().load(store)
    assert (task.length, task.vocabulary, task.classes) == (2048, 18, 10)
    assert task.train.inputs[0, :5].tolist() == [12, 4, 10, 15, 0]
    assert task.train.inputs[1, :8].tolist() == [14, 9, 8, 11, 5, 15, 15, 0]
    assert task.train.lengths.tolist() == [4, 7]
    assert task.test.targets.tolist() == [9, 9]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("Source", "Value"), ("[MAX 1 ]", "1")], r"has the columns \['Source', 'Value'\]"),
        ([("Source", "Target"), ("[MAX 1 ]", "1"), ("[MAX 1 ]",)], "line 3: 1 columns, expected 2"),
        ([("Source", "Target"), ("[AVG 1 ]", "1")], "line 2: .*is no expression"),
        ([("Source", "Target"), ("[MAX 1 ]", "12")], "line 2: the target is '12'"),
        ([("Source", "Target"), ("1 " * 3000, "1")], "line 2: 3000 tokens, expected at most length=2048"),
        ([("Source", "Target")], "holds no examples"),
    ],
)
def test_a_broken_listops_file_is_refused_with_its_line(store, rows, said):
    write_listops(store.root / "listops")
    write_tsv(store.root / "listops" / "basic_val.tsv", rows)
    with pytest.raises(DataError, match=rf"basic_val\.tsv.*{said}"):
        ListOps().load(store)


def test_a_missing_table_is_named(store):
    write_listops(store.root / "listops")
    (store.root / "listops" / "basic_test.tsv").unlink()
    with pytest.raises(DataError, match=r"has no basic_test\.tsv"):
        ListOps().load(store)
    shutil.rmtree(store.root / "listops")
    with pytest.raises(DataError, match=r"lra_release\.gz is not in .*generated=True"):
        ListOps().load(store)


def test_tokens_take_one_byte(store):
    write_imdb(store.root / "aclImdb", REVIEWS)
    assert IMDB().load(store).train.inputs.dtype == torch.uint8
