"""Processes that train together, and what each of them found: run by a script, they write it as JSON."""

import copy
import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import compressm as cs
from compressm.compression import StaleWrapperError, distributed, load_checkpoint, save_checkpoint, surgery
from compressm.compression.distributed import Processes
from compressm.compression.planning import Options, read_layers

CASES = {}


def case(function):
    """To be run by all processes, one case after the other."""
    CASES[function.__name__] = function
    return function


class Training:
    """A model with normalisation statistics in a wrapper; every process has data of its own."""

    def __init__(self, rank, order=12, optimizer=torch.optim.AdamW, layer=cs.layers.LRU, depth=2, **options):
        torch.manual_seed(0)
        self.rank, self.data = rank, torch.Generator().manual_seed(rank)
        self.inner = cs.models.SequenceClassifier(layer, depth=depth, width=4, order=order, inputs=3, classes=5)
        self.model = DistributedDataParallel(self.inner, **options)
        self.optimizer = optimizer(self.inner.parameters(), lr=1e-2)

    def batch(self):
        return torch.randn(4, 20, 3, generator=self.data), torch.randint(5, (4,), generator=self.data)

    def step(self, x, target):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(x), target)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, steps, compressor=None, first=1):
        events = []
        for step in range(first, first + steps):
            self.step(*self.batch())
            events += [] if compressor is None else compressor.step(step)
        return [str(event) for event in events]

    def orders(self):
        return [block.ssm.order for block in self.inner.blocks]

    def flat(self):
        """Parameters and moments in one row."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return torch.cat([torch.as_tensor(part).detach().flatten() for part in [*self.inner.parameters(), *moments]])

    def in_step(self):
        return all(torch.equal(rows, self.flat()) for rows in gathered(self.flat()))

    def averaged(self):
        """Whether what the wrapper leaves in the gradients is the mean of what each process finds."""
        self.model.eval()  # no dropout
        x, target = self.batch()
        self.model(x)  # statistics of the first process
        parameters = list(self.inner.parameters())
        own = torch.autograd.grad(cross_entropy(self.inner(x), target), parameters)
        self.optimizer.zero_grad()
        cross_entropy(self.model(x), target).backward()
        self.model.train()
        for gradient in own:
            dist.all_reduce(gradient)
        return all(
            torch.allclose(p.grad, total / dist.get_world_size(), atol=1e-6)
            for p, total in zip(parameters, own, strict=True)
        )


def gathered(value):
    """What every process has."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def refused(call, *args):
    """The kind of error and what it says."""
    try:
        call(*args)
    except BaseException as error:
        return [type(error).__name__, str(error)]
    return ["no error", ""]


def outcome(run, **more):
    return {"orders": run.orders(), "averaged": run.averaged(), "in step": run.in_step(), **more}


@case
def the_wrapper_is_given(rank, path):
    run = Training(rank)
    average = [copy.deepcopy(run.inner)] if rank == 0 else []  # kept by the first process alone
    compressor = cs.Compressor(run.model, run.optimizer, when=[2, 4], keep=cs.EnergyTolerance(0.1), follow=average)
    events = run.train(6, compressor)
    assert all([block.ssm.order for block in model.blocks] == run.orders() for model in average)
    return outcome(run, events=events)


class Both:
    """Muon for matrices, AdamW for the rest."""

    def __init__(self, parameters, lr):
        parameters = list(parameters)
        muon = torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=lr)
        self.parts = [muon, torch.optim.AdamW([p for p in parameters if p.ndim != 2], lr=lr)]

    @property
    def state(self):
        return {p: state for part in self.parts for p, state in part.state.items()}

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()

    def step(self):
        for part in self.parts:
            part.step()


@case
def several_optimizers(rank, path):
    run = Training(rank, optimizer=Both)
    average = torch.optim.swa_utils.AveragedModel(run.inner)
    compressor = cs.Compressor(run.model, run.optimizer.parts, when=[2, 4], keep=cs.EnergyTolerance(0.1))
    events = run.train(6, compressor)
    return outcome(run, events=events, outdated=refused(average.update_parameters, run.inner))


@case
def the_wrapper_is_not_given(rank, path):
    run = Training(rank)
    calibration = [run.batch()[0] for _ in range(1 + rank)]  # another number of batches, too

    def calibrate(model):
        for x in calibration:
            model(x)

    compressor = cs.Compressor(run.inner, run.optimizer, when=[2], keep=cs.EnergyTolerance(0.1), calibrate=calibrate)
    events, before = run.train(2, compressor), run.flat()
    stale = refused(run.train, 1)
    with torch.no_grad():
        run.model(run.batch()[0])  # evaluation needs no averages
    untouched = torch.equal(run.flat(), before)
    cs.rewrap_(run.model)
    run.train(3)
    return outcome(run, events=events, stale=stale, untouched=untouched)


