import pytest

from compressm.cli.options import PathError, require_writable


def test_asking_whether_a_file_can_be_written_makes_no_folder(tmp_path):
    path = tmp_path / "new" / "below" / "model.safetensors"
    assert require_writable(path) == path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["a file", "a file/below", "a link", "a link/below", "x" * 300])
def test_a_folder_that_could_not_be_made_is_refused_by_name(tmp_path, folder):
    (tmp_path / "a file").touch()
    (tmp_path / "a link").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(PathError, match="expected a folder that can be made and written") as error:
        require_writable(tmp_path / folder / "model.safetensors")
    assert str(error.value).startswith(f"{tmp_path / folder}: ")
    assert sorted(tmp_path.iterdir()) == before
