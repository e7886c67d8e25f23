"""The packages that are released: their version, what is in them, and that they work where nothing else of us is."""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import compressm

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_THE_ROOT = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff")
CUT = """
import torch, compressm as cs
model = cs.models.SequenceClassifier(cs.layers.LRU, depth=1, width=4, order=8, inputs=1, classes=2)
(cut,) = cs.compress_(model, keep=cs.TargetOrder(3))
print(cs.__file__, cut.rank, model(torch.randn(2, 10, 1)).shape)
"""


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert {PROJECT["version"], citation["version"], released[1]} == {compressm.__version__}


def test_the_changelog_begins_with_what_is_not_released():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"


def test_workflows_and_forms_are_yaml_and_ci_runs_what_developers_run():
    files = sorted((ROOT / ".github").rglob("*.yml"))
    found = {path.name: yaml.safe_load(path.read_text()) for path in files}
    assert {"ci.yml", "bug.yml", "wish.yml"} <= found.keys()
    commands = [step.get("run") for step in found["ci.yml"]["jobs"]["checks"]["steps"]]
    assert [command for command in commands if command] == [".ci/run", "make site", "make dist"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"site", "dist"} <= set(targets)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Wheel and sdist, built from a copy: a build leaves folders where it works."""
    for package in ("build", "twine", "setuptools"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("release")
    for name in OF_THE_ROOT:
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "dist"


@pytest.mark.slow
def test_twine_accepts_the_packages(dist):
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(dist.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


@pytest.mark.slow
def test_the_wheel_has_both_packages_with_their_files_and_nothing_else(dist):
    (wheel,) = dist.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and not {"__pycache__"} & set(path.parts) and ".egg-info" not in str(path)
    }
    assert names == tracked
    assert {"compressm/py.typed", "compressm_lab/py.typed", "compressm_lab/reports/templates/report.html"} <= names
    assert "compressm_lab/experiments/recipes/digits.yaml" in names


@pytest.mark.slow
def test_the_sdist_has_the_sources_and_no_tests(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert set(OF_THE_ROOT) <= set(names)
    assert [name for name in names if name.startswith(("tests", "docs", "studies", "benchmarks"))] == []


@pytest.mark.slow
def test_the_wheel_works_where_nothing_else_of_us_is_installed(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    # Dependencies are those of this environment. Its own *.pth files, which know this checkout, are not read.
    (place,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    lent = [path for path in sys.path if path.endswith("site-packages")]
    (place / "lent.pth").write_text("\n".join(lent))

    def run(*command):
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={}, check=True).stdout

    command = tmp_path / "venv" / "bin" / "compressm"
    assert run(command, "--version").strip() == f"compressm {PROJECT['version']}"
    assert "reproduce" in run(command, "--help"), "the laboratory has added its commands"
    file, rank, shape = run(python, "-c", CUT).split(maxsplit=2)
    assert Path(file).is_relative_to(tmp_path / "venv")
    assert (rank, shape.strip()) == ("3", "torch.Size([2, 2])")