@case
def measured_with_other_data(rank, path):
    run = Training(rank)
    calibration = (1 + 10 * rank) * torch.randn(2 + rank, 30, 3, generator=run.data)
    compressor = cs.Compressor(
        run.model, run.optimizer, when=[2], keep=cs.EnergyTolerance(0.1), calibrate=lambda model: model(calibration)
    )
    events = run.train(1, compressor)
    preview = [str(cut) for cut in compressor.preview()]
    events += [str(event) for event in compressor.step(2)]
    run.train(2, compressor, first=3)
    return outcome(run, events=events, preview=preview, bound=compressor.history[0].error_bound)


@case
def selective_layers(rank, path):
    run = Training(rank, layer=cs.layers.Mamba)
    parts = [
        torch.randn(2 + k, 30, 3, generator=torch.Generator().manual_seed(k)) for k in range(dist.get_world_size())
    ]
    options = {"keep": cs.EnergyTolerance(0.1), "gramian": cs.Measured(stride=1)}
    pooled, whole = (
        read_layers(run.inner, Options(calibrate=lambda model, x=x: model(x), **options))["blocks.0.ssm"]
        for x in (parts[rank], torch.cat(parts))
    )
    pooled = pooled.over(Processes().total)
    same = all(torch.allclose(*pair) for pair in zip(pooled.data.gramians, whole.data.gramians, strict=True))
    compressor = cs.Compressor(
        run.model, run.optimizer, when=[2], calibrate=lambda model: model(parts[rank]), **options
    )
    preview = [str(cut) for cut in compressor.preview()]
    return outcome(run, events=run.train(4, compressor), preview=preview, pooled=same)


@case
def channels_with_states_of_their_own(rank, path):
    run = Training(rank, layer=cs.layers.Mamba)
    x = torch.randn(4, 60, 3, generator=torch.Generator().manual_seed(rank))
    options = {
        "keep": cs.KeepFraction(0.6),
        "calibrate": lambda model: model(x),
        "selective": cs.PerChannel("measured"),
    }
    compressor = cs.Compressor(run.model, run.optimizer, when=[2, 4], **options)
    events = run.train(6, compressor)
    layer = run.inner.blocks[0].ssm
    own = torch.cat([layer.B_map.flatten(), layer.C_map.flatten(), layer.orders.double()])
    same = all(torch.equal(maps, own) for maps in gathered(own))
    return outcome(run, events=events, maps=same, complex=layer.A_imag is not None)


@case
def matrix_states(rank, path):
    from tests.families.memory.test_forms import data, make  # registers its adapter

    parts = [data(k, count=6 + k) for k in range(dist.get_world_size())]
    pooled, whole = (
        read_layers(make(), Options(cs.TargetOrder(3), lambda model, x=x: model(x)))["0"]
        for x in (parts[rank], torch.cat(parts))
    )
    pooled = pooled.over(Processes().total)
    same = all(torch.allclose(*pair) for pair in zip(pooled.data.moments, whole.data.moments, strict=True))
    events, weights = [], []
    for form in (cs.Folded(), cs.Selected(), cs.Fitted(steps=3)):
        model = make()
        cuts = cs.compress_(model, keep=cs.TargetOrder(3), calibrate=lambda model: model(parts[rank]), form=form)
        events += [str(cut) for cut in cuts]
        weights += [parameter.detach().flatten() for parameter in model.parameters()]
    flat = torch.cat(weights)
    return {"events": events, "pooled": same, "in step": all(torch.equal(rows, flat) for rows in gathered(flat))}


@case
def a_policy_that_differs(rank, path):
    run = Training(rank)
    options = {"when": [2], "keep": cs.TargetOrder(4 + rank), "moments": cs.Restart()}
    error = refused(lambda: cs.Compressor(run.model, run.optimizer, **options))
    once = refused(lambda: cs.compress_(run.model, keep=cs.TargetOrder(4), at_least=1 + rank))
    return outcome(run, error=error, once=once)


@case
def allowed_orders_that_differ(rank, path):
    run = Training(rank)
    options = {"when": [2], "keep": cs.TargetOrder(4), "round_to": (4, 6 + rank)}
    error = refused(lambda: cs.Compressor(run.model, run.optimizer, **options))
    return outcome(run, error=error, padded=refused(lambda: cs.pad_orders_(run.model, 16 + rank)))


