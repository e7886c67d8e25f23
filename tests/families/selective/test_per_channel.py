"""Channels with states of their own: against dense systems in NumPy and SciPy, cut once and again, real and complex."""

import copy

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

import compressm as cs
from compressm.compression import CompressionError
from compressm.compression.planning import Options, plan_cuts, read_layers
from compressm.layers import LRU
from tests.families.selective.mixers import Mixer, chosen, complex_layer, data, inputs_of, make, simulate

SURROGATES = ["mean", "second_moment", "measured"]
METHODS = [cs.PerChannel(surrogate, two_sided=both) for surrogate in SURROGATES for both in (True, False)]
EVERY_STEP = cs.Measured(stride=1)
# Not all methods measure.
pytestmark = pytest.mark.filterwarnings("ignore:without effect. gramian")


def runs(layer):
    return layer(data())


def cut(layer, method, keep, **options):
    found = cs.compress_(layer, keep=keep, calibrate=runs, selective=method, gramian=EVERY_STEP, **options)
    return found[0] if found else None


def stand_ins(layer, surrogate):
    """P and Q of every channel as the method defines them, in NumPy; in discrete time for means."""
    u = inputs_of(layer, data())
    rates, delta, B, C = chosen(layer, u)
    if surrogate == "mean":
        step = delta.mean((0, 1))
        found = []
        for i, a in enumerate(rates):
            A, b, c = np.diag(np.exp(step[i] * a)), step[i] * B.mean((0, 1)), C.mean((0, 1))
            found.append([scipy.linalg.solve_discrete_lyapunov(A, np.outer(v, v)) for v in (b, c)])
        return np.moveaxis(np.array(found), 1, 0)
    sums = -(rates[:, :, None] + rates[:, None])
    P, Q = (np.einsum("bti,btj->ij", M, M) / M[..., 0].size / sums for M in (B, C))
    if surrogate == "measured":
        h = simulate(layer, u)[0]
        P = np.einsum("btci,btcj->cij", h, h) / h[..., 0, 0].size
    return P, Q


def hankel(P, Q):
    return np.sqrt(np.sort(np.linalg.eigvals(P @ Q).real.clip(0))[..., ::-1])


def balanced(P, Q, order):
    """T and W of the leading states, from the eigenvectors of P Q and Q P."""
    values, T = np.linalg.eig(P @ Q)
    T = T[:, np.argsort(-values.real)[:order]].real
    W = Q @ T
    return T, W @ np.linalg.inv(T.T @ W)


def dense_outputs(layer, reduced):
    """y of channels with dense A: h ← exp(Δ A) h + Δ W B u, y = C T h."""
    u = inputs_of(layer, data())
    _, delta, B, C = chosen(layer, u)
    y = np.zeros(u.shape)
    for i, (A, W, T) in enumerate(reduced):
        moves, h = scipy.linalg.expm(delta[..., i, None, None] * A), np.zeros((len(u), len(A), 1), dtype=A.dtype)
        drive = (delta[..., i] * u[..., i])[..., None] * (B @ W)
        for t in range(u.shape[1]):
            h = moves[:, t] @ h + drive[:, t, :, None]
            y[:, t, i] = (C[:, t] @ T * h[..., 0]).sum(-1).real
    return y


def whole(layer, y):
    """What the layer puts out where its scan gives y."""
    x = data()
    u, gate = torch.from_numpy(inputs_of(layer, x)), nn.functional.silu(layer.in_proj(x).chunk(2, dim=-1)[1])
    return layer.out_proj((torch.from_numpy(y) + layer.D * u) * gate)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_spectra_are_hankel_values_of_each_channel(surrogate):
    layer = make(order=4)
    expected = hankel(*stand_ins(layer, surrogate))
    found = cs.inspect(layer, runs, selective=cs.PerChannel(surrogate), gramian=EVERY_STEP).spectra[""]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-7 * expected.max())


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_cut_layer_is_the_dense_balanced_one(surrogate):
    layer = make(order=4)
    original, (rates, delta, *_) = copy.deepcopy(layer), chosen(layer, inputs_of(layer, data()))
    reduced = []
    for P, Q, a, step in zip(*stand_ins(layer, surrogate), rates, delta.mean((0, 1)), strict=True):
        T, W = balanced(P, Q, 2)
        if surrogate == "mean":  # of a negative pole the logarithm is complex
            values, X = np.linalg.eig(W.T @ np.diag(np.exp(step * a)) @ T)
            A = X @ np.diag(np.log(values.astype(complex))) @ np.linalg.inv(X) / step
        else:
            A = W.T @ np.diag(a) @ T
        reduced.append((A, W, T))
    record = cut(layer, cs.PerChannel(surrogate), cs.TargetOrder(2))
    assert layer.order == record.rank <= 2
    expected = dense_outputs(original, reduced)
    torch.testing.assert_close(layer(data())[0], whole(original, expected), rtol=1e-5, atol=1e-7)
    before = simulate(original, inputs_of(original, data()))[1]
    error = np.linalg.norm(expected - before) / np.linalg.norm(before)
    assert record.measured_error == pytest.approx(error, rel=1e-4)
    assert record.error_bound is None


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_states_that_do_nothing_go_without_a_trace_and_a_second_cut_does_no_more(method):
    layer = make()
    layer.x_proj.weight.data[1:].view(2, 6, -1)[:, [1, 3, 4, 5]] = 0
    before = layer(data())[0]
    assert cut(layer, method, cs.TargetOrder(2)).measured_error < 1e-7
    assert layer.order == 2
    torch.testing.assert_close(layer(data())[0], before, rtol=1e-6, atol=1e-8)
    assert cut(layer, method, cs.TargetOrder(2)) is None


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_cut_again_the_layer_is_what_was_measured_and_decays(method, seed):
    layer = make(order=10, seed=seed)
    for order in (6, 4, 2):
        original = copy.deepcopy(layer)
        record = cut(layer, method, cs.TargetOrder(order))
        assert layer.order <= order
        assert torch.isfinite(layer.A_log).all()
        # The gate and out_proj are linear in y: where all of them are the same, errors of y show in the output.
        with torch.no_grad():
            for module in (layer, original):
                module.out_proj.weight.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
            change = (layer(data())[0] - original(data())[0]).norm() / original(data())[0].norm()
        assert float(change) <= 5 * record.measured_error + 1e-9
    assert int(layer.orders.max()) == layer.order


