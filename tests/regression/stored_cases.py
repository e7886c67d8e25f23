"""Models and trainings of the stored files: what was saved, and what goes on from it. Public names only."""

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import compressm as cs
from compressm.compression import load_checkpoint, save_checkpoint
from compressm.layers import LRU, S4D, S5, Bilinear, Legs, Mamba
from compressm.models import LanguageModel, LastStep, LayerNorm, OneMask, RMSNorm, RunningNorm, SequenceClassifier
from compressm.ops import Path
from tests.regression.trainings import HERE

STORED = HERE / "stored"
KINDS = {"lru": LRU, "s5": S5, "s4d": S4D, "mamba": Mamba}
VOCABULARY, INPUTS = 5, 2


def steps_of(batch, length, width, dtype=torch.float64):
    """Multiples of 1/4 between -1.5 and 1.5: the same on every machine and for every version of torch."""
    return ((torch.arange(batch * length * width) * 5 % 13 - 6) / 4).reshape(batch, length, width).to(dtype)


def tokens_of(batch, length):
    return (torch.arange(batch * length) * 3 % 7 % VOCABULARY).reshape(batch, length)


def outputs(model):
    """What a model says of fixed inputs, computed in float64 so that no machine rounds otherwise."""
    model.double().eval()
    with torch.no_grad():
        return model(steps_of(2, 6, INPUTS)) if isinstance(model, SequenceClassifier) else model(tokens_of(2, 6))[0]


def orders(model):
    """Orders of all layers, as the model itself says them."""
    return {name: layer.order for name, layer in model.named_modules() if isinstance(layer, tuple(KINDS.values()))}


def classifier(kind, **options):
    torch.manual_seed(0)
    return SequenceClassifier(kind, depth=2, width=2, order=5, inputs=INPUTS, classes=3, **options)


def language_model(kind, **options):
    torch.manual_seed(0)
    return LanguageModel(kind, **({"vocabulary": VOCABULARY, "depth": 1, "width": 2, "order": 4} | options))


def cut(model, *ranks, **options):
    """The model with another order in every block."""
    overrides = {f"blocks.{k}.ssm": cs.TargetOrder(rank) for k, rank in enumerate(ranks)}
    inputs = steps_of(3, 12, INPUTS, torch.float32)
    cs.compress_(
        model, keep=cs.KeepFraction(1.0), overrides=overrides, calibrate=lambda model: model(inputs), **options
    )
    return model


def complex_rates():
    """A Mamba model whose channels have conjugate modes once they are balanced."""
    model = language_model(Mamba, order=6)
    layer = model.blocks[0].ssm
    layer.A_log.data += 0.3 * torch.randn(layer.A_log.shape)
    layer.dt_proj.bias.data += 2
    tokens = tokens_of(3, 12)
    cs.compress_(model, keep=cs.TargetOrder(3), calibrate=lambda model: model(tokens), selective=cs.PerChannel())
    assert layer.A_imag is not None
    return model


class Training:
    """A training in float64 that is cut at step 3: to go on from a checkpoint gives the stored loss on any machine.

    With `guarded` the cut is judged at step 6, found to do harm, and undone.
    """

    def __init__(self, guarded=False):
        self.model = classifier(LRU, norm=LayerNorm()).double()
        groups = [{"params": self.model.blocks.parameters(), "lr": 5e-3}, {"params": self.model.head.parameters()}]
        self.optimizer = torch.optim.AdamW([*groups, {"params": self.model.encoder.parameters()}], lr=1e-2)
        self.scheduler = StepLR(self.optimizer, 3, 0.5)
        self.compressor = cs.Compressor(
            self.model,
            self.optimizer,
            when=[3],
            keep=cs.TargetOrder(2),
            overrides={"blocks.1.ssm": cs.TargetOrder(3)},
            guard=cs.Rollback(self.judge, settle=3) if guarded else None,
            scheduler=self.scheduler if guarded else None,
        )

    def judge(self):
        """Accuracy as a guard asks for it: it was good at the full orders alone."""
        return 1.0 if set(orders(self.model).values()) == {5} else 0.5

    @property
    def parts(self):
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "compressor")}

    def train(self, first, last):
        """The loss of every step."""
        losses = []
        for step in range(first, last + 1):
            x = steps_of(4, 6, INPUTS) + step / 8
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), torch.tensor([0, 1, 2, step % 3]))
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.compressor.step(step)
            losses.append(loss.item())
        return losses

    def save(self, path, step):
        save_checkpoint(path, step=step, extra={"note": ["anything", step]}, **self.parts)

    def load(self, path):
        return load_checkpoint(path, **self.parts)

    def summary(self):
        """History without times, and orders."""
        history = [event.as_dict() for event in self.compressor.history]
        return {
            "history": [{key: value for key, value in event.items() if key != "seconds"} for event in history],
            "orders": orders(self.model),
        }


TRAINING_STEPS = 9
# The step that each checkpoint was saved after, and whether a guard watched.
CHECKPOINTS = {"before-cut": (2, False), "after-cut": (4, False), "pending-rollback": (4, True)}


TRACKED_STEPS = 7


def tracked():
    """A model with poles of both kinds, as numbers and as logarithms, and its tracker."""
    model = nn.Sequential(classifier(LRU).blocks[0].ssm, classifier(S5).blocks[0].ssm)
    return model, cs.HankelTracker(model, every=2, changes=True)


def move(model, step):
    """Change every parameter a little, as training would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + step / 64)


TRANSFORMERS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 4,
    "state_size": 4,
    "num_hidden_layers": 2,
    "time_step_rank": 1,
    "conv_kernel": 2,
    "expand": 1,
    "eos_token_id": None,
}


def cut_transformers(model, *ranks):
    overrides = {f"*layers.{k}.mixer": cs.TargetOrder(rank) for k, rank in enumerate(ranks)}
    ids = tokens_of(3, 12)
    cs.compress_(model, keep=cs.KeepFraction(1.0), overrides=overrides, calibrate=lambda model: model(ids))


def models():
    """Every model to be saved, by file name."""
    made = {f"{name}-language-model": language_model(kind, tied=name != "s5") for name, kind in KINDS.items()}
    for name, kind in KINDS.items():
        norm = {"norm": RMSNorm()} if kind is Mamba else {}
        made[f"{name}-classifier-cut"] = cut(classifier(kind, dropout=OneMask(0.1), **norm), 2, 4)
    made["mamba-per-channel"] = cut(classifier(Mamba), 2, 3, selective=cs.PerChannel())
    made["mamba-complex-rates"] = complex_rates()
    options = {"initialisation": Legs(), "discretisation": Bilinear(), "path": Path.LOOP}
    made["options"] = classifier(S4D, layer_options=options, pooling=LastStep(), norm=RunningNorm())
    made["replaced"] = cut(classifier(LRU), 2, 5)
    made["replaced"].head = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3, bias=False))
    made["replaced"].head[0].weight.requires_grad_(False)
    return made
