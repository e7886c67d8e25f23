import copy
import math

import pytest
import torch
from torch import nn

from compressm.adapters import AdapterError, adapter_for, write
from compressm.control import NonFiniteError, PrecisionError, ShapeError
from compressm.layers import LRU, S4D


def smaller(layer, order=2):
    """Values for a layer of a lower order."""
    other = type(layer)(layer.width, order)
    return {name: getattr(other, name).detach().double() for name in layer.STATE_AXES}


def loss_of(layer):
    return layer(torch.ones(1, 5, layer.width, dtype=layer.D.dtype))[0].square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_parameters_stay_the_same_objects_with_all_they_carry(dtype):
    layer = LRU(2, 4).to(dtype)
    layer.C_re.requires_grad_(False)
    layer.nu_log._no_weight_decay = True
    before = dict(layer.named_parameters())
    values = smaller(layer)
    write(layer, values)
    assert dict(layer.named_parameters()).keys() == before.keys()
    for name, parameter in layer.named_parameters():
        assert parameter is before[name]
        assert parameter.dtype == dtype
        assert parameter.requires_grad == (name != "C_re")
        assert parameter.is_leaf
        assert parameter.is_contiguous()
    assert layer.nu_log._no_weight_decay
    assert layer.order == 2
    torch.testing.assert_close(layer.B_re.detach(), values["B_re"].to(dtype), rtol=0, atol=0)


def test_gradients_of_the_old_values_are_dropped():
    layer = LRU(2, 4)
    loss_of(layer).backward()
    write(layer, smaller(layer))
    assert all((parameter.grad is None) == (name in layer.STATE_AXES) for name, parameter in layer.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_next_step_works_while_an_old_loss_is_alive(dtype):
    layer = LRU(2, 4).to(dtype)
    held = loss_of(layer)
    held.backward()
    write(layer, smaller(layer))
    loss_of(layer).backward()
    assert layer.B_re.grad.shape == layer.B_re.shape == (2, 2)
    assert held.isfinite()


def test_replacing_the_data_alone_would_break_the_next_step():
    """The trap that `write` is there for."""
    layer = LRU(2, 4)
    held = loss_of(layer)
    held.backward()
    for name, value in smaller(layer).items():
        parameter = layer.get_parameter(name)
        parameter.grad, parameter.data = None, value.float()
    with pytest.raises(RuntimeError, match="invalid gradient"):
        loss_of(layer).backward()


def test_hooks_on_parameters_go_on():
    layer, seen = LRU(2, 4), []
    layer.nu_log.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    layer.nu_log.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    loss_of(layer).backward()
    write(layer, smaller(layer))
    loss_of(layer).backward()
    assert seen == [(4,), "accumulated", (2,), "accumulated"]


def test_an_optimizer_without_state_goes_on():
    layer = LRU(2, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    write(layer, smaller(layer))
    before = copy.deepcopy(layer.state_dict())
    loss_of(layer).backward()
    optimizer.step()
    assert all((value != before[name]).any() for name, value in layer.state_dict().items())


def test_the_values_are_copied():
    layer = LRU(2, 4).double()
    values = smaller(layer)
    write(layer, values)
    values["C_re"].fill_(7)
    assert (layer.C_re != 7).all()


def test_a_complex_parameter_may_be_written():
    module = nn.Module()
    module.poles = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    write(module, {"poles": torch.full((2,), 1j, dtype=torch.complex128)})
    assert module.poles.dtype == torch.complex64
    assert module.poles.tolist() == [1j, 1j]


def test_parameters_of_children_have_dotted_names():
    module = nn.Sequential(nn.Linear(2, 3))
    write(module, {"0.weight": torch.ones(4, 2), "0.bias": torch.ones(4)})
    assert module(torch.ones(1, 2)).tolist() == [[3.0] * 4]


def changed(**new):
    layer = LRU(2, 4)
    return layer, {**smaller(layer), **new}


@pytest.mark.parametrize(
    ("new", "error", "said"),
    [
        ({"D": torch.tensor([math.nan, 1.0])}, NonFiniteError, r"D\[0\] is nan"),
        ({"D": torch.tensor([1e300, 1.0], dtype=torch.float64)}, NonFiniteError, r"float32 D\[0\] is inf"),
        ({"D": torch.ones(3)}, ShapeError, r"D has shape \(3,\), expected \(2,\)"),
        ({"D": torch.ones(2, 1)}, ShapeError, r"\(2, 1\)"),
        ({"D": torch.ones(0)}, ShapeError, r"\(0,\)"),
        ({"D": torch.ones(2, dtype=torch.complex64)}, PrecisionError, "complex64"),
        ({"C_im": torch.ones(2, 3)}, ShapeError, "nu_log 2.*C_im 3"),
        ({"C_im": torch.ones(3, 2)}, ShapeError, r"C_im has shape \(3, 2\), expected \(2, 2\)"),
        ({"E": torch.ones(2)}, AdapterError, "no parameter 'E'.*nu_log"),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(new, error, said):
    layer, values = changed(**new)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(error, match=said):
        write(layer, values)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_half_a_cut_is_refused():
    layer = S4D(2, 4)
    values = smaller(layer)
    del values["C_im"]
    with pytest.raises(ShapeError, match="C_re 2, C_im 4"):
        write(layer, values)


def test_one_parameter_under_two_names_is_refused():
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    module[1].weight = module[0].weight
    with pytest.raises(AdapterError, match=r"0\.weight and 1\.weight are the same parameter"):
        write(module, {"0.weight": torch.ones(2, 2), "1.weight": torch.zeros(2, 2)})


def test_a_written_layer_reads_as_what_was_written():
    layer = LRU(2, 4).double()
    system = adapter_for(layer).read(LRU(2, 3))
    write(layer, adapter_for(layer).encode(layer, system))
    torch.testing.assert_close(adapter_for(layer).read(layer).poles, system.poles)
