"""Processes that train a model sharded by `fully_shard`, and what each of them found: they write it as JSON."""

import json
import sys
import traceback
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import compressm as cs
from compressm.compression import take_stored_orders_
from tests.compression.processes import gathered, refused

CASES = {}
KEEP = {"keep": cs.KeepFraction(0.6), "gate": 1.0}


def case(function):
    """To be run by all processes, one case after the other."""
    CASES[function.__name__] = function
    return function


def build(layer=cs.layers.LRU):
    torch.manual_seed(0)
    return cs.models.SequenceClassifier(
        layer, depth=2, width=6, order=12, inputs=3, classes=5, dropout=0.0, norm=cs.models.LayerNorm()
    )


def shard(model, parts=True, **options):
    for block in model.blocks if parts is True else parts or ():
        fully_shard(block, **options)
    return fully_shard(model, **options)


class Training:
    """Every process has data of its own."""

    def __init__(self, rank, model, wrap=shard, options=None, optimizer=torch.optim.AdamW, when=(2, 4)):
        self.rank, self.model, self.wrapped = rank, model, wrap(model)
        self.optimizer = optimizer(model.parameters(), lr=1e-2)
        self.compressor = cs.Compressor(self.wrapped, self.optimizer, when=when, **KEEP | (options or {}))
        self.step = 0

    def batch(self, step):
        draw = torch.Generator().manual_seed(100 * step + self.rank)
        return torch.randn(4, 10, 3, generator=draw), torch.randint(5, (4,), generator=draw)

    def train(self, until):
        while self.step < until:
            self.step += 1
            x, target = self.batch(self.step)
            self.optimizer.zero_grad()
            cross_entropy(self.wrapped(x), target).backward()
            self.optimizer.step()
            self.compressor.step(self.step)
        return self

    def whole(self):
        """All weights and moments, whole."""
        found = {}
        for name, parameter in self.model.named_parameters():
            values = {"": parameter, **self.optimizer.state[parameter]}
            found |= {f"{name} {key}": whole(value).detach().clone() for key, value in values.items()}
        return found

    def orders(self):
        return [block.ssm.order for block in self.model.blocks]


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)


