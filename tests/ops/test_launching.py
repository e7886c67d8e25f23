"""Launches that are planned once: what they give to a kernel, when they are refused, and that pointers may change."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels import DEVICE, GPU, MARK, normal

pytestmark = MARK


class Kernel:
    """A kernel as Triton makes one, which notes how it is launched."""

    arg_names = ("x", "y", "out", "rows", "scale", "H", "num")

    def __init__(self):
        self.compiled, self.launched = [], []
        self.run = SimpleNamespace(
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=False,
            launch=lambda *given: self.launched.append(given),
        )

    def __getitem__(self, grid):
        def launch(*given, **options):
            self.compiled.append((grid, given, options))
            return SimpleNamespace(run=self.run, function="function", packed_metadata="packed")

        return launch


@pytest.fixture
def kernel(monkeypatch):
    from compressm.ops import launching_triton

    monkeypatch.setattr(launching_triton, "_DIRECT", True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return Kernel()


def test_a_second_launch_gives_pointers_sizes_and_constants_in_the_kernels_own_order(kernel):
    from compressm.ops.launching_triton import Launched, Planned

    x, y = torch.zeros(8), torch.zeros(8)
    plan = Planned(Launched(kernel), (3, 2), 5, 0.5, num=4, H=8, num_warps=1)
    plan(x, None, x)
    assert kernel.compiled == [((3, 2), (x, None, x, 5, 0.5), {"num": 4, "H": 8, "num_warps": 1})]
    assert kernel.launched == []
    plan(y, None, x)
    assert len(kernel.compiled) == 1
    head = (3, 2, 1, 7, "function", False, False, None, None, "packed", None, None, None)
    assert kernel.launched == [(*head, y.data_ptr(), None, x.data_ptr(), 5, 0.5, 8, 4)]


def test_a_pointer_that_is_not_aligned_goes_the_way_of_triton(kernel):
    from compressm.ops.launching_triton import Launched, Planned

    x = torch.zeros(8)
    plan = Planned(Launched(kernel), (1,), 5, 0.5, num=4, H=8)
    for given in (x[1:], x, x[1:]):
        plan(given, x, x)
    assert len(kernel.compiled) == 3
    plan(x, x, x)
    assert len(kernel.compiled) == 3
    assert len(kernel.launched) == 1


def test_a_plan_refuses_other_dtypes_than_those_it_was_first_called_with():
    from compressm.ops.launching_triton import Planned

    plan = Planned(Kernel(), (1,), 5)
    plan(torch.zeros(2), None)
    with pytest.raises(RuntimeError, match=r"planned for \[torch.float32, None\]"):
        plan(torch.zeros(2).double(), None)


def test_sums_of_any_memory_are_right_whatever_was_summed_before():
    from compressm.ops.sums_triton import column_sums

    memory = normal(8, 40, seed=1).flatten()
    for begin in (0, 4, 1, 0, 3, 8):
        x = memory[begin : begin + 200].view(20, 10)
        torch.testing.assert_close(column_sums(x), x.sum(0))


@pytest.mark.skipif(not GPU, reason="recorded as a CUDA graph")
def test_a_planned_launch_is_recorded_on_the_stream_of_a_graph():
    from compressm.ops.sums_triton import column_sums

    x = normal(64, 10).to(DEVICE)
    column_sums(x)
    column_sums(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = column_sums(x)
    x.mul_(2)
    graph.replay()
    torch.testing.assert_close(out, x.sum(0))
