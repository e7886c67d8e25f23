import numpy as np
import pytest
import torch
from hypothesis import given

from compressm.control import DenseSystem, DiagonalSystem
from tests import oracles
from tests.strategies import diagonal_systems
from tests.systems import lru_at_initialisation


def as_dense(system):
    return DenseSystem(system.A, system.B, system.C)


@pytest.mark.parametrize("form", [lambda system: system, as_dense], ids=["diagonal", "dense"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 100])
def test_simulation_equals_the_recurrence_step_by_step(form, length):
    system = lru_at_initialisation(12, 3, seed=1)
    inputs = torch.randn(length, 3, dtype=torch.float64)
    expected = oracles.simulate_step_by_step(*oracles.as_arrays(system), inputs.numpy())
    np.testing.assert_allclose(form(system).simulate(inputs).numpy(), expected, rtol=1e-12, atol=1e-13)


def test_a_sequence_in_two_parts_equals_the_whole():
    system = lru_at_initialisation(8, 2)
    inputs = torch.randn(5, 40, 2, dtype=torch.float64)
    whole = system.states(inputs)
    second = system.states(inputs[:, 17:], initial_state=whole[:, 16])
    torch.testing.assert_close(second, whole[:, 17:], rtol=1e-12, atol=1e-13)


def test_the_impulse_response_is_the_answer_to_unit_impulses():
    system = lru_at_initialisation(6, 3)
    impulses = torch.zeros(3, 30, 3, dtype=torch.float64)
    impulses[range(3), 0, range(3)] = 1
    expected = system.simulate(impulses).permute(1, 2, 0)
    for form in (system, as_dense(system)):
        torch.testing.assert_close(form.impulse_response(30), expected, rtol=1e-12, atol=1e-14)


@given(diagonal_systems(max_order=12, max_channels=4))
def test_the_frequency_response_is_the_resolvent_and_the_same_in_both_forms(system):
    omega = torch.linspace(-3, 3, 7, dtype=torch.float64)
    expected = oracles.transfer(*oracles.as_arrays(system), omega.numpy())
    scale = abs(expected).max() + 1e-300
    for form in (system, DenseSystem._unchecked(system.A, system.B, system.C)):
        np.testing.assert_allclose(form.frequency_response(omega).numpy() / scale, expected / scale, atol=1e-9)


def test_the_frequency_response_is_the_transform_of_the_impulse_response():
    system = lru_at_initialisation(10, 2, seed=3)
    impulse = system.impulse_response(20_000).numpy()
    omega = 0.7
    transform = (impulse * np.exp(-1j * omega * np.arange(len(impulse)))[:, None, None]).sum(0)
    response = system.frequency_response(torch.tensor([omega], dtype=torch.float64))[0].numpy()
    np.testing.assert_allclose(response, transform, rtol=1e-6)


@given(diagonal_systems(max_order=8, max_channels=3))
def test_the_adjoint_of_the_adjoint_is_the_system(system):
    for form in (system, as_dense(system)):
        twice = form.adjoint().adjoint()
        assert all(torch.equal(a, b) for a, b in ((twice.A, form.A), (twice.B, form.B), (twice.C, form.C)))


def test_the_adjoint_moves_the_system_to_the_other_side_of_the_inner_product():
    system = lru_at_initialisation(5, 2)
    omega = torch.tensor([0.3, -1.2], dtype=torch.float64)
    mirrored = system.adjoint().frequency_response(-omega)
    torch.testing.assert_close(mirrored, system.frequency_response(omega).mH)


