"""Adapters of one's own that break their promises are refused by name before anything is cut."""

import copy

import pytest
import torch
from torch import nn

from compressm import Compressor, TargetOrder, compress_
from compressm.adapters import SSMAdapter, adapts, check_adapter, find
from compressm.adapters.base import encode_with, read_with
from compressm.compression import CompressionError, Restart, Slice
from compressm.control import DenseSystem, DiagonalSystem
from compressm.errors import AdapterError
from compressm.layers import LRU, S4, S4D, S5, LinOSS


class Leaky(nn.Module):
    """A layer with real poles: h = a h + B u, y = C h."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.linspace(0.3, 0.8, 5))
        self.B, self.C = nn.Parameter(torch.randn(5, 2)), nn.Parameter(torch.randn(2, 5))

    def forward(self, u):
        h, outputs = u.new_zeros(len(u), len(self.a)), []
        for step in u.unbind(1):
            h = self.a * h + step @ self.B.T
            outputs.append(h @ self.C.T)
        return torch.stack(outputs, 1)


def read(module):
    return DiagonalSystem(module.a.double(), module.B.double(), module.C.double())


def encode(system):
    return {"a": system.poles.real, "B": system.B.real, "C": system.C.real}


def trained(read=lambda self, module: read(module), encode=lambda self, module, system: encode(system)):
    """A trained layer of a class of its own, its adapter, and its optimizer with momentum."""
    kind = type("OwnLayer", (Leaky,), {})
    adapter = adapts(kind)(type("Own", (SSMAdapter,), {"read": read, "encode": encode}))()
    module = kind()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-5, momentum=0.9)
    module(torch.randn(2, 9, 2, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    optimizer.step()
    return module, adapter, optimizer


def test_a_right_adapter_carries_momentum():
    module, _, optimizer = trained()
    (cut,) = compress_(module, keep=TargetOrder(4), optimizer=optimizer)
    assert cut.rank == 4
    assert all(optimizer.state[parameter]["momentum_buffer"].norm() > 0.01 for parameter in module.parameters())


WRONG_READS = {
    "None": (lambda self, module: None, "Own().read gives None, expected a DiagonalSystem"),
    "a tuple": (lambda self, module: (1, 2), "Own().read gives (1, 2), expected a DiagonalSystem"),
    "a dense system": (
        lambda self, module: DenseSystem(*(part.double() for part in (module.a.diag(), module.B, module.C))),
        "expected a DiagonalSystem",
    ),
    "another order": (lambda self, module: _first_modes(module, 4), "order and bank"),
    "a bank": (lambda self, module: DiagonalSystem.stack([read(module)]), "expected the axes of (5,)"),
}


def _dense(module):
    return DenseSystem(module.a.double().diag(), module.B.double(), module.C.double())


def _first_modes(module, n):
    return DiagonalSystem(module.a.double()[:n], module.B.double()[:n], module.C.double()[:, :n])


WRONG_ENCODES = {
    "None": (lambda values: None, "Own().encode gives None, expected {parameter name: tensor}"),
    "a list": (lambda values: [1], "Own().encode gives [1], expected {parameter name: tensor}"),
    "a number as name": (lambda values: {3: values["a"]}, "expected {parameter name: tensor}"),
    "an unknown parameter": (lambda values: {**values, "zz": values["a"]}, "zz is not a parameter"),
    "text": (lambda values: {**values, "a": "x"}, "Own().encode gives a as 'x', expected a tensor"),
    "integers": (lambda values: {**values, "B": values["B"].long()}, "B as torch.int64, expected float64"),
    "complex numbers": (lambda values: {**values, "C": values["C"] + 0j}, "C as torch.complex128, expected float64"),
    "meta": (lambda values: {**values, "C": values["C"].to("meta")}, "gives C on meta"),
    "sparse": (lambda values: {**values, "C": values["C"].to_sparse()}, "sparse"),
    "a turned matrix": (lambda values: {**values, "B": values["B"].mT}, "B the shape (2, 5) for the system"),
    "other axes": (lambda values: {**values, "a": values["a"][None]}, "a the shape (1, 5), expected the axes of (5,)"),
    "too many states": (lambda values: {**values, "a": torch.cat([values["a"]] * 2)}, "a the shape (10,)"),
}


def check_refused(message, **methods):
    module, _, optimizer = trained(**methods)
    before = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    for cut in (
        lambda: compress_(module, keep=TargetOrder(2)),
        lambda: compress_(module, keep=TargetOrder(2), optimizer=optimizer),
        lambda: Compressor(module, optimizer, when=[1], keep=TargetOrder(2)),
    ):
        with pytest.raises(CompressionError) as found:
            cut()
        assert message in str(found.value)
        assert str(found.value).startswith("the model: ") or "not a parameter" in message
    assert str((module.state_dict(), optimizer.state_dict())) == str(before)


@pytest.mark.parametrize("case", WRONG_READS)
def test_a_wrong_read_is_refused_with_adapter_and_method(case):
    wrong, message = WRONG_READS[case]
    check_refused(message, read=wrong)


@pytest.mark.parametrize("case", WRONG_ENCODES)
def test_a_wrong_encode_is_refused_with_adapter_and_method(case):
    wrong, message = WRONG_ENCODES[case]
    check_refused(message, encode=lambda self, module, system: wrong(encode(system)))


def test_wrong_results_are_adapter_errors_where_adapters_are_called():
    module, adapter, _ = trained(read=lambda self, module: None, encode=lambda self, module, system: 3)
    with pytest.raises(AdapterError, match="read gives None"):
        read_with(adapter, module)
    with pytest.raises(AdapterError, match="read gives None"):
        adapter.order(module)
    with pytest.raises(AdapterError, match="encode gives 3"):
        encode_with(adapter, module, {}, read(module))
    with pytest.raises(AdapterError, match="read gives None"):
        check_adapter(type(module))


DETACHED_READS = {
    "everything": (lambda self, module: read(module).detach(), "carries no gradient to B, C, a"),
    "B alone": (
        lambda self, module: DiagonalSystem(module.a.double(), module.B.detach().double(), module.C.double()),
        "carries no gradient to B:",
    ),
}


@pytest.mark.parametrize("case", DETACHED_READS)
def test_a_read_that_detaches_is_refused_instead_of_setting_moments_to_zero(case):
    wrong, message = DETACHED_READS[case]
    module, _, optimizer = trained(read=wrong)
    for cut in (
        lambda: compress_(module, keep=TargetOrder(4), optimizer=optimizer),
        lambda: Compressor(module, optimizer, when=[1], keep=TargetOrder(4)),
    ):
        with pytest.raises(CompressionError, match=message):
            cut()
    assert module.a.shape == (5,)


def test_an_encode_that_detaches_is_refused_too():
    module, _, optimizer = trained(encode=lambda self, module, system: encode(system.detach()))
    with pytest.raises(CompressionError, match="encode gives values that carry no gradient to B, C, poles"):
        compress_(module, keep=TargetOrder(4), optimizer=optimizer)


@pytest.mark.parametrize("moments", [Restart(), Slice()], ids=str)
def test_a_read_that_detaches_may_cut_where_no_moment_is_carried(moments):
    module, _, optimizer = trained(read=DETACHED_READS["everything"][0])
    (cut,) = compress_(module, keep=TargetOrder(4), optimizer=optimizer, moments=moments)
    assert cut.rank == 4
    module, _, _ = trained(read=DETACHED_READS["everything"][0])
    (cut,) = compress_(module, keep=TargetOrder(4))
    assert cut.rank == 4


@pytest.mark.parametrize("layer", [LRU, S5, S4, S4D, LinOSS])
def test_our_own_adapters_pass_with_frozen_parameters(layer):
    module = layer(4, 8)
    for frozen in (None, *dict(module.named_parameters())):
        other = copy.deepcopy(module)
        if frozen is not None:
            other.get_parameter(frozen).requires_grad_(False)
        optimizer = torch.optim.Adam([parameter for parameter in other.parameters() if parameter.requires_grad])
        Compressor(other, optimizer, when=[1], keep=TargetOrder(4))
        assert list(find(other)) == [""]