def test_orders_are_those_that_the_policy_gives_every_channel():
    layer, keep = make(order=10), cs.EnergyTolerance(0.05)
    layer.A_log.data[0] = layer.A_log.data[0, 0]  # of one channel all rates are the same
    sigma = cs.inspect(layer, runs, selective=cs.PerChannel(two_sided=False)).spectra[""]
    expected = [keep.order(one) for one in sigma]
    assert len(set(expected)) > 1
    record = cut(layer, cs.PerChannel(two_sided=False), keep)
    assert layer.orders.tolist() == expected
    assert record.rank == layer.order == max(expected)
    lost = sum(float(one[order:].sum()) for one, order in zip(sigma, expected, strict=True)) / float(sigma.sum())
    assert record.energy_lost == pytest.approx(lost)


def test_a_function_of_ones_own_is_asked_about_every_channel():
    layer, seen = make(), []

    def keep(spectra):
        seen.append({name: tuple(sigma.shape) for name, sigma in spectra.items()})
        return dict.fromkeys(spectra, 1 + len(seen) % 2)

    cut(layer, cs.PerChannel(two_sided=False), keep)
    assert seen == [{"": (6,)}] * 8
    assert layer.orders.tolist() == [2, 1] * 4


def test_channels_below_the_gate_keep_the_states_they_have():
    layer = make()
    before = layer.A_log.detach().clone()
    orders = iter([3, 6, 6, 6, 6, 6, 6, 2])
    cut(layer, cs.PerChannel(two_sided=False), lambda spectra: dict.fromkeys(spectra, next(orders)), gate=1.0)
    assert layer.orders.tolist() == [3, 6, 6, 6, 6, 6, 6, 2]
    torch.testing.assert_close(layer.A_log[1:7].detach(), before[1:7])
    torch.testing.assert_close(layer.B_map[1], torch.eye(6).double())
    cut(layer, cs.PerChannel(two_sided=False), cs.TargetOrder(4))
    assert layer.orders.tolist() == [3, 4, 4, 4, 4, 4, 4, 2]
    assert layer.order == 4


def errors(method, order=5):
    found = []
    for seed in range(3):
        layer = make(order=16, seed=seed)
        options = Options(cs.TargetOrder(order), calibrate=runs, selective=method, gramian=EVERY_STEP)
        found.append(plan_cuts(read_layers(layer, options), options)[0].measured_error)
    return float(np.mean(found))


def test_second_moments_keep_what_means_lose():
    mean, second, measured = (errors(cs.PerChannel(surrogate)) for surrogate in SURROGATES)
    assert second < 0.5 * mean
    assert measured < 0.5 * mean
    assert second < 1.05 * errors(cs.Baked())


