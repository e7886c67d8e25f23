"""Moments carried through a cut, against gradients of the cut model and against the closed formulas for the LRU."""

import copy

import numpy as np
import pytest
import torch

from compressm.adapters import write
from compressm.compression.optimizer import Entry, Restart, Role, Slice, Transport
from compressm.families.linear.transport import Spread
from compressm.layers import LRU
from tests.compression.trained import LAYERS, change_of, gradients_of, loss_of, make_layer
from tests.marks import later


@pytest.fixture(params=LAYERS)
def layer(request):
    return make_layer(request.param)


def drawn(layer, names, seed=2, positive=False):
    g = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(layer.get_parameter(name).shape, generator=g, dtype=torch.float64) for name in names}
    return {name: value**2 + 0.1 for name, value in values.items()} if positive else values


@pytest.mark.parametrize("folded", [True, False])
def test_a_gradient_becomes_the_gradient_of_the_changed_layer(layer, folded):
    """With all states kept the function is the same, in other coordinates: autograd is the oracle."""
    change = change_of(layer, 8, fold=folded)
    carried = change.gradient(gradients_of(layer))
    before = loss_of(layer).item()
    write(layer, change.values)
    assert loss_of(layer).item() == pytest.approx(before, rel=1e-12)
    expected = gradients_of(layer)
    for name, value in carried.items():
        assert (value - expected[name]).abs().max() <= 1e-12 * expected[name].abs().max()


@pytest.mark.parametrize("folded", [True, False])
def test_an_update_changes_the_loss_as_it_did(layer, folded):
    """By finite differences, with all states kept."""
    change = change_of(layer, 8, fold=folded)
    step = drawn(layer, change.values)
    carried = change.update(step)
    changed = copy.deepcopy(layer)
    write(changed, change.values)

    def slope(module, direction, size=1e-6):
        losses = []
        for sign in (1, -1):
            moved = copy.deepcopy(module)
            for name, value in direction.items():
                moved.get_parameter(name).data += sign * size * value
            losses.append(loss_of(moved).item())
        return (losses[0] - losses[1]) / (2 * size)

    assert slope(changed, carried) == pytest.approx(slope(layer, step), rel=1e-5)


def lru_formulas(layer, change, m):
    """First moments by section 5.1 of the numerics, in NumPy: fold, then (Φ, Ψ), then the parameters."""
    old = {name: p.detach().numpy() for name, p in layer.named_parameters()}
    new = {name: value.numpy() for name, value in change.values.items()}
    Phi, Psi = change.basis.right.numpy(), change.basis.left.numpy()
    m = {name: value.numpy().copy() for name, value in m.items()}
    below = change.basis.old_conjugated.numpy()
    for name in ("B_im", "C_im"):
        m[name] = np.where(below[:, None] if name == "B_im" else below, -m[name], m[name])
    # θ' = 2π − θ and m_θlog *= −θ'/θ, so that m_θlog / θ changes its sign.
    m_theta = np.where(below, -m["theta_log"], m["theta_log"]) / np.exp(old["theta_log"])
    lam = np.exp(-np.exp(old["nu_log"]) + 1j * np.where(below, -1, 1) * np.exp(old["theta_log"]))
    m_B = np.exp(-old["gamma_log"])[:, None] * (m["B_re"] + 1j * m["B_im"])
    m_B = np.exp(new["gamma_log"])[:, None] * (Phi.conj().T @ m_B)
    m_C = (m["C_re"] + 1j * m["C_im"]) @ Psi
    q = -(m["nu_log"] * np.exp(-old["nu_log"]) + 1j * m_theta)
    m_lam = (Phi.conj() * Psi).T @ np.conj(q / lam)
    lam_new = np.exp(-np.exp(new["nu_log"]) + 1j * np.exp(new["theta_log"]))
    q = np.conj(m_lam) * lam_new
    return {
        "nu_log": -np.exp(new["nu_log"]) * q.real,
        "theta_log": -np.exp(new["theta_log"]) * q.imag,
        "gamma_log": (m_B.conj() * (new["B_re"] + 1j * new["B_im"])).real.sum(1),
        "B_re": m_B.real,
        "B_im": m_B.imag,
        "C_re": m_C.real,
        "C_im": m_C.imag,
    }


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("order", [8, 5, 2, 1])
def test_first_moments_of_an_lru_follow_the_closed_formulas(order, folded):
    layer = make_layer("LRU")
    change = change_of(layer, order, fold=folded)
    m = drawn(layer, change.values)
    carried, expected = change.gradient(m), lru_formulas(layer, change, m)
    assert change.basis.old_conjugated.any() == folded
    for name, value in expected.items():
        np.testing.assert_allclose(carried[name].numpy(), value, rtol=1e-11, atol=1e-12 * np.abs(value).max())


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("order", [8, 5, 2])
def test_second_moments_of_an_lru_are_the_squared_entries_of_the_same_map(order, folded):
    """The matrix of the closed formulas, entry by entry; γ takes from B: Σ v_Bre B_re² + v_Bim B_im²."""
    layer = make_layer("LRU", order=8, width=2)
    change = change_of(layer, order, fold=folded)
    v = drawn(layer, change.values, positive=True)
    names = [name for name in change.values if name != "gamma_log"]
    expected = {name: np.zeros(tuple(value.shape)) for name, value in change.values.items()}
    for source in names:
        for index in np.ndindex(*v[source].shape):
            unit = {name: torch.zeros_like(value) for name, value in v.items()}
            unit[source][index] = 1
            for name, column in lru_formulas(layer, change, unit).items():
                expected[name] += column**2 * v[source][index].item()
    B_re, B_im = change.values["B_re"].numpy(), change.values["B_im"].numpy()
    expected["gamma_log"] = (expected["B_re"] * B_re**2 + expected["B_im"] * B_im**2).sum(1)
    carried = change.gradient_squares(v)
    for name in names:
        np.testing.assert_allclose(carried[name].numpy(), expected[name], rtol=1e-10)
    # What the two parts of B have in common, which 5.1 leaves out, is kept: exact is the sum over old entries.
    exact = np.zeros_like(expected["gamma_log"])
    for source in ("B_re", "B_im"):
        for index in np.ndindex(*v[source].shape):
            unit = {name: torch.zeros_like(value) for name, value in v.items()}
            unit[source][index] = 1
            exact += lru_formulas(layer, change, unit)["gamma_log"] ** 2 * v[source][index].item()
    np.testing.assert_allclose(carried["gamma_log"].numpy(), exact, rtol=1e-10)
    assert (exact > expected["gamma_log"] / 4).all()
    assert (exact < expected["gamma_log"] * 4).all()


