"""Under torch.compile a block trains by the kernels of eager mode: results are the plain block's, at every order."""

import json

import pytest

from tests import unhooked
from tests.kernels import DEVICE, GPU, MARK, later

pytestmark = MARK

SCRIPT = """
import copy, json, os, sys
layer, width, dropout, half, device = sys.argv[1:]
width, dropout, half = int(width), dropout == "dropout", half == "bfloat16"
if device == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
import torch, torch._dynamo
from torch import nn
from compressm.layers import LRU, Mamba
from compressm.models import Block, Blocks, MixerBlock, OneMask, PerElement, RMSNorm
from compressm.ops import dispatch
if device == "cpu":
    import tests.kernels
dispatch._DEVICES = (device,)
import torch._inductor.config
torch._inductor.config.fallback_random = True  # masks are those of eager mode
backend = "inductor" if device == "cuda" else "aot_eager"
counts, worst, found_ops = [], 0.0, set()

def compiler(graph, inputs):
    found_ops.update(str(node.target) for node in graph.graph.nodes if "compressm." in str(node.target))
    return torch._dynamo.lookup_backend(backend)(graph, inputs)

def results(model, run, x):
    x = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast(device, torch.bfloat16, enabled=half and model is not plain):
        out, states = run(x, keep_state=layer == "Mamba")
    loss = (out.double() * torch.arange(out.numel(), device=device).view_as(out).sin()).sum()
    for state in states or ():
        loss = loss + state.double().square().sum()
    loss.backward()
    return [out.detach(), x.grad, *[p.grad for p in model.parameters()], *model.buffers()]

torch.manual_seed(0)
kind = OneMask(0.3) if dropout else PerElement(0.0)
make = LRU if layer == "LRU" else Mamba
around = {"norm": RMSNorm()} if layer == "Mamba" else {}
block_of = Block if layer == "LRU" else MixerBlock
model = Blocks([block_of(make(width, order=9), dropout=kind, **around) for _ in range(2)]).to(device)
run = torch.compile(model, backend=compiler, fullgraph=True)
for order in (9, 8, 18, 5):
    for block in model:
        block.ssm.load_state_dict(make(width, order=order).state_dict())
    x = torch.randn(3, 12, width, generator=torch.Generator().manual_seed(order)).to(device)
    dispatch._DEVICES = ()
    plain = copy.deepcopy(model).double()
    wanted = results(plain, plain, x.double())
    dispatch._DEVICES = (device,)
    before = [value.clone() for value in model.buffers()]
    if not dropout:
        got = results(model, run, x)
    else:  # the plain block draws the same masks in another order: eager kernels draw them as compiled ones do
        wanted = results(model, model, x)
        wanted = [value.clone() for value in wanted]
        for now, value in zip(model.buffers(), before):
            now.copy_(value)
        got = results(model, run, x)
    pairs = [(a.double(), b.double()) for a, b in zip(got, wanted, strict=True)]
    worst = max([worst] + [((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).item() for a, b in pairs])
    counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
print(json.dumps({"counts": counts, "worst": worst, "ops": sorted(found_ops)}))
"""


@pytest.mark.parametrize(
    ("layer", "width", "op", "dropout"),
    [
        ("LRU", 6, "narrow_lru_block", "dropout"),
        later("LRU", 6, "narrow_lru_block", "no dropout"),
        later("LRU", 40, "wide_lru_block", "dropout"),
        ("LRU", 40, "wide_lru_block", "no dropout"),
        ("Mamba", 5, "mamba_mixer", "no dropout"),
        later("Mamba", 5, "mamba_mixer", "dropout"),
    ],
)
def test_a_compiled_block_learns_what_the_plain_one_does_at_every_order(layer, width, op, dropout):
    found = json.loads(unhooked.run(SCRIPT, layer, str(width), dropout, "float32", DEVICE.type))
    assert f"compressm.{op}" in found["ops"]
    assert not {"compressm.scan", "compressm.selective_scan", "compressm.lti_layer"} & set(found["ops"])
    assert found["counts"] == [found["counts"][0]] * 4
    assert found["worst"] < 2e-4


@pytest.mark.skipif(not GPU, reason="autocast of the kernels is that of a GPU")
@pytest.mark.parametrize(("layer", "width"), [("LRU", 8), ("LRU", 40), ("Mamba", 8)])
def test_it_does_so_in_half_precision(layer, width):
    found = json.loads(unhooked.run(SCRIPT, layer, str(width), "no dropout", "bfloat16", "cuda"))
    assert found["worst"] < 0.1
