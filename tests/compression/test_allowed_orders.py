"""Orders that a cut may leave: collections, powers of two and runtimes in `round_to`."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import compressm as cs
from compressm import deploy
from compressm.compression import CompressionError, choose_orders
from compressm.families.choices import Multiples, OneOf, PowersOfTwo, as_allowed_orders
from compressm.layers import LRU, S4, S4D, S5, LinOSS, Mamba
from compressm.models import SequenceClassifier
from tests.compression.spectra import spectra_of_a_model

COLLECTIONS = st.sets(st.integers(1, 12), min_size=1, max_size=4)
X = torch.randn(4, 24, 3, generator=torch.Generator().manual_seed(0))


def model_of(layer=LRU, order=12, **options):
    torch.manual_seed(0)
    return SequenceClassifier(layer, **{"depth": 2, "width": 4, "order": order, "inputs": 3, "classes": 5, **options})


def orders_of(model):
    return [module.order for module in model.modules() if isinstance(module, LRU | S5 | S4 | S4D | LinOSS | Mamba)]


def of_low_rank_(model, rank):
    """The same model, whose layers have only this many states with an input."""
    for module in model.modules():
        if isinstance(module, LRU):
            module.B_re.data[rank:] = module.B_im.data[rank:] = 0
    return model


@given(COLLECTIONS, st.integers(1, 14))
def test_the_next_order_is_the_smallest_member_that_is_not_below(allowed, order):
    expected = min((member for member in allowed if member >= order), default=None)
    assert as_allowed_orders(allowed).next(order) == expected
    assert as_allowed_orders(list(allowed)) == as_allowed_orders(np.array(sorted(allowed)))


@given(st.integers(1, 5000))
def test_the_next_power_of_two(order):
    expected = next(2**k for k in itertools.count() if 2**k >= order)
    assert cs.powers_of_two.next(order) == expected
    assert PowersOfTwo(at_most=64).next(order) == (expected if expected <= 64 else None)


@given(spectra_of_a_model(), COLLECTIONS, st.sampled_from([cs.EnergyTolerance(0.2), cs.TargetOrder(4)]))
def test_a_layer_is_cut_to_the_next_member_or_not_at_all(spectra, allowed, keep):
    orders = choose_orders(spectra, keep, round_to=allowed, gate=1.0)
    for name, wanted in keep(spectra).items():
        n = spectra[name].shape[-1]
        fitting = [member for member in allowed if wanted <= member < n and bool(spectra[name].any())]
        assert orders[name] == min(fitting, default=n)


@pytest.mark.parametrize(
    ("round_to", "expected"),
    [(8, 64), ((16, 48, 100), 48), ({64}, 64), (range(10, 60, 10), 40), (cs.powers_of_two, 64)],
    ids=str,
)
def test_kinds_of_round_to(round_to, expected):
    sigma = torch.ones(100).double()
    wanted = 57 if isinstance(round_to, int) else 39
    assert choose_orders({"it": sigma}, cs.TargetOrder(wanted), round_to=round_to) == {"it": expected}


def test_an_integer_gives_what_it_always_gave():
    """A layer of smaller rank goes to its rank, and nothing is filled up."""
    model = of_low_rank_(model_of(), 3)
    assert [cut.rank for cut in cs.compress_(model, keep=cs.TargetOrder(7), round_to=4)] == [3, 3]
    assert orders_of(model) == [3, 3]


@pytest.mark.parametrize(("round_to", "order"), [((5, 8), 5), (cs.powers_of_two, 4), ((8,), 8)], ids=str)
def test_a_layer_of_smaller_rank_is_filled_up_to_an_allowed_order(round_to, order):
    model = of_low_rank_(model_of(), 3).eval()
    before = model(X)
    cuts = cs.compress_(model, keep=cs.TargetOrder(7), round_to=round_to)
    assert [cut.rank for cut in cuts] == orders_of(model) == [order, order]
    torch.testing.assert_close(model(X), before, rtol=1e-4, atol=1e-5)


def test_moments_followers_and_streams_go_with_layers_that_are_filled_up():
    model = of_low_rank_(model_of(pooling=cs.models.LastStep()), 3)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).square().sum().backward()
    optimizer.step()
    of_low_rank_(model, 3)
    average.update_parameters(model)
    model.eval()
    cs.compress_(model, keep=cs.TargetOrder(7), round_to=(8,), optimizer=optimizer, follow=[average])
    assert orders_of(model) == orders_of(average) == [8, 8]
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].shape == parameter.shape
    model.train()(X).square().sum().backward()
    optimizer.step()
    average.update_parameters(model)


def test_compress_warns_with_the_number_if_an_order_is_not_allowed():
    model = model_of(order=12)
    with pytest.warns(UserWarning, match=r"blocks\.0\.ssm has 12 states, allowed: 4; .*pad_orders_"):
        assert cs.compress_(model, keep=cs.TargetOrder(6), round_to=(4,)) == []
    assert orders_of(model) == [12, 12]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"at_least": 10, "round_to": (4, 8)}, "No allowed order is left by round_to and at_least=10:"),
        ({"gate": 0.5, "round_to": (9,)}, "No allowed order is left by gate=0.5 and round_to:"),
        ({"gate": 0.5, "round_to": (4, 9)}, "No allowed order is left by keep and gate=0.5 and round_to:"),
        ({"round_to": (32,)}, "No allowed order is left by round_to:"),
        ({"round_to": (4,)}, "The policy kept more"),
    ],
    ids=str,
)
def test_the_warning_names_the_option_that_stands_in_the_way(options, said):
    model = model_of()
    with pytest.warns(UserWarning, match=said):
        cs.compress_(model, keep=cs.TargetOrder(5), **options)
    assert orders_of(model) == [12, 12]


def test_an_override_stands_in_the_way_of_its_own_layers_alone():
    model = model_of()
    with pytest.warns(UserWarning, match=r"blocks\.0\.ssm has 12 .* The policy kept more") as said:
        cs.compress_(model, keep=cs.TargetOrder(4), round_to=(4,), overrides={"blocks.0.*": cs.TargetOrder(5)})
    assert "blocks.1" not in str(said[0].message)
    assert orders_of(model) == [12, 4]


def test_a_compressor_warns_of_orders_that_are_not_allowed_only_after_its_last_cut():
    model = model_of(order=12)
    compressor = cs.Compressor(model, when=[1, 2], keep=cs.KeepFraction(0.9), round_to=(4, 11), gate=1.0)
    assert [cut.rank for cut in compressor.step(1)] == [11, 11]
    assert orders_of(model) == [11, 11]
    assert compressor.step(2) == []  # 9 is above 4, and 11 is allowed
    other = cs.Compressor(model_of(order=12), when=[1, 2], keep=cs.EnergyTolerance(1e-6), round_to=(4,), gate=1.0)
    assert other.step(1) == []
    with pytest.warns(UserWarning, match="has 12 states, allowed: 4"):
        assert other.step(2) == []


def test_options_that_cannot_cut_are_named_whatever_round_to_is():
    compressor = cs.Compressor(model_of(order=12), when=[1, 2], keep=cs.KeepFraction(0.5), round_to=(16, 32))
    with pytest.warns(UserWarning, match=r"nothing will be cut: with round_to=OneOf\(orders=\(16, 32\)\)"):
        assert compressor.step(1) == []


@pytest.mark.parametrize("bad", [(), set(), [0], (-4, 8), [True], {8: 1}, {}, 0, -1, True])
def test_other_values_are_refused_and_nothing_changes(bad):
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CompressionError, match="round_to"):
        cs.compress_(model, keep=cs.TargetOrder(4), round_to=bad)
    with pytest.raises(CompressionError, match="round_to"):
        cs.Compressor(model, when=[1], keep=cs.TargetOrder(4), round_to=bad)
    with pytest.raises(CompressionError, match="round_to"):
        choose_orders({"it": torch.ones(4).double()}, cs.TargetOrder(2), round_to=bad)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("allowed", [Multiples(8), OneOf((16,)), cs.powers_of_two, *deploy.RUNTIMES.values()], ids=repr)
def test_allowed_orders_print_compare_and_pickle(allowed):
    again = pickle.loads(pickle.dumps(allowed))
    assert again == allowed
    assert hash(again) == hash(allowed)
    assert repr(again) == repr(allowed) == str(repr(copy.deepcopy(allowed)))
    assert "0x" not in repr(allowed)


def test_a_runtime_rounds_the_orders_of_its_layers_and_makes_them_equal():
    model = model_of(Mamba, order=20)
    cs.compress_(model, keep=cs.EnergyTolerance(0.02), calibrate=lambda model: model(X), round_to=deploy.VLLM)
    assert len(set(orders_of(model))) == 1
    assert orders_of(model)[0] in (2, 4, 8, 16)


@pytest.mark.parametrize("runtime", [deploy.CANDLE, deploy.LLAMA_CPP_CUDA], ids=repr)
def test_a_model_that_is_too_small_for_a_runtime_stays_as_it_is_and_the_warning_says_what_fills_it_up(runtime):
    model = model_of(Mamba, order=12)
    with pytest.warns(UserWarning, match=r"12 states, allowed: 16; .* fill layers up with zero states by pad_orders_"):
        cs.compress_(model, keep=cs.TargetOrder(5), calibrate=lambda model: model(X), round_to=runtime)
    assert orders_of(model) == [12, 12]


def test_a_runtime_without_such_layers_is_refused_by_name():
    with pytest.raises(CompressionError, match=r"blocks\.0\.ssm, blocks\.1\.ssm: llama.cpp \(CUDA\) runs Mamba-1"):
        cs.compress_(model_of(), keep=cs.TargetOrder(4), round_to=deploy.LLAMA_CPP_CUDA)
    mamba = model_of(Mamba)
    options = {"keep": cs.TargetOrder(4), "calibrate": lambda model: model(X)}
    with pytest.raises(CompressionError, match=r"Vulkan\) has no good order for Mamba-1: .*CPU"):
        cs.compress_(mamba, **options, round_to=deploy.LLAMA_CPP_VULKAN)
    with pytest.raises(CompressionError, match="gives every channel its own order"):
        cs.compress_(mamba, **options, round_to=deploy.LLAMA_CPP_CUDA, selective=cs.PerChannel())
    with pytest.raises(CompressionError, match="depend on the kind of layer"):
        choose_orders({"it": torch.ones(4).double()}, cs.TargetOrder(2), round_to=deploy.VLLM)


def test_a_round_to_that_keeps_every_layer_is_named():
    with pytest.warns(UserWarning, match="nothing was cut: with round_to=64 .*12 states"):
        assert cs.compress_(model_of(depth=1), keep=cs.TargetOrder(4), round_to=64) == []


def test_an_at_least_above_every_order_is_named_and_one_that_an_earlier_cut_reached_is_not():
    model = model_of(depth=1)
    with pytest.warns(UserWarning, match="nothing was cut: with at_least=13 .*12 states"):
        assert cs.compress_(model, keep=cs.TargetOrder(4), at_least=13) == []
    assert cs.compress_(model, keep=cs.TargetOrder(4), at_least=6)
    assert cs.compress_(model, keep=cs.TargetOrder(4), at_least=6) == []


def test_a_share_of_all_states_is_named_because_it_never_cuts():
    with pytest.warns(UserWarning, match=r"nothing was cut: with keep=KeepFraction\(rho=1\.0\) every layer keeps its"):
        assert cs.compress_(model_of(depth=1), keep=cs.KeepFraction(1.0)) == []


def test_a_second_cut_to_the_same_order_is_no_surprise():
    model = model_of(depth=1)
    assert cs.compress_(model, keep=cs.TargetOrder(3), round_to=4)
    assert cs.compress_(model, keep=cs.TargetOrder(3), round_to=4) == []
