"""Runtimes: what they do with a model, and step times by order."""

import dataclasses
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import compressm as cs
from compressm import deploy
from compressm.deploy import Rule, Runtime, Verdict
from compressm.families.choices import Multiples
from compressm.layers import LRU, Mamba
from compressm.models import LanguageModel
from tests.adapters import test_normed_mixers

TOKENS = torch.randint(0, 7, (4, 64), generator=torch.Generator().manual_seed(0))
DOCS = Path(__file__).parents[1] / "docs" / "runtimes.md"


def writer(*orders, layer=Mamba, width=64):
    torch.manual_seed(0)
    parts = [LanguageModel(layer, depth=len(orders), width=width, order=order, vocabulary=7) for order in orders]
    for k, part in enumerate(parts):
        parts[0].blocks[k] = part.blocks[k]
    return parts[0].eval()


def verdicts(model, runtime):
    return [one.verdict.value for one in deploy.check(model, runtime).verdicts]


@pytest.mark.parametrize(
    ("runtime", "order", "verdict"),
    [
        (deploy.TRANSFORMERS, 7, "fine"),
        (deploy.LLAMA_CPP_CPU, 7, "fine"),
        (deploy.LLAMA_CPP_METAL, 7, "fine"),
        (deploy.LLAMA_CPP_CUDA, 16, "fine"),
        (deploy.LLAMA_CPP_CUDA, 8, "slow"),
        (deploy.LLAMA_CPP_VULKAN, 16, "slow"),
        (deploy.CANDLE, 16, "fine"),
        (deploy.CANDLE, 32, "refused"),
        (deploy.VLLM, 64, "fine"),
        (deploy.VLLM, 20, "slow"),
        (deploy.VLLM, 300, "refused"),
        (deploy.SGLANG, 20, "slow"),
        (deploy.MAMBA_SSM, 257, "refused"),
        (deploy.MLX, 7, "fine"),
        (deploy.FLA, 64, "refused"),
    ],
    ids=str,
)
def test_the_verdict_on_an_order(runtime, order, verdict):
    model = writer(order)
    found = deploy.check(model, runtime)
    assert verdicts(model, runtime) == [verdict]
    assert found.fine == (verdict == "fine")
    assert verdict in str(found)
    (finding,) = found.verdicts
    assert (finding.why == "") == (finding.cure == "") == (verdict == "fine")


@pytest.mark.parametrize(("order", "verdict"), [(48, "silently wrong"), (64, "fine"), (31, "silently wrong")])
def test_mlx_loses_states_of_mamba_2_in_silence(order, verdict):
    assert deploy.MLX.rule("Mamba-2").verdict(order).value == verdict


def test_unequal_orders_are_refused_by_all_and_padding_cures_it():
    for runtime in deploy.RUNTIMES.values():
        model = writer(16, 8)
        found = deploy.check(model, runtime).verdicts[-1]
        assert (found.layer, found.order, found.verdict) == ("all layers", "8, 16", Verdict.REFUSED)
        assert "pad_orders_(model)" in found.cure
    cs.pad_orders_(model)
    assert verdicts(model, deploy.LLAMA_CPP_CUDA) == ["fine", "fine"]


@pytest.mark.parametrize("runtime", [deploy.LLAMA_CPP_CUDA, deploy.CANDLE, deploy.VLLM], ids=str)
def test_what_is_cut_for_a_runtime_is_fine_there(runtime):
    model = writer(40, 40)
    cs.compress_(model, keep=cs.EnergyTolerance(0.2), calibrate=lambda model: model(TOKENS), round_to=runtime)
    assert deploy.check(model, runtime).fine


def test_a_cure_that_is_followed_cures():
    model = writer(20, 20)
    (finding, _) = deploy.check(model, deploy.VLLM).verdicts
    assert finding.cure == "pad_orders_(model, 32) or compress_(model, keep=TargetOrder(16), ...)"
    before, _ = model(TOKENS)
    cs.pad_orders_(model, 32)
    assert deploy.check(model, deploy.VLLM).fine
    torch.testing.assert_close(model(TOKENS)[0], before)


def test_layers_that_a_runtime_does_not_have_are_refused():
    (finding,) = deploy.check(writer(16, layer=LRU), deploy.TRANSFORMERS).verdicts
    assert (finding.verdict, finding.why) == (Verdict.REFUSED, "transformers has no LRU layers")
    assert finding.cure == "export the model's step instead"


