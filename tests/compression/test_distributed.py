"""Two or four processes cut to the same orders and stay in step; where one of them fails, none has changed."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from compressm.compression import (
    CompressionError,
    Compressor,
    HankelTracker,
    SavingError,
    TargetOrder,
    compress_,
    inspect,
    load_checkpoint,
    save_checkpoint,
    save_model,
)
from compressm.compression.distributed import Processes
from compressm.errors import ExportError
from compressm.exporting import export
from compressm.layers import LRU
from compressm.models import SequenceClassifier
from tests import unhooked
from tests.compression.trying import CASES


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    """What all processes say of every case."""
    path = tmp_path_factory.mktemp("processes")
    unhooked.run("from tests.compression.trying import main; main()", str(path), str(request.param))
    said = [json.loads((path / f"found-{rank}.json").read_text()) for rank in range(request.param)]
    return {name: [one[name] for one in said] for name in CASES}


@pytest.mark.parametrize("case", CASES)
def test_the_processes_agree_on_what_happened(case, found):
    first = found[case][0]
    for one in found[case]:
        assert "failed" not in one, one["failed"]
        for said in {"orders", "events", "preview"} & one.keys():
            assert one[said] == first[said] or case == "groups_of_their_own"
        for said in {"in step", "averaged", "untouched"} & one.keys():
            assert one[said] is True, said


def test_a_wrapper_that_is_given_is_made_anew_by_each_cut(found):
    first = found["the_wrapper_is_given"][0]
    assert len(first["events"]) == 4
    assert all(order < 12 for order in first["orders"])


def test_all_processes_fill_up_layers_to_the_same_orders(found):
    assert {tuple(one["orders"]) for one in found["one_allowed_order_for_all_layers"]} == {(7, 7)}
    assert {tuple(one["orders"]) for one in found["zero_states_in_all_processes"]} == {(16, 16)}
    for rank, one in enumerate(found["allowed_orders_that_differ"]):
        assert one["orders"] == [12, 12]
        assert f"to is {16 + rank} here" in one["padded"][1]


def test_losses_of_a_captured_step_are_those_of_the_plain_loop(found):
    """Each process has data of its own; the cut after the fourth step renews the wrapper."""
    for one in found["a_captured_step"]:
        assert one["orders"] == [5, 5]
        assert one["captured"] == one["plain"]
    assert found["a_captured_step"][0]["plain"] != found["a_captured_step"][1]["plain"]


def test_several_optimizers_stay_in_step_and_an_average_is_named_in_every_process(found):
    for one in found["several_optimizers"]:
        assert len(one["events"]) == 4
        assert one["outdated"][0] == "CompressionError"
        assert "follow=[average]" in one["outdated"][1]


def test_a_wrapper_that_is_not_given_refuses_to_train_until_it_is_made_anew(found):
    for one in found["the_wrapper_is_not_given"]:
        kind, said = one["stale"]
        assert kind == "StaleWrapperError"
        assert "compressm.rewrap_(model)" in said


@pytest.mark.parametrize("through", ["", "_through_the_wrapper"])
def test_a_wrapper_refuses_to_train_after_a_state_dict_of_other_orders_was_loaded(through, found):
    for one in found[f"a_state_dict_of_smaller_orders{through}"]:
        kind, said = one["stale"]
        assert kind == "StaleWrapperError"
        assert "compressm.rewrap_(model)" in said
        assert one["orders"] == [5, 5]


LAYERS_ALONE = """
import sys, tempfile
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from compressm.layers import LRU
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
import torch
wrapper, other = DistributedDataParallel(LRU(2, 6)), DistributedDataParallel(LRU(2, 6))
wrapper.module.load_state_dict(LRU(2, 3).state_dict())
assert not [name for name in sys.modules if name.startswith("compressm.compression")]
other(torch.ones(1, 4, 2))
try:
    wrapper(torch.ones(1, 4, 2))
except RuntimeError as error:
    assert "compressm.rewrap_(model)" in str(error)
    print("refused")
else:
    raise AssertionError("it trains without averages")
