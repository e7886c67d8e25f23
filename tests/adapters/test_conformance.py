"""`check_adapter` over every adapter of ours, and over wrong ones."""

import re
from pathlib import Path

import pytest
import torch

from compressm.adapters import ConformanceError, LRUAdapter, S5Adapter, SSMAdapter, check_adapter
from compressm.adapters.promises import Finding
from compressm.control import DiagonalSystem
from compressm.layers import LRU, S4, S4D, S5, Bilinear, DampedIMEX, Inv, Legs, LinOSS
from tests.marks import every_other, later

PAGE = Path(__file__).parents[2] / "docs" / "adding_an_adapter.md"

MODULES = {
    "LRU": lambda: LRU(6, 16),
    "LRU with one channel": lambda: LRU(1, 32),
    "fast LRU": lambda: LRU(3, 9, r_min=0.0, r_max=0.5),
    "slow LRU": lambda: LRU(4, 20, r_min=0.999, r_max=0.99999, max_phase=0.1),
    "smallest LRU": lambda: LRU(2, 4),
    "S5": lambda: S5(6, 16),
    "S5, bilinear": lambda: S5(3, 15, discretisation=Bilinear()),
    "S5 with long steps": lambda: S5(2, 12, step_max=2.0),
    "S4D": lambda: S4D(5, 12),
    "S4D, bilinear": lambda: S4D(5, 12, discretisation=Bilinear()),
    "S4D-LegS": lambda: S4D(3, 24, initialisation=Legs()),
    "S4D-Inv": lambda: S4D(3, 8, initialisation=Inv()),
    "LinOSS": lambda: LinOSS(4, 12),
    "LinOSS with short steps": lambda: LinOSS(3, 9, step_min=1e-2, step_max=0.1),
    "LinOSS with one channel": lambda: LinOSS(1, 16),
    "LinOSS, damped": lambda: LinOSS(4, 12, scheme=DampedIMEX()),
    "LinOSS, damped, with short steps": lambda: LinOSS(3, 8, scheme=DampedIMEX(), step_min=1e-3, step_max=0.1),
    "S4": lambda: S4(4, 12),
    "S4 with long steps": lambda: S4(2, 16, step_max=1.0),
    "LRU in double precision": lambda: LRU(3, 8).double(),
}


NOW = ("LRU", "slow LRU", "smallest LRU", "S5, bilinear", "S4", "S4D", "LinOSS", "LinOSS, damped")


@pytest.mark.parametrize("name", later(MODULES, *NOW))
def test_our_adapters_keep_their_promises(name):
    findings = check_adapter(MODULES[name])
    assert all(finding.holds for finding in findings)
    assert len({finding.promise for finding in findings}) >= 20


@pytest.mark.parametrize("name", later(["LRU", "S5", "S4", "S4D", "LinOSS", "LinOSS, damped"], "S5"))
def test_single_precision_is_enough_for_a_looser_tolerance(name):
    assert check_adapter(MODULES[name], dtype=torch.float32, tolerance=1e-3)


class WithoutGamma(SSMAdapter):
    def read(self, module):
        system = LRUAdapter().read(module)
        return DiagonalSystem.from_log_poles(
            system.log_poles, system.B / torch.exp(module.gamma_log.double())[:, None], system.C
        )

    def encode(self, module, system):
        return LRUAdapter().encode(module, system)


class Of(SSMAdapter):
    """The right adapter with what it gives changed."""

    def __init__(self, inner, reading=lambda module, system: system, encoding=lambda module, values: values):
        self.inner, self.reading, self.encoding = inner, reading, encoding

    def read(self, module):
        return self.reading(module, self.inner.read(module))

    def encode(self, module, system):
        return self.encoding(module, self.inner.encode(module, system))


def conjugated(module, system):
    return DiagonalSystem(system.poles, system.B, system.C.conj())


def halved(module, system):
    return DiagonalSystem(system.poles, system.B, system.C / 2)


def delayed(module, system):
    """The convention h[k+1] = λ h[k] + B u[k]."""
    return DiagonalSystem(system.poles, system.B / system.poles[:, None], system.C)


