"""Cuts of a layer with a matrix state and linear keys and queries, from outside the package: every form that folds."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import logsigmoid

import compressm as cs
from compressm.adapters import Basis, MemoryAdapter, adapts
from compressm.adapters.memory import Memory, Rows, Steps
from compressm.compression.planning import Options, read_layers
from compressm.families.memory.simulation import outputs

WIDTH, ORDER, HEADS = 6, 8, 2


class Decaying(nn.Module):
    """Simple gated linear attention: HEADS heads share keys and queries; no convolution, no activation."""

    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.Linear(WIDTH, ORDER) for _ in "qk")
        self.v, self.gate = nn.Linear(WIDTH, HEADS * 3), nn.Linear(WIDTH, HEADS)

    def forward(self, x):  # step by step
        S, found = 0, []
        for t in range(x.shape[1]):
            q, k, v = self.q(x[:, t]), self.k(x[:, t]), self.v(x[:, t]).unflatten(-1, (HEADS, -1))
            S = torch.sigmoid(self.gate(x[:, t]))[..., None, None] * S + k[:, None, :, None] * v[:, :, None, :]
            found.append(torch.einsum("bn,bhnp->bhp", q, S).flatten(1))
        return torch.stack(found, dim=1)


@adapts(Decaying)
class DecayingAdapter(MemoryAdapter):
    STORES = frozenset({Basis.ANY, Basis.SELECTED})

    def rows(self, module):
        every = torch.arange(len(module.k.weight))[None]
        of = {"q": Rows(None, every), "k": Rows(every, None)}
        return {f"{part}.{leaf}": rows for part, rows in of.items() for leaf in ("weight", "bias")}

    def attributes(self, module, order):
        return {"q.out_features": order, "k.out_features": order}

    def observed(self, module, args, kwargs):
        return args[0], None

    def steps(self, module, x, memory, counted=None):
        def rows(of, part):
            return x @ of[f"{part}.weight"].to(x)[0].mT + of[f"{part}.bias"].to(x)[0]

        values = module.v(x.to(module.v.weight)).to(x).unflatten(-1, (HEADS, -1)).permute(0, 2, 1, 3)
        logs = logsigmoid(module.gate(x.to(module.v.weight))).to(x).mT
        return Steps(
            rows(memory.queries, "q")[:, None], rows(memory.keys, "k")[:, None], values[:, None], logs[:, None]
        )


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Decaying()).double()


def data(seed=0, count=30):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 20, WIDTH, generator=generator, dtype=torch.float64)


def runs(model):
    return model(data())


def layer_of(model, **options):
    return read_layers(model, Options(cs.TargetOrder(3), runs, **options))["0"]


def test_steps_and_a_scan_are_the_modules_own_output():
    model = make()
    adapter = DecayingAdapter()
    own = outputs(adapter.steps(model[0], data(), adapter.read(model[0])))
    torch.testing.assert_close(own[:, 0].permute(0, 2, 1, 3).flatten(2), model(data()))


FORMS = [cs.Folded(), cs.Selected(), cs.Selected(read_out=True), cs.Fitted(steps=5)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_stored_layer_has_the_measured_error(form):
    model = make()
    before = copy.deepcopy(model)
    (record,) = cs.compress_(model, keep=cs.TargetOrder(3), calibrate=runs, form=form)
    assert (record.order, record.rank, record.error_bound) == (8, 3, None)
    assert model[0].q.weight.shape == (3, WIDTH)
    assert model[0].k.out_features == 3
    if not isinstance(form, cs.Fitted):
        old, new = before(data()), model(data())
        assert record.measured_error == pytest.approx(((new - old).norm() / old.norm()).item(), rel=1e-9)
    assert 0 < record.measured_error < 1


def test_folded_is_the_default_with_the_smallest_error_near_its_estimate():
    errors = {
        form: cs.compress_(make(), keep=cs.TargetOrder(3), calibrate=runs, form=form)[0] for form in [None, *FORMS]
    }
    assert errors[None].measured_error == errors[cs.Folded()].measured_error
    assert all(errors[None].measured_error <= one.measured_error for one in errors.values())
    assert errors[cs.Selected(read_out=True)].measured_error <= errors[cs.Selected()].measured_error
    assert errors[None].measured_error == pytest.approx(errors[None].energy_lost ** 0.5, rel=0.5)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_all_states_reproduce_the_output(form):
    model = make()
    layer = layer_of(model)
    reduction = form.reduce(layer.data, torch.arange(ORDER))
    values = reduction.change(model[0], layer.adapter, layer.system).values
    assert layer.data.error(reduction) < 1e-8
    new = functional_call(model[0], {name: value.detach() for name, value in values.items()}, (data(3),))
    torch.testing.assert_close(new, model(data(3)), rtol=1e-6, atol=1e-8)


def test_a_fit_leaves_the_gradients_of_the_module_alone():
    model = make()
    cs.Fitted(steps=3).reduce(layer_of(model).data, torch.arange(3))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_states_that_are_never_written_cost_nothing():
    model = make()
    model[0].k.weight.data[3:], model[0].k.bias.data[3:] = 0, 0
    before = model(data(5))
    (record,) = cs.compress_(model, keep=cs.TargetOrder(5), calibrate=runs)
    assert record.rank == 3
    torch.testing.assert_close(model(data(5)), before)


def test_rows_of_folded_states_have_equal_norms_in_keys_and_queries():
    model = make()
    cs.compress_(model, keep=cs.TargetOrder(3), calibrate=runs)
    norms = [torch.cat([part.weight, part.bias[:, None]], dim=1).norm(dim=1) for part in (model[0].k, model[0].q)]
    torch.testing.assert_close(*norms)


def lifted(module, reduction, small):
    """The rows of the full layer that compute what these rows of the reduced one do: k = T k̂ and q = W q̂."""
    T, W = reduction.T[0], reduction.W[0]
    return {name: (T if name.startswith("k") else W) @ value for name, value in small.items()}


@pytest.mark.parametrize("form", [cs.Folded(), cs.Selected(), cs.Selected(read_out=True), cs.Fitted(steps=2)], ids=str)
def test_gradients_are_carried_as_the_vector_jacobian_product_of_the_lift(form):
    model = make()
    layer = layer_of(model)
    change = (reduction := form.reduce(layer.data, torch.arange(3))).change(model[0], layer.adapter, layer.system)
    small = {name: value.detach().requires_grad_() for name, value in change.values.items()}
    full = lifted(model[0], reduction, small)
    inner, y = data(7), torch.randn(30, 20, HEADS * 3, dtype=torch.float64)
    rest = {name: value for name, value in model[0].named_parameters() if name not in full}
    # The lifted layer computes what the reduced one computes.
    there = functional_call(model[0], full | rest, (inner,))
    torch.testing.assert_close(there, functional_call(model[0], small | rest, (inner,)))
    on_full = torch.autograd.grad((there * y).sum(), list(full.values()), retain_graph=True)
    expected = torch.autograd.grad((there * y).sum(), list(small.values()))
    carried = change.gradient(dict(zip(full, on_full, strict=True)))
    for name, value in zip(small, expected, strict=True):
        torch.testing.assert_close(carried[name], value)


@pytest.mark.parametrize("form", [cs.Folded(), cs.Selected(), cs.Selected(read_out=True), cs.Fitted(steps=2)], ids=str)
def test_updates_are_carried_as_the_change_itself(form):
    model = make()
    layer = layer_of(model)
    reduction = form.reduce(layer.data, torch.arange(3))
    change = reduction.change(model[0], layer.adapter, layer.system)
    moved = copy.deepcopy(model[0])
    moves = {name: torch.randn_like(value) for name, value in moved.named_parameters() if name in change.values}
    for name, move in moves.items():
        moved.get_parameter(name).data += move
    after = reduction.change(moved, layer.adapter, layer.adapter.read(moved)).values
    for name, value in change.update(moves).items():
        torch.testing.assert_close(value, after[name] - change.values[name])
    ones = {name: torch.ones_like(move) for name, move in moves.items()}
    assert all((value > 0).all() for value in change.gradient_squares(ones).values())


def test_the_first_states_are_kept_by_slice():
    model = make()
    layer = layer_of(model)
    change = cs.Folded().reduce(layer.data, torch.arange(3)).change(model[0], layer.adapter, layer.system)
    moment = torch.randn(ORDER, WIDTH, dtype=torch.float64)
    assert torch.equal(change.first("q.weight", moment), moment[:3])


@pytest.mark.parametrize("select", [cs.Random(1), cs.Smallest()], ids=str)
@pytest.mark.parametrize("form", [cs.Folded(), cs.Selected(), cs.Fitted(steps=2)], ids=str)
def test_worse_selections_have_larger_errors(select, form):
    errors = [
        cs.compress_(make(), keep=cs.TargetOrder(3), calibrate=runs, form=form, select=one)[0].measured_error
        for one in (select, cs.Largest())
    ]
    assert errors[0] > errors[1]


def test_a_tolerance_of_the_energy_bounds_the_estimate():
    (record,) = cs.compress_(make(), keep=cs.EnergyTolerance(0.01), calibrate=runs)
    layer = layer_of(make())
    assert record.energy_lost <= 0.01
    assert float(layer.spectrum()[0, record.rank - 1 :].sum() / layer.spectrum().sum()) > 0.01


def test_the_moments_of_several_processes_are_those_of_all_data():
    model, parts = make(), (data()[:10], data()[10:])
    whole = layer_of(model).observations
    found = [read_layers(model, Options(cs.TargetOrder(3), lambda model, x=x: model(x)))["0"] for x in parts]

    def totals(mine, other):
        """The sum over both processes, in the order in which tensors are asked for."""
        queue = []
        other.over(lambda tensor: queue.append(tensor) or tensor)
        return mine.over(lambda tensor: tensor + queue.pop(0))

    together = totals(*found)
    for mine, all_of_it in zip(together.data.moments, whole.moments(ORDER), strict=True):
        torch.testing.assert_close(mine, all_of_it)


def test_a_cut_that_another_process_sent_is_the_same():
    model = make()
    layer = layer_of(model)
    cut = layer.cut(torch.arange(3), 0.25)
    again = layer.received(cut.sent())
    assert torch.equal(again.reduction.W, cut.reduction.W)
    assert again.energy_lost == 0.25
    torch.testing.assert_close(again.squared_change(), cut.squared_change())


@pytest.mark.parametrize("size", [1e-150, 1e150])
def test_keys_and_queries_of_any_size_are_cut_alike(size):
    near, far = make(), make()
    for leaf in (far[0].q.weight, far[0].q.bias):
        leaf.data *= size
    records = [cs.compress_(one, keep=cs.TargetOrder(3), calibrate=runs)[0] for one in (near, far)]
    assert records[0].measured_error == pytest.approx(records[1].measured_error, rel=1e-6)
    torch.testing.assert_close(far(data()) / size, near(data()), rtol=1e-6, atol=1e-9)


def test_a_rehearsal_needs_no_data():
    layer = layer_of(make()).imagined()
    assert layer.spectrum().tolist() == [[1.0] * ORDER]
    assert layer.form.reduce(layer.data, torch.arange(3)).order == 3


def test_a_layer_without_writing_is_not_cut_and_the_reason_is_said():
    model = make()
    model[0].k.weight.data.zero_()
    model[0].k.bias.data.zero_()
    with pytest.warns(UserWarning, match=r"all values of their states are zero: 0 \(its keys are zero"):
        assert cs.compress_(model, keep=cs.TargetOrder(3), calibrate=runs) == []


def test_encode_refuses_rows_that_do_not_fit():
    model = make()
    adapter = DecayingAdapter()
    memory = adapter.read(model[0])
    wide = Memory({name: torch.cat([rows, rows], dim=1) for name, rows in memory.keys.items()}, memory.queries)
    with pytest.raises(cs.control.ShapeError, match=r"k.weight gets rows of shape \(1, 16, 6\), expected"):
        adapter.encode(model[0], wide)
    with pytest.raises(cs.control.ShapeError, match=r"q.weight gets no rows"):
        adapter.encode(model[0], Memory(memory.keys, {}))
