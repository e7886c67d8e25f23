import json

import pytest

from compressm.files import replacing
from compressm_lab.runs.measurement import Environment, Measurement, MeasurementError


def measurement():
    return Measurement("reduction", "a title", 3, [{"order": 4, "reduction_s": 0.25}])


def test_what_is_written_is_read_back(tmp_path):
    written = measurement()
    assert Measurement.read(written.write(tmp_path / "deep" / "result.json")) == written


def test_a_result_says_where_and_when_it_was_measured(tmp_path):
    stored = json.loads(measurement().write(tmp_path / "result.json").read_text())["environment"]
    assert stored["processor"]
    assert stored["cores"] >= 1
    assert stored["torch"].startswith("2.")
    assert stored["date"][:2] == "20"
    assert stored["commit"]


def test_the_commit_can_be_given_where_there_is_no_repository(monkeypatch):
    monkeypatch.setenv("COMPRESSM_COMMIT", "abc123")
    assert Environment.here().commit == "abc123"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "x"}', '{"name": "x", "environment": {}}', "\x00\xff"])
def test_a_broken_or_foreign_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(MeasurementError, match=r"other\.json"):
        Measurement.read(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": 5}, "rows is 5, expected list"),
        ({"rows": [5]}, r"rows\[0\] is 5, expected dict"),
        ({"rows": [{"order": None}]}, r"rows\[0\]\['order'\] is None"),
        ({"name": 3}, "name is 3, expected str"),
        ({"repeats": "9"}, "repeats is '9', expected int"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(tmp_path, change, said):
    path = measurement().write(tmp_path / "other.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(MeasurementError, match=rf"other\.json.*{said}"):
        Measurement.read(path)


def test_an_environment_of_another_type_is_refused_by_name(tmp_path):
    path = measurement().write(tmp_path / "other.json")
    stored = json.loads(path.read_text())
    stored["environment"]["date"] = 2025
    path.write_text(json.dumps(stored))
    with pytest.raises(MeasurementError, match=r"other\.json.*environment\.date is 2025, expected str"):
        Measurement.read(path)


def test_a_folder_is_refused_by_name(tmp_path):
    with pytest.raises(MeasurementError, match=f"{tmp_path}: Is a directory"):
        Measurement.read(tmp_path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(MeasurementError, match=r"nowhere\.json: no such file"):
        Measurement.read(tmp_path / "nowhere.json")


def test_an_error_while_writing_leaves_the_old_file_whole_and_no_scratch(tmp_path):
    target = tmp_path / "file.txt"
    target.write_text("old")

    def write_half():
        with replacing(target) as scratch:
            scratch.write_text("half")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_half()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]
