"""Selective layers in any model: found, read, written back, or refused by name."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from compressm.adapters import AdapterError, ConformanceError, adapter_for, check_adapter, find, state_axes, write
from compressm.compression import CompressionError, TargetOrder, compress_
from compressm.layers import LRU, Mamba
from tests.families.selective.mixers import Mixer, MixerAdapter, chosen, data, inputs_of, make, simulate

KINDS = [Mamba, Mixer]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_is_encoded_as_the_values_that_are_there(kind):
    layer = make(kind=kind)
    adapter = adapter_for(layer)
    values = adapter.encode(layer, adapter.read(layer))
    assert set(values) == {"x_proj.weight", "A_log"}
    for name, value in values.items():
        torch.testing.assert_close(value, layer.get_parameter(name), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_the_system_read_chooses_what_the_layer_chooses(kind):
    layer = make(kind=kind)
    u = inputs_of(layer, data())
    for found, expected in zip(
        adapter_for(layer).read(layer).selected(torch.from_numpy(u)), chosen(layer, u)[1:], strict=True
    ):
        torch.testing.assert_close(found.detach(), torch.from_numpy(expected))


def test_the_oracle_is_the_layer():
    layer, x = make(kind=Mixer), data()
    u = inputs_of(layer, x)
    gate = nn.functional.silu(layer.in_proj(x).chunk(2, dim=-1)[1])
    y = layer.out_proj((torch.from_numpy(simulate(layer, u)[1]) + layer.D * torch.from_numpy(u)) * gate)
    torch.testing.assert_close(layer(x), y)


def test_selective_layers_are_found_beside_linear_ones():
    model = nn.Sequential(LRU(4, 3), Mixer(), nn.ModuleDict({"inner": Mamba(4)}))
    assert [type(module) for module, _ in find(model).values()] == [LRU, Mixer, Mamba]
    assert [adapter.order(module) for module, adapter in find(model).values()] == [3, 6, 16]


def other_names(layer):
    layer.x_projection = layer.x_proj
    del layer.x_proj


def other_sizes(layer):
    layer.dt_proj = nn.Linear(3, 8)


def not_finite(layer):
    layer.A_log.data[1, 2] = torch.nan


ODD = {
    "a norm of B": (lambda layer: layer.add_module("b_layernorm", nn.LayerNorm(6)), "b_layernorm.weight, unknown to"),
    "a scale in a buffer": (lambda layer: layer.register_buffer("b_c_rms", torch.ones(6)), "has b_c_rms, unknown to"),
    "other names": (other_names, "has no x_proj.weight"),
    "other sizes": (other_sizes, r"dt_proj.weight \(8, 3\).*expected \(channels, n\)"),
    "a weight that is computed": (
        lambda layer: nn.utils.parametrizations.weight_norm(layer.x_proj),
        "no x_proj.weight",
    ),
    "a bias": (lambda layer: setattr(layer, "x_proj", nn.Linear(8, 14)), "x_proj.bias"),
    "NaN": (not_finite, r"A_log\[1, 2\] is nan"),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_mixer_that_looks_different_is_refused_by_name_and_left_alone(odd):
    model = nn.Sequential(nn.Identity(), make(kind=Mixer))
    change, said = ODD[odd]
    change(model[1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CompressionError, match=rf"^1: .*{said}"):
        compress_(model, keep=TargetOrder(3), calibrate=lambda model: model(data()))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0, equal_nan=True)


def test_an_attribute_that_should_go_with_the_order_and_is_missing_is_named():
    layer = make(kind=Mixer)
    layer.config = None
    with pytest.raises(CompressionError, match=r"the model: config.state_size should change with the order"):
        compress_(layer, keep=TargetOrder(3), calibrate=lambda layer: layer(data()))
    assert layer.A_log.shape[1] == layer.ssm_state_size == 6


def test_what_is_for_linear_systems_says_so():
    with pytest.raises(
        AdapterError, match=r"Mamba is not a linear system: MambaAdapter\(\) reads it, expected an SSMAdapter"
    ):
        state_axes(make())


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_selective_layers_keep_their_promises(kind):
    findings = check_adapter(lambda: kind(4, order=6), length=20)
    assert all(finding.holds for finding in findings)
    assert len(findings) == 10


class Forgetful(MixerAdapter):
    """Does not know that the order stands in an attribute."""

    def attributes(self, module, order):
        return {}


class Deaf(MixerAdapter):
    """Listens to what is not given u."""

    def observed(self, module):
        return module.in_proj


class Mirrored(MixerAdapter):
    """Takes the rows of B for those of C, and puts them back."""

    def read(self, module):
        system = super().read(module)
        return replace(system, W_B=system.W_B.flip(0))


WRONG = {
    Forgetful: r"fails in the promise: Removing one state without input",
    Deaf: r"x_proj is given u of shape \(batch, length, 8\): 1",
    Mirrored: r"encode\(read\) gives the values back",
}


@pytest.mark.parametrize("adapter", WRONG)
def test_the_check_of_adapters_finds_what_is_wrong(adapter):
    with pytest.raises(ConformanceError, match=WRONG[adapter]):
        check_adapter(lambda: Mixer(4, order=6), adapter=adapter(), length=20)


def test_the_check_of_adapters_wants_a_few_states():
    with pytest.raises(AdapterError, match="order 3, expected at least 4"):
        check_adapter(lambda: Mixer(4, order=3))


def test_a_written_layer_has_the_order_of_what_was_encoded():
    layer = make()
    adapter = adapter_for(layer)
    system = adapter.read(layer).detach()
    write(
        layer,
        adapter.encode(
            layer, system.projected(torch.eye(6).double()[:2], torch.eye(6).double()[:, :2], system.rates[:, :2])
        ),
    )
    assert layer.order == adapter.order(layer) == 2
    assert layer(data())[0].isfinite().all()
