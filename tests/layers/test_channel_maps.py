"""Mamba with states of its own in every channel: what it computes, and that it is stored and comes back."""

import copy

import pytest
import torch
from torch.nn.functional import silu, softplus

from compressm import load_model, save_model
from compressm.adapters import write
from compressm.compression import SavingError, load_checkpoint, save_checkpoint
from compressm.control import ShapeError
from compressm.layers import Mamba
from compressm.models import SequenceClassifier
from compressm.ops import SequenceError
from compressm.saving import rebuilding
from tests import unhooked

WIDTH, PROJECTED, ORDER = 3, 5, 2
KINDS = ("real", "complex")


def maps(inner, kind, order=ORDER, projected=PROJECTED, seed=1):
    """Random ones, of which some channels use fewer states, one none."""
    g = torch.Generator().manual_seed(seed)
    pair = (2,) if kind == "complex" else ()
    made = {
        "B_map": torch.randn(inner, *pair, order, projected, generator=g),
        "C_map": torch.randn(inner, *pair, projected, order, generator=g),
        "orders": torch.arange(inner) % (order + 1),
        "A_log": torch.randn(inner, order, generator=g),
    }
    return made | ({"A_imag": torch.randn(inner, order, generator=g)} if pair else {})


def make(kind=None, width=WIDTH, order=PROJECTED, **options):
    torch.manual_seed(0)
    layer = Mamba(width, order, **options)
    if kind is not None:
        layer.keep_maps_(**maps(layer.inner, kind, projected=order))
    return layer


def sequence(batch=2, length=11, dtype=torch.float32):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype)


def shapes(layer):
    return {name: tuple(value.shape) for name, value in layer.state_dict().items()}


def by_hand(layer, x):
    """Channel by channel and step by step, in complex numbers."""
    p = {name: value.detach() for name, value in layer.state_dict().items()}
    imaginary = p.get("A_imag", torch.zeros_like(p["A_log"]))
    a = torch.complex(-p["A_log"].exp(), imaginary)
    B_map, C_map = p["B_map"], p["C_map"]
    if B_map.ndim == 3:
        B_map, C_map = (torch.stack([M, torch.zeros_like(M)], dim=1) for M in (B_map, C_map))
    B_map, C_map = (torch.complex(M[:, 0], M[:, 1]) for M in (B_map, C_map))
    v, z = (x @ p["in_proj.weight"].mT).chunk(2, dim=-1)
    past = torch.cat([torch.zeros_like(v[:, :3]), v], dim=1)
    window = torch.stack([past[:, k : k + x.shape[1]] for k in range(4)], dim=-1)
    u = silu((window * p["conv1d.weight"][:, 0]).sum(-1) + p["conv1d.bias"])
    dt, B, C = (u @ p["x_proj.weight"].mT).split([layer.dt_rank, PROJECTED, PROJECTED], dim=-1)
    step = softplus(dt @ p["dt_proj.weight"].mT + p["dt_proj.bias"])
    y = torch.zeros_like(u)
    for i in range(layer.inner):
        n = int(p["orders"][i])
        h = torch.zeros(len(x), n, dtype=a.dtype)
        for t in range(x.shape[1]):
            drive = (step[:, t, i] * u[:, t, i])[:, None] * (B[:, t].to(a.dtype) @ B_map[i, :n].mT)
            h = torch.exp(step[:, t, i, None] * a[i, :n]) * h + drive
            y[:, t, i] = ((C[:, t].to(a.dtype) @ C_map[i, :, :n]) * h).sum(-1).real + p["D"][i] * u[:, t, i]
    return (y * silu(z)) @ p["out_proj.weight"].mT


