"""Processes of which one ends or stalls inside a cut, and what the others say of it: run by a script, as JSON."""

import json
import os
import signal
import socket
import sys
import time
import warnings
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import compressm as cs
from compressm.compression import distributed, rollback, surgery
from tests.compression.processes import Training

# Seconds that processes wait for each other.
TIMEOUT = 1.5

# Which process is lost, how, and where; and what the others do then.
CASES = {
    "reading": (1, "ends", "calibrate", "reading the layers"),
    "planning": (0, "ends", "policy", "planning the cut"),
    "sending": (1, "is killed", "broadcast", "sending the cut to all processes"),
    "evaluating": (1, "is killed", "evaluate", "evaluating"),
    "failing too": (1, "ends", "evaluate", "evaluating"),
    "writing": (1, "ends", "write", "writing the cut"),
    "writing slowly": (1, "stalls", "write", "writing the cut"),
    "restoring": (1, "ends", "restore", "restoring the snapshot from before the cut"),
    "keeping the store": (0, "ends", "write", "writing the cut"),
    "freezing with the store": (0, "freezes", "write", "writing the cut"),
}


class Fate:
    """The end of one process, at one place of the cut."""

    def __init__(self, case, rank):
        who, self.how, self.where, _ = CASES[case]
        self.case, self.is_lost, self.armed = case, rank == who, False

    def at(self, place):
        if not (self.armed and self.is_lost and place == self.where):
            return
        self.armed = False
        if self.how == "stalls":
            time.sleep(1.5 * TIMEOUT)
        elif self.how == "ends":
            os._exit(0)
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.how == "is killed" else signal.SIGSTOP)

    def before(self, owner, name, place):
        """Make a function of the library, or of torch, a place."""
        inner = getattr(owner, name)

        def function(*args, **options):
            self.at(place)
            return inner(*args, **options)

        setattr(owner, name, function)


def compressor_of(run, fate, folder):
    scores = iter([1.0, 0.1])

    def calibrate(model):
        fate.at("calibrate")
        model(torch.ones(2, 10, 3))

    def keep(spectra):
        fate.at("policy")
        return dict.fromkeys(spectra, 4)

    def evaluate():
        fate.at("evaluate")
        if fate.case == "evaluating":  # by collectives of its own
            dist.all_reduce(torch.ones(1), group=run.model.process_group)
        if fate.case == "failing too":
            raise OSError("no data")
        return next(scores)

    fate.before(dist, "broadcast_object_list", "broadcast")
    fate.before(surgery, "replace_data", "write")
    fate.before(rollback.Snapshot, "restore_", "restore")
    guard = cs.Rollback(evaluate, settle=1, folder=folder)
    return cs.Compressor(run.model, run.optimizer, when=[3], keep=keep, calibrate=calibrate, guard=guard)


def state(run, compressor, folder):
    """Everything that a cut changes, as bytes or text."""
    watch = {key: str(value) for key, value in vars(compressor._watch).items()}
    parts = (run.orders(), run.optimizer.state_dict()["param_groups"], compressor.history, watch)
    return run.flat().numpy().tobytes(), str(parts), sorted(os.listdir(folder))


def trains(run):
    """Whether the wrapper still gives a gradient to every parameter; nothing is sent."""
    x, target = run.batch()
    run.optimizer.zero_grad()
    with run.model.no_sync():
        cross_entropy(run.model(x), target).backward()
    return all(p.grad is not None and p.grad.shape == p.shape for p in run.inner.parameters())


def found_by(run, compressor, step, folder):
    before, start = state(run, compressor, folder), time.monotonic()
    try:
        compressor.step(step)
        found = {"kinds": [], "said": "no error"}
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        found = {"kinds": kinds, "said": str(error), "cause": str(error.__cause__)}
    seconds, same = time.monotonic() - start, state(run, compressor, folder) == before
    return {**found, "seconds": seconds, "same": same, "trains": trains(run)}


def work(rank, count, case, path, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    # With its own statistics a wrapper that has been trained for two steps sends only gradients.
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    run = Training(rank, depth=1, order=8, process_group=group, broadcast_buffers=False)
    fate, folder = Fate(case, rank), f"{path}/{case}-{rank}"
    distributed._NOTICE = 0.3 if fate.how == "freezes" else distributed._NOTICE
    os.mkdir(folder)
    compressor = compressor_of(run, fate, folder)
    step = 4 if case == "restoring" else 3
    run.train(step - 1, compressor)
    run.train(2)
    fate.armed = True
    dist.barrier()
    found = found_by(run, compressor, step, folder)
    with open(f"{path}/{case}-{rank}.json", "w") as file:
        json.dump(found, file)
    os._exit(0)


def differ(rank, count, path, store):
    """Make compressors that differ; the first process, which keeps the store, ends as soon as it knows."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    if rank:
        read = dist.PrefixStore.get
        dist.PrefixStore.get = lambda self, key: (time.sleep(0.3), read(self, key))[1]
    try:
        cs.Compressor(cs.layers.LRU(2, 4), when=[3 + rank], keep=cs.TargetOrder(2))
    except ValueError as error:
        with open(f"{path}/differing-{rank}.json", "w") as file:
            json.dump(str(error), file)
    os._exit(0)


def at_a_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def main():
    path, count = sys.argv[1], int(sys.argv[2])
    store = at_a_port()
    processes = [get_context("fork").Process(target=differ, args=(rank, count, path, store)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    for number, (case, (lost, how, *_)) in enumerate(CASES.items()):
        store = at_a_port() if "the store" in case else f"file://{path}/store-{number}"
        given = [(rank, count, case, path, store) for rank in range(count)]
        processes = [get_context("fork").Process(target=work, args=args) for args in given]
        for process in processes:
            process.start()
        for process in processes[:lost] + processes[lost + 1 :]:
            process.join()
        if how == "freezes":
            processes[lost].kill()
        processes[lost].join()
