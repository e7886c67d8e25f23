"""A cut of a sharded model is refused while a forward pass waits for its backward pass, and never otherwise."""

import gc
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import compressm as cs
from compressm.errors import CompressionError

WAITS = "a forward pass of it waits for its backward pass"


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclass
class Found:
    states: dict[str, list[Tensor]]
    name: str = "found"


GIVEN = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, None, 3),
    "mapping": lambda y: {"y": {"inner": [y]}},
    "dataclass": lambda y: Found({"y": [y]}),
}


class Part(nn.Module):
    def __init__(self, given):
        super().__init__()
        self.ssm, self.head, self.given = cs.layers.LRU(4, 8), nn.Linear(4, 4), GIVEN[given]

    def forward(self, x):
        return self.given(self.ssm(self.head(x))[0] * 2)


class Net(nn.Module):
    def __init__(self, given="tensor", saves_memory=False):
        super().__init__()
        self.part, self.saves_memory = Part(given), saves_memory

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False) if self.saves_memory else self.part(x)


def first(output):
    while not isinstance(output, Tensor):
        output = output.states if isinstance(output, Found) else output
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output


def make(**options):
    torch.manual_seed(0)
    net = Net(**options)
    fully_shard(net.part)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters())
    return net, optimizer, cs.Compressor(net, optimizer, when=[1, 2], keep=cs.TargetOrder(4))


X = torch.randn(2, 6, 4)


@pytest.mark.parametrize("given", GIVEN)
def test_a_cut_before_the_backward_pass_is_refused_and_changes_nothing(given):
    net, _, compressor = make(given=given)
    before = [(id(p), p.full_tensor().clone()) for p in net.parameters()]
    output = net(X)
    for cut in (partial(compressor.step, 1), partial(cs.compress_, net, keep=cs.TargetOrder(4))):
        with pytest.raises(CompressionError, match=WAITS):
            cut()
    assert all(
        id(p) == number and torch.equal(p.full_tensor(), value)
        for p, (number, value) in zip(net.parameters(), before, strict=True)
    )
    assert compressor.history == []
    assert len(compressor.preview()) == 1
    first(output).sum().backward()
    assert len(compressor.step(1)) == 1
    assert net.part.ssm.order == 4
    first(net(X)).sum().backward()


def deleted(net):
    net(X)


def without_gradients(net):
    with torch.no_grad():
        return net(X)


def kept_after_backward(net):
    loss = net(X).sum()
    loss.backward()
    return loss


def backward_twice(net):
    loss = net(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def failed(net):
    with pytest.raises(RuntimeError):
        net(X[..., :3])


def several_microbatches(net):
    for _ in range(3):
        net(X).sum().backward()


def one_of_two_outputs(net):
    net.part.given = lambda y: (y, y.cos())
    y, other = net(X)
    y.sum().backward()
    return other


@pytest.mark.parametrize(
    "run",
    [deleted, without_gradients, kept_after_backward, backward_twice, failed, several_microbatches, one_of_two_outputs],
)
def test_no_other_forward_pass_is_an_obstacle(run):
    net, _, compressor = make()
    kept = run(net)
    assert len(compressor.step(1)) == 1
    del kept


def test_a_recomputed_forward_pass_does_not_wait():
    net, _, compressor = make(saves_memory=True)
    loss = net(X).sum()
    with pytest.raises(CompressionError, match=WAITS):
        compressor.step(1)
    loss.backward()
    assert len(compressor.step(1)) == 1


def test_passes_are_noted_as_long_as_the_compressor_lives():
    net, _, compressor = make()
    count = len(net._forward_hooks), len(net.part._forward_hooks)
    del compressor
    gc.collect()
    assert (len(net._forward_hooks), len(net.part._forward_hooks)) == (count[0], count[1] - 1)
    net(X).sum().backward()
    assert len(cs.compress_(net, keep=cs.TargetOrder(4))) == 1
