import pytest
import torch
import compressm as cs
from compressm.layers import LRU
from compressm.models import SequenceClassifier
from compressm.exporting import TorchExport, export, ONNX


@pytest.mark.parametrize("what", ["step", "forward"])
def test_hooked(what, tmp_path):
    torch.manual_seed(0)
    m = SequenceClassifier(LRU, depth=1, width=4, order=3, inputs=2, classes=3)
    e = export(m, tmp_path / "m.pt2", what=what, check=40)
    print(e)
