"""Models with recurrent and attention layers: cut, saved, and read by transformers alone in a process of its own."""

import pytest
import torch

import compressm as cs
from compressm.adapters import find
from tests import unhooked
from tests.adapters import test_delta_net, test_mamba2, test_normed_mixers
from tests.adapters.test_mamba2 import IDS
from tests.marks import later

transformers = pytest.importorskip("transformers")

# Weights of models that were never trained are so small that the ε of norms counts.
pytestmark = pytest.mark.filterwarnings("ignore:.*of the norm behind them counts:UserWarning")

HYBRIDS = {
    "Jamba": test_normed_mixers.make,
    **dict.fromkeys(("Bamba", "GraniteMoeHybrid", "FalconH1", "Zamba2", "NemotronH"), test_mamba2.make),
    **dict.fromkeys(("Qwen3Next", "Qwen3_5", "OlmoHybrid"), test_delta_net.make),
}
ALONE = """
import os
import sys
import torch
import transformers

os.chdir(sys.argv[1])
transformers.logging.set_verbosity_error()
folder, found = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
ids = torch.load(f"{folder}/ids.pt")
with torch.no_grad():
    whole = model(ids).logits
    text = model.generate(ids[:, :9], use_cache=True, max_new_tokens=8, do_sample=False)
assert "compressm" not in sys.modules
torch.save({"name": type(model).__name__, "logits": whole, "text": text}, found)
"""


def gap(model):
    """How far logits of decoding with a cache are from those without; FalconH1 of transformers has one of .2."""
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    cached = model.generate(IDS[:, :9], do_sample=False, use_cache=True, **options)
    with torch.no_grad():
        whole = model(cached.sequences[:, :-1], use_cache=False).logits[:, 8:]
    return float((torch.stack(cached.logits, dim=1) - whole).abs().max())


@pytest.mark.parametrize("name", later(HYBRIDS, "Jamba", "Qwen3Next"))
def test_a_hybrid_is_cut_saved_and_decodes_in_transformers_alone(name, tmp_path):
    model = HYBRIDS[name](name)
    mixers = find(model)
    cut_ones = tuple(f"{path}." for path in mixers)
    others = {key: value.clone() for key, value in model.state_dict().items() if not key.startswith(cut_ones)}
    assert any(".q_proj." in key for key in others)
    before = gap(model)
    records = cs.compress_(model, keep=cs.TargetOrder(4), calibrate=lambda model: model(IDS, use_cache=False))
    assert [one.rank for one in records] == [4] * len(mixers)
    assert all(0 < one.measured_error < 1.5 for one in records)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in others.items())
    assert gap(model) < before + 1e-3

    model.save_pretrained(tmp_path)
    torch.save(IDS, tmp_path / "ids.pt")
    unhooked.run(ALONE, str(tmp_path), str(tmp_path / "found.pt"), loaded=False)
    found = torch.load(tmp_path / "found.pt")
    assert found["name"] == type(model).__name__
    with torch.no_grad():
        torch.testing.assert_close(found["logits"], model(IDS, use_cache=False).logits, rtol=1e-4, atol=1e-5)
    assert torch.equal(found["text"], model.generate(IDS[:, :9], max_new_tokens=8, do_sample=False))
