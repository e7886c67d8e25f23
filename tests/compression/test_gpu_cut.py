"""Whole cuts on a GPU by the compressor: the same as on the CPU, and training goes on in a graph recorded anew."""

import math

import pytest
import torch

import compressm as cs
from compressm.errors import CompressionError
from compressm.layers.parameters import Kept
from compressm_lab.bench.timing import capture
from compressm_lab.bench.train_step import StepCase, build_batch, build_model, eager_step, make_optimizer

pytestmark = pytest.mark.gpu

CASE = StepCase(task="test", depth=3, width=24, order=40, batch=4, length=64, inputs=3, classes=5)


def trained(device, case=CASE, steps=3):
    """On the CPU first, so that both devices have the same weights and moments."""
    torch.manual_seed(0)
    model = build_model(case)
    x, target = build_batch(case, torch.device("cpu"))
    optimizer = make_optimizer(model, torch.device("cpu"))
    step = eager_step(model, x, target, case, optimizer)
    for _ in range(steps):
        step()
    moved = build_model(case)
    moved.load_state_dict(model.state_dict())
    moved = moved.to(device)
    there = make_optimizer(moved, torch.device(device))
    state = optimizer.state_dict()
    state["param_groups"][0] |= {key: there.param_groups[0][key] for key in ("fused", "capturable")}
    there.load_state_dict(state)
    return moved, there, x.to(device), target.to(device)


def outputs(model, x):
    model.eval()
    with torch.no_grad():
        return model(x).float().cpu()


@pytest.mark.parametrize("data", [False, True], ids=["white noise", "measured"])
def test_a_cut_on_a_gpu_is_that_on_the_cpu(data):
    found = {}
    for device in ("cpu", "cuda"):
        model, optimizer, x, _ = trained(device)
        # As on the CPU: whole float32 products.
        events = cs.compress_(
            model,
            optimizer=optimizer,
            keep=cs.TargetOrder(12),
            calibrate=(lambda model, x=x: model(x)) if data else None,
        )
        found[device] = (events, model, optimizer, outputs(model, x))
    for here, there in zip(found["cpu"][0], found["cuda"][0], strict=True):
        assert (here.module, here.order, here.rank) == (there.module, there.order, there.rank)
        assert there.energy_lost == pytest.approx(here.energy_lost, rel=1e-3 if data else 1e-6)
        if not data:
            assert there.error_bound == pytest.approx(here.error_bound, rel=1e-6)
    torch.testing.assert_close(found["cuda"][3], found["cpu"][3], rtol=1e-3, atol=1e-3)


def test_moments_after_a_cut_on_a_gpu_are_those_on_the_cpu():
    sizes = {}
    for device in ("cpu", "cuda"):
        model, optimizer, _, _ = trained(device)
        cs.compress_(model, optimizer=optimizer, keep=cs.TargetOrder(12))
        sizes[device] = {
            (name, key): optimizer.state[parameter][key].double().cpu().norm()
            for name, parameter in model.named_parameters()
            for key in ("exp_avg", "exp_avg_sq")
        }
    for which, size in sizes["cpu"].items():
        torch.testing.assert_close(sizes["cuda"][which], size, rtol=1e-3, atol=1e-9, msg=str(which))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("moments", [cs.Transport(), cs.Restart()], ids=repr)
def test_training_goes_on_in_a_graph_recorded_anew(moments, precision):
    case = StepCase(**{**vars(CASE), "precision": precision})
    model, optimizer, x, target = trained("cuda", case)
    step = eager_step(model, x, target, case, optimizer)
    compressor = cs.Compressor(model, optimizer, when=[2, 4], keep=cs.KeepFraction(0.5), moments=moments)
    orders = []
    for number in range(1, 6):
        graph = capture(step, warm_up=1)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(3):
            graph()
        torch.cuda.synchronize()
        moved = [bool((now != old).any()) for now, old in zip(model.parameters(), before, strict=True)]
        assert all(moved)
        assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
        orders.append([event.rank for event in compressor.step(number)])
    assert orders == [[], [20] * 3, [], [10] * 3, []]
    assert math.isfinite(float(outputs(model, x).sum()))


@pytest.mark.parametrize(
    "method", [cs.Baked(), cs.Baked(refit=True), cs.SharedIndex(refit=True), cs.PerChannel()], ids=str
)
def test_a_cut_of_selective_layers_on_a_gpu_is_that_on_the_cpu(method):
    tokens, found = torch.randint(0, 11, (6, 40), generator=torch.Generator().manual_seed(1)), {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = cs.models.LanguageModel(cs.layers.Mamba, vocabulary=11, depth=2, width=16, order=12).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        there = tokens.to(device)
        model(there)[0].square().mean().backward()
        optimizer.step()
        compressor = cs.Compressor(
            model,
            optimizer,
            when=[1],
            keep=cs.TargetOrder(5),
            calibrate=lambda model, there=there: model(there),
            selective=method,
        )
        errors = [cut.measured_error for cut in compressor.step(1)]
        found[device] = errors, model.eval()(there)[0].detach().cpu()
    assert found["cuda"][0] == pytest.approx(found["cpu"][0], rel=0.02)
    torch.testing.assert_close(found["cuda"][1], found["cpu"][1], rtol=0, atol=1e-2)


@pytest.mark.parametrize("room", [True, False], ids=["on the GPU", "on the CPU"])
def test_weights_that_a_calibration_changes_are_put_back(room, monkeypatch):
    if not room:
        monkeypatch.setattr("compressm.layers.parameters._SHARE", 10**12)
    model, optimizer, x, _ = trained("cuda")
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def writes(model):
        model(x)
        model.head.weight.data.mul_(2)
        model.blocks[1].ssm.D.data = model.blocks[1].ssm.D.data.clone()

    with pytest.raises(CompressionError, match=r"calibrate changed head\.weight;"):
        cs.compress_(model, optimizer=optimizer, keep=cs.TargetOrder(12), calibrate=writes)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_copies_of_weights_stay_on_the_gpu():
    model, *_ = trained("cuda")
    assert all(kept.copy.is_cuda for kept in Kept(model)._tensors.values())


@pytest.mark.parametrize("ranks", [(12, 12, 12), (12, 9, 5)], ids=str)
def test_measured_errors_on_a_gpu_are_those_on_the_cpu(ranks):
    errors = {}
    for device in ("cpu", "cuda"):
        model, optimizer, x, _ = trained(device)
        events = cs.compress_(
            model,
            optimizer=optimizer,
            keep=lambda spectra: dict(zip(spectra, ranks, strict=True)),
            calibrate=lambda model, x=x: model(x),
        )
        errors[device] = [event.measured_error for event in events]
    assert errors["cuda"] == pytest.approx(errors["cpu"], rel=1e-2)