def without_poles_gradient(module, system):
    return DiagonalSystem(system.poles.detach(), system.B, system.C)


def louder(module, values):
    return {**values, "C_re": 1.01 * values["C_re"]}


def rounded(module, values):
    return {name: value.float() for name, value in values.items()}


def mutating(module, values):
    module.D.data += 1
    return values


def resting(module, values):
    return {**values, "C_im": values["C_im"].detach()}


def incomplete(module, values):
    return {name: value for name, value in values.items() if name != "B_im"}


def endless(module, values):
    return {**values, "gamma_log": torch.full_like(values["gamma_log"], torch.inf)}


WRONG = {
    "no gain": (WithoutGamma(), "impulse response"),
    "a conjugate too many": (Of(LRUAdapter(), conjugated), "impulse response"),
    "a conjugate pair counted once": (Of(S5Adapter(), halved), "is read gives the module's output"),
    "another convention of time": (Of(LRUAdapter(), delayed), "impulse response"),
    "a detached pole": (Of(LRUAdapter(), without_poles_gradient), "derivatives of read equal"),
    "an output 1 % too loud": (Of(LRUAdapter(), encoding=louder), r"encode\(read\) keeps the output: 0\.00"),
    "values in single precision": (Of(LRUAdapter(), encoding=rounded), "encode gives float64: 7"),
    "a module changed by encode": (Of(LRUAdapter(), encoding=mutating), r"encode leaves the module alone: 1.*\(D\)"),
    "a detached value": (Of(LRUAdapter(), encoding=resting), "derivatives of encode of an unfolded system"),
    "a forgotten parameter": (Of(LRUAdapter(), encoding=incomplete), "orders would disagree"),
    "a value that is not finite": (Of(LRUAdapter(), encoding=endless), "gamma_log.* is inf"),
}


@pytest.mark.parametrize("mistake", every_other(WRONG))
def test_a_wrong_adapter_is_found_out(mistake):
    adapter, promise = WRONG[mistake]
    kind = S5 if isinstance(getattr(adapter, "inner", None), S5Adapter) else LRU
    with pytest.raises(ConformanceError, match=promise):
        check_adapter(lambda: kind(3, 6), adapter=adapter, length=30)


def test_a_module_that_forgets_a_weight_is_found_out():
    class Still(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lru, self.idle = LRU(3, 6), torch.nn.Parameter(torch.ones(1))

        def forward(self, u):
            return self.lru(u)[0] + 0 * self.idle

    class Inner(SSMAdapter):
        def read(self, module):
            return LRUAdapter().read(module.lru)

        def encode(self, module, system):
            return {f"lru.{name}": value for name, value in LRUAdapter().encode(module.lru, system).items()}

    with pytest.raises(ConformanceError, match=r"a training step moves every weight: 1.*\(idle\)"):
        check_adapter(Still, adapter=Inner(), length=20)


def test_how_a_module_is_run_and_streamed_can_be_said():
    calls = []

    def run(module, u):
        calls.append("run")
        return module(u)[0]

    def stream(module, u):
        calls.append("stream")
        return module(u)[0] + 1

    with pytest.raises(ConformanceError, match="steps equal the sequence"):
        check_adapter(lambda: LRU(2, 4), run=run, stream=stream, length=10)
    assert set(calls) == {"run", "stream"}


def test_the_seed_makes_a_check_repeatable_and_leaves_the_generator_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second = (check_adapter(lambda: LRU(2, 4), length=10, seed=5) for _ in range(2))
    assert [finding.measured for finding in first[:9]] == [finding.measured for finding in second[:9]]
    assert torch.equal(before, torch.get_rng_state())


def test_a_module_that_is_always_the_same_object_is_not_changed():
    layer = LRU(2, 6)
    check_adapter(lambda: layer, length=10)
    assert layer.order == 6


def test_a_finding_says_what_was_measured_and_allowed():
    assert str(Finding("steps equal", 0.25, 1e-8)) == "steps equal: 0.25, allowed 1e-08"
    assert not Finding("steps equal", float("nan"), 1.0).holds


def test_the_adapter_on_the_page_has_fewer_than_40_lines():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "@adapts(" in block)
    assert block.count("\n") < 40
