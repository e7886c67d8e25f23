"""Norms leave padding out; dropout draws per element or once for the batch."""

import pickle

import pytest
import torch

from compressm.models import BatchNorm, LayerNorm, NoNorm, OneMask, PerElement, RMSNorm

BATCH, LENGTH, WIDTH = 4, 9, 5
LENGTHS = torch.tensor([9, 4, 1, 6])


def sequence(seed=0):
    return 2 + 3 * torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def valid(x, lengths=LENGTHS):
    return x[torch.arange(x.shape[1]) < lengths[:, None]]


def noisy_padding(x, value):
    return torch.where(torch.arange(x.shape[1])[None, :, None] < LENGTHS[:, None, None], x, value)


@pytest.mark.parametrize("lengths", [None, torch.full((BATCH,), LENGTH)])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_of_full_sequences_is_that_of_torch_in_values_and_statistics(lengths, affine):
    ours, theirs = BatchNorm(momentum=0.3, affine=affine).build(WIDTH), torch.nn.BatchNorm1d(WIDTH, 1e-5, 0.3, affine)
    for seed in range(3):
        x = sequence(seed)
        torch.testing.assert_close(ours(x, lengths), theirs(x.mT).mT)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, msg=name)
    torch.testing.assert_close(ours.eval()(x, lengths), theirs.eval()(x.mT).mT)


@pytest.mark.parametrize("padding", [1e6, float("nan"), float("inf")])
def test_batch_norm_of_padded_sequences_is_that_of_their_valid_steps(padding):
    ours, theirs = BatchNorm().build(WIDTH), torch.nn.BatchNorm1d(WIDTH)
    x = noisy_padding(sequence(), padding).requires_grad_()
    steps = valid(x).detach().requires_grad_()
    weights = torch.randn(len(steps), WIDTH)
    (valid(ours(x, LENGTHS)) * weights).sum().backward()
    (theirs(steps) * weights).sum().backward()
    torch.testing.assert_close(valid(x.grad), steps.grad)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, msg=name)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, msg=name)
    torch.testing.assert_close(valid(ours(x, LENGTHS)), theirs(steps))


def test_batch_norm_without_momentum_averages_all_batches():
    """What `torch.optim.swa_utils.update_bn` asks of a batch norm."""
    norm = BatchNorm().build(WIDTH)
    norm.momentum = None
    norm.reset_running_stats()
    for seed in range(3):
        norm(sequence(seed), LENGTHS)
    means = [valid(sequence(seed)).mean(0) for seed in range(3)]
    torch.testing.assert_close(norm.running_mean, torch.stack(means).mean(0))


def test_layer_norm_is_that_of_torch():
    x = sequence()
    torch.testing.assert_close(LayerNorm().build(WIDTH)(x, LENGTHS), torch.nn.functional.layer_norm(x, (WIDTH,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_divides_each_step_by_its_root_mean_square(affine, dtype):
    norm, x = RMSNorm(affine=affine).build(WIDTH).to(dtype), sequence().to(dtype)
    if affine:
        torch.nn.init.normal_(norm.weight)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (norm.weight.double() if affine else 1)
    y = norm(x, LENGTHS)
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected.to(dtype))


def test_rms_norm_of_half_precision_takes_weights_in_float32():
    norm, x = RMSNorm().build(WIDTH), sequence().bfloat16()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).float(), norm(x.float()), rtol=1e-2, atol=1e-2)


def test_no_norm_changes_nothing():
    x = sequence()
    assert NoNorm().build(WIDTH)(x, LENGTHS) is x


def zeros_differ_between_sequences(choice):
    dropped = choice.build()(torch.ones(BATCH, LENGTH, WIDTH)) == 0
    return bool((dropped != dropped[:1]).any())


def test_one_mask_is_shared_by_the_batch_and_per_element_is_not():
    torch.manual_seed(0)
    assert not zeros_differ_between_sequences(OneMask(0.5))
    assert zeros_differ_between_sequences(PerElement(0.5))


@pytest.mark.parametrize("choice", [OneMask(0.25), PerElement(0.25)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_the_mean_and_drops_its_share(choice, dtype):
    torch.manual_seed(0)
    dropped = choice.build()(torch.ones(2, 200, 200, dtype=dtype))
    assert dropped.dtype == dtype
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert dropped.float().mean().item() == pytest.approx(1, abs=0.015)


@pytest.mark.parametrize("choice", [OneMask(0.5), PerElement(0.5)], ids=repr)
def test_dropout_does_nothing_in_evaluation(choice):
    x = sequence()
    assert torch.equal(choice.build().eval()(x), x)


@pytest.mark.parametrize(
    "choice", [BatchNorm(0.2, False), LayerNorm(), RMSNorm(), NoNorm(), PerElement(0.1), OneMask(0.1)]
)
def test_a_choice_can_be_pickled_compared_and_read(choice):
    assert pickle.loads(pickle.dumps(choice)) == choice
    assert repr(choice).startswith(type(choice).__name__)
