"""Optimizers, quantised weights and averages of other packages: each works, or is refused by name at construction."""

import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import compressm as cs
from compressm.compression import CompressionError


def build():
    torch.manual_seed(0)
    return cs.models.SequenceClassifier(cs.layers.LRU, depth=1, width=64, order=64, inputs=3, classes=5)


def compressor_for(model, optimizer, **options):
    return cs.Compressor(model, optimizer, when=[2], keep=cs.TargetOrder(20), gate=1.0, **options)


def train(model, optimizer, compressor, steps=4):
    x, target = torch.randn(4, 10, 3), torch.randint(5, (4,))
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        cross_entropy(model(x), target).backward()
        optimizer.step()
        compressor.step(step)
    return model.blocks[0].ssm.order


def package(name):
    """The package of that name, whose import may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


@pytest.mark.parametrize("kind", ["AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"])
def test_schedule_free_optimizers_are_refused_at_construction_in_either_mode(kind):
    schedulefree, model = package("schedulefree"), build()
    optimizer = getattr(schedulefree, kind)(model.parameters(), lr=1e-2)
    for mode in (optimizer.eval, optimizer.train):
        mode()
        with pytest.raises(CompressionError, match=f"{kind} keeps weights in 'z'"):
            compressor_for(model, optimizer)


@pytest.mark.slow  # torchao compiles its steps
@pytest.mark.parametrize(("kind", "state"), [("8bit", "8bit"), ("4bit", "4bit"), ("Fp8", "Fp8")])
def test_quantised_states_of_torchao_are_refused_at_construction(kind, state):
    torchao, model = package("torchao.optim"), build()
    optimizer = getattr(torchao, f"AdamW{kind}")(model.parameters(), lr=1e-2)
    with pytest.raises(CompressionError, match=rf"is a OptimState{state}, expected .* plain tensor"):
        compressor_for(model, optimizer)


@pytest.mark.slow
def test_adamw_of_torchao_with_whole_states_works():
    torchao, model = package("torchao.optim"), build()
    optimizer = torchao._AdamW(model.parameters(), lr=1e-2)
    assert train(model, optimizer, compressor_for(model, optimizer)) == 20


def test_eight_bit_states_of_bitsandbytes_are_refused_at_construction():
    bitsandbytes, model = package("bitsandbytes"), build()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2)
    with pytest.raises(CompressionError, match=r"is torch.uint8, expected real floating-point numbers"):
        compressor_for(model, optimizer)


class EightBit(torch.optim.Optimizer):
    """States as integers of eight bits, as those of bitsandbytes."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("state1", torch.zeros_like(parameter, dtype=torch.uint8))
                    parameter.sub_(group["lr"] * parameter.grad.sign())


def test_eight_bit_states_are_refused_before_the_first_step_and_after_it():
    model = build()
    optimizer = EightBit(model.parameters(), lr=1e-2)
    for _ in range(2):
        with pytest.raises(CompressionError, match=r"EightBit's 'state1' of .* is torch.uint8"):
            compressor_for(model, optimizer)
        model(torch.randn(2, 10, 3)).sum().backward()
        optimizer.step()


def test_states_of_unknown_meaning_go_with_restart():
    bitsandbytes, model = package("bitsandbytes"), build()
    optimizer = bitsandbytes.optim.AdamW32bit(model.parameters(), lr=1e-2)
    with pytest.raises(CompressionError, match=r"keeps 'state1', 'state2', whose meaning .*Restart\(\)"):
        compressor_for(model, optimizer)
    compressor_for(model, optimizer, moments=cs.Restart())


def test_an_average_follows_the_model():
    model = build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert train(model, optimizer, compressor_for(model, optimizer, follow=[average])) == 20
    average.update_parameters(model)
    assert average.module.blocks[0].ssm.order == 20


def test_weights_of_a_layer_quantised_by_torchao_are_refused_by_name():
    quantization, model = package("torchao.quantization"), build()
    linear = torch.nn.Linear(64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(linear, quantization.Int8WeightOnlyConfig())
    model.blocks[0].ssm.C_re = torch.nn.Parameter(linear.weight.detach(), requires_grad=False)
    with pytest.raises(CompressionError, match=r"blocks.0.ssm.C_re"):
        compressor_for(model, None)
