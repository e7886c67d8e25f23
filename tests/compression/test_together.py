"""Layers of equal shapes go through a cut together: their values and moments are those of cuts one by one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compressm.adapters import adapter_for
from compressm.adapters.base import encode_with, read_with, stacked_parameters, stacking_key
from compressm.compression.compressor import compress_
from compressm.compression.optimizer import Moments, Restart, Slice, Transport
from compressm.compression.planning import Options, changes_of, found_layers, plan_cuts, spectra
from compressm.compression.policies import TargetOrder
from compressm.compression.surgery import prepare_cut, prepare_cuts
from compressm.control import DiagonalSystem
from compressm.families.linear import simulation
from compressm.families.linear.transport import ModuleChange
from compressm.layers import LRU, S4, S4D, S5, Bilinear, LinOSS
from compressm.models import SequenceClassifier

OPTIMIZERS = {
    "AdamW, amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "RMSprop, centred": lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.9),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
}


def trained(kind, optimizer=torch.optim.AdamW, depth=3, steps=3, frozen=(), **options):
    torch.manual_seed(0)
    model = SequenceClassifier(kind, depth=depth, width=3, order=8, inputs=2, classes=4, layer_options=options)
    for block in model.blocks:
        for name in frozen:
            getattr(block.ssm, name).requires_grad_(False)
    trainer = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    for step in range(steps):
        x = torch.randn(4, 20, 2, generator=torch.Generator().manual_seed(step))
        trainer.zero_grad()
        model(x).logsumexp(-1).sum().backward()
        trainer.step()
    return model, trainer


def changes(model, orders=(4, 4, 4)):
    chosen = Options(keep=lambda spectra: dict(zip(spectra, orders, strict=True)), gate=1.0)
    with torch.no_grad():
        return changes_of(plan_cuts(found_layers(model, chosen), chosen))


def check_equal(together, apart):
    for one, other in zip(together, apart, strict=True):
        assert one.module is other.module
        for name, value in other.values.items():
            torch.testing.assert_close(one.values[name], value, rtol=1e-12, atol=1e-12, msg=name)
        assert one.states.keys() == other.states.keys()
        for name, state in other.states.items():
            for key, value in state.items():
                torch.testing.assert_close(one.states[name][key], value, rtol=1e-5, atol=1e-12, msg=f"{name} {key}")
                assert one.states[name][key].untyped_storage().nbytes() == value.untyped_storage().nbytes()


@pytest.mark.parametrize("orders", [(4, 4, 4), (5, 1, 3)], ids=str)
@pytest.mark.parametrize("moments", [Transport(), Restart(), Slice()], ids=repr)
@pytest.mark.parametrize("kind", [LRU, S5, S4, S4D, LinOSS])
def test_moments_are_those_of_single_cuts(kind, moments, orders):
    model, optimizer = trained(kind)
    found = changes(model, orders)
    apart = [prepare_cut(name, change, optimizer, moments) for name, change in found.items()]
    check_equal(prepare_cuts(found, optimizer, moments), apart)


@pytest.mark.parametrize("orders", [(4, 4, 4), (5, 1, 3)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_of_every_role_are_those_of_single_cuts(optimizer, orders):
    model, trainer = trained(LRU, OPTIMIZERS[optimizer])
    found = changes(model, orders)
    apart = [prepare_cut(name, change, trainer, Transport()) for name, change in found.items()]
    check_equal(prepare_cuts(found, trainer, Transport()), apart)


@pytest.mark.parametrize("frozen", [("B_re", "B_im"), ("gamma_log",), ("nu_log", "theta_log")])
def test_frozen_parameters_make_no_difference(frozen):
    model, trainer = trained(LRU, frozen=frozen)
    found = changes(model)
    apart = [prepare_cut(name, change, trainer, Transport()) for name, change in found.items()]
    check_equal(prepare_cuts(found, trainer, Transport()), apart)


def test_layers_with_other_orders_rules_or_states_go_their_own_way(monkeypatch):
    stacked, together = [], ModuleChange.together.__func__

    def counted(cls, members):
        stacked.append(len(members))
        return together(cls, members)

    monkeypatch.setattr(ModuleChange, "together", classmethod(counted))
    model, optimizer = trained(S5, depth=4)
    model.blocks[3].ssm.discretisation = Bilinear()
    for parameter in model.blocks[2].ssm.parameters():
        optimizer.state.pop(parameter)
    ranks = dict(zip([f"blocks.{k}.ssm" for k in range(4)], (4, 4, 4, 4), strict=True))
    compress_(model, optimizer=optimizer, keep=lambda spectra: ranks)
    assert stacked == [2]
    compress_(model, optimizer=optimizer, keep=lambda spectra: dict(zip(spectra, (3, 2, 3, 2), strict=True)))
    assert stacked == [2, 2]


def test_a_rule_that_takes_one_module_at_a_time_gets_one():
    shapes = []

    class Halved(Moments):
        def carry(self, change, entries):
            shapes.append(change.values["nu_log"].shape)
            return {
                key: {name: change.first(name, value) / 2 for name, value in entry.values.items()}
                for key, entry in entries.items()
            }

    model, optimizer = trained(LRU)
    compress_(model, optimizer=optimizer, keep=TargetOrder(4), moments=Halved())
    assert shapes == [(4,)] * 3


@pytest.mark.parametrize(
    ("kind", "options"), [(LRU, {}), (S5, {}), (S5, {"discretisation": Bilinear()}), (S4D, {})], ids=str
)
def test_stacked_modules_are_read_and_encoded_like_each_alone(kind, options):
    model, _ = trained(kind, **options)
    modules = [block.ssm for block in model.blocks]
    adapter = adapter_for(modules[0])
    assert len({stacking_key(module, adapter) for module in modules}) == 1
    present = stacked_parameters(modules)
    stacked, alone = read_with(adapter, modules[0], present), [adapter.read(module) for module in modules]
    expected = DiagonalSystem.stack(alone)
    for part in ("poles", "log_poles", "B", "C", "decay"):
        torch.testing.assert_close(getattr(stacked, part), getattr(expected, part), rtol=1e-14, atol=1e-300, msg=part)
    for cut in (slice(None), slice(0, 5)):
        smaller = [DiagonalSystem(one.poles[..., cut], one.B[..., cut, :], one.C[..., cut]) for one in alone]
        values = encode_with(adapter, modules[0], present, DiagonalSystem.stack(smaller))
        for k, (module, system) in enumerate(zip(modules, smaller, strict=True)):
            for name, value in adapter.encode(module, system).items():
                torch.testing.assert_close(values[name][k], value, rtol=1e-14, atol=0, msg=name)


@pytest.mark.parametrize("kind", [LRU, S4D])
def test_the_spectra_that_a_cut_is_planned_by_are_those_that_are_inspected(kind):
    model, _ = trained(kind)
    options = Options(keep=TargetOrder(4))
    layers = found_layers(model, options)
    inspected, planned = spectra(layers, options), spectra(layers, options, cutting=True)
    assert inspected.keys() == planned.keys()
    for name, sigma in inspected.items():
        torch.testing.assert_close(planned[name], sigma, rtol=0, atol=1e-13 * float(sigma.max()))


@pytest.mark.parametrize("ranks", [(4, 4, 4), (5, 4, 5), (5, 4, 3)], ids=str)
@pytest.mark.parametrize("kind", [LRU, S4D])
def test_gramians_of_the_spectra_serve_any_choice_of_orders(kind, ranks, monkeypatch):
    from compressm.families.linear import family

    def cut():
        model, optimizer = trained(kind)
        events = compress_(model, optimizer=optimizer, keep=lambda spectra: dict(zip(spectra, ranks, strict=True)))
        return model.state_dict(), [(event.rank, event.error_bound) for event in events]

    (kept, events), pairs = cut(), []
    monkeypatch.setattr(family, "_known_pair", lambda group, choices: pairs.append(1) or family._pair(group, choices))
    anew, same = cut()
    assert pairs
    assert events == [(rank, pytest.approx(bound, rel=1e-9)) for rank, bound in same]
    for name, value in kept.items():
        torch.testing.assert_close(value, anew[name], rtol=1e-4, atol=1e-6, msg=name)


# Operations on complex numbers that PyTorch compiles on a GPU at their first use, each for some tenths of a second.
COMPILED = {"abs", "addcdiv", "addcmul", "angle", "exp", "expm1", "lerp", "log", "log1p", "neg", "pow", "prod"}
COMPILED |= {"reciprocal", "rsqrt", "sgn", "sigmoid", "sin", "cos", "tan", "tanh", "sqrt"}


class Compiled(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.removesuffix("_")
        if name in COMPILED and any(isinstance(value, torch.Tensor) and value.is_complex() for value in args):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("data", [False, True], ids=["white noise", "measured"])
def test_nothing_in_a_cut_of_an_lru_waits_for_a_compiler_on_a_gpu(data, monkeypatch):
    monkeypatch.setattr(simulation, "lti_layer", lambda u, *system, **options: (u, None))
    model, optimizer = trained(LRU)
    layers = found_layers(model, options := Options(keep=TargetOrder(4), gate=1.0, calibrate=print if data else None))
    with Compiled() as seen, torch.no_grad():
        if data:
            layers = {name: layer.observing_noise(options.choices) for name, layer in layers.items()}
            for layer in layers.values():
                simulation.outputs_by_products(layer.system, torch.randn(2, 30, 3, dtype=torch.float64))
        prepare_cuts(changes_of(plan_cuts(layers, options)), optimizer, Transport())
    assert seen.found == set()
