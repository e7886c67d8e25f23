"""What LRU, S5 and S4D are as systems, and that systems come back as they were encoded."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings

from compressm.adapters import AdapterError, adapter_for, continuous_poles, state_axes, write
from compressm.control import DiagonalSystem, NonFiniteError, ShapeError, UnstableSystemError, balanced_truncation, fold
from compressm.layers import LRU, S4D, S5, ZOH, Bilinear, Discretisation, Legs
from tests.strategies import diagonal_systems

LAYERS = {
    "LRU": lambda width=3, order=8: LRU(width, order),
    "S5": lambda width=3, order=8: S5(width, order),
    "S5 bilinear": lambda width=3, order=8: S5(width, order, discretisation=Bilinear()),
    "S4D": lambda width=3, order=8: S4D(width, order),
    "S4D bilinear": lambda width=3, order=8: S4D(width, order, discretisation=Bilinear(), initialisation=Legs()),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(0)
    return LAYERS[request.param]().double()


def becomes(layer, system):
    """The layer's system after the given one was written."""
    layer, adapter = copy.deepcopy(layer).double(), adapter_for(layer)
    write(layer, adapter.encode(layer, system))
    return adapter.read(layer).detach()


def single(poles, width=1):
    """A system of these poles with gains of 1."""
    poles = torch.tensor(poles, dtype=torch.complex128)
    ones = torch.ones(len(poles), width, dtype=torch.complex128)
    return DiagonalSystem(poles, ones, ones.mT)


def square(system):
    """With as many inputs as outputs."""
    width = min(system.inputs, system.outputs)
    return DiagonalSystem(system.poles, system.B[..., :width], system.C[..., :width, :])


def test_systems_are_read_in_double_precision(layer):
    system = adapter_for(layer).read(layer.float())
    assert system.dtype == torch.complex128
    assert system.order == layer.order


def test_a_bank_has_a_system_a_channel():
    bank = adapter_for(S4D(3, 8)).read(S4D(3, 8))
    assert (bank.bank, bank.inputs, bank.outputs) == ((3,), 1, 1)


def test_single_precision_parameters_are_converted_before_poles_are_formed():
    """A pole formed in float32 is off by up to 6e-8, of 1 − |λ| = 1e-5 that is 6e-3."""
    lru = LRU(2, 4)
    torch.nn.init.constant_(lru.nu_log, math.log(1e-5))
    exact = torch.exp(lru.nu_log.detach().double())
    torch.testing.assert_close(adapter_for(lru).read(lru).decay.detach(), -torch.expm1(-2 * exact), rtol=1e-14, atol=0)


def test_the_gain_of_an_lru_is_part_of_its_input_matrix():
    lru = LRU(2, 4).double()
    louder = copy.deepcopy(lru)
    louder.gamma_log.data += math.log(3)
    adapter = adapter_for(lru)
    torch.testing.assert_close(adapter.read(louder).B, 3 * adapter.read(lru).B)


def test_state_axes_are_found_without_being_told(layer):
    assert state_axes(layer) == layer.STATE_AXES


def test_encoding_changes_nothing_and_gives_parameters_in_double_precision(layer):
    before = copy.deepcopy(layer.state_dict())
    values = adapter_for(layer).encode(layer, adapter_for(layer).read(layer))
    assert set(values) == set(layer.STATE_AXES)
    assert all(value.dtype == torch.float64 for value in values.values())
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@settings(max_examples=25)
@given(system=diagonal_systems(max_order=12, max_channels=3))
def test_an_lru_stores_any_stable_system(system):
    system = square(system)
    stored = becomes(LRU(system.inputs, 3), system)
    # Poles that are real and positive are turned by 1e-3 of their distance from 1.
    turned = (torch.angle(system.poles) >= 0) & (torch.angle(system.poles) < 1.001e-3 * system.decay)
    allowed = torch.where(turned, 1.001e-3 * (1 - system.poles.abs()), 4e-15)
    assert ((stored.poles - system.poles).abs() <= allowed).all()
    torch.testing.assert_close(stored.B, system.B.to(torch.complex128), rtol=1e-12, atol=0)
    torch.testing.assert_close(stored.C, system.C.to(torch.complex128), rtol=0, atol=0)