@case
def one_allowed_order_for_all_layers(rank, path):
    run = Training(rank)
    for block in run.inner.blocks:
        block.ssm.B_re.data[5:] = block.ssm.B_im.data[5:] = 0
    compressor = cs.Compressor(
        run.model, run.optimizer, when=[1], keep=cs.TargetOrder(6), uniform=True, round_to={11, 7}, gate=1.0
    )
    return outcome(run, events=run.train(4, compressor))


@case
def zero_states_in_all_processes(rank, path):
    run = Training(rank)
    run.train(2)
    padded = cs.pad_orders_(run.model, 16, optimizer=run.optimizer)
    run.train(2)
    return outcome(run, padded=padded)


@case
def a_schedule_that_differs(rank, path):
    run = Training(rank)
    error = refused(lambda: cs.Compressor(run.model, run.optimizer, when=[2, 3 + rank], keep=cs.TargetOrder(4)))
    return outcome(run, error=error)


@case
def options_that_are_functions(rank, path):
    """Each process has its own functions; random choices are those of the first."""
    run = Training(rank)
    compressor = cs.Compressor(
        run.model,
        run.optimizer,
        when=[2],
        keep=lambda spectra: dict.fromkeys(spectra, 4 + rank),
        filter_fn=lambda module, name: True,
        select=cs.Random(3),
    )
    return outcome(run, events=run.train(4, compressor))


@case
def a_model_that_one_refuses(rank, path):
    run = Training(rank)
    if rank == 1:
        run.inner.blocks[0].ssm.C_re = run.inner.blocks[1].ssm.C_re  # a shared parameter
    return {"error": refused(lambda: cs.Compressor(run.model, when=[2], keep=cs.TargetOrder(4)))}


@case
def layers_that_differ(rank, path):
    """Sums of other sizes would end the process."""
    torch.manual_seed(0)
    model = cs.models.SequenceClassifier(cs.layers.Mamba, depth=1, width=4 + rank, order=8, inputs=3, classes=5)
    options = {"keep": cs.TargetOrder(4), "calibrate": lambda model: model(torch.ones(2, 10, 3))}
    return {"error": refused(lambda: cs.compress_(model, **options)), "orders": [model.blocks[0].ssm.order]}


@case
def data_that_fails_in_one(rank, path):
    run, left = Training(rank), ["once"] * (rank == 1)

    def calibrate(model):
        if left:
            left.pop()
            raise RuntimeError("no data")
        model(torch.ones(2, 10, 3))

    compressor = cs.Compressor(run.model, run.optimizer, when=[2, 3], keep=cs.TargetOrder(4), calibrate=calibrate)
    run.train(1, compressor)
    before = run.flat()
    error = refused(compressor.step, 2)
    untouched = torch.equal(run.flat(), before) and not compressor.history
    return outcome(run, error=error, untouched=untouched, events=run.train(2, compressor, first=3))


@case
def an_optimizer_that_is_behind_in_one(rank, path):
    run = Training(rank)
    run.train(1)
    if rank == 1:
        run.optimizer.state.clear()
    compressor = cs.Compressor(run.model, run.optimizer, when=[2], keep=cs.TargetOrder(4))
    before = run.flat()
    error = refused(compressor.step, 2)
    return {"error": error, "untouched": torch.equal(run.flat(), before), "orders": run.orders()}


@case
def a_write_that_fails_in_one(rank, path):
    run, replace_data = Training(rank), surgery.replace_data
    guard = cs.Rollback(lambda: 1.0, settle=3, folder=path)
    compressor = cs.Compressor(run.model, run.optimizer, when=[2, 3], keep=cs.TargetOrder(4), guard=guard)
    run.train(1, compressor)
    calls, before, state = [], run.flat(), json.dumps(compressor.state_dict())

    def fails(parameter, data):
        calls.append(parameter)
        if rank == 1 and len(calls) == 3:
            raise OSError("no memory")
        replace_data(parameter, data)

    surgery.replace_data = fails
    error = refused(compressor.step, 2)
    surgery.replace_data = replace_data
    untouched = torch.equal(run.flat(), before) and json.dumps(compressor.state_dict()) == state
    return outcome(run, error=error, untouched=untouched, events=run.train(2, compressor, first=3))