def squared_map(layer, change, v, names, carry):
    """(J ∘ J) v among the named parameters, J column by column from what was checked above."""
    total = {name: torch.zeros_like(change.values[name]) for name in names}
    for source in names:
        for index in np.ndindex(*v[source].shape):
            unit = {name: torch.zeros_like(v[name]) for name in change.values}
            unit[source][index] = 1
            for name, column in carry(unit).items():
                if name in names:
                    total[name] += column**2 * v[source][index]
    return total


@pytest.mark.parametrize("order", later([8, 4], 8))
@pytest.mark.parametrize("carry", ["gradient", "update"])
def test_second_moments_of_any_layer_are_the_squared_entries_of_the_same_map(layer, order, carry):
    """Within B, and within C; what S4D stores of its input is 1."""
    change = change_of(layer, order)
    v = drawn(layer, change.values, positive=True)
    first, second = getattr(change, carry), getattr(change, f"{carry}_squares")
    carried = second(v)
    for letter in "BC":
        names = [name for name in change.values if name.startswith(letter)]
        expected = squared_map(layer, change, v, names, first)
        for name in names:
            if carry == "update" and (letter == "B" and isinstance(layer, LRU)):
                assert (carried[name] >= expected[name] * (1 - 1e-9)).all()  # steps of γ move B too
            else:
                torch.testing.assert_close(carried[name], expected[name], rtol=1e-9, atol=0)


def test_second_moments_of_a_layer_left_as_it_was_are_permuted_and_scaled(layer):
    """So that every value keeps its meaning: v/m² of the parameters that a system determines is the same set."""
    change = change_of(layer, 8, fold=False)
    m = drawn(layer, change.values)
    v = {name: value**2 for name, value in m.items()}
    for name in change.values:
        if name in change.redundant:
            continue
        # A parameter for itself: without those of other kinds, and without its partner.
        alone = {other: torch.zeros_like(value) for other, value in m.items()} | {name: m[name]}
        squares = {other: torch.zeros_like(value) for other, value in v.items()} | {name: v[name]}
        first, second = change.gradient(alone)[name], change.gradient_squares(squares)[name]
        assert change.parts[name]
        torch.testing.assert_close(second, first**2, rtol=1e-6, atol=1e-12)


def test_second_moments_are_finite_and_not_negative(layer):
    for order in (1, 4, 8):
        change = change_of(layer, order)
        for scale in (1e-300, 1.0, 1e100):
            v = {name: scale * value for name, value in drawn(layer, change.values, positive=True).items()}
            for carry in (change.gradient_squares, change.update_squares):
                for value in carry(v).values():
                    assert value.isfinite().all()
                    assert (value >= 0).all()


def test_parameters_that_a_system_leaves_open_are_found():
    found = {name: change_of(make_layer(name), 4).redundant for name in LAYERS}
    assert found == {
        "LRU": {"gamma_log"},
        "S5": {"log_step"},
        "S5 bilinear": {"log_step"},
        "S4D": set(),
        "S4D above the sampling rate": set(),
        "LinOSS": {"log_step"},
        "LinOSS damped": {"log_step"},
        "somebody's": set(),
    }