@pytest.mark.parametrize("kind", KINDS)
def test_every_channel_reads_its_own_b_and_c(kind):
    layer, x = make(kind).double(), sequence(dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], by_hand(layer, x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_it_streams_as_it_reads(kind):
    layer, x = make(kind).double(), sequence(dtype=torch.float64)
    state = torch.randn_like(layer.initial_state(2))
    y, last = layer(x, state)
    first, between = layer(x[:, :4], state)
    torch.testing.assert_close(torch.cat([first, layer(x[:, 4:], between)[0]], dim=1), y)
    for t in range(x.shape[1]):
        stepped, state = layer.step(x[:, t], state)
        torch.testing.assert_close(stepped, y[:, t])
    torch.testing.assert_close(state, last)


def test_maps_that_change_nothing_leave_the_layer_as_it_was():
    layer, x = make(), sequence()
    before, last = layer(x)
    same = torch.eye(PROJECTED).repeat(layer.inner, 1, 1)
    layer.keep_maps_(same, same, torch.full((layer.inner,), PROJECTED), layer.A_log)
    y, state = layer(x)
    torch.testing.assert_close(y, before)
    torch.testing.assert_close(state, last)


def test_real_rates_are_complex_ones_without_an_imaginary_part():
    real, other, x = make("real"), make(), sequence()
    given = maps(real.inner, "real")
    pairs = {name: torch.stack([given[name], torch.zeros_like(given[name])], dim=1) for name in ("B_map", "C_map")}
    other.keep_maps_(**{**given, **pairs}, A_imag=torch.zeros_like(given["A_log"]))
    torch.testing.assert_close(other(x)[0], real(x)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rates_and_projections_are_trained_and_maps_are_not(kind):
    layer = make(kind)
    rates, projection = layer.A_log, layer.x_proj.weight
    layer(sequence())[0].square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert not any(buffer.requires_grad for buffer in layer.buffers())
    layer.keep_maps_(**maps(layer.inner, kind, order=1))
    assert layer.A_log is rates
    assert layer.x_proj.weight is projection
    assert layer.A_log.grad is None
    assert projection.grad is not None
    assert layer.order == 1
    layer(sequence())[0].square().sum().backward()
    assert layer.A_log.grad.shape == (layer.inner, 1)


def test_under_autocast_maps_are_applied_in_float32():
    """100 b − 99.9 b is 0.1 b, of which nothing would be left where 99.9 is rounded to 100."""
    layer = make(order=2)
    cancelling = torch.tensor([[100.0, -99.9]]).repeat(layer.inner, 1, 1)
    layer.keep_maps_(cancelling, cancelling.mT, torch.ones(layer.inner, dtype=torch.int64), torch.zeros(layer.inner, 1))
    with torch.no_grad():
        layer.x_proj.weight.fill_(1)
    with torch.autocast("cpu", torch.bfloat16):
        _, B, C = layer.selected(torch.ones(1, 1, layer.inner))
    assert B.dtype == C.dtype == torch.bfloat16
    expected = torch.full((1, 1, layer.inner, 1), 0.1 * layer.inner)
    torch.testing.assert_close(B.float(), expected, rtol=1e-2, atol=0)
    torch.testing.assert_close(C.float(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maps_stay_in_float32_when_the_layer_becomes_half_as_precise(dtype, kind):
    """As in a layer that was cut in half precision; what nearly cancels would be gone."""
    layer = make(kind)
    maps_before = layer.B_map.clone(), layer.C_map.clone()
    layer.to(dtype)
    assert (layer.A_log.dtype, layer.x_proj.weight.dtype, layer.orders.dtype) == (dtype, dtype, torch.int64)
    assert layer.B_map.dtype == layer.C_map.dtype == torch.float32
    assert torch.isfinite(layer(sequence(dtype=dtype))[0]).all()
    layer.double()
    assert layer.B_map.dtype == torch.float64
    torch.testing.assert_close((layer.B_map.float(), layer.C_map.float()), maps_before, rtol=0, atol=0)
    assert layer.to("meta").B_map.is_meta


def test_the_printed_form_says_what_channels_have():
    assert "order=2, inner=6" in repr(make("real"))
    assert "own real states a channel from 5 of x_proj" in repr(make("real"))
    assert "own complex states" in repr(make("complex"))


@pytest.mark.parametrize("there", [None, *KINDS])
@pytest.mark.parametrize("here", [None, *KINDS])
def test_a_state_dict_of_any_form_loads(here, there):
    layer, other, x = make(here, order=7), make(there), sequence()
    layer.load_state_dict(other.state_dict())
    assert shapes(layer) == shapes(other)
    assert torch.equal(layer(x)[0], other(x)[0])
    assert layer.order == other.order
    assert torch.equal(copy.deepcopy(layer)(x)[0], other(x)[0])


def test_half_a_form_is_refused_and_changes_no_shape():
    layer, state = make(order=7), make("complex").state_dict()
    del state["A_imag"]
    with pytest.raises(RuntimeError, match="size mismatch for A_log"):
        layer.load_state_dict(state)
    assert shapes(layer) == shapes(make(order=7))


def test_rates_cannot_be_cut_without_their_maps():
    layer = make("real")
    with pytest.raises(ShapeError, match="A_log 1, B_map 2, C_map 2"):
        write(layer, {"A_log": torch.zeros(layer.inner, 1)})


def classifier(kind=None, order=PROJECTED):
    torch.manual_seed(0)
    model = SequenceClassifier(Mamba, depth=2, width=WIDTH, order=order, inputs=1, classes=2)
    if kind is not None:
        model.blocks[1].ssm.keep_maps_(**maps(2 * WIDTH, kind, projected=order))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_maps_is_saved_and_comes_back(kind, tmp_path):
    model, x = classifier(kind).eval(), torch.randn(3, 9, 1)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert torch.equal(loaded(x), model(x))
    assert [block.ssm.order for block in loaded.blocks] == [PROJECTED, ORDER]
    assert {name for name, _ in loaded.named_parameters()} == {name for name, _ in model.named_parameters()}
    assert loaded.blocks[1].ssm.orders.dtype == torch.int64


@pytest.mark.parametrize("kind", KINDS)
def test_training_with_maps_goes_on_from_a_checkpoint(kind, tmp_path):
    def trained(model, optimizer, steps):
        for k in range(steps):
            x = torch.linspace(0, 1 + k, 12).reshape(2, 6, 1)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return {name: value.tolist() for name, value in model.state_dict().items()}

    model = classifier(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trained(model, optimizer, 2)
    save_checkpoint(tmp_path / "c", model=model, optimizer=optimizer)
    later = trained(model, optimizer, 2)
    again = classifier(order=7)
    other = torch.optim.Adam(again.parameters(), lr=0.01)
    held = {name: id(parameter) for name, parameter in again.named_parameters()}
    load_checkpoint(tmp_path / "c", model=again, optimizer=other)
    assert held.items() <= {name: id(parameter) for name, parameter in again.named_parameters()}.items()
    assert trained(again, other, 2) == later


WRONG_ORDERS = {
    "above the states": (lambda orders: orders + 2, "orders run from 2 to 4, expected 0 to 2"),
    "below nothing": (lambda orders: orders - 1, "orders run from -1 to 1, expected 0 to 2"),
    "not whole": (lambda orders: orders.double(), "orders are torch.float64, expected torch.int64"),
    "of too few channels": (lambda orders: orders[1:], r"orders have shape \(5,\), expected \(6,\)"),
    "of another shape": (lambda orders: orders[:, None], r"orders have shape \(6, 1\), expected \(6,\)"),
}


@pytest.mark.parametrize("case", WRONG_ORDERS)
@pytest.mark.parametrize("here", [None, "real"])
def test_orders_that_no_channel_can_have_are_not_loaded(case, here):
    change, said = WRONG_ORDERS[case]
    state, layer = make("complex").state_dict(), make(here, order=7)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(SequenceError, match=said):
        layer.load_state_dict(state | {"orders": change(state["orders"])})
    check_unchanged(layer, before)


@pytest.mark.parametrize("case", WRONG_ORDERS)
def test_a_file_with_orders_that_no_channel_can_have_is_refused_and_changes_nothing(case, tmp_path, monkeypatch):
    change, said = WRONG_ORDERS[case]
    model = classifier("real")
    model.blocks[1].ssm.orders = change(model.blocks[1].ssm.orders)
    with pytest.raises(SavingError, match=rf"blocks\.1\.ssm: {said}"):
        save_model(model, tmp_path / "m")
    with monkeypatch.context() as unchecked:
        for check in ("require_values", "require_fit"):
            unchecked.setattr(rebuilding, check, lambda *_: None)
        save_model(model, tmp_path / "m")
    with pytest.raises(SavingError, match=rf"blocks\.1\.ssm: {said}"):
        load_model(tmp_path / "m")
    save_checkpoint(tmp_path / "c", model=model)
    other = classifier(order=7)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(SavingError, match=rf"blocks\.1\.ssm: {said}"):
        load_checkpoint(tmp_path / "c", model=other)
    check_unchanged(other, before)


def check_unchanged(module, before):
    after = module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


REFUSED = {
    "maps of another layer": ("B_map=ones(6, 2, 4)", "(6, 2, 4)", "(6, 2, 5)"),
    "maps that are not pairs": ("A_imag=ones(6, 2)", "(6, 2, 5)", "(6, 2, 2, 5)"),
    "rates of other channels": ("A_log=ones(5, 2)", "A_log is of shape (5, 2)", "(6, 2)"),
    "no rates": ("A_log=None", "(6, 2, 5)", "(6, 1, 5)"),
    "an order too many": ("orders=tensor([0, 1, 2, 3, 1, 1])", "0 to 3", "0 to 2"),
    "orders of less than nothing": ("orders=tensor([0, 1, 2, -1, 1, 1])", "-1 to 2", "0 to 2"),
    "orders that are not whole": ("orders=ones(6)", "torch.float32", "torch.int64"),
    "maps that are not finite": ("C_map=ones(6, 5, 2) / 0", "C_map", "finite"),
}
PREAMBLE = """
import torch
from torch import ones, tensor
from compressm.layers import Mamba

def keep(**new):
    given = {"B_map": ones(6, 2, 5), "C_map": ones(6, 5, 2), "orders": tensor([2] * 6), "A_log": ones(6, 2)}
    layer = Mamba(3, 5)
    before = layer.state_dict()
    try:
        layer.keep_maps_(**given | new)
    finally:
        assert layer.state_dict().keys() == before.keys()
"""


@pytest.fixture(scope="module")
def outcomes():
    return unhooked.outcomes(PREAMBLE, {case: f"keep({row[0]})" for case, row in REFUSED.items()})


@pytest.mark.parametrize("case", REFUSED)
def test_bad_maps_are_refused_and_change_nothing(case, outcomes):
    kinds, message = outcomes[case]
    assert kinds[:1] == ["SequenceError"], message
    assert all(fragment in message for fragment in REFUSED[case][1:]), message