dist.destroy_process_group()
"""


def test_it_does_so_where_only_layers_were_imported():
    assert unhooked.run(LAYERS_ALONE, loaded=False).split() == ["refused"]


def test_data_of_all_processes_is_measured_together(found):
    first = found["measured_with_other_data"][0]
    assert first["bound"] is None
    assert first["preview"] == first["events"]


def test_selective_layers_are_cut_by_the_averages_of_all_processes(found):
    for one in found["selective_layers"]:
        assert one["pooled"]
        expected = [f"blocks.{k}.ssm: 12 -> {n} state{'s' * (n > 1)}" for k, n in enumerate(one["orders"])]
        assert [event.split(",")[0] for event in one["preview"]] == expected
        assert all(order < 12 for order in one["orders"])


def test_matrix_states_are_cut_by_the_moments_of_all_processes(found):
    for one in found["matrix_states"]:
        assert one["pooled"]
        assert [event.split(",")[0] for event in one["events"]] == ["0: 8 -> 3 states"] * 3


def test_all_processes_keep_the_same_maps(found):
    for one in found["channels_with_states_of_their_own"]:
        assert one["maps"]
        assert one["complex"]
        assert all(order <= 4 for order in one["orders"])


def test_the_first_process_decides(found):
    assert found["options_that_are_functions"][0]["orders"] == [4, 4]
    undone = found["a_cut_that_is_undone"][0]
    assert undone["orders"] == [12, 12]
    assert undone["events"][-1].startswith("restored")


STEP = "Compressor.step"
FAILURES = {
    "data_that_fails_in_one": ("process 1 failed while reading the layers: RuntimeError: no data", "no data"),
    "an_optimizer_that_is_behind_in_one": (
        "process 1 failed while writing the cut",
        "is another one in the first process; every process must load the optimizer",
    ),
    "a_write_that_fails_in_one": ("process 1 failed while writing the cut: OSError: no memory", "no memory"),
    "a_snapshot_that_fails_in_one": ("process 1 failed while taking a snapshot before the cut", "snapshots-1"),
    "an_evaluation_that_fails_in_one": ("process 1 failed while evaluating", "evaluate returned None"),
    "processes_at_other_steps": (f"{STEP}(2) here, {STEP}(3) in process 1", f"{STEP}(3) here, {STEP}(2) in process 0"),
    "a_step_that_one_skips": (f"{STEP}(2) here, {STEP}(3) in process 1", f"{STEP}(3) here, {STEP}(2) in process 0"),
    "a_policy_that_differs": (
        "keep is TargetOrder(n=4) here, TargetOrder(n=5) in process 1",
        "keep is TargetOrder(n=5)",
    ),
    "allowed_orders_that_differ": (
        "round_to is OneOf(orders=(4, 6)) here, OneOf(orders=(4, 7)) in process 1",
        "round_to is OneOf(orders=(4, 7))",
    ),
    "a_schedule_that_differs": ("when is [2, 3] here, [2, 4] in process 1", "when is [2, 4] here"),
    "a_model_that_one_refuses": ("process 1 failed while making a Compressor: CompressionError", "is also"),
    "layers_that_differ": (
        "blocks.0.ssm.A_log is (8, 8) torch.float32 here, (10, 8) torch.float32 in process 1: every process must",
        "blocks.0.ssm.A_log is (10, 8) torch.float32 here, (8, 8) torch.float32 in process 0",
    ),
    "a_process_that_does_not_come": ("did not call Compressor(...) within 0:00:01, the timeout", ""),
    "a_wrapper_that_cannot_be_rebuilt_in_one": ("process 1 failed while writing the cut: KeyboardInterrupt", "no wrap"),
}


def test_a_process_that_trains_on_without_a_step_leaves_nobody_waiting_for_ever(found):
    first, second, *others = found["a_step_that_one_skips_while_its_wrapper_waits"]
    for one in (first, *others):
        assert "process 1 did not call Compressor.step(2) within 0:00:02, the timeout of" in one["error"][1]
    # The second process is inside torch, whose own error it gets.
    assert second["error"][0] == "RuntimeError"


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_in_one_process_is_said_in_all(case, found):
    first, second, *others = found[case]
    for one, said in zip((first, second), FAILURES[case], strict=True):
        assert said in one["error"][1]
    for other in others:
        assert (other["error"][0] == "CompressionError") == (case != "a_process_that_does_not_come")


def test_the_options_and_hooks_of_a_wrapper_are_kept(found):
    for one in found["options_of_the_wrapper"]:
        assert [name for name, kept in one["kept"].items() if not kept] == []


def test_a_wrapper_s_own_group_is_the_one_that_cuts_together(found):
    first, *others = (one["orders"] for one in found["groups_of_their_own"])
    assert first == [4, 4]
    assert all(orders == [12, 12] for orders in others)


def test_one_process_may_look_alone(found):
    assert {one["states"] for one in found["a_look_by_one"]} == {24}


def test_there_is_nothing_to_redo_without_a_wrapper(found):
    assert "has no DistributedDataParallel" in found["nothing_to_redo"][0]["error"][1]


def test_one_process_alone_waits_for_nobody():
    alone = Processes()
    assert alone.count == 1
    assert alone.is_first
    with pytest.raises(OSError, match="mine"), alone.together("working"):
        raise OSError("mine")
    alone.require_same("values", {"anything": "1"})


# The only strategy in one process, and deprecated as such.
ONE_PROCESS = pytest.mark.filterwarnings("ignore:.*NO_SHARD", "ignore:.*device_id")


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def make():
    torch.manual_seed(0)
    return SequenceClassifier(LRU, depth=1, width=4, order=8, inputs=3, classes=5)


def sharded(how, mesh, model):
    if how == "fully_shard":
        return fully_shard(model, mesh=mesh)
    return FullyShardedDataParallel(
        model, process_group=mesh.get_group(), device_id=torch.device("cpu"), use_orig_params="original" in how
    )


@ONE_PROCESS
@pytest.mark.parametrize("how", ["flat parameters", "original parameters"])
def test_models_of_the_first_fsdp_are_refused_before_anything_changes(how, group):
    model = sharded(how, group, make())
    before = [p.detach().clone() for p in model.parameters()]
    said = r"blocks\.0\.ssm is sharded by FSDP.*cannot be cut"
    optimizer = torch.optim.Adam(model.parameters())
    for call in (
        lambda: Compressor(model, optimizer, when=[1], keep=TargetOrder(4)),
        lambda: compress_(model, keep=TargetOrder(4)),
        lambda: inspect(model),
        lambda: HankelTracker(model, every=1).step(1),
    ):
        with pytest.raises(CompressionError, match=said):
            call()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


@ONE_PROCESS
@pytest.mark.parametrize("how", ["fully_shard", "flat parameters"])
def test_sharding_after_the_compressor_was_made_is_noticed_at_the_cut(how, group):
    model = make()
    compressor = Compressor(model, torch.optim.Adam(model.parameters()), when=[1], keep=TargetOrder(4))
    wrapped = sharded(how, group, model)
    with pytest.raises(CompressionError, match=r"FSDP|optimizer does not hold"):
        compressor.step(1)
    assert compressor.history == []
    assert wrapped is not None


@pytest.mark.parametrize(
    "write",
    [save_model, lambda model, path: save_checkpoint(path, model=model), lambda model, path: export(model, path)],
)
def test_a_sharded_model_is_not_written_and_the_error_says_what_is(write, group, tmp_path):
    with pytest.raises((SavingError, ExportError), match="is sharded by fully_shard: expected a whole model, such as"):
        write(fully_shard(make(), mesh=group), tmp_path / "model.onnx")
    assert [*tmp_path.iterdir()] == [tmp_path / "store"]


def test_an_optimizer_that_shards_its_state_is_refused(group):
    model = make()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    with pytest.raises(CompressionError, match="ZeroRedundancyOptimizer keeps each state in one process"):
        Compressor(model, optimizer, when=[1], keep=TargetOrder(4))


def test_a_wrapper_with_copies_of_its_parameters_is_refused(group):
    model = nn.parallel.DistributedDataParallel(make())
    model.mixed_precision = object()
    with pytest.raises(CompressionError, match="mixed_precision keeps copies"):
        Compressor(model, when=[1], keep=TargetOrder(4))


def test_a_checkpoint_for_such_a_wrapper_is_refused_before_anything_is_changed(group, tmp_path):
    save_checkpoint(tmp_path / "c", model=LRU(2, 3))
    model = nn.parallel.DistributedDataParallel(LRU(2, 5))
    model.mixed_precision = object()
    with pytest.raises(SavingError, match=r"c: .*mixed_precision keeps copies"):
        load_checkpoint(tmp_path / "c", model=model)
    assert model.module.order == 5


def test_every_process_makes_every_trial_on_its_own_data(found):
    for one in found["cuts_that_are_tried"]:
        assert len(set(one["calls"])) == 1
        assert one["calls"][0] > 4
        assert any("loss" in event for event in one["events"])


def test_processes_find_the_same_automatic_cuts(found):
    first = found["cuts_that_are_found_automatically"][0]
    assert [event for event in first["events"] if event.startswith("cuts: ")], first["events"]


def test_a_loss_that_fails_in_one_process_fails_in_all_and_the_step_can_be_made_again(found):
    *others, failing = found["a_loss_that_fails_in_one_process"]
    assert failing["error"] == ["OSError", "no data"]
    for one in others:
        assert f"process {len(others)} failed while trying a cut: OSError: no data" in one["error"][1]
    assert all(len(one["events"]) == 3 for one in (*others, failing))


def test_a_policy_that_fails_in_the_first_process_leaves_no_process_waiting(found):
    first, *others = found["a_policy_that_fails_in_the_first_process"]
    assert first["error"] == ["OSError", "no choice"]
    assert all("process 0 failed while planning the cut: OSError: no choice" in one["error"][1] for one in others)
