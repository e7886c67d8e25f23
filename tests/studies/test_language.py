"""The study of bytes reads the reviews, cuts one model in every way, and measures tokens."""

import math

import numpy as np
import pytest
import torch

import language
from command import silent
from compressm_lab.reports.measurements import markdown
from compressm_lab.runs.measurement import Measurement
from side_by_side import main

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reviews")
    for part in ("train", "test"):
        for tone in ("neg", "pos"):
            path = folder / "aclImdb" / part / tone
            path.mkdir(parents=True)
            for k in range(10):
                (path / f"{k}_1.txt").write_text(f"{part} {tone} {k}: " + "a good film " * 8)
    return folder


@pytest.fixture(scope="module")
def data(reviews):
    return language.prepare(reviews, reviews / "imdb.npz", tested=1000)


def test_the_file_has_every_review_once_and_a_zero_after_each(data):
    with np.load(data) as stored:
        train, test = stored["train"].tobytes(), stored["test"].tobytes()
    assert sorted(text.split(b":")[0] for text in train.split(b"\0")[:-1]) == sorted(
        f"train {tone} {k}".encode() for tone in ("neg", "pos") for k in range(10)
    )
    assert len(test) == 1000
    assert b"train" not in test


def test_a_folder_without_reviews_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="expected the folder of the IMDB reviews"):
        language.prepare(tmp_path, tmp_path / "imdb.npz")


@pytest.fixture(scope="module")
def studied(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("language")
    arguments = ["--data", str(data), "--out", str(out), "--quick", "--family", "Mamba-2", "--processes", "1"]
    options = {"description": "d", "processes": 1, "progress": silent}
    paths = main(language._planned, language._options, arguments=arguments, **options)
    return {path.stem: Measurement.read(path) for path in paths}


def test_one_model_is_cut_in_every_way(studied):
    rows = studied["language"].rows
    ways = ("Mapped", "Fitted", "GHOST", "RRQR", "PCA", "random")
    assert {(row["arm"], row["rank"]) for row in rows} == {("uncut", 16), *((way, 4) for way in ways)}
    assert len({row["perplexity"] for row in rows}) == 1
    uncut = next(row for row in rows if row["arm"] == "uncut")
    assert uncut["perplexity"] == uncut["perplexity_cut"] != uncut["perplexity_more"]
    cuts = [row for row in rows if row["arm"] != "uncut"]
    assert min(cuts, key=lambda row: row["error"])["arm"] == "Mapped"
    assert {row["parameters"] < uncut["parameters"] for row in cuts if row["arm"] in ("Fitted", "GHOST")} == {True}


def test_states_shrink_and_both_ways_to_keep_them_are_timed(studied):
    rows = studied["language_decode"].rows
    found = {(row["arm"], row["rank"], row["batch"]): row["state_bytes"] for row in rows}
    assert set(found) == {
        (arm, rank, batch) for arm, rank in (("rows", 16), ("rows", 4), ("maps", 4)) for batch in (1, 2)
    }
    assert found["rows", 4, 1] == found["rows", 4, 2] < found["maps", 4, 1] < found["rows", 16, 1]
    assert all(row["seconds"] > 0 for row in rows)


def of_tokens(out, *arguments):
    options = {"description": "d", "processes": 1, "progress": silent}
    given = ["--out", str(out), "--quick", "--decode", "--processes", "1", *arguments]
    return main(language._planned, language._options, arguments=given, **options)


def test_tokens_of_both_families_are_measured_without_data_or_training(tmp_path):
    (path,) = of_tokens(tmp_path)
    assert path.name == "language_decode.json"
    rows = Measurement.read(path).rows
    assert {(row["family"], row["arm"], row["rank"]) for row in rows} == {
        (family, *size) for family in ("Mamba-2", "Gated DeltaNet") for size in (("rows", 16), ("rows", 4), ("maps", 4))
    }
    # A state of a head has as many rows as there are states, with 4 bytes a number.
    for row in rows:
        shape = language.Plan("", **language.SMALL).shape(row["family"], 16)
        states = 4 * shape.heads * shape.head * row["rank"]
        window = (
            3
            * 4
            * (shape.heads * shape.head + 2 * shape.groups * (4 if (row["arm"], row["rank"]) == ("rows", 4) else 16))
        )
        assert row["state_bytes"] == states + window
    assert {row["device"] for row in rows} == {language.device().type}


def test_a_study_without_data_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"expected --data .*or --decode"):
        main(
            language._planned,
            language._options,
            arguments=["--out", str(tmp_path)],
            description="d",
            processes=1,
            progress=silent,
        )


def test_their_tables_have_a_line_a_way_and_a_size(studied):
    assert markdown(studied["language"]).count("| 16 → 4 |") == 6
    table = markdown(studied["language_decode"])
    assert "a token of 1 | a token of 2 |" in table
    assert table.count("| 16 → 4 | fewer rows |") == table.count("| 16 → 4 | maps |") == 1


def test_the_perplexity_of_a_model_that_knows_nothing_is_the_number_of_bytes(data):
    plan = language.Plan(str(data), **language.SMALL)
    trainer = language._fresh(plan, "Mamba-2")
    trainer.values.zero_()
    assert language.perplexity(trainer, plan) == pytest.approx(256, rel=1e-5)


def test_a_training_takes_the_steps_that_its_time_allows_and_goes_on_with_them(data, tmp_path, monkeypatch):
    monkeypatch.setattr(language, "_TIMED_AFTER", 2)
    monkeypatch.setattr(language, "_TIMED", 2)
    plan = language.Plan(str(data), **language.SMALL | {"steps": 0}, seconds=0.01)
    (row,) = language.train(plan, "Mamba-2", tmp_path, math.inf)
    assert row["steps"] == 100
    stored = torch.load(tmp_path / "mamba-2-whole.pt", weights_only=True)
    assert stored["more"] == {"done": 100, "steps": 100}
    # A second call has nothing left to do.
    assert language.train(plan, "Mamba-2", tmp_path, math.inf)[0]["steps"] == 100