def test_pairs_of_conjugates_are_one_complex_state():
    layer = complex_layer()
    original = copy.deepcopy(layer)
    rates = chosen(layer, inputs_of(layer, data()))[0]
    reduced = []
    for P, Q, a in zip(*stand_ins(layer, "second_moment"), rates, strict=True):
        T, W = balanced(P, Q, 6)
        reduced.append((W.T @ np.diag(a) @ T, W, T))
    pairs = [int((np.linalg.eigvals(A).imag > 0).sum()) for A, _, _ in reduced]
    cut(layer, cs.PerChannel(), cs.TargetOrder(6))
    assert sum(pairs) > 0
    assert layer.orders.tolist() == [6 - count for count in pairs]
    torch.testing.assert_close(
        layer(data())[0], whole(original, dense_outputs(original, reduced)), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("method", [cs.Baked(), cs.SharedIndex(), cs.PerChannel(two_sided=False)], ids=str)
def test_methods_that_cannot_go_on_from_maps_say_so(method):
    layer = complex_layer()
    cut(layer, cs.PerChannel(), cs.TargetOrder(6))
    with pytest.raises(CompressionError, match=r"the model: an earlier .*cut.*cannot cut those; expected"):
        cut(layer, method, cs.TargetOrder(3))


def test_a_module_that_cannot_keep_maps_is_refused_by_name():
    model = nn.Sequential(make(kind=Mixer))
    for call in (lambda **given: cs.Compressor(model, when=[1], **given), lambda **given: cs.compress_(model, **given)):
        with pytest.raises(
            CompressionError, match=r"^0: a Mixer cannot store a separate projection.*expected selective=Baked\(\)"
        ):
            call(keep=cs.TargetOrder(3), calibrate=runs, selective=cs.PerChannel())


def test_policies_without_a_meaning_for_selective_layers_are_refused_by_name():
    model = nn.ModuleList([LRU(4, 6).double(), make()])

    def calibrate(model):
        for layer in model:
            layer(data())

    def compressor(keep, method, **options):
        cs.Compressor(model, when=[1], keep=keep, calibrate=calibrate, selective=method, **options)

    exact = {"gramian": cs.WhiteNoise()}
    with pytest.raises(
        CompressionError, match=r"^1: Budget\(total_states=9\) distributes states over layers.*PerChannel"
    ):
        compressor(cs.Budget(9), cs.PerChannel())
    with pytest.raises(CompressionError, match=r"^1: ErrorBound\(.*needs an error bound, which selective layers never"):
        compressor(cs.ErrorBound(0.1), cs.Baked(), **exact)
    compressor(cs.ErrorBound(0.1), cs.Baked(), overrides={"1": cs.TargetOrder(3)}, **exact)
    compressor(cs.Budget(9), cs.PerChannel(), overrides={"1": cs.TargetOrder(3)})
    compressor(cs.Budget(9), cs.Baked())


def test_overrides_reach_layers_of_either_kind():
    model = nn.ModuleList([LRU(4, 6).double(), make(), make(seed=1)])

    def calibrate(model):
        for layer in model:
            layer(data())

    overrides = {"0": cs.TargetOrder(5), "1": cs.TargetOrder(4)}
    cs.compress_(
        model,
        keep=cs.TargetOrder(3),
        overrides=overrides,
        calibrate=calibrate,
        selective=cs.PerChannel(two_sided=False),
    )
    assert [layer.order for layer in model] == [5, 4, 3]


def test_models_with_maps_are_saved_resumed_and_tracked(tmp_path):
    torch.manual_seed(0)
    make_model = lambda: cs.models.LanguageModel(cs.layers.Mamba, vocabulary=9, depth=1, width=8, order=12)  # noqa: E731
    model, tokens = make_model(), torch.randint(0, 9, (4, 40))
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens)[0].square().mean().backward()
    optimizer.step()
    given = {"calibrate": lambda model: model(tokens), "selective": cs.PerChannel("measured")}
    tracker = cs.HankelTracker(model, every=1, **given)
    tracker.step(1)
    cs.compress_(model, keep=cs.TargetOrder(5), optimizer=optimizer, **given)
    tracker.step(2)
    assert tracker.spectra[0]["blocks.0.ssm"].shape == (16, 12)
    assert tracker.spectra[1]["blocks.0.ssm"].shape == (16, model.blocks[0].ssm.order)
    cs.save_model(model, tmp_path / "model")
    torch.testing.assert_close(cs.load_model(tmp_path / "model")(tokens)[0], model.eval()(tokens)[0], rtol=0, atol=0)
    cs.compression.save_checkpoint(tmp_path / "c.pt", model=model, optimizer=optimizer)
    other = make_model()
    again = torch.optim.AdamW(other.parameters())
    cs.compression.load_checkpoint(tmp_path / "c.pt", model=other, optimizer=again)
    torch.testing.assert_close(other.eval()(tokens)[0], model(tokens)[0], rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("select", [cs.Random(1), cs.Smallest()], ids=str)
def test_states_are_drawn_among_those_that_are_there_cut_after_cut(method, select):
    """Of a mode made of a state whose σ is rounding the rate would be log 0."""
    layer = make(order=24)
    for keep in (16, 5, 2):
        cut(layer, method, cs.TargetOrder(keep), select=select, gate=1.0)
        assert layer.order <= keep
        assert all(bool(torch.isfinite(parameter).all()) for parameter in layer.parameters())
        assert bool(torch.isfinite(layer(data())[0]).all())