def test_log_poles_and_poles_describe_the_same_system():
    from_logs = lru_at_initialisation(7, 2)
    from_poles = DiagonalSystem(from_logs.poles, from_logs.B, from_logs.C)
    omega = torch.linspace(-3, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(from_logs.frequency_response(omega), from_poles.frequency_response(omega))


def test_a_bank_is_a_loop_over_its_members():
    bank = lru_at_initialisation(6, 2, bank=(2, 3))
    inputs = torch.randn(2, 3, 20, 2, dtype=torch.float64)
    omega = torch.linspace(-1, 1, 4, dtype=torch.float64)
    for i in range(2):
        for j in range(3):
            member = bank[i, j]
            torch.testing.assert_close(bank.simulate(inputs)[i, j], member.simulate(inputs[i, j]))
            torch.testing.assert_close(bank.frequency_response(omega)[i, j], member.frequency_response(omega))
            torch.testing.assert_close(bank.impulse_response(9)[i, j], member.impulse_response(9))


def test_single_precision_parameters_are_raised_to_double_before_anything_is_formed():
    single = lru_at_initialisation(4, 2)
    system = DiagonalSystem(
        single.poles.to(torch.complex64), single.B.to(torch.complex64), single.C.to(torch.complex64)
    )
    assert system.dtype == torch.complex128
    real = DiagonalSystem(torch.tensor([0.5]), torch.ones(1, 1), torch.ones(1, 1))
    assert real.dtype == torch.float64


def test_the_printed_form_names_order_channels_and_bank():
    assert repr(lru_at_initialisation(6, 2, bank=(3,))) == "DiagonalSystem(order=6, inputs=2, outputs=2, bank=(3,))"


@pytest.mark.parametrize("form", [lambda system: system, as_dense], ids=["diagonal", "dense"])
def test_complex_signals_through_a_real_system_keep_their_imaginary_part(form):
    system = form(real_system())
    inputs, start = (torch.randn(*shape, dtype=torch.complex128) for shape in ((20, 2), (4,)))
    parts = [system.simulate(part, state) for part, state in ((inputs.real, start.real), (inputs.imag, start.imag))]
    torch.testing.assert_close(system.simulate(inputs, start), torch.complex(*parts))
    free = system.simulate(torch.zeros(20, 2, dtype=torch.float64), 1j * start.real)
    assert free.dtype == torch.complex128
    assert free.imag.abs().max() > 0


def real_system():
    poles = torch.tensor([0.9, -0.5, 0.3, 0.0], dtype=torch.float64)
    return DiagonalSystem(poles, torch.ones(4, 2, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64))


def test_one_signal_can_start_from_several_states():
    system, inputs = lru_at_initialisation(4, 2), torch.randn(9, 2, dtype=torch.float64)
    starts = torch.randn(5, 4, dtype=torch.complex128)
    together = system.states(inputs, starts)
    for start, states in zip(starts, together, strict=True):
        torch.testing.assert_close(states, system.states(inputs, start))


@pytest.mark.parametrize("make", [DiagonalSystem, DiagonalSystem.from_log_poles, DenseSystem])
def test_changing_a_parameter_later_leaves_the_system_as_it_was(make):
    first = torch.tensor([-0.5, -0.25], dtype=torch.float64)
    given = [first.diag() if make is DenseSystem else first, *torch.ones(2, 2, 2, dtype=torch.float64)]
    system = make(*given)
    before = system.impulse_response(5)
    for tensor in given:
        tensor.zero_()
    assert torch.equal(system.impulse_response(5), before)


@pytest.mark.parametrize("make", [DiagonalSystem, DiagonalSystem.from_log_poles, DenseSystem])
def test_gradients_reach_the_parameters_that_a_system_has_copied(make):
    first = torch.tensor([-0.5, -0.25], dtype=torch.float64)
    given = [first.diag() if make is DenseSystem else first, *torch.ones(2, 2, 2, dtype=torch.float64)]
    given = [tensor.requires_grad_() for tensor in given]
    make(*given).impulse_response(5).square().sum().backward()
    assert all(tensor.grad.abs().sum() > 0 for tensor in given)


INDICES = {
    "an integer": 1,
    "a negative integer": -1,
    "a slice": slice(1, None),
    "a pair": (1, 2),
    "a slice and an integer": (slice(None), 0),
    "an ellipsis": (..., 0),
    "a new axis": (None, 1),
    "a list": [1, 0, 1],
    "a tensor": torch.tensor([[0, 1], [1, 1]]),
    "a scalar tensor": torch.tensor(1),
    "a mask": torch.tensor([[True, False, True], [False, True, False]]),
    "a mask of the first axis": torch.tensor([False, True]),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("form", [lambda system: system, as_dense], ids=["diagonal", "dense"])
def test_an_index_of_a_bank_selects_whole_systems(form, index):
    bank = form(lru_at_initialisation(4, 2, bank=(2, 3)))
    chosen = torch.arange(6).reshape(2, 3)[index]
    selected = bank[index]
    assert (selected.bank, selected.order, selected.inputs) == (chosen.shape, 4, 2)
    for name in ("A", "B", "C"):
        members = getattr(bank, name).flatten(0, 1)
        assert torch.equal(getattr(selected, name).reshape(-1, *members.shape[1:]), members[chosen.flatten()])


@pytest.mark.parametrize("index", [2, (0, 3), (0, 0, 0), (..., 0, 0, 0)])
def test_an_index_beyond_the_bank_is_refused(index):
    with pytest.raises(IndexError):
        lru_at_initialisation(4, 2, bank=(2, 3))[index]


def test_a_bank_can_be_walked_through():
    bank = lru_at_initialisation(4, 2, bank=(3,))
    assert [torch.equal(member.poles, poles) for member, poles in zip(bank, bank.poles, strict=True)] == [True] * 3
