"""Captured steps on a GPU, beside the same loop without them."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import compressm as cs
from compressm.errors import CaptureError
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba
from compressm.models import LanguageModel, SequenceClassifier
from compressm.saving import load_checkpoint, save_checkpoint

pytestmark = pytest.mark.gpu

OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW, capturable": lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


class Run:
    """A training of a small classifier, captured or not."""

    def __init__(self, captured, layer=LRU, optimizer="Adam", dropout=0.1, schedule=None, inside=False, **options):
        torch.manual_seed(0)
        self.model = SequenceClassifier(layer, depth=2, width=16, order=16, inputs=3, classes=5, dropout=dropout).cuda()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = schedule and schedule(self.optimizer)
        self.inside = inside
        if options:
            x = self.batch(100)[0]
            calibrate = (lambda model: model(x)) if layer is Mamba else None
            self.compressor = cs.Compressor(self.model, self.optimizer, calibrate=calibrate, **options)
        self.step_fn = cs.CapturedStep(self.step) if captured else self.step
        self.losses = []

    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(4, 40, 3, generator=generator).cuda(), torch.arange(4).cuda()

    def step(self, x, target):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(x), target)
        loss.backward()
        self.optimizer.step()
        if self.inside and self.scheduler:
            self.scheduler.step()
        return loss

    def train(self, first, last):
        for step in range(first, last + 1):
            self.losses.append(self.step_fn(*self.batch(step)))
            if self.scheduler and not self.inside:
                self.scheduler.step()
            if hasattr(self, "compressor"):
                self.compressor.step(step)
        return self


def check_same(captured, eager):
    assert captured.step_fn.is_recorded
    left, right = (torch.stack([loss.detach() for loss in run.losses]).cpu() for run in (captured, eager))
    assert torch.allclose(left, right, rtol=2e-4, atol=2e-5), (left - right).abs().max()
    if any(isinstance(module, S4) for module in captured.model.modules()):
        return  # a cut orders modes of a dense matrix as the eigensolver finds them, which rounding decides
    for (name, a), b in zip(captured.model.named_parameters(), eager.model.parameters(), strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=2e-2, atol=2e-3), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_are_those_of_the_plain_loop(name):
    check_same(*(Run(captured, optimizer=name).train(1, 20) for captured in (True, False)))


@pytest.mark.parametrize("layer", [LRU, S5, S4, S4D, LinOSS, Mamba])
def test_a_step_is_recorded_anew_after_each_of_three_cuts(layer):
    options = {"when": [6, 12, 18], "keep": cs.KeepFraction(0.7)}
    torch.manual_seed(1)
    left, right = (Run(captured, layer=layer, dropout=0.0, **options).train(1, 26) for captured in (True, False))
    assert [block.ssm.order for block in left.model.blocks] == [block.ssm.order for block in right.model.blocks]
    check_same(left, right)


def test_a_step_is_recorded_anew_after_a_rollback():
    runs = []
    for captured in (True, False):
        values = iter([1.0, 0.1])
        guard = cs.Rollback(lambda values=values: next(values), settle=6)
        runs.append(Run(captured, when=[6], keep=cs.TargetOrder(4), guard=guard, dropout=0.0).train(1, 20))
        assert [block.ssm.order for block in runs[-1].model.blocks] == [16, 16]
    check_same(*runs)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 7, 0.5),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)),
    ],
    ids=["cosine", "steps", "lambda"],
)
def test_rates_of_a_scheduler_are_followed(schedule, inside):
    runs = [Run(captured, schedule=schedule, inside=inside).train(1, 18) for captured in (True, False)]
    check_same(*runs)
    assert runs[0].scheduler.last_epoch == runs[1].scheduler.last_epoch == 18
    assert float(runs[0].optimizer.param_groups[0]["lr"]) == pytest.approx(runs[1].optimizer.param_groups[0]["lr"])


def test_rates_that_are_set_by_hand_are_followed():
    runs = []
    for captured in (True, False):
        run = Run(captured)
        for step in range(1, 16):
            for group in run.optimizer.param_groups:
                group["lr"] = 1e-2 / step
            run.train(step, step)
        runs.append(run)
    check_same(*runs)


def test_options_that_change_are_followed():
    runs = []
    for captured in (True, False):
        run = Run(captured).train(1, 6)
        run.optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        runs.append(run.train(7, 14))
    check_same(*runs)


def test_one_call_is_one_step_and_recording_changes_nothing():
    run = Run(True, optimizer="AdamW, capturable")
    for step in range(1, 8):
        run.train(step, step)
        assert {int(state["step"]) for state in run.optimizer.state.values()} == {step}
        assert run.step_fn.is_recorded == (step > 3)


def test_a_shape_is_recorded_once_and_kept():
    runs = [Run(captured, dropout=0.0) for captured in (True, False)]
    for run in runs:
        for step in range(1, 20):
            x, target = run.batch(step)
            size = 2 if step % 3 == 0 else 4
            run.losses.append(run.step_fn(x[:size], target[:size]))
    check_same(*runs)
    assert len(runs[0].step_fn._shapes) == 2


def test_a_batch_on_the_cpu_is_moved():
    run, other = Run(True, dropout=0.0), Run(False, dropout=0.0)

    def step(x, target):
        return run.step(x.cuda(), target.cuda())

    run.step_fn = cs.CapturedStep(step)
    for k in range(1, 12):
        x, target = run.batch(k)
        run.losses.append(run.step_fn(x.cpu(), target.cpu()))
    check_same(run, other.train(1, 11))


def test_a_loaded_checkpoint_is_trained_on(tmp_path):
    runs = []
    for captured in (True, False):
        run = Run(captured, dropout=0.0).train(1, 8)
        parts = {"model": run.model, "optimizer": run.optimizer}
        save_checkpoint(tmp_path / "8.pt", **parts, step=8)
        run.train(9, 15)
        load_checkpoint(tmp_path / "8.pt", **parts)
        runs.append(run.train(9, 16))
    check_same(*runs)
    losses = torch.stack([loss.detach() for loss in runs[0].losses])
    assert torch.allclose(losses[8:15], losses[15:22], rtol=1e-5)


def test_a_loaded_state_of_the_optimizer_is_trained_on():
    runs = []
    for captured in (True, False):
        run = Run(captured, dropout=0.0).train(1, 6)
        kept = copy.deepcopy(run.optimizer.state_dict())
        run.train(7, 12)
        run.optimizer.load_state_dict(kept)
        runs.append(run.train(13, 20))
    check_same(*runs)


def test_losses_that_come_back_are_copies():
    run = Run(True).train(1, 10)
    assert len({loss.data_ptr() for loss in run.losses[-3:]}) == 3
    assert not run.losses[-1].requires_grad


def line_of(said):
    return said.rsplit(": ", 1)[-1]


def test_what_cannot_be_captured_is_named_and_changes_nothing():
    run = Run(True)

    def step(x, target):
        run.optimizer.zero_grad()
        loss = cross_entropy(run.model(x), target)
        loss.backward()
        print(loss.item(), end="")
        run.optimizer.step()

    captured = cs.CapturedStep(step)
    for k in range(1, 4):
        captured(*run.batch(k))
    before = copy.deepcopy(run.model.state_dict())
    with pytest.raises(CaptureError, match=r"test_capture_gpu.py:\d+: print\(loss.item\(\), end=\"\"\)"):
        captured(*run.batch(4))
    torch.cuda.synchronize()
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())
    step(*run.batch(4))  # the plain loop still works
    run.train(5, 12)
    assert run.step_fn.is_recorded


def test_a_plateau_scheduler_and_rates_inside_are_refused():
    run = Run(True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer)

    def plateau(x, target):
        scheduler.step(run.step(x, target).detach())

    with pytest.raises(CaptureError, match="ReduceLROnPlateau"):
        cs.CapturedStep(plateau)(*run.batch(1))

    def by_hand(x, target):
        run.step(x, target)
        run.optimizer.param_groups[0]["lr"] *= 0.5

    with pytest.raises(CaptureError, match="sets a learning rate"):
        cs.CapturedStep(by_hand)(*run.batch(1))


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_accumulated_over_calls(to_none):
    results = []
    for captured in (True, False):
        run = Run(captured, dropout=0.0)

        def collect(x, target, run=run):
            loss = cross_entropy(run.model(x), target) / 3
            loss.backward()
            return loss

        step_fn = cs.CapturedStep(collect) if captured else collect
        run.step_fn = step_fn
        for step in range(1, 31):
            run.losses.append(step_fn(*run.batch(step)))
            if step % 3 == 0:
                run.optimizer.step()
                run.optimizer.zero_grad(set_to_none=to_none)
        results.append(run)
    check_same(*results)


def test_a_language_model_in_bfloat16():
    losses = []
    for captured in (True, False):
        torch.manual_seed(0)
        model = LanguageModel(Mamba, vocabulary=32, depth=2, width=32, order=8).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(tokens, model=model, optimizer=optimizer):
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens[:, :-1])[0]
            loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return {"loss": loss}

        step_fn = cs.CapturedStep(step) if captured else step
        tokens = torch.randint(32, (4, 33), generator=torch.Generator().manual_seed(0)).cuda()
        losses.append(torch.stack([step_fn(tokens)["loss"].detach() for _ in range(12)]))
    assert torch.allclose(*losses, rtol=1e-2)


def test_a_wrapped_model_is_recorded_again_after_a_cut(tmp_path):
    """One process of a group of nccl; losses are those of the plain loop."""
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        losses = []
        for captured in (True, False):
            run = Run(captured)
            with torch.cuda.stream(torch.cuda.Stream()) if captured else nullcontext():
                run.model = DistributedDataParallel(run.model, device_ids=[0])
            compressor = cs.Compressor(run.model, run.optimizer, when=[15], keep=cs.TargetOrder(7))
            for step in range(1, 31):
                run.train(step, step)
                compressor.step(step)
                if captured and step in (14, 30):
                    assert run.step_fn.is_recorded
            losses.append(torch.stack(run.losses).tolist())
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    finally:
        dist.destroy_process_group()
