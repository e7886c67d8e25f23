"""What selective layers see: averages against plain loops, padding, streaming, and data that cannot be used."""

import numpy as np
import pytest
import torch
from torch import nn

from compressm.adapters import adapter_for
from compressm.compression import (
    Baked,
    CompressionError,
    Compressor,
    HankelTracker,
    Measured,
    SharedIndex,
    TargetOrder,
    compress_,
    inspect,
)
from compressm.control import StateCovariance
from compressm.families.observing import observe
from compressm.families.selective.observer import Averages, SelectiveObservations, SelectiveObserver
from compressm.layers import LRU, Mamba
from tests.families.selective.mixers import Mixer, chosen, data, inputs_of, make, simulate

EVERY_STEP = Measured(stride=1)


def observed(layer, calibrate, *, choice=EVERY_STEP, covariance=True):
    adapter = adapter_for(layer)
    system = adapter.read(layer).detach()
    observations = SelectiveObservations(
        "it", StateCovariance() if covariance else None, averages=Averages.nothing(system)
    )
    observer = SelectiveObserver(observations, layer, system, choice, adapter)
    observe(layer, calibrate, [observer])
    return observer.observations


def close(found, expected, rtol=1e-10):
    np.testing.assert_allclose(found.numpy(), expected, rtol=rtol, atol=rtol * np.abs(expected).max())


LENGTHS = torch.tensor([30, 7, 19, 1])
RIGHT = torch.arange(30) < LENGTHS[:, None]
PADDINGS = {
    "none": (Mamba, {}, None),
    "lengths": (Mamba, {"lengths": LENGTHS}, RIGHT),
    "mask on the right": (Mixer, {"attention_mask": RIGHT.long()}, RIGHT),
    "mask on the left": (Mixer, {"attention_mask": RIGHT.flip(1)}, RIGHT.flip(1)),
}


@pytest.mark.parametrize("padding", PADDINGS)
def test_averages_and_covariances_are_those_of_plain_loops_over_what_is_no_padding(padding):
    kind, options, counts = PADDINGS[padding]
    layer, x = make(kind=kind), data()
    seen = observed(layer, lambda layer: layer(x, **options))
    u = inputs_of(layer, x, **options)
    counts = np.ones(u.shape[:2], dtype=bool) if counts is None else counts.numpy()
    u = np.where(counts[..., None], u, 0)
    _, delta, B, C = (part if k == 0 else part[counts] for k, part in enumerate(chosen(layer, u)))
    assert int(seen.averages.count) == counts.sum()
    close(seen.averages.mean("step"), delta.mean(0))
    close(seen.averages.mean("B"), B.mean(0))
    close(seen.averages.mean("C"), C.mean(0))
    close(seen.averages.mean("BB"), B.T @ B / len(B))
    close(seen.averages.mean("CC"), C.T @ C / len(C))
    h = simulate(layer, u)[0][counts]
    close(seen.covariance.gramian(), np.einsum("sci,scj->cij", h, h) / len(h))
    assert seen.sample.steps == counts.sum()


def test_padding_may_hold_anything():
    layer, x = make(), data()
    garbage = torch.where(RIGHT[..., None], x, torch.nan)
    one, other = (observed(layer, lambda layer, x=x: layer(x, lengths=LENGTHS)) for x in (x, garbage))
    torch.testing.assert_close(one.averages.BB, other.averages.BB)
    torch.testing.assert_close(one.covariance.gramian(), other.covariance.gramian())


def test_batches_one_after_the_other_are_one_batch_and_steps_of_a_stream_are_not_observed():
    layer, x = make(), data()

    def pieces(layer):
        for part in x.split(1):
            layer(part)
        layer.step(x[:, 0], layer.initial_state(len(x)))

    one, other = observed(layer, lambda layer: layer(x)), observed(layer, pieces)
    assert (one.passes, other.passes) == (1, 4)
    torch.testing.assert_close(one.averages.CC, other.averages.CC)
    torch.testing.assert_close(one.covariance.gramian(), other.covariance.gramian())


