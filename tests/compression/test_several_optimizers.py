"""Several optimizers train one model, Muon for matrices and AdamW for the rest: cuts, rollbacks and errors."""

import copy
import math

import pytest
import torch
from torch import nn

from compressm.adapters import write
from compressm.compression import CompressionError, Compressor, KeepFraction, Rollback, TargetOrder, compress_
from compressm.compression.optimizer import Transport, carried_states
from compressm.compression.several import as_optimizer
from compressm.compression.surgery import apply_cuts, prepare_cut
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba
from compressm.models import SequenceClassifier
from tests.compression.test_moments import lru_formulas
from tests.compression.test_rollback import same
from tests.compression.trained import LAYERS, change_of, gradients_of, loss_of, make_layer

optim = torch.optim
X, Y = torch.randn(8, 20, 3, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 5


def make(kind=LRU, order=12):
    torch.manual_seed(0)
    return SequenceClassifier(kind, depth=2, width=4, order=order, inputs=3, classes=5)


def both(model, lr=1e-2):
    """Muon for matrices in two groups, AdamW for everything else in two groups."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices[:3], "lr": lr / 2}, {"params": matrices[3:]}]
    return [optim.Muon(groups, lr=lr), optim.AdamW([{"params": rest[:2]}, {"params": rest[2:], "lr": lr / 2}], lr=lr)]


def step(model, optimizers):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(X), Y)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def options_for(kind):
    return {"calibrate": lambda model: model(X)} if kind is Mamba else {}


@pytest.mark.parametrize("kind", [LRU, S5, S4, S4D, LinOSS, Mamba])
def test_muon_and_adamw_train_on_through_cuts(kind):
    model = make(kind)
    optimizers = both(model)
    compressor = Compressor(model, optimizers, when=[10, 15], keep=KeepFraction(0.5), **options_for(kind))
    losses = [step(model, optimizers)]
    groups = [[list(map(id, g["params"])) for g in o.param_groups] for o in optimizers]
    states = {p: id(o.state[p]) for o in optimizers for p in o.state}
    for number in range(1, 30):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        losses.append(step(model, optimizers))
        still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
        # p of an S4 layer is 0 after a cut, and stays there.
        assert {name.rpartition(".")[2] for name in still} <= ({"p_re", "p_im"} if number > 10 else set())
        compressor.step(number)
    assert [block.ssm.order for block in model.blocks] == [3, 3]
    assert [[list(map(id, g["params"])) for g in o.param_groups] for o in optimizers] == groups
    assert {p: id(o.state[p]) for o in optimizers for p in o.state} == states
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            assert all(value.shape in (parameter.shape, ()) for value in state.values())
    assert losses[-1] < losses[15] < losses[0]
    assert sum(p.ndim == 2 for p in model.parameters()) == len(optimizers[0].state)


def muon_for(layer, momentum=0.95):
    return optim.Muon([p for p in layer.parameters() if p.ndim == 2], lr=0.0, momentum=momentum)


def rest_for(layer, make=optim.AdamW, **options):
    return make([p for p in layer.parameters() if p.ndim != 2], lr=0.0, **options)


def train(layer, optimizers, steps=1):
    """Steps of length 0: gradients stay the same."""
    for k in range(steps):
        layer.zero_grad()
        loss_of(layer, seed=1 + k % 2).backward()
        for optimizer in optimizers:
            optimizer.step()


def cut(layer, optimizers, order):
    optimizer = as_optimizer(optimizers)
    apply_cuts([prepare_cut("layer", change_of(layer, order), optimizer, Transport())], optimizer)


@pytest.mark.parametrize("name", sorted(set(LAYERS) - {"somebody's"}))
def test_the_momentum_of_a_matrix_becomes_the_gradient_of_the_changed_layer(name):
    """With all states kept the function is the same, in other coordinates: autograd is the oracle."""
    layer = make_layer(name)
    optimizers = [muon_for(layer), rest_for(layer)]
    train(layer, optimizers)
    cut(layer, optimizers, 8)
    expected = gradients_of(layer)
    matrices = [key for key, p in layer.named_parameters() if p.ndim == 2]
    assert {key for key in matrices if key.startswith("C")} > set()
    for key in matrices:
        momentum = optimizers[0].state[layer.get_parameter(key)]["momentum_buffer"]
        torch.testing.assert_close(momentum, 0.05 * expected[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("order", [5, 2])
def test_the_momentum_of_a_cut_lru_follows_the_closed_formulas(order):
    layer = make_layer("LRU")
    optimizers = [muon_for(layer), rest_for(layer)]
    train(layer, optimizers)
    change = change_of(layer, order)
    gradients = {name: value for name, value in gradients_of(layer).items() if name in change.values}
    expected = lru_formulas(layer, change, gradients)
    cut(layer, optimizers, order)
    for name in ("B_re", "B_im", "C_re", "C_im"):
        momentum = optimizers[0].state[layer.get_parameter(name)]["momentum_buffer"]
        torch.testing.assert_close(momentum, 0.05 * torch.from_numpy(expected[name]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["LRU", "S5", "S5 bilinear", "S4D"])
@pytest.mark.parametrize("order", [8, 4])
def test_two_optimizers_carry_means_of_gradients_as_one_does(name, order):
    """γ of the LRU takes its gradient from B, S5's poles act on B: the optimizers' means are carried together."""
    layer = make_layer(name)
    twin = copy.deepcopy(layer)
    two = [muon_for(layer), rest_for(layer, betas=(0.95, 0.999))]
    one = [optim.AdamW(twin.parameters(), lr=0.0, betas=(0.95, 0.999))]
    for module, optimizers in ((layer, two), (twin, one)):
        train(module, optimizers, steps=5)
        cut(module, optimizers, order)
    for key, parameter in layer.named_parameters():
        state, expected = as_optimizer(two).state[parameter], one[0].state[twin.get_parameter(key)]
        mean = state["momentum_buffer"] if parameter.ndim == 2 else state["exp_avg"]
        torch.testing.assert_close(mean, expected["exp_avg"], rtol=1e-9, atol=1e-12)
        if parameter.ndim != 2:
            # γ and log_step get the mean of their old squares; a factor of 20 is one of 4.5 in a step.
            assert 1 / 20 < (state["exp_avg_sq"].mean() / expected["exp_avg_sq"].mean()).item() < 20
            assert (state["exp_avg_sq"] > 0).all()


def test_sums_and_means_of_gradients_are_carried_in_their_own_units():
    """SGD with momentum 0.8 keeps five mean gradients, Muon one; γ's five come from B's one."""
    layer = make_layer("LRU")
    optimizers = [muon_for(layer, momentum=0.8), rest_for(layer, optim.SGD, momentum=0.8)]
    for _ in range(80):
        train(layer, optimizers)
    cut(layer, optimizers, 8)
    expected = gradients_of(layer)
    for name, parameter in layer.named_parameters():
        momentum = as_optimizer(optimizers).state[parameter]["momentum_buffer"]
        unit = 1 if parameter.ndim == 2 else 5
        torch.testing.assert_close(momentum, unit * expected[name], rtol=1e-5, atol=1e-9)


def test_one_key_may_have_two_meanings():
    """RMSprop's momentum_buffer holds updates, Muon's gradients: each is carried as if the other were not there."""
    found = []
    for beside in (
        lambda layer: muon_for(layer),
        lambda layer: optim.Adam([p for p in layer.parameters() if p.ndim == 2]),
    ):
        layer = make_layer("LRU")
        rest = rest_for(layer, optim.RMSprop, momentum=0.9)
        optimizers = [beside(layer), rest]
        layer.zero_grad()
        loss_of(layer).backward()
        rest.step()
        optimizers[0].step() if isinstance(optimizers[0], optim.Muon) else None
        cut(layer, optimizers, 4)
        found.append(
            {key: value for key, p in layer.named_parameters() for key, value in [(key, rest.state.get(p))] if value}
        )
    assert found[0].keys() == found[1].keys() == {"nu_log", "theta_log", "gamma_log", "D"}
    assert same(found[0], found[1])


def test_frozen_matrices_leave_gamma_a_second_moment():
    """Without squares of B γ's became 0, and its next steps were 3.2 times too long."""
    layer = make_layer("LRU")
    for key in ("B_re", "B_im"):
        layer.get_parameter(key).requires_grad_(False)
    optimizer = optim.Adam([p for p in layer.parameters() if p.requires_grad])
    train(layer, [optimizer], steps=3)
    mean = optimizer.state[layer.gamma_log]["exp_avg_sq"].mean()
    cut(layer, [optimizer], 4)
    torch.testing.assert_close(optimizer.state[layer.gamma_log]["exp_avg_sq"], mean.expand(4))


def wrong_lists(model):
    adam = optim.Adam(model.parameters())
    muon, adamw = both(model)
    return {
        "none": ([], r"optimizer is \[\], expected one optimizer, a list of at least one, or None"),
        "None in it": ([adam, None], r"optimizer\[1\] is None, expected one of torch.optim \(with param_groups"),
        "a list in it": ([[muon], adamw], r"optimizer\[0\] is a list, expected one of torch.optim"),
        "twice": ([adam, adam], r"optimizer\[1\] is the same Adam as one before it"),
        "a class": (optim.Adam, "optimizer is the class Adam, expected"),
        "a dictionary": ({"adam": adam}, "optimizer is a dict, expected one of torch.optim"),
        "a generator": ((o for o in (muon, adamw)), "optimizer is a generator, expected"),
        "two that share": (
            [muon, optim.AdamW(p for n, p in model.named_parameters() if p.ndim != 2 or n.endswith("0.ssm.C_re"))],
            r"blocks.0.ssm.C_re is in group 1 of optimizer\[0\], Muon, and in group 0 of optimizer\[1\], AdamW.*one gr",
        ),
        "two that share what is not cut": (
            [muon, optim.AdamW([*(p for p in model.parameters() if p.ndim != 2), model.head.weight])],
            r"head.weight is in group 1 of optimizer\[0\], Muon, and in group 0 of optimizer\[1\], AdamW",
        ),
        "one of two": (muon, r"the optimizer does not hold blocks.0.ssm.nu_log, .*optimizer=\[first, second\].*freeze"),
        "two of three": (
            [muon, optim.AdamW(model.encoder.linear.bias for _ in range(1))],
            r"none of Muon and AdamW holds blocks.0.ssm.nu_log.*pass every optimizer",
        ),
        "only D is missing": (
            [muon, optim.AdamW(p for n, p in model.named_parameters() if p.ndim != 2 and not n.endswith("0.ssm.D"))],
            r"none of Muon and AdamW holds blocks.0.ssm.D: pass",
        ),
    }


@pytest.mark.parametrize("case", wrong_lists(make()))
def test_wrong_optimizers_are_refused_by_name_when_the_compressor_is_made(case):
    model = make()
    given, said = wrong_lists(model)[case]
    with pytest.raises(CompressionError, match=said) as caught:
        Compressor(model, given, when=[1], keep=TargetOrder(4))
    assert "optimizer=None" not in str(caught.value)


def test_one_optimizer_in_a_list_is_that_optimizer():
    adam = optim.Adam(make().parameters())
    assert as_optimizer([adam]) is as_optimizer((adam,)) is as_optimizer(adam) is adam
    assert as_optimizer(None) is None
    several = as_optimizer([adam, optim.Adam(make().parameters())])
    assert as_optimizer(several).parts == several.parts


def test_an_optimizer_that_trains_no_ssm_layer_may_be_of_any_kind():
    """Only the state of what is cut must follow."""
    model = make()
    inside = {id(p) for block in model.blocks for p in block.ssm.parameters()}
    optimizers = [
        optim.AdamW(p for p in model.parameters() if id(p) in inside),
        optim.Adafactor(p for p in model.parameters() if id(p) not in inside),
    ]
    step(model, optimizers)
    compress_(model, keep=TargetOrder(4), optimizer=optimizers)
    assert math.isfinite(step(model, optimizers))
    with pytest.raises(CompressionError, match="Adafactor mixes"):
        compress_(model, keep=TargetOrder(2), optimizer=[both(model)[0], optim.Adafactor(both(model)[1].param_groups)])


@pytest.mark.parametrize("kind", [LRU, Mamba])
def test_a_rollback_restores_all_optimizers_and_schedulers_bit_for_bit(kind, tmp_path):
    model = make(kind)
    optimizers = both(model)
    schedulers = [optim.lr_scheduler.StepLR(o, k + 1, 0.9) for k, o in enumerate(optimizers)]
    values = iter([1.0, 0.0])
    guard = Rollback(lambda: next(values), settle=2, folder=tmp_path)
    compressor = Compressor(
        model, optimizers, when=[3], keep=TargetOrder(4), guard=guard, scheduler=schedulers, **options_for(kind)
    )

    def picture():
        return copy.deepcopy([part.state_dict() for part in (model, *optimizers, *schedulers)])

    for number in range(1, 6):
        step(model, optimizers)
        for scheduler in schedulers:
            scheduler.step()
        if number == 3:
            before = picture()
        events = compressor.step(number)
        if number == 3:
            assert not same(picture(), before)
            assert model.blocks[0].ssm.order == 4
    assert "fell" in str(events[0])
    assert same(picture(), before)
    assert math.isfinite(step(model, optimizers))


def test_nothing_is_written_to_any_optimizer_if_a_cut_fails(monkeypatch):
    model = make()
    optimizers = both(model)
    step(model, optimizers)
    optimizers[1].state[model.blocks[1].ssm.nu_log]["exp_avg"][0] = math.nan
    before = copy.deepcopy([part.state_dict() for part in (model, *optimizers)])
    with pytest.raises(CompressionError, match=r"'exp_avg' of blocks\.1\.ssm\.nu_log holds 1 entries"):
        compress_(model, keep=TargetOrder(4), optimizer=optimizers)
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    after = [part.state_dict() for part in optimizers]
    assert [{k: list(s) for k, s in state["state"].items()} for state in after] == [
        {k: list(s) for k, s in state["state"].items()} for state in before[1:]
    ]


def test_states_of_several_are_a_mapping_over_their_own():
    layer = make_layer("LRU", torch.float32)
    muon, adam = muon_for(layer), rest_for(layer)
    several = as_optimizer([muon, adam])
    assert len(several.state) == 0
    assert several.state.get(layer.B_re) is None
    several.state[layer.B_re] = {"momentum_buffer": torch.zeros(8, 3)}
    several.state[layer.nu_log] = {"step": 1}
    assert set(several.state) == {layer.B_re, layer.nu_log}
    assert layer.B_re in muon.state
    assert adam.state.pop(layer.nu_log) == {"step": 1}
    assert several.state.pop(layer.B_re).keys() == {"momentum_buffer"}
    assert not muon.state
    assert several.param_groups[0] is muon.param_groups[0]
    assert carried_states(change_of(layer, 4), several, Transport()) == {}
    with pytest.raises(KeyError):
        several.state[layer.B_re]


def test_write_is_left_to_surgery():
    """A layer whose values are written without its optimizers is refused at the next cut, with both shapes."""
    layer = make_layer("LRU", torch.float32)
    optimizers = [muon_for(layer), rest_for(layer)]
    train(layer, optimizers)
    write(layer, change_of(layer, 6).values)
    with pytest.raises(CompressionError, match=r"'exp_avg' of layer\.nu_log has shape \(8,\), the parameter \(6,\)"):
        cut(layer, optimizers, 4)


def test_a_cut_of_a_layer_that_two_models_share_tells_of_the_other_optimizer():
    shared = LRU(4, order=8)
    models = [nn.Sequential(shared, nn.Linear(4, 2)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    both = [
        Compressor(model, optimizer, when=[1], keep=KeepFraction(0.5))
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    with pytest.warns(UserWarning, match="holds this model, and that optimizer was not passed"):
        both[0].step(1)
    assert shared.order == 4
