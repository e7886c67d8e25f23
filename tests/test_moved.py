"""A module by its earlier name is refused with its new one."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import compressm
from compressm.moved import MOVED, MovedModuleError, moved, refuse_moved_modules
from tests import unhooked


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_module_that_has_moved_names_its_new_place(old, new):
    with pytest.raises(ImportError) as error:
        importlib.import_module(old)
    assert isinstance(error.value, MovedModuleError)
    assert str(error.value).startswith(f"{old} has moved to {new}")
    assert ("pip install 'compressm[lab]'" in str(error.value)) is new.startswith("compressm_lab.")
    assert importlib.util.find_spec(new) is not None


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import compressm.data", "compressm.data has moved to compressm_lab.data: pip install 'compressm[lab]'"),
        ("from compressm import data", "compressm.data has moved to compressm_lab.data"),
        ("from compressm.training import train", "compressm.training has moved to compressm_lab.training"),
        ("import compressm.experiments.results", "compressm.experiments has moved to compressm_lab.experiments"),
        ("from compressm.data.task import Task", "compressm.data has moved to compressm_lab.data"),
        ("from compressm.compression.saving import load_model", "has moved to compressm.saving.models"),
        ("from compressm.nearest import did_you_mean", "compressm.nearest has moved to compressm.errors"),
        ("from compressm.cli.paths import PathError", "compressm.cli.paths has moved to compressm.cli.options"),
    ],
)
def test_every_way_to_import_it_says_so(statement, said):
    with pytest.raises(ImportError) as error:
        exec(statement, {})
    assert said in str(error.value)


def test_an_attribute_that_has_moved_says_so():
    with pytest.raises(AttributeError, match=r"compressm\.data has moved to compressm_lab\.data"):
        compressm.data  # noqa: B018
    assert not hasattr(compressm, "training")
    with pytest.raises(AttributeError, match="module 'compressm' has no attribute 'nothing'"):
        compressm.nothing  # noqa: B018


def test_a_name_that_never_was_is_not_found_as_ever():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'compressm\.nothing'") as error:
        importlib.import_module("compressm.nothing")
    assert not isinstance(error.value, MovedModuleError)
    assert moved("compressm.nothing") is None


def test_an_old_folder_with_bytecode_alone_does_not_hide_it(tmp_path):
    """Where git has taken the files away, Python would see a package without any."""
    script = "import compressm; compressm.__path__.append({!r}); import compressm.data"
    (tmp_path / "data" / "__pycache__").mkdir(parents=True)
    done = unhooked.finished(script.format(str(tmp_path)), loaded=False, code=1)
    assert "compressm.data has moved to compressm_lab.data" in done.stderr


def test_the_finder_is_there_once_and_loads_nothing():
    refuse_moved_modules()
    assert [type(finder).__name__ for finder in sys.meta_path].count("_MovedModules") == 1
    script = "import sys, compressm; print(*(name for name in sys.modules if name.startswith('compressm')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"compressm", "compressm.moved"}


def test_every_module_of_the_version_before_is_there_or_says_where_it_went():
    names = (Path(__file__).parent / "regression" / "modules.txt").read_text().split()
    assert len(names) > 350
    assert [name for name in names if not _is_answered(name)] == []


def _is_answered(name):
    try:
        return importlib.util.find_spec(name) is not None
    except MovedModuleError:
        return True