@case
def a_cut_that_is_undone(rank, path):
    run = Training(rank)
    scores = iter([1.0, 0.2 if rank == 0 else 5.0])  # the first process's count
    guard = cs.Rollback(lambda: next(scores), settle=2)
    compressor = cs.Compressor(run.model, run.optimizer, when=[2], keep=cs.TargetOrder(4), guard=guard)
    return outcome(run, events=run.train(6, compressor))


@case
def an_evaluation_that_fails_in_one(rank, path):
    run = Training(rank)
    guard = cs.Rollback(lambda: None if rank else 1.0)
    compressor = cs.Compressor(run.model, run.optimizer, when=[2], keep=cs.TargetOrder(4), guard=guard)
    before = run.flat()
    return {"error": refused(compressor.step, 2), "untouched": torch.equal(run.flat(), before)}


@case
def processes_at_other_steps(rank, path):
    run = Training(rank)
    compressor = cs.Compressor(run.model, run.optimizer, when=[2, 3], keep=cs.TargetOrder(4))
    compressor.step(1)
    return {"error": refused(compressor.step, 2 + rank), "orders": run.orders()}


@case
def a_step_that_one_skips(rank, path):
    """The second process does not call step(2); its next call is refused, and so is the first one's."""
    run = Training(rank)
    compressor = cs.Compressor(run.inner, run.optimizer, when=[2, 5], keep=cs.TargetOrder(4))
    compressor.step(1)
    error = refused(compressor.step, 3 if rank == 1 else 2)
    return {"error": error, "orders": run.orders()}


@case
def a_step_that_one_skips_while_its_wrapper_waits(rank, path):
    """The second process trains on, and its wrapper waits for the first: both end with the group's timeout."""
    run = Training(rank, process_group=dist.new_group(timeout=timedelta(seconds=2)))
    compressor = cs.Compressor(run.model, run.optimizer, when=[2], keep=cs.TargetOrder(4))
    run.train(1, compressor)
    run.train(1, first=2)
    error = refused(run.train, 1) if rank == 1 else refused(compressor.step, 2)
    return {"error": error, "orders": run.orders()}