def test_layers_that_are_not_ours_are_not_advised_to_be_exported():
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, state_size=2))
    (finding,) = deploy.check(model, deploy.FLA).verdicts
    assert (finding.verdict, finding.why) == (Verdict.REFUSED, "flash-linear-attention has no Mamba-1 layers")
    assert finding.cure == "use another runtime"


@pytest.mark.parametrize("name", ["FalconMamba", "Jamba"])
def test_mixers_with_norms_run_only_where_there_are_norms(name):
    model = test_normed_mixers.make(name)
    for runtime in (deploy.CANDLE, deploy.MAMBA_SSM, deploy.SGLANG, deploy.FLA):
        assert set(verdicts(model, runtime)) == {"refused"}
    assert "candle has no normed Mamba-1 layers" in str(deploy.check(model, deploy.CANDLE))
    assert verdicts(model, deploy.LLAMA_CPP_CPU) == ["fine", "fine"]
    (finding, _) = deploy.check(model, deploy.VLLM).verdicts
    assert finding.cure.startswith("pad_orders_(model, 8) or compress_(model, keep=TargetOrder(4)")
    cs.pad_orders_(model, 8)
    assert deploy.check(model, deploy.VLLM).fine


def test_an_inner_width_that_a_kernel_does_not_take_is_named():
    (found,) = deploy.check(writer(16, width=24), deploy.LLAMA_CPP_CUDA).verdicts
    assert (found.verdict, found.why) == (Verdict.SLOW, "its inner width 48 is no multiple of 128")
    assert deploy.check(writer(16, width=24), deploy.CANDLE).fine


def test_channels_with_states_of_their_own_are_refused():
    model = writer(16)
    cs.compress_(model, keep=cs.TargetOrder(8), calibrate=lambda model: model(TOKENS), selective=cs.PerChannel())
    (finding,) = deploy.check(model, deploy.TRANSFORMERS).verdicts
    assert finding.verdict is Verdict.REFUSED
    assert "B_map" in finding.why


def test_wrapped_models_are_checked_inside():
    assert verdicts(nn.Sequential(writer(16)), deploy.CANDLE) == ["fine"]
    assert verdicts(torch.optim.swa_utils.AveragedModel(writer(16)), deploy.CANDLE) == ["fine"]


def test_a_runtime_of_ones_own_is_one_like_the_others():
    rule = Rule("linear", Multiples(4), Verdict.WRONG, "it reads four states at a time", "our own engine")
    mine = Runtime("mine", (rule,))
    assert pickle.loads(pickle.dumps(mine)) == mine
    assert mine != dataclasses.replace(mine, name="other")
    model = writer(10, 10, layer=LRU)
    assert verdicts(model, mine) == ["silently wrong", "silently wrong"]
    cs.compress_(model, keep=cs.TargetOrder(5), round_to=mine)
    assert verdicts(model, mine) == ["fine", "fine"]


def test_every_preset_says_why_and_where_it_is_written():
    for name, runtime in deploy.RUNTIMES.items():
        assert getattr(deploy, name.replace("-", "_").upper()) is runtime
        assert all(rule.why and rule.source for rule in runtime.rules)
        assert runtime.one_for_all


def test_the_table_in_the_documentation_is_that_of_the_presets():
    assert deploy.table() in DOCS.read_text(encoding="utf-8")


def test_step_times_are_those_of_models_of_each_order():
    seen, model = [], writer(6, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def run(model):
        seen.append([block.ssm.order for block in model.blocks])
        model(TOKENS)
        torch.rand(3)

    random = torch.get_rng_state()
    times = deploy.step_times(model, run, (8, 2, 6), repeats=3)
    assert torch.equal(torch.get_rng_state(), random)
    assert list(times) == [2, 6, 8]
    assert all(time > 0 for time in times.values())
    assert seen == [[order, order] for order in (2, 6, 8) for _ in range(5)]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    cuts = cs.compress_(
        model, keep=cs.Budget(milliseconds=1.5, measure={2: 1.0, 6: 2.0}), calibrate=lambda model: model(TOKENS)
    )
    assert sorted(cut.rank for cut in cuts) in ([2], [2, 2])
