"""An error or Ctrl-C at any line of a cut: everything is as it was, or the cut is made, recorded and restorable.

A trace function raises when a chosen line of the library is about to run, so that every line of `Compressor.step`,
`compress_` and `pad_orders_`, and of everything of ours that they call, can fail. The tests take a share of the lines;
`python -m tests.compression.faults OUT PROCESSES` takes all, at their first and at their last visit, and counts.
"""

import ast
import copy
import functools
import gc
import json
import multiprocessing
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import compressm
from compressm.compression.compressor import Compressor, compress_, pad_orders_
from compressm.compression.policies import KeepFraction
from compressm.compression.record import Restored
from compressm.compression.rollback import Rollback
from compressm.compression.schedule import Automatic
from compressm.compression.trying import LossTolerance
from compressm.families.selective.methods import Baked, PerChannel
from compressm.files import replacing
from compressm.layers import LRU, Mamba
from compressm.models import SequenceClassifier
from compressm_lab.runs.measurement import Environment
from tests.compression.test_rollback import same

LIBRARY = str(Path(compressm.__file__).parent)
# The files that change or record something.
CHANGING = ("compressor.py", "cutting.py", "surgery.py", "rollback.py")


class Fault(BaseException):
    """Neither an Exception nor expected, like KeyboardInterrupt."""


class Run:
    """A training with everything that a cut touches; `guarded` keeps snapshots in a folder."""

    def __init__(self, folder, scores=None, when=(3,), layer=LRU, selective=None, keep=None):
        torch.manual_seed(0)
        keep = KeepFraction(0.5) if keep is None else keep
        self.model = SequenceClassifier(layer, depth=1, width=2, order=4, inputs=1, classes=2)
        self.average, self.folder, self.scores = copy.deepcopy(self.model), folder, list(scores or [])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.options = {
            "keep": keep,
            "calibrate": lambda model: model(torch.randn(2, 8, 1)),
            "follow": [self.average],
            "selective": selective or Baked(),
        }
        guard = None if scores is None else Rollback(lambda: self.scores.pop(0), settle=2, folder=folder)
        more = {"when": when, "guard": guard, "scheduler": None if guard is None else self.scheduler}
        self.compressor = Compressor(self.model, self.optimizer, **more, **self.options)

    def train(self, first, last):
        for step in range(first, last + 1):
            x = torch.randn(2, 8, 1, generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            cross_entropy(self.model(x), torch.arange(2)).backward()
            self.optimizer.step()
            self.scheduler.step()
            if step < last:
                self.compressor.step(step)
        return self

    def once(self):
        return compress_(self.model, optimizer=self.optimizer, **self.options)

    def padded(self):
        return pad_orders_(self.model, 6, optimizer=self.optimizer, follow=[self.average])

    def outcome(self):
        """Everything that must be as it was, or as after an undisturbed cut."""
        watch, modules = self.compressor._watch, list(self.model.modules())
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules]
        return copy.deepcopy(
            [
                self.model.state_dict(),
                self.average.state_dict(),
                self.optimizer.state_dict(),
                self.scheduler.state_dict(),
                [parameter.grad for parameter in self.model.parameters()],
                [event.as_dict() | {"seconds": 0} for event in self.compressor.history],
                [self.compressor._seen, self.compressor._ended],
                {name: part for name, part in self.compressor.state_dict().items() if name not in ("history", "watch")},
                None if watch is None else [watch.due, str(watch.before), watch.snapshot is None],
                [module.training for module in modules],
                hooks,
                torch.get_rng_state(),
                [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
            ]
        )

    def picture(self):
        """The outcome, the objects that hold it, and the files."""
        groups = [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]
        identities = [[id(parameter) for parameter in self.model.parameters()], groups]
        return [self.outcome(), identities, sorted(file.name for file in self.folder.rglob("*"))]


def held_out(model):
    """A loss that rises when states go."""
    x = torch.randn(8, 8, 1, generator=torch.Generator().manual_seed(0))
    return cross_entropy(model(x), torch.arange(8) % 2).item()


TRYING = {"when": Automatic(8, every=1, begin_by=0.1), "keep": LossTolerance(0.001, held_out)}

SCENARIOS = {
    "a cut": (lambda folder: Run(folder).train(1, 3), lambda run: run.compressor.step(3)),
    "a guarded cut": (lambda folder: Run(folder, [1.0] * 3).train(1, 3), lambda run: run.compressor.step(3)),
    "a restoration": (lambda folder: Run(folder, [1.0, 0.1, 0.1]).train(1, 5), lambda run: run.compressor.step(5)),
    "an accepted cut and the next": (
        lambda folder: Run(folder, [1.0] * 4, when=(3, 5)).train(1, 5),
        lambda run: run.compressor.step(5),
    ),
    "a restoration of channels": (
        lambda folder: Run(folder, [1.0, 0.1, 0.1], layer=Mamba, selective=PerChannel("measured")).train(1, 5),
        lambda run: run.compressor.step(5),
    ),
    "a cut by trials": (lambda folder: Run(folder, **TRYING).train(1, 1), lambda run: run.compressor.step(1)),
    "a guarded cut by trials": (
        lambda folder: Run(folder, [1.0] * 3, **TRYING).train(1, 1),
        lambda run: run.compressor.step(1),
    ),
    "compress_": (lambda folder: Run(folder).train(1, 3), Run.once),
    "pad_orders_": (lambda folder: Run(folder).train(1, 3), Run.padded),
    "a step between cuts": (
        lambda folder: Run(folder, [1.0] * 3, when=(5,)).train(1, 3),
        lambda run: run.compressor.step(3),
    ),
}


def visited(call, fault=None):
    """Run the call and count its visits of lines of the library; `fault` is a line, and the visit that raises.

    With a fault only lines of its file are counted: to look at all of them takes longer than the call.
    """
    visits = Counter()
    files = LIBRARY if fault is None else fault[0][0]

    def at_line(frame, event, arg):
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            visits[place] += 1
            if fault == (place, visits[place]):
                sys.settrace(None)
                raise Fault
        return at_line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: at_line if frame.f_code.co_filename.startswith(files) else None)
    try:
        call()
    finally:
        sys.settrace(before)
    return visits