@pytest.mark.parametrize("rule", [ZOH(), Bilinear()])
@settings(max_examples=25)
@given(system=diagonal_systems(max_order=12, max_channels=3))
def test_an_s5_layer_stores_any_stable_system(rule, system):
    system = square(system)
    stored = becomes(S5(system.inputs, 3, discretisation=rule), system)
    assert ((stored.poles - system.poles).abs() <= rounding(rule, system.poles)).all()
    size = system.B.abs().amax(-1, keepdim=True)
    assert ((stored.B - system.B).abs() <= 1e-12 * size).all()
    torch.testing.assert_close(stored.C, system.C.to(torch.complex128), rtol=0, atol=0)


@pytest.mark.parametrize("rule", [ZOH(), Bilinear()])
@settings(max_examples=25)
@given(system=diagonal_systems(max_order=12, max_channels=1, bank=(3,)))
def test_an_s4d_layer_stores_any_stable_bank(rule, system):
    stored = becomes(S4D(3, 4, discretisation=rule), system)
    assert ((stored.poles - system.poles).abs() <= rounding(rule, system.poles)).all()
    gains, expected = (s.B[..., 0] * s.C[..., 0, :] for s in (stored, system))
    torch.testing.assert_close(gains, expected.to(torch.complex128), rtol=1e-12, atol=0)


def rounding(rule, poles):
    """That of float64; bilinear layers lose the digits of |λ|² next to 1, and all of them below 1e-7."""
    if isinstance(rule, ZOH):
        return 1e-14
    return torch.where(poles.abs() < 1e-7, 2e-7, 1e-14 + 1e-15 / poles.abs().clamp_min(1e-7))


@pytest.mark.parametrize("poles", [[0.0], [1e-200], [-0.5], [0.5], [1 - 1e-15], [-1 + 1e-15], [1e-8j], [-0.9j]])
def test_extreme_poles_are_stored_finitely(layer, poles):
    bank = type(layer) is S4D
    system = single(poles, width=1 if bank else 3)
    system = DiagonalSystem(*(t.expand(3, *t.shape) for t in (system.poles, system.B, system.C))) if bank else system
    values = adapter_for(layer).encode(layer, system)
    assert all(value.isfinite().all() for value in values.values())
    assert ((becomes(layer, system).poles - system.poles).abs() <= 2e-7 + 1e-3 * (1 - system.poles.abs())).all()


def test_a_system_of_logarithms_keeps_the_digits_of_slow_poles(layer):
    """1 − |λ| = 1e-13 has three digits when λ is rounded, sixteen when log λ is."""
    system = adapter_for(layer).read(layer)
    logs = torch.complex(torch.full_like(system.poles.real, -1e-13), system.log_poles.imag)
    stored = becomes(layer, DiagonalSystem.from_log_poles(logs, system.B, system.C).detach())
    expected = torch.full_like(stored.decay, 2e-13)
    torch.testing.assert_close(stored.decay, expected, rtol=1e-11 if "Bilinear" not in repr(layer) else 1e-9, atol=0)


def test_the_gain_of_a_new_mode_makes_it_as_loud_as_the_others():
    torch.manual_seed(0)
    lru = LRU(2, 6).double()
    lru.gamma_log.data += 1
    adapter = adapter_for(lru)
    values = adapter.encode(lru, balanced_truncation(fold(adapter.read(lru)), 3).diagonalise().system)
    modulus = torch.exp(-torch.exp(values["nu_log"]))
    torch.testing.assert_close(torch.exp(2 * values["gamma_log"]), 1 - modulus**2)


def test_a_mode_of_an_lru_that_was_there_before_keeps_the_gain_it_has_learned():
    """Wherever it stands, and folded too."""
    torch.manual_seed(0)
    lru = LRU(2, 6).double()
    lru.gamma_log.data += torch.randn(6)
    adapter = adapter_for(lru)
    chosen = torch.tensor([4, 1, 5])
    system = adapter.read(lru).detach()
    some = DiagonalSystem(system.poles[chosen], system.B[chosen], system.C[:, chosen])
    for kept in (some, fold(some)):
        torch.testing.assert_close(adapter.encode(lru, kept)["gamma_log"], lru.gamma_log.detach()[chosen])


