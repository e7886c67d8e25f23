"""Penalties of whole models: their values by independent formulas, their gradients by finite differences."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from compressm.adapters import AdapterError, adapter_for
from compressm.control import ControlError
from compressm.layers import LRU, S4D, S5, LinOSS, Mamba
from compressm.models import SequenceClassifier
from compressm_lab.baselines import HankelMajoriser, HankelNuclearNorm, ModalL1
from tests.oracles import as_arrays, finite_hankel_values

PENALTIES = [HankelNuclearNorm(floor=1e-6), HankelNuclearNorm(floor=1e-6, fold=False), HankelMajoriser(), ModalL1()]


def classifier(layer=LRU, depth=2, order=4, **options):
    torch.manual_seed(0)
    options = {"layer_options": options} if options else {}
    return SequenceClassifier(layer, depth=depth, width=3, order=order, inputs=1, classes=2, **options)


def test_the_nuclear_norm_is_that_of_finite_hankel_matrices():
    """Fast modes, of which 60 blocks hold all."""
    model = classifier(r_min=0.3, r_max=0.6)
    systems = [as_arrays(adapter_for(block.ssm).read(block.ssm)) for block in model.blocks]
    expected = sum(finite_hankel_values(*system, blocks=60).sum() for system in systems)
    assert HankelNuclearNorm(floor=1e-6, fold=False)(model).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("fold", [True, False])
def test_the_mean_is_the_sum_of_each_layer_over_its_order(fold):
    model = classifier(depth=2, order=6)
    total, mean = (HankelNuclearNorm(fold=fold, mean=mean)(model).item() for mean in (False, True))
    assert mean == pytest.approx(total / 6, rel=1e-12)
    model.blocks[1].ssm = LRU(3, 2)
    layers = [HankelNuclearNorm(fold=fold)(block.ssm).item() for block in model.blocks]
    assert HankelNuclearNorm(fold=fold, mean=True)(model).item() == pytest.approx(layers[0] / 6 + layers[1] / 2)


def test_folding_penalises_what_a_folded_cut_goes_by():
    model = classifier(depth=1, order=6, r_min=0.3, r_max=0.6)
    A, B, C = as_arrays(adapter_for(model.blocks[0].ssm).read(model.blocks[0].ssm))
    below = np.diag(A).imag < 0
    assert below.any()
    poles = np.where(below, np.diag(A).conj(), np.diag(A))
    B, C = np.where(below[:, None], B.conj(), B), np.where(below, C.conj(), C)
    expected = finite_hankel_values(np.diag(poles), B, C, blocks=60).sum()
    assert HankelNuclearNorm(floor=1e-6)(model).item() == pytest.approx(expected, rel=1e-9)


def test_the_majoriser_and_the_modal_norm_are_what_they_say():
    model = classifier(depth=1)
    A, B, C = as_arrays(adapter_for(model.blocks[0].ssm).read(model.blocks[0].ssm))
    poles = np.abs(np.diag(A))
    sizes = np.linalg.norm(B, axis=1) * np.linalg.norm(C, axis=0) / (1 - poles**2)
    assert HankelMajoriser()(model).item() == pytest.approx(sizes.sum(), rel=1e-9)
    assert ModalL1()(model).item() == pytest.approx(poles.sum(), rel=1e-12)


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize("layer", [LRU, S5, S4D, LinOSS])
def test_the_gradient_of_every_parameter_agrees_with_finite_differences(penalty, layer):
    model = classifier(layer, depth=1, order=3).double()
    module = model.blocks[0].ssm
    if layer is S4D:  # has a pole on the real axis, where folding jumps
        module.A_imag.data += 0.3
    names, values = zip(*((n, p.detach().clone()) for n, p in module.named_parameters() if n != "D"), strict=True)

    def of(*parts):
        for name, part in zip(names, parts, strict=True):
            setattr(module, name, part)
        return penalty(model)

    for name in names:
        delattr(module, name)
    inputs = [value.requires_grad_() for value in values]
    assert torch.autograd.gradcheck(of, inputs, eps=1e-6, atol=1e-4, rtol=1e-3)


def test_layers_of_different_orders_are_summed():
    small, large = classifier(depth=1, order=3), classifier(depth=1, order=5)
    both = nn.ModuleList([small, large])
    for penalty in PENALTIES:
        assert penalty(both).item() == pytest.approx(penalty(small).item() + penalty(large).item(), rel=1e-9)


def test_a_step_along_the_gradient_lowers_the_norm_of_a_float32_model():
    model = classifier(depth=3, order=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    values = []
    for _ in range(20):
        optimizer.zero_grad()
        value = HankelNuclearNorm()(model)
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < 0.8 * values[0]
    assert all(math.isfinite(value) for value in values)


def test_selective_layers_and_models_without_layers_are_refused_by_name():
    with pytest.raises(AdapterError, match="Mamba is not a linear system"):
        HankelNuclearNorm()(Mamba(4, 3))
    with pytest.raises(AdapterError, match="Linear has no SSM layer"):
        ModalL1()(nn.Linear(2, 2))


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
@pytest.mark.parametrize(("layer", "decay"), [(LRU, "nu_log"), (S5, "log_A_real"), (S4D, "log_A_real")])
def test_modes_that_are_dead_already_have_a_gradient(layer, decay, penalty):
    """|λ| = exp(−exp(20)), or that to the power of a step, is 0 in float64."""
    model = nn.Sequential(layer(3, order=4))
    with torch.no_grad():
        getattr(model[0], decay).fill_(20.0)
    penalty(model).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"floor": -1.0}, "floor is -1.0, expected a number from 0 to below 1"),
        ({"floor": 1.0}, "floor is 1.0, expected"),
        ({"floor": float("nan")}, "floor is nan, expected"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(options, said):
    with pytest.raises(ControlError, match=said):
        HankelNuclearNorm(**options)


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_weights_that_are_not_finite_are_named_by_their_layer(penalty):
    model = SequenceClassifier(LRU, depth=2, width=3, order=4, inputs=2, classes=2)
    with torch.no_grad():
        model.blocks[1].ssm.nu_log[2] = torch.nan
    with pytest.raises(ControlError, match=r"blocks\.1\.ssm: LRU\.nu_log\[2\] is nan"):
        penalty(model)
