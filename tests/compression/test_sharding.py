"""Models sharded by `fully_shard` are cut like whole ones, in two and four processes."""

import json

import pytest

from tests import unhooked
from tests.compression.sharded import CASES

COMPARED = ["blocks_and_the_rest", "the_root_alone", "the_layers_themselves", "measured_on_data_of_all"]
# The sums of two numbers have one rounding, of four several.
ROUNDING = {2: 1e-6, 4: 1e-4}


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory):
    """What all processes say of every case."""
    path, count = tmp_path_factory.mktemp("sharded"), request.param
    unhooked.run("from tests.compression.sharded import main; main()", str(path), str(count))
    said = [json.loads((path / f"found-{rank}.json").read_text()) for rank in range(count)]
    return count, {name: [one.get(name, {"failed": "not reached"}) for one in said] for name in CASES}


# Two and four processes take some ten seconds each.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_no_process_failed(case, found):
    for one in found[1][case]:
        assert "failed" not in one, one["failed"]


@pytest.mark.parametrize("case", COMPARED)
def test_a_sharded_training_with_cuts_is_the_whole_one_to_rounding(case, found):
    count, said = found
    for one in said[case]:
        ours, plain = one["events"]
        assert len(ours) == len(plain) == 4
        assert [event.split(",")[0] for event in ours] == [event.split(",")[0] for event in plain]
        assert one["orders"] == [4, 4]
        assert one["off"] <= ROUNDING[count]
        assert one["sharded"]
        assert one["in step"]


def test_checkpoints_of_sharded_models_go_on_across_cuts(found):
    for one in found[1]["checkpoints_across_cuts"]:
        for stop, (changed, off) in one["found"].items():
            assert changed == ([] if int(stop) < 2 else ["blocks.0.ssm", "blocks.1.ssm"])
            assert off == 0
        sharded, folder, prefix = one["refused"]
        assert "before fully_shard" in sharded[1]
        assert "no .metadata" in folder[1]
        assert "pass the right prefix=" in prefix[1]


def test_a_cut_that_fails_leaves_a_sharded_model_as_it_was(found):
    for one in found[1]["a_cut_that_fails"]:
        assert one["error"][0] == "CompressionError"
        assert one["same"]
        assert one["orders"] == [[12, 12], [7, 7]]


def test_a_cut_between_forward_and_backward_is_refused_in_all_processes(found):
    for rank, one in enumerate(found[1]["a_cut_before_the_backward_pass"]):
        for how, (errors, same, orders) in one.items():
            for kind, said in errors:
                assert kind == "CompressionError"
                assert "a forward pass of it waits for its backward pass" in said
                assert ("process 0 failed" in said) == (how == "in one process" and rank > 0)
            assert same
            assert orders == [7, 7]


def test_what_a_sharded_model_cannot_do_is_refused_by_name(found):
    for one in found[1]["what_is_refused"]:
        assert {kind for kind, _ in one.values()} == {"CompressionError"}
        assert "guard: a model sharded by fully_shard cannot be restored" in one["guard"][1]
        assert "the cut adds" in one["added"][1]
        assert "offloads parameters to the CPU" in one["offloaded"][1]
        assert "fully_shard got 2 modules at once" in one["group"][1]
        assert "axis 1" in one["axis"][1]
        assert "follow[0] is sharded by fully_shard" in one["follower"][1]
        assert "the model that is padded is sharded by fully_shard" in one["padding"][1]
        assert "the model of a stream is sharded by fully_shard" in one["stream"][1]


def test_mixed_precision_a_single_cut_and_a_preview(found):
    first = found[1]["bf16_and_once_and_preview"][0]
    for one in found[1]["bf16_and_once_and_preview"]:
        assert one == first
        assert len(one["preview"]) == len(one["cuts"]) == 2
        assert one["orders"] == [5, 5]
        assert one["finite"]
