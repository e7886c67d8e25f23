"""Equal models give equal files, in any process."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import compressm
from compressm import load_model, save_model
from compressm.compression import TargetOrder, compress_
from compressm.layers import LRU, S4D, S5, Mamba
from compressm.models import LanguageModel, LayerNorm, SequenceClassifier
from tests import unhooked

SCRIPT = """
import hashlib, sys, tempfile, torch
from pathlib import Path
from compressm import save_model
from compressm.layers import LRU, Mamba
from compressm.models import SequenceClassifier

torch.manual_seed(0)
model = torch.nn.Sequential(
    SequenceClassifier(LRU, depth=2, width=4, order=6, inputs=2, classes=3), torch.nn.Linear(3, 3).half(), Mamba(2)
)
model[0].head = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.GELU())
model[0].blocks[1] = model[0].blocks[0]
model[2].requires_grad_(False)
with tempfile.TemporaryDirectory() as folder:
    save_model(model, folder)
    print(*(hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).iterdir())))
print(hash("text"))
"""


def test_other_processes_and_other_hash_seeds_write_the_same_bytes():
    source = str(Path(compressm.__file__).parents[1])
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    (*files, seeded), (*others, other) = done.stdout.split(), unhooked.run(SCRIPT).split()
    assert len(files) == 2
    assert files == others
    assert seeded != other


MODELS = {
    "classifier": lambda: SequenceClassifier(S5, depth=2, width=4, order=6, inputs=2, classes=3, norm=LayerNorm()),
    "bank": lambda: S4D(3, 4),
    "language model": lambda: LanguageModel(LRU, depth=1, width=4, order=4, vocabulary=7),
    "several dtypes": lambda: nn.Sequential(Mamba(3, 4), nn.Linear(3, 3).half(), nn.Linear(3, 3).double()),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_was_loaded_is_saved_with_the_same_bytes(case, tmp_path):
    for k in range(8):  # safetensors' order of two keys is right in half of all files
        model = MODELS[case]() if k == 0 else load_model(tmp_path / "0")
        save_model(model, tmp_path / str(k))
    files = [[path.read_bytes() for path in sorted((tmp_path / str(k)).iterdir())] for k in range(8)]
    assert all(other == files[0] for other in files)


def test_the_layout_in_memory_is_not_seen_in_the_file(tmp_path):
    model = SequenceClassifier(LRU, depth=2, width=4, order=6, inputs=2, classes=3)
    compress_(model, keep=TargetOrder(3))
    save_model(model, tmp_path / "one.safetensors")
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.mT.contiguous().mT
    save_model(model, tmp_path / "two.safetensors")
    one, two = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("one", "two"))
    assert hashlib.sha256(one).hexdigest() == hashlib.sha256(two).hexdigest()


def test_safetensors_reads_names_that_need_escapes(tmp_path):
    model = nn.Sequential()
    model.add_module('ä "quoted" \\ \t\x7f', nn.Linear(2, 2))
    save_model(model, tmp_path / "odd.safetensors")
    with safe_open(tmp_path / "odd.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(model.state_dict())
    assert torch.equal(load_model(tmp_path / "odd.safetensors")[0].weight, model[0].weight)