@case
def a_process_that_does_not_come(rank, path):
    """The second process makes no compressor; the first learns so after the timeout of the group."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    run = Training(rank, process_group=group)
    error = ["no error", ""]
    if rank == 0:
        error = refused(lambda: cs.Compressor(run.model, run.optimizer, when=[2], keep=cs.TargetOrder(4)))
    dist.barrier()
    compressor = cs.Compressor(run.model, run.optimizer, when=[2], keep=cs.TargetOrder(4))
    return outcome(run, error=error, events=run.train(4, compressor))


@case
def a_wrapper_that_cannot_be_rebuilt_in_one(rank, path):
    run, made_anew = Training(rank), distributed._made_anew_
    compressor = cs.Compressor(run.model, run.optimizer, when=[2, 3], keep=cs.TargetOrder(4))
    run.train(1, compressor)
    before, calls = run.flat(), []

    def fails(wrapper):
        calls.append(wrapper)
        if rank == 1 and len(calls) == 1:
            raise KeyboardInterrupt("no wrapper")
        made_anew(wrapper)

    distributed._made_anew_ = fails
    error = refused(compressor.step, 2)
    distributed._made_anew_ = made_anew
    untouched = torch.equal(run.flat(), before) and compressor.history == []
    return outcome(run, error=error, untouched=untouched, events=run.train(2, compressor, first=3))


@case
def options_of_the_wrapper(rank, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        run = Training(rank, bucket_cap_mb=3, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)
    calls = []
    run.model.register_comm_hook(None, allreduce_hook)
    run.model.register_forward_hook(lambda *_: calls.append(1))
    run.model.mark = "mine"
    compressor = cs.Compressor(run.model, run.optimizer, when=[2], keep=cs.TargetOrder(4))
    run.train(2, compressor)
    calls.clear()
    run.train(2)
    kept = {
        "bytes": run.model.bucket_bytes_cap == 3 * 1024 * 1024,
        "views": run.model.gradient_as_bucket_view,
        "static": run.model.static_graph,
        "statistics of its own": not run.model.will_sync_module_buffers(),
        "communication": run.model._comm_hooks[0][0] is allreduce_hook,
        "hooks": len(calls) == 2,
        "attributes": run.model.mark == "mine",
    }
    return {"orders": run.orders(), "in step": run.in_step(), "kept": kept}


@case
def groups_of_their_own(rank, path):
    groups = [dist.new_group([k]) for k in range(dist.get_world_size())]
    run = Training(rank, process_group=groups[rank])
    if rank == 0:
        cs.compress_(run.model, keep=cs.TargetOrder(4), optimizer=run.optimizer)
        run.train(2)
    return {"orders": run.orders()}


@case
def a_look_by_one(rank, path):
    run, x = Training(rank), torch.randn(4, 20, 3)
    if rank > 0:
        return {"states": 24}
    tracker = cs.HankelTracker(run.model, every=1, calibrate=lambda model: model(x))
    tracker.step(1)
    return {"states": sum(cs.inspect(run.model, lambda model: model(x)).orders.values())}


@case
def a_snapshot_that_fails_in_one(rank, path):
    run, folder = Training(rank), Path(path) / f"snapshots-{rank}"
    guard = cs.Rollback(lambda: 1.0, folder=folder)
    if rank == 1:
        folder.write_text("not a folder")
    compressor = cs.Compressor(run.model, run.optimizer, when=[2], keep=cs.TargetOrder(4), guard=guard)
    before = run.flat()
    error = refused(compressor.step, 2)
    left = [] if rank == 1 else list(folder.iterdir())
    return {"error": error, "untouched": torch.equal(run.flat(), before) and not left}


@case
def a_compiled_wrapper(rank, path):
    run = Training(rank, depth=1)
    run.model = torch.compile(run.model, backend="eager")
    compressor = cs.Compressor(run.model, run.optimizer, when=[2], keep=cs.TargetOrder(4))
    return outcome(run, events=run.train(4, compressor))


@case
def a_checkpoint_of_smaller_orders(rank, path):
    run, file = Training(rank), f"{path}/{rank}.pt"
    compressor = cs.Compressor(run.model, run.optimizer, when=[2], keep=cs.TargetOrder(4))
    run.train(2, compressor)
    save_checkpoint(file, model=run.model, optimizer=run.optimizer, compressor=compressor, step=2)
    again = Training(rank)
    resumed = cs.Compressor(again.model, again.optimizer, when=[2], keep=cs.TargetOrder(4))
    load_checkpoint(file, model=again.model, optimizer=again.optimizer, compressor=resumed)
    again.train(2)
    return outcome(again)


def loaded_at_smaller_orders(run, load):
    """What a wrapper does once the weights of a smaller model were loaded into what it wraps."""
    smaller = Training(run.rank, order=5).inner.state_dict()
    run.train(1)
    load(smaller)
    stale = refused(run.train, 1)
    with torch.no_grad():
        run.model(run.batch()[0])
    cs.rewrap_(run.model)
    run.optimizer = torch.optim.AdamW(run.inner.parameters(), lr=1e-2)
    run.train(2)
    return outcome(run, stale=stale)


@case
def a_state_dict_of_smaller_orders(rank, path):
    run = Training(rank)
    return loaded_at_smaller_orders(run, run.inner.load_state_dict)


@case
def a_state_dict_of_smaller_orders_through_the_wrapper(rank, path):
    run = Training(rank)
    return loaded_at_smaller_orders(
        run, lambda state: run.model.load_state_dict({f"module.{name}": value for name, value in state.items()})
    )


@case
def a_state_dict_of_the_same_orders(rank, path):
    run = Training(rank)
    run.inner.load_state_dict(Training(0).inner.state_dict())
    run.train(2)
    return outcome(run)


@case
def a_captured_step(rank, path):
    losses = []  # beside the plain loop, over a cut; on a CPU the function is just called
    for captured in (True, False):
        run = Training(rank)
        compressor = cs.Compressor(run.model, run.optimizer, when=[4], keep=cs.TargetOrder(5))
        step_fn = cs.CapturedStep(run.step) if captured else run.step
        losses.append(own := [])
        for number in range(1, 9):
            own.append(step_fn(*run.batch()).item())
            compressor.step(number)
    return outcome(run, captured=losses[0], plain=losses[1])


@case
def nothing_to_redo(rank, path):
    assert issubclass(StaleWrapperError, cs.compression.CompressionError)
    return {"error": refused(cs.rewrap_, Training(rank).inner)}


def work(rank, path, count):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=count)
    found = {}
    for name, function in CASES.items():
        try:
            found[name] = function(rank, path)
        except Exception:
            found[name] = {"failed": traceback.format_exc()}
        dist.barrier()
    with open(f"{path}/found-{rank}.json", "w") as file:
        json.dump(found, file)
    dist.destroy_process_group()


def main():
    count = int(sys.argv[2])
    mp.start_processes(work, (sys.argv[1], count), nprocs=count, start_method="fork")
