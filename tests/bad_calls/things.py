"""Good things to call badly, and the check that a refused call has left them as they were."""

PREAMBLE = """
import copy
import io
import os
import pathlib
import tempfile
import warnings

import torch
from torch import nn, inf, nan, ones, randn, tensor, zeros

import compressm as cs
from compressm import adapters, compression, control, families, layers, models, ops, saving
from compressm.adapters import *
from compressm.compression import *
from compressm.control import *
from compressm.layers import *
from compressm.models import *

torch.manual_seed(0)
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=DeprecationWarning)
warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)
keep, zoh = TargetOrder(4), ZOH()


def classifier(layer=LRU, **options):
    return SequenceClassifier(layer, **{"depth": 2, "width": 4, "order": 8, "inputs": 3, "classes": 5, **options})


def writer(layer=LRU, **options):
    return LanguageModel(layer, **{"depth": 1, "width": 4, "order": 8, "vocabulary": 7, **options})


model, mamba, words = classifier(), classifier(Mamba, depth=1, order=4), writer()
optimizer = torch.optim.AdamW(model.parameters())
x, tokens = randn(2, 9, 3), zeros(2, 9, dtype=torch.int64)
model(x).sum().backward()
optimizer.step()
run = lambda model: model(x)
layer, stack = LRU(4, 8), nn.ModuleList([LRU(4, 8), S5(4, 8)])
every_layer = [LRU(4, 8), S5(4, 8), S4D(4, 8), Mamba(4, 8)]


def broken(name, value):
    other = copy.deepcopy(model)
    setattr(other.blocks[0].ssm, name, value)
    return other


def with_nan(module):
    module = copy.deepcopy(module)
    next(value for name, value in module.named_parameters() if name.endswith("nu_log")).data[0] = nan
    return module


poles = torch.tensor([0.9 + 0.1j, 0.5 - 0.2j, 0.1 + 0j], dtype=torch.complex128)
B, C = randn(3, 2, dtype=torch.complex128), randn(2, 3, dtype=torch.complex128)
system = DiagonalSystem(poles, B, C)
real = DenseSystem(torch.diag(tensor([0.9, 0.5, 0.1])).double(), randn(3, 2).double(), randn(2, 3).double())
eye = torch.eye(3, dtype=torch.float64)
rates = -ones(2, 3).double()
folder = pathlib.Path(tempfile.mkdtemp())
os.chdir(folder)
cs.save_model(model, "model")
save_checkpoint("c.pt", model=model, optimizer=optimizer, step=3)
(folder / "empty").mkdir()
(folder / "text.txt").write_text("nothing")
(folder / "half.safetensors").write_bytes((folder / "model/model.safetensors").read_bytes()[:200])
(folder / "half.pt").write_bytes((folder / "c.pt").read_bytes()[:300])
torch.save({"a": 1}, "other.pt")
torch.save(model.state_dict(), "state.pt")
(folder / "listed").mkdir()
(folder / "listed/config.json").write_text("[1]")


def compressor(model=model, optimizer=optimizer, **options):
    return Compressor(model, optimizer, **{"when": [5], "keep": keep, **options})


def once(model=model, optimizer=optimizer, **options):
    return compress_(model, **{"optimizer": optimizer, "keep": keep, **options})


def asked(orders):
    class Asking(TryingPolicy):
        loss = staticmethod(lambda given: given(x).square().mean().detach())

        def choose(self, spectra, trials):
            return trials(orders)

    return Asking()


def beginning(step):
    class Beginning(Schedule):
        def first(self, after):
            return step

        def decide(self, look):
            return look.attempt()

        def plan(self):
            return "one cut"

    return Beginning()


def cut(**changes):
    usual = dict(step=1, module="a", order=4, rank=2, error_bound=None, measured_error=None)
    return Cut(**{**usual, "energy_lost": 0.1, "seconds": 1.0, **changes})


def state(**changes):
    return {**compressor().state_dict(), **changes}


def loaded(state, **options):
    return compressor(**options).load_state_dict(state)


traced = torch.jit.trace(classifier().eval(), x)
held = [model, optimizer, mamba, words, layer, stack, *every_layer]


def picture():
    return [thing.state_dict() for thing in held]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


before, files = copy.deepcopy(picture()), sorted(folder.rglob("*"))


def watched(call):
    try:
        call()
    finally:
        assert same(before, picture()), "the call has changed what it was given"
        assert sorted(folder.rglob("*")) == files, "the call has written files"
"""
