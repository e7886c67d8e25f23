import pytest
import torch
from torch import nn

from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba
from compressm.models import SequenceClassifier
from compressm_lab.training import TrainingConfig
from compressm_lab.training.building import build_optimizer, dynamics, keep_rates_on_, set_rate

CPU = torch.device("cpu")


def model_of(layer):
    return SequenceClassifier(layer, depth=2, width=3, order=4, inputs=1, classes=2)


def config(**options):
    return TrainingConfig(steps=10, batch=2, learning_rate=0.1, **options)


@pytest.mark.parametrize("layer", [LRU, S5, S4, S4D, LinOSS])
def test_poles_steps_and_input_matrices_are_slow_and_nothing_else(layer):
    model = model_of(layer)
    slow = {id(parameter) for parameter in dynamics(model)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in slow}
    assert {name.rsplit(".", 1)[0] for name in names} == {"blocks.0.ssm", "blocks.1.ssm"}
    rest = {name.rsplit(".", 1)[1] for name, _ in model.named_parameters() if ".ssm." in name} - {
        name.rsplit(".", 1)[1] for name in names
    }
    assert rest
    assert all(name[0] in "CD" for name in rest)
    assert not {name for name in names if name.rsplit(".", 1)[1][0] in "CD"}


def test_the_slow_group_has_the_factor_and_no_weight_decay():
    model = model_of(LRU)
    optimizer = build_optimizer(model, config(ssm_factor=0.25, weight_decay=0.05), CPU)
    slow, rest = optimizer.param_groups
    assert (slow["lr"], slow["weight_decay"]) == (0.025, 0.0)
    assert (rest["lr"], rest["weight_decay"]) == (0.1, 0.05)
    grouped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


def test_of_mamba_rates_and_steps_are_slow_and_the_skip_only_keeps_its_size():
    model = model_of(Mamba)
    optimizer = build_optimizer(model, config(ssm_factor=0.25, weight_decay=0.05), CPU)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    slow, kept, rest = ({names[id(p)].partition(".ssm.")[2] for p in g["params"]} for g in optimizer.param_groups)
    assert (slow, kept) == ({"A_log", "dt_proj.bias"}, {"D"})
    ordinary = {"in_proj.weight", "conv1d.weight", "conv1d.bias", "x_proj.weight", "dt_proj.weight", "out_proj.weight"}
    assert rest - {""} == ordinary
    settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert settings == [(0.025, 0.0), (0.1, 0.0), (0.1, 0.05)]


def test_a_model_without_ssm_layers_has_one_group():
    optimizer = build_optimizer(nn.Linear(2, 2), config(weight_decay=0.05), CPU)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05]


def test_a_rate_is_set_in_every_group_by_its_factor():
    optimizer = build_optimizer(model_of(LRU), config(ssm_factor=0.5), CPU)
    set_rate(optimizer, 0.02)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]


def test_a_rate_in_a_tensor_stays_in_its_place():
    """A CUDA graph reads it there."""
    optimizer = build_optimizer(model_of(LRU), config(ssm_factor=0.5), CPU)
    held = [torch.tensor(0.0) for _ in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, held, strict=True):
        group["lr"] = rate
    for value in (0.02, torch.tensor(0.02)):
        set_rate(optimizer, value)
        torch.testing.assert_close(torch.stack(held), torch.tensor([0.01, 0.02]))
        assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, held, strict=True))
    keep_rates_on_(optimizer, CPU)
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, held, strict=True))


def test_a_step_is_that_of_adam_with_decoupled_weight_decay():
    """Loshchilov & Hutter 2019, written out: p − lr λ p − lr m̂ / (√v̂ + ε)."""
    torch.manual_seed(0)
    model = model_of(LRU)
    optimizer = build_optimizer(model, config(ssm_factor=0.25, weight_decay=0.05), CPU)
    slow = {id(parameter) for parameter in dynamics(model)}
    expected = {id(p): (p.detach().double(), 0.0, 0.0) for p in model.parameters()}
    for step in (1, 2, 3):
        set_rate(optimizer, 0.1 / step)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
            value, m, v = expected[id(p)]
            factor, decay = (0.25, 0.0) if id(p) in slow else (1.0, 0.05)
            rate = 0.1 / step * factor
            m, v = 0.9 * m + 0.1 * p.grad.double(), 0.999 * v + 0.001 * p.grad.double() ** 2
            change = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
            expected[id(p)] = value - rate * decay * value - rate * change, m, v
        optimizer.step()
    for p in model.parameters():
        torch.testing.assert_close(p.detach().double(), expected[id(p)][0], rtol=1e-5, atol=1e-6)


def test_inside_a_group_large_tensors_come_first():
    model = SequenceClassifier(LRU, depth=2, width=4, order=6, inputs=1, classes=3)
    optimizer = build_optimizer(model, TrainingConfig(steps=1, batch=1, learning_rate=0.1), torch.device("cpu"))
    for group in optimizer.param_groups:
        sizes = [parameter.numel() for parameter in group["params"]]
        assert sizes == sorted(sizes, reverse=True)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
