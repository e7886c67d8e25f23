"""A training with all parts of a checkpoint, all that can be seen of it, and checkpoints with one part changed."""

import copy

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from compressm.compression import Compressor, KeepFraction, Rollback, load_checkpoint, save_checkpoint
from compressm.layers import LRU
from compressm.models import SequenceClassifier
from compressm.saving.checkpoints import seal


class Guarded:
    """A training with an average, a cut at step 2 that is judged at step 5, and an evaluation that calls it bad."""

    def __init__(self, seed=0, folder=None, averaged=True):
        torch.manual_seed(seed)
        self.model = SequenceClassifier(LRU, depth=1, width=2, order=4, inputs=1, classes=2)
        dynamics = list(self.model.blocks[0].ssm.dynamics())
        rest = [p for p in self.model.parameters() if not any(p is other for other in dynamics)]
        self.optimizer = torch.optim.AdamW([{"params": rest}, {"params": dynamics, "weight_decay": 0.0}], lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.value, self.average = 1.0, AveragedModel(self.model)
        guard = Rollback(evaluate=lambda: self.value, settle=3, folder=folder)
        options = {"when": [2], "keep": KeepFraction(0.5), "guard": guard, "scheduler": self.scheduler}
        follow = [self.average] if averaged else []
        self.compressor = Compressor(self.model, self.optimizer, follow=follow, **options)

    @property
    def parts(self):
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "compressor")}

    def train(self, first, last):
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            self.model(torch.randn(2, 5, 1)).square().sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            if self.compressor.followers:
                self.average.update_parameters(self.model)
            self.compressor.step(step)
        return self


def saved(path, **options):
    """The contents of a checkpoint between a cut and its judgement."""
    save_checkpoint(path, step=3, extra={"a": [1]}, **Guarded(**options).train(1, 3).parts)
    return torch.load(path, weights_only=True)


def write(contents, path):
    """Write changed contents with a seal that fits."""
    torch.save(contents, path)
    seal(path)


def frozen(value):
    """Anything as numbers and bytes that can be compared, bit for bit."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().reshape(-1).view(torch.uint8) if value.numel() else value.detach()
        return str(value.dtype), tuple(value.shape), value.requires_grad, bytes(plain.tolist())
    if isinstance(value, dict):
        return [(frozen(key), frozen(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [frozen(item) for item in value]
    return repr(value)


def everything(run):
    """All that a checkpoint may change, and which objects hold it."""
    parameters = [*run.model.parameters(), *run.average.parameters()]
    states = [getattr(run, name).state_dict() for name in ("model", "optimizer", "scheduler", "compressor", "average")]
    numpy_state = np.random.get_state()  # noqa: NPY002
    return {
        "states": frozen(states),
        "objects": [
            *map(id, parameters),
            *(id(p) for group in run.optimizer.param_groups for p in group["params"]),
            *map(id, run.optimizer.state),
        ],
        "gradients": frozen([p.grad for p in parameters]),
        "attributes": sorted(map(str, [*vars(run.scheduler), *vars(run.compressor)])),
        "random": (frozen(torch.get_rng_state()), frozen(list(numpy_state[1]))),
    }


def places(value, path=(), most=3):
    """The places in nested containers: of long ones only the first and the last."""
    yield path
    if isinstance(value, dict | list | tuple):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys if len(keys) <= 2 * most or not path else [*keys[:most], *keys[-most:]]:
            yield from places(value[key], (*path, key), most)


DROPPED = object()
OTHERS = (DROPPED, None, "text", -1, 1.5, True, [], {}, torch.ones(2, 3), [torch.ones(1)], float("nan"))


def others(value):
    """What may stand in a place instead."""
    yield from OTHERS
    if isinstance(value, torch.Tensor):
        yield value[None].clone()
        yield torch.cat([value.reshape(-1), value.reshape(-1)])
        yield value.to(torch.int8) if value.dtype != torch.int8 else value.float()
        if value.is_floating_point():
            yield torch.full_like(value, torch.nan)


def at(contents, path):
    for key in path:
        contents = contents[key]
    return contents


def changed(contents, path, other):
    """A copy of the contents with something else in one place."""
    if not path:
        return other
    copied = copy.copy(contents) if not isinstance(contents, tuple) else list(contents)
    key, *rest = path
    if not rest and other is DROPPED:
        del copied[key]
    else:
        copied[key] = changed(contents[key], rest, other)
    return tuple(copied) if isinstance(contents, tuple) else copied


def goes_on(path):
    """A training from this checkpoint goes on, through the judgement of the cut, and can be saved again."""
    run = Guarded(seed=1)
    step = load_checkpoint(path, **run.parts).step
    if run.average.module.blocks[0].ssm.order != run.model.blocks[0].ssm.order:
        run.average.module.load_state_dict(run.model.state_dict())  # the file has no followers
    run.value = 0.1
    run.train(step + 1, step + 4)
    save_checkpoint(path.with_name("again"), **run.parts)
    return all(isinstance(p, nn.Parameter) for p in run.model.parameters())
