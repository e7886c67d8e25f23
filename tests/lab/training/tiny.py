"""Recipes and tasks that train in a fraction of a second, and what their runs left on disk."""

import json
import signal
import threading
from functools import lru_cache

import torch
from safetensors.torch import load_file

from compressm_lab.data import DelayedCopy, Digits, LTITeacher, Split, Task, TaskKind
from compressm_lab.training.reading import make_recipe, with_settings
from compressm_lab.training.steps import task_objective

RECIPE = {
    "name": "tiny",
    "task": {"name": "delayed_copy"},
    "model": {"depth": 1, "width": 4, "order": 6, "dropout": 0.1},
    "training": {
        "steps": 16,
        "batch": 8,
        "learning_rate": 0.01,
        "schedule": "cosine",
        "evaluate_every": 4,
        "checkpoint_every": 6,
    },
}
CUTS = "compression={rho: 0.75, gate: 1.0, when: {steps: [5, 11]}}"
SPECTRA = "spectra={every: 3, changes: true}"


def recipe(*settings):
    return make_recipe(with_settings(RECIPE, settings))


def from_dataset(dataset):
    form = {key: value for key, value in vars(dataset.form).items() if key != "length"}
    return Task(name=dataset.name, **dataset.parse((), lambda *_: None)._asdict(), **form)


@lru_cache
def copies():
    return from_dataset(DelayedCopy(symbols=4, copied=4, delay=2, examples=64, held_out=16))


@lru_cache
def teacher():
    return from_dataset(LTITeacher(order=2, length=12, largest_radius=0.9, examples=64, held_out=16))


@lru_cache
def digits():
    task = from_dataset(Digits(side=4))
    few = torch.arange(100)
    return Task(
        name="digits", kind=task.kind, classes=10, channels=1, **{s: getattr(task, s).select(few) for s in SPLITS}
    )


SPLITS = ("train", "validation", "test")


def words(count, towers, generator):
    """Sequences of 3 to 9 tokens that all are 1 or 2, and nothing but noise after their ends."""
    lengths = torch.randint(3, 10, (count, *towers), generator=generator)
    tokens = torch.randint(1, 3, (count, *towers, 1), generator=generator).expand(*lengths.shape, 9)
    noise = torch.randint(0, 3, tokens.shape, generator=generator)
    return torch.where(torch.arange(9) < lengths[..., None], tokens, noise).short(), lengths, tokens[..., 0]


@lru_cache
def tokens():
    """Which token it is."""
    splits = {}
    for number, split in enumerate(SPLITS):
        inputs, lengths, said = words(64, (), torch.Generator().manual_seed(number))
        splits[split] = Split(inputs, said - 1, lengths)
    return Task(name="tokens", kind=TaskKind.CLASSIFY, classes=2, vocabulary=3, **splits)


@lru_cache
def pairs():
    """Whether two sequences are of the same token."""
    splits = {}
    for number, split in enumerate(SPLITS):
        inputs, lengths, said = words(64, (2,), torch.Generator().manual_seed(number))
        splits[split] = Split(inputs, (said[:, 0] == said[:, 1]).long(), lengths)
    return Task(name="pairs", kind=TaskKind.CLASSIFY, classes=2, vocabulary=3, towers=2, **splits)


class Sending:
    """The objective of a task that, at one gradient step, sends signals to its own process."""

    def __init__(self, kind, at, *signals):
        self.inner, self.at, self.signals, self.steps = task_objective(kind), at, signals or (signal.SIGINT,), 0

    def __call__(self, model, batch):
        self.steps += 1
        if self.steps == self.at:
            for number in self.signals:
                # To this thread: another one would hand it over whenever it is its turn.
                signal.pthread_kill(threading.get_ident(), number)
        return self.inner(model, batch)


def lines(folder, name):
    """Of one of the JSONL files, without what a clock said."""
    text = (folder / f"{name}.jsonl").read_text()
    timed = ("seconds", "step_seconds")
    return [{k: v for k, v in json.loads(line).items() if k not in timed} for line in text.splitlines()]


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def check_same_run(one, other, *names):
    """The same bits, whatever the clock said."""
    mine, yours = weights(one), weights(other)
    assert mine.keys() == yours.keys()
    assert [name for name in mine if not torch.equal(mine[name], yours[name])] == []
    for name in names or ("metrics", "cuts", "spectra"):
        assert lines(one, name) == lines(other, name)