def test_phases_of_an_lru_stand_between_0_and_two_pi():
    values = adapter_for(LRU(1, 1)).encode(
        LRU(1, 1), single([0.9j, -0.9j, -0.9, 0.9, complex(0.9, -1e-17), complex(-0.9, -0.0)])
    )
    theta = torch.exp(values["theta_log"])
    half = math.pi / 2
    wanted = torch.tensor([half, 3 * half, math.pi, 1e-4, 2 * math.pi, math.pi], dtype=torch.float64)
    torch.testing.assert_close(theta, wanted, rtol=1e-12, atol=1e-12)


def test_folded_systems_are_stored_in_the_upper_half():
    torch.manual_seed(0)
    lru = LRU(3, 12).double()
    values = adapter_for(lru).encode(lru, fold(adapter_for(lru).read(lru)))
    assert (torch.exp(values["theta_log"]) <= math.pi).all()
    s5 = S5(3, 12)
    system = adapter_for(lru).read(lru)
    assert (adapter_for(s5).encode(s5, fold(system))["A_imag"] >= 0).all()
    assert (adapter_for(s5).encode(s5, system)["A_imag"] < 0).any()


def test_encoding_what_was_read_gives_the_parameters_back(layer):
    """What a pole leaves open is as it was: gains, steps, frequencies above the sampling rate, phases above 2π."""
    if type(layer) is LRU:
        layer.gamma_log.data += torch.randn(8)
        layer.theta_log.data[2:4] = torch.tensor([math.log(7.0), -40.0])
    else:
        layer.log_step.data += 1
    values = adapter_for(layer).encode(layer, adapter_for(layer).read(layer))
    assert values.keys() == layer.STATE_AXES.keys()
    for name, value in values.items():
        torch.testing.assert_close(value, getattr(layer, name).detach(), rtol=1e-9, atol=1e-12)


def test_modes_with_one_pole_are_told_apart_by_their_place():
    lru = LRU(2, 4).double()
    for name in ("nu_log", "theta_log"):
        getattr(lru, name).data[1:] = getattr(lru, name).data[:1]
    lru.gamma_log.data = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    values = adapter_for(lru).encode(lru, adapter_for(lru).read(lru))
    torch.testing.assert_close(values["gamma_log"], lru.gamma_log.detach())


def test_a_new_mode_of_an_s5_layer_gets_the_step_of_the_nearest_old_pole():
    torch.manual_seed(0)
    s5 = S5(3, 8).double()
    adapter = adapter_for(s5)
    old = adapter.read(s5).detach()
    chosen = torch.tensor([5, 2, 7])
    moved = old.poles[chosen] * (1 - 1e-3 * old.decay[chosen])
    conjugates = DiagonalSystem(moved.conj(), old.B[chosen], old.C[:, chosen])
    torch.testing.assert_close(adapter.encode(s5, conjugates)["log_step"], s5.log_step.detach()[chosen])


def test_steps_survive_a_cut_within_the_range_they_had():
    torch.manual_seed(0)
    s5 = S5(4, 16).double()
    adapter = adapter_for(s5)
    values = adapter.encode(s5, balanced_truncation(fold(adapter.read(s5)), 6).diagonalise().system)
    assert set(values["log_step"].tolist()) <= set(s5.log_step.tolist())
    assert values["log_step"].shape == (6,)


def test_frequencies_of_new_modes_are_the_slowest_with_the_same_samples():
    s4d = S4D(2, 8, step_min=0.4, step_max=0.6).double()
    adapter = adapter_for(s4d)
    old = adapter.read(s4d).detach()
    system = DiagonalSystem(0.99 * old.poles, old.B, old.C)
    phase = adapter.encode(s4d, system)["A_imag"] * torch.exp(s4d.log_step)[:, None]
    assert (s4d.A_imag * torch.exp(s4d.log_step)[:, None]).max() > math.pi
    assert phase.abs().max() <= math.pi
    torch.testing.assert_close(becomes(s4d, system).poles, system.poles)