def test_the_spread_of_a_product_is_that_of_samples():
    g = torch.Generator().manual_seed(0)
    sources = torch.randn(3, 4, 2, dtype=torch.complex128, generator=g)
    z = torch.randn(3, 4, dtype=torch.complex128, generator=g)
    signs = torch.randint(0, 2, (200_000, 3, 4, 2), generator=g) * 2 - 1
    x = z @ (signs * sources).sum(1)
    spread = Spread.of(sources).through(z)
    torch.testing.assert_close(spread.re, x.real.square().mean(0), rtol=0.02, atol=0.02)
    torch.testing.assert_close(spread.im, x.imag.square().mean(0), rtol=0.02, atol=0.02)
    torch.testing.assert_close(spread.mixed, (x.real * x.imag).mean(0), rtol=0.02, atol=0.1)
    again = Spread.of(spread.factors())
    for part in ("re", "im", "mixed"):
        torch.testing.assert_close(getattr(again, part), getattr(spread, part))
    d = torch.randn(3, 2, dtype=torch.complex128, generator=g)
    torch.testing.assert_close(spread.along(d), (d.conj() * x).real.square().mean(0), rtol=0.02, atol=0.02)


def entries_of(layer, change, **roles):
    return {
        key: Entry(
            role,
            drawn(layer, change.values, seed=k, positive=role is not Role.GRADIENT),
            dict.fromkeys(change.values, 0.0),
        )
        for k, (key, role) in enumerate(roles.items())
    }


def test_slices_are_the_first_states():
    layer = make_layer("LRU")
    change = change_of(layer, 5)
    entries = entries_of(layer, change, exp_avg=Role.GRADIENT)
    carried = Slice().carry(change, entries)["exp_avg"]
    for name, value in entries["exp_avg"].values.items():
        axis = LRU.STATE_AXES[name]
        assert torch.equal(carried[name], value[:5] if axis == 0 else value[:, :5])
    assert Slice().carry_scalar("step", 7) == 7


def test_a_restart_is_as_before_the_first_step():
    layer = make_layer("LRU")
    change = change_of(layer, 5)
    entries = entries_of(layer, change, exp_avg=Role.GRADIENT, whatever=None)
    for values in Restart().carry(change, entries).values():
        assert all((value == 0).all() and value.shape == change.values[name].shape for name, value in values.items())
    assert Restart().carry_scalar("step", 7) == 0
    assert torch.equal(Restart().carry_scalar("step", torch.tensor(7.0)), torch.tensor(0.0))
    assert Restart().carry_scalar("mu_product", 0.3) == 1.0
    assert Restart().carry_scalar("something", "else") == "else"


def test_sizes_of_gradients_are_roots_of_squares():
    layer = make_layer("LRU")
    change = change_of(layer, 5)
    sizes = drawn(layer, change.values, positive=True)
    entry = Entry(Role.GRADIENT_SIZE, sizes, dict.fromkeys(sizes, 0.0))
    carried = Transport().carry(change, {"exp_inf": entry})["exp_inf"]
    squares = change.gradient_squares({name: value**2 for name, value in sizes.items()})
    for name, value in squares.items():
        torch.testing.assert_close(carried[name] ** 2, value)


def test_first_moments_never_stand_beside_second_ones_that_no_run_could_have():
    layer = make_layer("S5")
    change = change_of(layer, 5)
    entries = entries_of(layer, change, exp_avg=Role.GRADIENT, exp_avg_sq=Role.GRADIENT_SQUARE)
    nothing = {name: torch.zeros_like(value) for name, value in entries["exp_avg_sq"].values.items()}
    entries["exp_avg_sq"] = Entry(Role.GRADIENT_SQUARE, nothing, entries["exp_avg"].initial)
    carried = Transport().carry(change, entries)
    for name, value in carried["exp_avg"].items():
        torch.testing.assert_close(carried["exp_avg_sq"][name], value**2 / 53)


def test_the_centred_square_stays_above_the_squared_mean():
    layer = make_layer("LRU")
    change = change_of(layer, 5)
    entries = entries_of(layer, change, square_avg=Role.GRADIENT_SQUARE, grad_avg=Role.GRADIENT)
    mean = entries["grad_avg"].values
    entries["square_avg"] = Entry(
        Role.GRADIENT_SQUARE, {name: value**2 + 1e-8 for name, value in mean.items()}, entries["grad_avg"].initial
    )
    carried = Transport().carry(change, entries)
    for name, value in carried["square_avg"].items():
        assert (value >= carried["grad_avg"][name] ** 2).all()


def test_choices_can_be_compared_printed_and_used_as_defaults():
    assert Transport() == Transport() != Restart()
    assert [repr(choice) for choice in (Transport(), Restart(), Slice())] == ["Transport()", "Restart()", "Slice()"]
    assert len({Transport(), Transport(), Slice()}) == 2