def test_averages_are_of_every_batch_and_states_of_the_first_alone():
    layer, batches = make(), [data(seed=seed) for seed in range(5)]

    def often(layer):
        for x in batches:
            layer(x)

    found = observed(layer, often, choice=Measured(batches=2))
    every = observed(layer, often, choice=Measured(batches=9))
    first = observed(layer, lambda layer: [layer(x) for x in batches[:2]], choice=Measured(batches=2))
    assert found.passes == 5
    for part in ("count", "step", "BB", "CC"):
        torch.testing.assert_close(getattr(found.averages, part), getattr(every.averages, part))
    torch.testing.assert_close(found.covariance.gramian(), first.covariance.gramian())
    assert found.sample.sequences.keys() == every.sample.sequences.keys()
    assert not layer._forward_hooks
    assert not layer.x_proj._forward_pre_hooks


def test_a_stride_looks_at_fewer_states_and_at_all_averages():
    layer, x = make(), data(8, 120)
    every, some = (observed(layer, lambda layer: layer(x), choice=Measured(stride=stride)) for stride in (1, 8))
    assert int(some.covariance.count[0]) == 8 * 120 // 8
    torch.testing.assert_close(every.averages.BB, some.averages.BB)
    difference = some.covariance.gramian() - every.covariance.gramian()
    assert difference.norm() < 0.2 * every.covariance.gramian().norm()


def test_single_precision_is_averaged_in_double():
    seen = observed(make(dtype=torch.float32), lambda layer: layer(data().float()))
    assert seen.averages.BB.dtype == seen.covariance.gramian().dtype == torch.float64


LOOKS = {
    "Compressor": lambda model, **options: Compressor(model, when=[1], keep=TargetOrder(3), **options),
    "compress_": lambda model, **options: compress_(model, keep=TargetOrder(3), **options),
    "inspect": inspect,
    "tracker": lambda model, **options: HankelTracker(model, every=1, **options).step(1),
}


@pytest.mark.parametrize("look", LOOKS)
def test_without_calibrate_a_selective_layer_is_refused_and_it_says_what_to_pass(look):
    model = nn.Sequential(LRU(4, 3), make())
    with pytest.raises(CompressionError, match=r"^1: selective layers.*pass calibrate.*calibrate=lambda model"):
        LOOKS[look](model)
    assert model[1].order == 6


def check_refused(layer, said, x, **options):
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(CompressionError, match=said):
        compress_(layer, keep=TargetOrder(3), calibrate=lambda layer: layer(x), **options)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_are_refused_by_name(bad):
    x = data()
    x[1, 2, 3] = bad
    check_refused(
        make(kind=Mixer), r"calibrate gave 'the model' inputs that cannot be measured, expected finite ones: u\[1", x
    )


def test_weights_that_are_not_finite_are_refused_by_layer_and_name():
    model = nn.Sequential(nn.Identity(), make())
    model[1].in_proj.weight.data[0, 1] = torch.nan
    with pytest.raises(CompressionError, match=r"^1\.in_proj\.weight holds 1 entries that are not finite$"):
        compress_(model, keep=TargetOrder(3), calibrate=lambda model: model(data()))
    assert model[1].order == 6


def test_fewer_steps_than_states_are_refused():
    for options in ({}, {"gramian": Measured()}, {"selective": SharedIndex()}, {"selective": Baked(refit=True)}):
        check_refused(make(), "calibrate ran 5 steps through a layer of 6 states", data(1, 5), **options)


def test_a_layer_that_calibrate_does_not_run_is_named():
    model = nn.ModuleList([make(), make()])
    with pytest.raises(CompressionError, match=r"calibrate did not run '1'"):
        compress_(model, keep=TargetOrder(3), calibrate=lambda model: model[0](data()))


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(CompressionError, match=r"with a mask \(4, 29\)"):
        observed(make(kind=Mixer), lambda layer: layer(data(), attention_mask=Odd(RIGHT)))


class Odd:
    """A mask that the mixer takes, and that the adapter sees one step short."""

    def __init__(self, mask):
        self.mask = mask

    def __getitem__(self, index):
        return self.mask[index]

    def bool(self):
        return self.mask[:, 1:]