@pytest.mark.parametrize("kind", ["unfolded", "folded", "logarithms"])
def test_derivatives_agree_with_finite_differences(layer, kind):
    """Entry by entry, near |λ| = 0.9 where a difference of 1e-6 is small."""
    layer = type(layer)(2, 3, **({} if type(layer) is LRU else {"discretisation": layer.discretisation})).double()
    bank = (2,) if type(layer) is S4D else ()
    width = 1 if bank else 2
    g = torch.Generator().manual_seed(0)
    phase = torch.tensor([0.7, -2.0, 3.0]) if kind != "folded" else torch.tensor([0.7, 2.0, 3.0])
    logs = torch.complex(torch.tensor([-0.1, -0.5, -2.0]), phase).to(torch.complex128).expand(*bank, 3).clone()
    B = torch.randn(*bank, 3, width, generator=g, dtype=torch.complex128)
    C = torch.randn(*bank, width, 3, generator=g, dtype=torch.complex128)
    make = DiagonalSystem.from_log_poles if kind == "logarithms" else DiagonalSystem
    poles = logs if kind == "logarithms" else torch.exp(logs)

    def encode(poles, B, C):
        values = adapter_for(layer).encode(layer, make(poles, B, C))
        return tuple(value for value in values.values() if value.requires_grad)

    inputs = tuple(tensor.requires_grad_() for tensor in (poles, B, C))
    assert torch.autograd.gradcheck(encode, inputs)


def test_reading_after_encoding_has_the_identity_as_derivative(layer):
    """What an optimizer's moments rely on: system → parameters → system loses nothing to first order."""
    adapter = adapter_for(layer)
    start = adapter.read(layer).detach()
    names = list(layer.STATE_AXES)

    def round_trip(poles):
        values = adapter.encode(layer, DiagonalSystem(poles, start.B, start.C))
        return torch.func.functional_call(Reading(layer), {f"layer.{name}": values[name] for name in names}, ())

    inputs = torch.randn_like(start.poles)
    _, moved = torch.autograd.functional.jvp(round_trip, start.poles, inputs)
    torch.testing.assert_close(moved, inputs, rtol=1e-7, atol=1e-9)


class Reading(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self):
        return adapter_for(self.layer).read(self.layer).poles


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_parameter_that_is_not_finite_is_named(layer, bad):
    name = list(layer.STATE_AXES)[1]
    getattr(layer, name).data.view(-1)[2] = bad
    with pytest.raises(NonFiniteError, match=rf"{type(layer).__name__}\.{name}\[.*\] is {bad}"):
        adapter_for(layer).read(layer)


def test_a_layer_whose_poles_reached_the_circle_is_refused():
    lru = LRU(2, 4)
    lru.nu_log.data[1] = -1000
    with pytest.raises(UnstableSystemError, match="largest pole modulus is 1, "):
        adapter_for(lru).read(lru)


@pytest.mark.parametrize(
    ("scale", "error", "said"),
    [(1.25, UnstableSystemError, r"1\.25"), (1.0, UnstableSystemError, "is 1,"), (math.nan, NonFiniteError, "poles")],
)
def test_systems_that_cannot_be_stored_are_refused(layer, scale, error, said):
    system = adapter_for(layer).read(layer).detach()
    broken = DiagonalSystem._unchecked(
        scale * torch.polar(torch.ones_like(system.decay), system.decay), None, system.B, system.C
    )
    with pytest.raises(error, match=said):
        adapter_for(layer).encode(layer, broken)


def test_systems_of_other_sizes_are_refused(layer):
    other = adapter_for(layer).read(type(layer)(4, 8))
    with pytest.raises(ShapeError, match=r"4.*3"):
        adapter_for(layer).encode(layer, other)


class Forwards(Discretisation):
    def __call__(self, a, step):
        return step * a, torch.stack([step, torch.zeros_like(step)])


def test_a_rule_of_ones_own_needs_its_inverse():
    s5 = S5(2, 4, discretisation=Forwards())
    system = adapter_for(s5).read(s5)
    with pytest.raises(AdapterError, match=r"Forwards.*continuous_poles\.register"):
        adapter_for(s5).encode(s5, system)

    @continuous_poles.register(Forwards)
    def inverse(rule, system, step):
        return continuous_poles(ZOH(), system, step)

    torch.testing.assert_close(becomes(s5, system.detach()).B, system.B.detach())
