"""Runs and a page that several tests look at: made once."""

import pytest

from compressm_lab.reports.run_report import write_report
from compressm_lab.runs.directory import find_runs
from compressm_lab.runs.groups import group_runs
from compressm_lab.runs.run import read_run
from tests.lab.reports import made_runs
from tests.lab.reports.made_runs import Made


def read(folder):
    return [read_run(directory) for directory in find_runs([folder])]


@pytest.fixture(scope="session")
def shallow(tmp_path_factory):
    """Two baselines and a compressed group of three seeds, one block."""
    return group_runs(read(made_runs.shallow(tmp_path_factory.mktemp("shallow"), order=24)))


@pytest.fixture(scope="session")
def odd(tmp_path_factory):
    """By name and label, the groups of which something is missing or wrong."""
    groups = group_runs(read(made_runs.odd(tmp_path_factory.mktemp("odd"))))
    return {(group.name, group.label.split(",")[0]): group for group in groups}


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    """A whole report: a shallow and a deep recipe, a run that goes on, one that has only begun."""
    folder = made_runs.odd(tmp_path_factory.mktemp("runs") / "odd")
    keep = {"empty", "broken-going-on-64-0.04-0"}
    runs = [run for run in read(folder) if run.path.rsplit("/", 1)[-1] in keep]
    for seed in range(3):
        made_runs.write(Made(label="baseline", seed=seed, order=24, spectra=False), folder / "shallow")
        made_runs.write(Made(seed=seed, order=24, spectra=False, cuts=made_runs.CUTS), folder / "shallow")
    made_runs.write(Made("scifar", depth=3, order=12, cuts=((1000, 0.7),), every=500), folder / "deep")
    out = tmp_path_factory.mktemp("out")
    return write_report([*runs, *read(folder / "shallow"), *read(folder / "deep")], out, formats=[])
