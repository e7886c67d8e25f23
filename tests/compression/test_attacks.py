"""Users' functions that do more than they should, and snapshots that were damaged."""

import copy

import pytest
import torch

from compressm.compression import CompressionError, Compressor, Rollback, TargetOrder, compress_
from compressm.layers import LRU
from compressm.models import SequenceClassifier


def make():
    torch.manual_seed(0)
    return SequenceClassifier(LRU, depth=2, width=4, order=8, inputs=3, classes=5)


X = torch.randn(6, 20, 3, generator=torch.Generator().manual_seed(0))


def orders(model):
    return [block.ssm.order for block in model.blocks]


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9])
def test_a_snapshot_with_a_flipped_bit_is_refused_and_nothing_changes(place, tmp_path):
    model, values = make(), iter([1.0, 0.1])
    guard = Rollback(lambda: next(values), settle=1, folder=tmp_path)
    compressor = Compressor(model, when=[1], keep=TargetOrder(4), guard=guard)
    compressor.step(1)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 64
    file.write_bytes(content)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CompressionError, match="is damaged"):
        compressor.step(2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["a layer", "a block", "the head"])
def test_calibrate_cannot_replace_parts_of_the_model(how):
    model = make()
    parts = dict(model.named_modules())

    def calibrate(model):
        model(X)
        if how == "a layer":
            model.blocks[0].ssm = copy.deepcopy(model.blocks[0].ssm)
        elif how == "a block":
            del model.blocks[1]
        else:
            model.head = torch.nn.Sequential(model.head)

    with pytest.raises(CompressionError, match=r"calibrate changed (blocks|head)"):
        compress_(model, keep=TargetOrder(4), calibrate=calibrate)
    assert dict(model.named_modules()) == parts
    assert orders(model) == [8, 8]


def test_a_policy_gets_copies_of_the_spectra():
    def keep(spectra):
        for sigma in spectra.values():
            sigma.zero_()
        return dict.fromkeys(spectra, 4)

    expected = compress_(make(), keep=TargetOrder(4))
    assert [cut.energy_lost for cut in compress_(make(), keep=keep)] == [cut.energy_lost for cut in expected]


def test_a_step_inside_a_step_is_refused_and_the_next_one_works():
    model, again = make(), []

    def evaluate():
        if not again:
            again.append(1)
            compressor.step(1)
        return 1.0

    compressor = Compressor(model, when=[1], keep=TargetOrder(4), guard=Rollback(evaluate))
    with pytest.raises(CompressionError, match=r"step\(1\) was called inside a step"):
        compressor.step(1)
    assert orders(model) == [8, 8]
    assert len(compressor.step(1)) == len(compressor.history) == 2
