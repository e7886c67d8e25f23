"""Captured steps without a GPU: the function is called as it is, and bad input is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compressm as cs
from compressm.errors import CaptureError
from compressm.running import capture


def test_on_a_cpu_the_function_is_just_called():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    calls = []

    def step(x, *, scale):
        calls.append(x)
        loss = (weight * x).sum() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    captured = cs.CapturedStep(step)
    batches = [torch.ones(3), torch.zeros(3), torch.ones(3)] * 3
    values = [captured(batch, scale=2.0) for batch in batches]
    assert all(given is batch for given, batch in zip(calls, batches, strict=True))
    assert values[:3] == pytest.approx([6.0, 0.0, 4.8])
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not captured.is_recorded


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: cs.CapturedStep(3), r"step_fn is 3, expected a function"),
        (lambda: cs.CapturedStep(print, warmup=0), r"warmup is 0, expected an integer of at least 1"),
        (lambda: cs.CapturedStep(print, warmup=True), r"warmup is True"),
        (lambda: cs.CapturedStep(print, warmup=2.0), r"warmup is 2.0"),
    ],
)
def test_bad_input_is_refused(given, said):
    with pytest.raises(CaptureError, match=said):
        given()


def test_a_step_that_trains_a_wrapped_model_is_known(tmp_path):
    """It warms up longer, as DistributedDataParallel times its first steps."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        models = [nn.Linear(2, 1), DistributedDataParallel(nn.Linear(2, 1))]
        for model in models:
            optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), capture._Seen()
            with seen.watching():
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            assert len(seen.parameters) == 2
            assert seen.is_wrapped == isinstance(model, DistributedDataParallel)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_step_that_cannot_be_recorded_says_how_to_wrap_its_model(is_wrapped):
    said = str(capture._refused(RuntimeError("no"), is_wrapped))
    assert ("with torch.cuda.stream(torch.cuda.Stream())" in said) == is_wrapped