def furthest(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def compared(rank, options=None, wrap=shard, **more):
    """A training that is sharded beside one that is not."""
    plain = Training(rank, build(), DistributedDataParallel, options=options, **more).train(6)
    run = Training(rank, build(), wrap, options=options, **more).train(6)
    ours = [[str(event) for event in one.compressor.history] for one in (run, plain)]
    sharded = all(isinstance(p, DTensor) for p in run.model.parameters())
    sharded &= all(isinstance(run.optimizer.state[p]["exp_avg"], DTensor) for p in run.model.parameters())
    return {
        "events": ours,
        "orders": run.orders(),
        "off": furthest(run.whole(), plain.whole()),
        "sharded": sharded,
        "in step": len({str(one) for one in gathered(ours)}) == 1,
    }


@case
def blocks_and_the_rest(rank, path):
    return compared(rank)


@case
def the_root_alone(rank, path):
    return compared(rank, wrap=lambda model: shard(model, parts=()))


@case
def the_layers_themselves(rank, path):
    return compared(rank, wrap=lambda model: shard(model, parts=[block.ssm for block in model.blocks]))


@case
def measured_on_data_of_all(rank, path):
    x = torch.randn(2 + rank, 20, 3, generator=torch.Generator().manual_seed(rank))
    return compared(rank, options={"calibrate": lambda model: model(x)})


@case
def checkpoints_across_cuts(rank, path):
    end, found = Training(rank, build()).train(6), {}
    for stop in (1, 2, 3, 5):
        first, folder = Training(rank, build()).train(stop), f"{path}/checkpoint-{stop}"
        weights, moments = get_state_dict(first.model, first.optimizer)
        checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        model = build()
        changed = take_stored_orders_(model, folder)
        again = Training(rank, model, when=(2, 4))
        weights, moments = get_state_dict(again.model, again.optimizer)
        checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(again.model, again.optimizer, model_state_dict=weights, optim_state_dict=moments)
        again.compressor.load_state_dict(first.compressor.state_dict())
        again.step = stop
        again.train(6)
        found[stop] = [changed, furthest(again.whole(), end.whole())]
    refusals = [refused(take_stored_orders_, end.model, folder), refused(take_stored_orders_, build(), path)]
    return {"found": found, "refused": [*refusals, refused(take_stored_orders_, build(), folder, "net.")]}


@case
def a_cut_that_fails(rank, path):
    run = Training(rank, build(), when=(2,)).train(1)
    before, objects = run.whole(), [id(p) for p in run.model.parameters()]
    part = run.model.blocks[1].ssm.C_re.detach().to_local()
    value = part.clone()
    part.fill_(float("nan"))
    error = refused(run.compressor.step, 2)
    run.model.blocks[1].ssm.C_re.detach().to_local().copy_(value)
    same = furthest(run.whole(), before) == 0 and [id(p) for p in run.model.parameters()] == objects
    run.step = 1
    return {"error": error, "same": same, "orders": [run.orders(), run.train(3).orders()]}


@case
def a_cut_before_the_backward_pass(rank, path):
    def refusals(first_alone=False, compiled=""):
        run = Training(rank, build(), when=(2,)).train(1)
        for block in run.model.blocks if compiled == "blocks" else ():
            block.compile(backend="aot_eager")
        model = torch.compile(run.model, backend="aot_eager") if compiled == "model" else run.model
        before, (x, target) = run.whole(), run.batch(2)
        losses = [cross_entropy(model(x), target) for _ in range(2)]
        losses[0].backward()
        if first_alone and rank:
            del losses
        once = partial(cs.compress_, run.model, keep=cs.TargetOrder(4), optimizer=run.optimizer)
        errors = [refused(cut) for cut in (partial(run.compressor.step, 2), once)]
        same = furthest(run.whole(), before) == 0 and run.compressor.history == []
        losses = []
        return errors, same, run.train(3).orders()

    said = {"eager": refusals(), "in one process": refusals(first_alone=True)}
    return said | {f"compiled {what}": refusals(compiled=what) for what in ("model", "blocks")}


@case
def what_is_refused(rank, path):
    def make(wrap=shard, layer=cs.layers.LRU, optimizer=torch.optim.AdamW, **options):
        return Training(rank, build(layer), wrap, options, optimizer).train(3)

    guard = cs.Rollback(evaluate=lambda: 1.0, drop=0.1, settle=1)
    x = torch.randn(2, 20, 3)
    channels = {"layer": cs.layers.Mamba, "selective": cs.PerChannel("measured"), "calibrate": lambda m: m(x)}
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}

    def group(model):
        fully_shard([model.encoder, model.head])
        return fully_shard(model)

    def along(model):
        def placed(parameter):
            return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % 2 == 0 else None

        return fully_shard(model, shard_placement_fn=placed)

    return {
        "guard": refused(lambda: make(guard=guard)),
        "added": refused(lambda: make(**channels)),
        "offloaded": refused(lambda: make(lambda model: shard(model, **offload))),
        "group": refused(lambda: make(group)),
        "follower": refused(lambda: make(follow=[shard(build())])),
        "padding": refused(lambda: cs.pad_orders_(shard(build()), 16)),
        "stream": refused(lambda: cs.Stream(shard(build()))),
        "axis": refused(lambda: make(along)) if dist.get_world_size() == 2 else ["CompressionError", "axis 1"],
    }


@case
def bf16_and_once_and_preview(rank, path):
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    run = Training(rank, build(), lambda model: shard(model, mp_policy=half), when=(3,)).train(1)
    preview = [str(cut) for cut in run.compressor.preview()]
    cuts = [str(cut) for cut in cs.compress_(run.model, keep=cs.TargetOrder(9), optimizer=run.optimizer)]
    run.train(5)
    finite = all(value.isfinite().all() for value in run.whole().values())
    return {"preview": preview, "cuts": cuts, "orders": run.orders(), "finite": finite}


def work(rank, count, path):
    """All cases in this process."""
    store = dist.FileStore(f"{path}/store", count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=60))
    found = {}
    for name, function in CASES.items():
        try:
            found[name] = function(rank, path)
        except BaseException:
            found[name] = {"failed": traceback.format_exc()}
            break
    Path(path, f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main():
    path, count = sys.argv[1], int(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mp.start_processes(work, (count, path), nprocs=count, start_method="fork")
