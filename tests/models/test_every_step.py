"""What training added to the models: running norms, and answers at every step."""

import pytest
import torch

from compressm.layers import LRU, SequenceError
from compressm.models import EveryStep, LayerNorm, RunningNorm, SequenceClassifier

LENGTHS = torch.tensor([5, 2, 3])


def valid(x):
    return torch.cat([row[:length] for row, length in zip(x, LENGTHS, strict=True)])


@pytest.mark.parametrize("padded", [True, False])
def test_a_running_norm_trains_with_the_averages_it_evaluates_with(padded):
    torch.manual_seed(0)
    norm, lengths = RunningNorm(momentum=0.25).build(2), LENGTHS if padded else None
    mean = variance = None
    for _ in range(3):
        x = 3 * torch.randn(3, 5, 2) + 1
        seen = valid(x) if padded else x.flatten(0, 1)
        now = seen.mean(0), seen.var(0, unbiased=False)
        mean = now[0] if mean is None else mean + 0.25 * (now[0] - mean)
        variance = now[1] if variance is None else variance + 0.25 * (now[1] - variance)
        y = norm.train()(x, lengths)
        expected = (x - mean) / (variance + norm.eps).sqrt()
        evaluated = norm.eval()(x, lengths)
        for found in (y, evaluated):
            assert torch.allclose(*((valid(v) if padded else v) for v in (found, expected)), atol=1e-5)
    assert norm.num_batches_tracked == 3


def test_averages_are_constants_to_gradients_and_padding_reaches_nothing():
    norm, x = RunningNorm().build(2), torch.randn(3, 5, 2, requires_grad=True)
    y = norm(x, LENGTHS)
    (gradient,) = torch.autograd.grad(y[0, 0, 0], x)
    assert gradient.count_nonzero() == 1
    spoilt = x.detach().clone()
    spoilt[1, 2:] = torch.nan
    again = RunningNorm().build(2)
    assert torch.equal(valid(again(spoilt, LENGTHS)), valid(y))


def test_gradients_go_through_the_averages_where_asked_and_padding_reaches_nothing():
    x = torch.randn(3, 5, 2, requires_grad=True)
    norm, steps = RunningNorm(through=True).build(2), valid(x)
    assert norm.through
    (gradient,) = torch.autograd.grad(norm(x, LENGTHS)[0, 0, 0], x)
    alone = RunningNorm(through=True).build(2)
    (expected,) = torch.autograd.grad(alone(steps[None])[0, 0, 0], x)
    torch.testing.assert_close(gradient, expected)
    assert (valid(gradient)[:, 0] != 0).all()
    assert gradient[1, 2:].count_nonzero() == 0
    torch.testing.assert_close(norm.running_var, alone.running_var)


@pytest.mark.parametrize("momentum", [0.0, 1.5])
def test_a_momentum_that_is_no_share_is_refused(momentum):
    with pytest.raises(SequenceError, match=f"momentum is {momentum}, expected a number above 0 and up to 1"):
        RunningNorm(momentum=momentum)


def test_answers_at_every_step_are_those_of_a_stream():
    torch.manual_seed(0)
    model = SequenceClassifier(
        LRU, depth=2, width=3, order=4, inputs=2, classes=1, norm=LayerNorm(), pooling=EveryStep()
    )
    x = torch.randn(2, 5, 2)
    y = model.eval()(x)
    assert y.shape == (2, 5, 1)
    state = model.initial_state(2)
    for step in range(5):
        logits, state = model.step(x[:, step], state)
        torch.testing.assert_close(logits, y[:, step], rtol=1e-4, atol=1e-5)


def test_every_step_takes_one_tower_only():
    options = {"depth": 1, "width": 2, "order": 2, "inputs": 1}
    with pytest.raises(SequenceError, match="towers is 2, expected 1"):
        SequenceClassifier(LRU, classes=2, towers=2, pooling=EveryStep(), **options)