def stopped(call, files, number=None):
    """Run the call and count the lines that run in files with such names; Ctrl-C comes before line `number`."""
    lines = 0

    def at_line(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        if event == "line" and lines == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return at_line

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: at_line if any(f in frame.f_code.co_filename for f in files) else None)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


@functools.cache
def heads(file):
    """The lines of `with` statements, which are visited again on the way out.

    A trace function can raise between the end of such a block and its `__exit__`, where nothing else ever raises:
    CPython looks for signals after calls only.
    """
    blocks = [node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.With)]
    return {line for block in blocks for line in range(block.lineno, block.body[0].lineno)}


def chosen(visits, shares):
    """The lines to fail at, each with the number of its visit; an import hook runs once a process.

    `shares` are one of how many lines that change something, and one of how many others; None takes all.
    """
    lines = [line for line in visits if Path(line[0]).name != "moved.py"]
    last = {line: 1 if line[1] in heads(line[0]) else visits[line] for line in lines}
    if shares is None:
        return [(line, visit) for line in lines for visit in sorted({1, last[line]})]
    changing = [line for line in lines if Path(line[0]).name in CHANGING]
    others = [line for line in lines if line not in changing]
    return [(line, last[line]) for line in (*changing[:: shares[0]], *others[:: shares[1]])]


def fail_once(name, fault, folder, expected):
    """Require all or nothing after one fault: "unchanged", and then like the undisturbed cut, or "recorded"."""
    prepare, call = SCENARIOS[name]
    run = prepare(folder)
    before = run.picture()
    try:
        visited(lambda: call(run), fault)
    except Fault:
        pass
    else:
        return "not reached"  # what a process does once, such as filling a cache
    (file, line), visit = fault
    where = f"{name}, {Path(file).relative_to(LIBRARY)}:{line}, visit {visit}"
    if same(run.picture(), before):
        outcome = "unchanged"
        call(run)
        assert same(run.outcome(), expected), f"{where}: tried again, it ends otherwise"
    else:
        outcome = "recorded"
        assert name not in ("compress_", "pad_orders_"), f"{where}: changed, but nobody has the records"
        assert same(run.outcome(), expected), f"{where}: neither as it was nor recorded"
    # A guard can still take an unjudged cut back.
    watch = run.compressor._watch
    if watch is not None and watch.snapshot is not None:
        run.scores[:] = [0.0]
        (restored,) = run.compressor.step(watch.due)
        assert isinstance(restored, Restored), where
        assert run.model.blocks[0].ssm.order == (4 if name.startswith("a guarded cut") else 2), where
    return outcome


def inject(name, folder, shares=None, part=slice(None), failures=None):
    """Fail at the chosen lines, one after the other; the number of each outcome. With a list, failures go into it."""
    prepare, call = SCENARIOS[name]
    (whole := folder / "whole").mkdir()
    run = prepare(whole)
    visits = visited(lambda: call(run))
    expected, outcomes = run.outcome(), Counter()
    for number, fault in enumerate(chosen(visits, shares)[part]):
        (own := folder / str(number)).mkdir()
        try:
            outcomes[fail_once(name, fault, own, expected)] += 1
        except AssertionError as error:
            if failures is None:
                raise
            failures.append(str(error).splitlines()[0])
            torch.set_grad_enabled(True)
    return outcomes


def share(job):
    """The outcomes of one share of a scenario's faults, and the failures among them."""
    torch.set_num_threads(1)
    name, first, step = job
    failures = []
    prepare, call = SCENARIOS[name]
    with tempfile.TemporaryDirectory() as folder:
        call(prepare(Path(folder)))
    gc.freeze()  # a cut looks at all objects that live: those of imported modules took two thirds of the time
    with tempfile.TemporaryDirectory() as folder:
        return name, inject(name, Path(folder), part=slice(first, None, step), failures=failures), failures


def main(path, concurrency):
    """Fail at every line, and write how many faults there were and which of them did harm."""
    found, failures = {name: Counter() for name in SCENARIOS}, []
    jobs = [(name, first, concurrency) for name in SCENARIOS for first in range(concurrency)]
    with multiprocessing.get_context("spawn").Pool(concurrency) as pool:
        for name, outcomes, failed in pool.imap_unordered(share, jobs):
            found[name] += outcomes
            failures += failed
            print(name, dict(found[name]), *failed, sep="\n", flush=True)
    faults = sum(outcomes["unchanged"] + outcomes["recorded"] for outcomes in found.values()) + len(failures)
    result = {"environment": asdict(Environment.here()), "faults": faults, "failures": failures, "scenarios": found}
    with replacing(path) as scratch:
        scratch.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{faults} faults, {len(failures)} failures")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
