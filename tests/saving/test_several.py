"""Checkpoints of several optimizers and schedulers: resumed bit for bit, before, between and after cuts."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Muon
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from compressm.compression import Compressor, KeepFraction, Rollback, SavingError, load_checkpoint, save_checkpoint
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba
from compressm.models import SequenceClassifier
from tests.compression.test_rollback import same
from tests.marks import later

CUTS, STEPS = [2, 4], 7


class Run:
    """A training with Muon for matrices and AdamW for the rest, two schedulers, cuts, and a guard on request."""

    def __init__(self, kind=LRU, guarded=False):
        torch.manual_seed(0)
        self.model = SequenceClassifier(kind, depth=2, width=4, order=8, inputs=3, classes=5)
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        rest = [p for p in self.model.parameters() if p.ndim != 2]
        muon = Muon([{"params": matrices[:2]}, {"params": matrices[2:], "lr": 3e-3}], lr=1e-2)
        self.optimizers = [muon, AdamW(rest, lr=1e-2)]
        self.schedulers = [StepLR(muon, 2, 0.5), CosineAnnealingLR(self.optimizers[1], 20)]
        x = torch.randn(8, 12, 3, generator=torch.Generator().manual_seed(9))
        self.compressor = Compressor(
            self.model,
            self.optimizers,
            when=CUTS,
            keep=KeepFraction(0.5),
            calibrate=(lambda model: model(x)) if kind is Mamba else None,
            guard=Rollback(lambda: self.model.blocks[0].ssm.order, settle=3) if guarded else None,
            scheduler=self.schedulers if guarded else None,
        )

    @property
    def parts(self):
        return {
            "model": self.model,
            "optimizer": self.optimizers,
            "scheduler": self.schedulers,
            "compressor": self.compressor,
        }

    def train(self, first, last=STEPS):
        losses = []
        for step in range(first, last + 1):
            loss = nn.functional.cross_entropy(self.model(torch.randn(4, 12, 3)), torch.randint(5, (4,)))
            self.model.zero_grad()
            loss.backward()
            for part in (*self.optimizers, *self.schedulers):
                part.step()
            losses.append(loss.item())
            self.compressor.step(step)
        return losses

    def picture(self):
        return copy.deepcopy([part.state_dict() for part in (self.model, *self.optimizers, *self.schedulers)])


@pytest.mark.parametrize(
    ("kind", "guarded"),
    later([(k, g) for k in (LRU, S5, S4, S4D, LinOSS, Mamba) for g in (False, True)], (LRU, True), (Mamba, False)),
)
@pytest.mark.parametrize("at", [1, 3, 5])
def test_training_with_several_optimizers_resumes_bit_for_bit(kind, guarded, at, tmp_path):
    whole = Run(kind, guarded)
    whole.train(1, at)
    save_checkpoint(tmp_path / "at.pt", step=at, **whole.parts)
    losses, again = whole.train(at + 1), Run(kind, guarded)
    torch.rand(3)
    held = {id(p) for optimizer in again.optimizers for group in optimizer.param_groups for p in group["params"]}
    assert load_checkpoint(tmp_path / "at.pt", **again.parts).step == at
    assert again.train(at + 1) == losses
    assert same(again.picture(), whole.picture())
    assert [block.ssm.order for block in again.model.blocks] == ([8, 8] if guarded else [2, 2])
    now = {id(p) for optimizer in again.optimizers for group in optimizer.param_groups for p in group["params"]}
    assert now == held


def groups_of(run):
    return [group["params"] for optimizer in run.optimizers for group in optimizer.param_groups]


WRONG = {
    "one of two": (
        lambda run: {"optimizer": run.optimizers[0]},
        "with the optimizer Muon and AdamW, this one is a Muon",
    ),
    "the other order": (
        lambda run: {"optimizer": run.optimizers[::-1]},
        "with the optimizer Muon and AdamW, here it is AdamW and Muon, in this order",
    ),
    "another class": (
        lambda run: {"optimizer": [run.optimizers[0], Adam(groups_of(run)[2])]},
        "Muon and AdamW, here it is Muon and Adam, in this order",
    ),
    "other shares": (
        lambda run: {
            "optimizer": [
                Muon(groups_of(run)[0]),
                AdamW([{"params": groups_of(run)[1]}, {"params": groups_of(run)[2]}]),
            ]
        },
        r"the optimizers were saved with \[2, 1\] groups, these have \[1, 2\]",
    ),
    "other parameters": (
        lambda run: {"optimizer": [run.optimizers[0], AdamW(groups_of(run)[2][::-1])]},
        "the optimizer was saved with 'encoder.linear.bias' where this one has 'head.bias'",
    ),
    "none": (lambda run: {"optimizer": []}, r"optimizer is \[\], expected one optimizer"),
    "no optimizer": (lambda run: {"optimizer": "adam"}, "optimizer is 'adam', expected one of torch.optim"),
    "one scheduler": (
        lambda run: {"scheduler": run.schedulers[0]},
        "with the scheduler StepLR and CosineAnnealingLR, this one is a StepLR",
    ),
    "no scheduler": (lambda run: {"scheduler": [3]}, r"scheduler\[0\] is 3, expected one of torch.optim.lr_scheduler"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_optimizers_than_the_saved_ones_are_refused_before_anything_is_changed(case, tmp_path):
    saved = Run()
    saved.train(1, 3)
    save_checkpoint(tmp_path / "three.pt", **saved.parts)
    run = Run()
    before = run.picture()
    given, said = WRONG[case]
    with pytest.raises(SavingError, match=said):
        load_checkpoint(tmp_path / "three.pt", **{**run.parts, **given(run)})
    assert same(run.picture(), before)


@pytest.mark.parametrize("given", [{"optimizer": []}, {"optimizer": [3]}, {"scheduler": object()}])
def test_saving_what_is_no_optimizer_is_refused_and_writes_no_file(given, tmp_path):
    with pytest.raises(SavingError, match=r"(optimizer|scheduler).* expected one"):
        save_checkpoint(tmp_path / "none.pt", **{**Run().parts, **given})
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_one_optimizer_is_as_before_and_loads_from_a_list_too(tmp_path):
    """Files of earlier versions hold the class and the state of the one."""
    torch.manual_seed(0)
    model = SequenceClassifier(LRU, depth=1, width=4, order=8, inputs=3, classes=5)
    optimizer = AdamW(model.parameters())
    model(torch.randn(2, 9, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "one.pt", model=model, optimizer=optimizer)
    save_checkpoint(tmp_path / "listed.pt", model=model, optimizer=[optimizer])
    for name in ("one", "listed"):
        stored = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert (stored["version"], stored["optimizer"]["kind"]) == (1, "AdamW")
        assert stored["optimizer"]["state"].keys() == {"state", "param_groups"}
    fresh = AdamW(model.parameters())
    load_checkpoint(tmp_path / "one.pt", model=model, optimizer=[fresh])
    assert same(fresh.state_dict(), optimizer.state_dict())
