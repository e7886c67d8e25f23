"""A process that ends or stalls inside a cut is named by all others, and their models stay as they were."""

import json

import pytest

from tests import unhooked
from tests.compression.lost import CASES, TIMEOUT

OWN_ERROR, NO_STORE = "failing too", ("keeping the store", "freezing with the store")
NAMED = [case for case in CASES if case not in (OWN_ERROR, *NO_STORE)]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ran(request, tmp_path_factory):
    """The number of processes, and the folder in which they say something."""
    path = tmp_path_factory.mktemp("processes")
    unhooked.run("from tests.compression.lost import main; main()", str(path), str(request.param))
    return request.param, path


@pytest.fixture(scope="module")
def found(ran):
    """{case: {rank: what it says}} of all that could say something."""
    count, path = ran
    found = {}
    for case, (lost, *_) in CASES.items():
        files = {rank: path / f"{case}-{rank}.json" for rank in range(count)}
        said = {rank: file for rank, file in files.items() if rank != lost or file.exists()}
        found[case] = {rank: json.loads(file.read_text()) for rank, file in said.items()}
    return found


def left(case, found):
    """What all others than the lost one say."""
    return [one for rank, one in found[case].items() if rank != CASES[case][0]]


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_changed_in_the_processes_that_are_left(case, found):
    for one in left(case, found):
        assert one["same"], one
        assert one["trains"], one
        assert one["seconds"] < 4 * TIMEOUT


@pytest.mark.parametrize("case", NAMED)
def test_a_lost_process_is_named_with_what_the_others_did(case, found):
    lost, _, _, doing = CASES[case]
    for one in left(case, found):
        assert one["kinds"][:2] == ["LostProcessError", "CompressionError"], one
        # Some cannot tell it from one that has not noticed the loss yet.
        who, _, rest = one["said"].partition(" ended, or did not come within 0:00:01.5")
        assert f"process {lost}" in who.split(" or "), one["said"]
        assert rest.endswith(f"while {doing}; nothing was changed on this process")
        assert "gloo" in one["cause"] or "pair closure" in one["cause"]
        assert "gloo" not in one["said"]


@pytest.mark.parametrize("case", NO_STORE)
def test_a_lost_first_process_that_keeps_the_store_is_named_too(case, found):
    for one in left(case, found):
        assert one["kinds"][:2] == ["LostProcessError", "CompressionError"], one
        assert one["said"] == (
            "the first process, which keeps the store of the process group, cannot be reached, while writing the cut;"
            " nothing was changed on this process"
        )


def test_an_error_of_a_process_s_own_is_not_replaced_by_the_loss_of_another(found):
    for one in left(OWN_ERROR, found):
        assert one["kinds"][0] == "OSError"
        assert one["said"] == "no data"


def test_a_process_that_was_too_slow_learns_that_the_others_have_given_up(found):
    one = found["writing slowly"][1]
    assert one["said"].startswith("the other processes have given up, while writing the cut; nothing was changed")
    assert one["same"]
    assert one["trains"]


def test_options_that_differ_are_said_in_all_processes_though_the_first_ends_at_once(ran):
    """It keeps the store in which the others read the options."""
    count, path = ran
    said = [json.loads((path / f"differing-{rank}.json").read_text()) for rank in range(count)]
    assert said[0].startswith("when is [3] here, [4] in process 1: every process must have the same options")
    for rank in range(1, count):
        assert said[rank].startswith(f"when is [{3 + rank}] here, [3] in process 0: every process must have the same")
