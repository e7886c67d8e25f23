"""Models that follow a compressor are saved in its checkpoints and loaded with the model, at any orders."""

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from compressm.compression import (
    CompressionError,
    Compressor,
    PerChannel,
    SavingError,
    load_checkpoint,
    save_checkpoint,
)
from compressm.layers import LRU, Mamba
from compressm.models import SequenceClassifier
from tests.saving.changed_checkpoints import frozen, write

X = torch.randn(4, 12, 3, generator=torch.Generator().manual_seed(1))


class Run:
    """A training with an average of torch and a copy that is averaged by hand; cuts are at steps 2 and 5."""

    def __init__(self, layer=LRU, seed=0, **options):
        torch.manual_seed(seed)
        self.model = SequenceClassifier(layer, depth=1, width=4, order=8, inputs=3, classes=5)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.average, self.copy = AveragedModel(self.model), copy.deepcopy(self.model)
        options = {"follow": [self.average, self.copy], "calibrate": lambda model: model(X), **options}
        self.compressor = Compressor(self.model, self.optimizer, when=[2, 5], keep=halved, **options)

    @property
    def parts(self):
        return {name: getattr(self, name) for name in ("model", "optimizer", "compressor")}

    def train(self, first, last):
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 12, 3)).square().sum().backward()
            self.optimizer.step()
            if self.compressor.followers:
                self.average.update_parameters(self.model)
                with torch.no_grad():
                    for mean, new in zip(self.copy.parameters(), self.model.parameters(), strict=True):
                        mean.lerp_(new, 0.1)
            self.compressor.step(step)
        return self

    def everything(self):
        parts = (self.model, self.average, self.copy, self.optimizer, self.compressor)
        # Records hold the seconds that a cut took.
        return frozen([part.state_dict() for part in parts[:4]]), len(self.compressor.history)


def halved(spectra):
    return {name: max(1, values.shape[-1] // 2) for name, values in spectra.items()}


@pytest.mark.parametrize(
    ("layer", "options"), [(LRU, {}), (Mamba, {}), (Mamba, {"selective": PerChannel()})], ids=["LRU", "Mamba", "maps"]
)
def test_averages_go_on_bit_for_bit_from_before_between_and_after_cuts(layer, options, tmp_path):
    whole = Run(layer, **options)
    for step in range(1, 7):
        whole.train(step, step)
        save_checkpoint(tmp_path / str(step), step=step, **whole.parts)
    for step in (1, 3, 6):
        run = Run(layer, seed=7, **options)
        before = dict(run.average.named_parameters())
        load_checkpoint(tmp_path / str(step), **run.parts)
        assert all(before.get(name, p) is p for name, p in run.average.named_parameters())
        assert run.train(step + 1, 6).everything() == whole.everything()
        assert int(run.average.n_averaged) == 6
        assert "update_parameters" not in vars(run.average)


def test_a_checkpoint_loads_into_the_training_that_wrote_it_at_earlier_orders(tmp_path):
    run = Run().train(1, 1)
    save_checkpoint(tmp_path / "one", **run.parts)
    before = run.everything()
    run.train(2, 3)
    assert run.average.module.blocks[0].ssm.order == 4
    load_checkpoint(tmp_path / "one", **run.parts)
    assert run.everything() == before
    run.average.update_parameters(run.model)


def without_followers(path):
    """A checkpoint as earlier versions wrote it."""
    contents = torch.load(path, weights_only=True)
    del contents["followers"]
    write(contents, path)


def test_an_old_checkpoint_loads_and_says_what_to_do_for_its_followers(tmp_path):
    saved = Run().train(1, 3)
    averages = {"average": saved.average.state_dict(), "copy": saved.copy.state_dict()}
    save_checkpoint(tmp_path / "old", step=3, extra=averages, **saved.parts)
    without_followers(tmp_path / "old")
    expected = saved.train(4, 6).everything()
    run = Run(seed=7)
    with pytest.warns(UserWarning, match=r"no weights of follow\[0\], follow\[1\].*load_state_dict"):
        extra = load_checkpoint(tmp_path / "old", **run.parts).extra
    with pytest.raises(CompressionError, match=r"has the shape \(8,\) in it.*load its own saved state of these orders"):
        run.average.update_parameters(run.model)
    with pytest.raises(CompressionError, match=r"follow\[0\].*load the state of the copy that was saved with it"):
        run.compressor.step(5)
    run.average.load_state_dict(extra["average"])
    run.copy.load_state_dict(extra["copy"])
    assert run.train(4, 6).everything() == expected


def test_another_number_of_followers_is_refused_before_anything_is_changed(tmp_path):
    save_checkpoint(tmp_path / "two", **Run().train(1, 3).parts)
    run = Run(seed=7)
    run.compressor = Compressor(run.model, run.optimizer, when=[2, 5], keep=halved, follow=[run.average])
    before = run.everything()
    with pytest.raises(SavingError, match="has the weights of 2 followers, the compressor has 1"):
        load_checkpoint(tmp_path / "two", **run.parts)
    assert run.everything() == before


def test_a_compressor_without_followers_says_that_they_are_not_loaded(tmp_path):
    save_checkpoint(tmp_path / "two", **Run().train(1, 3).parts)
    run = Run(seed=7, follow=[])
    with pytest.warns(UserWarning, match=r"weights of follow\[0\], follow\[1\], which are not loaded.*same follow="):
        load_checkpoint(tmp_path / "two", **run.parts)
    assert run.model.blocks[0].ssm.order == 4


def test_without_a_compressor_followers_are_left_out_like_it(tmp_path):
    run = Run().train(1, 3)
    save_checkpoint(tmp_path / "two", **run.parts)
    other = SequenceClassifier(LRU, depth=1, width=4, order=8, inputs=3, classes=5)
    load_checkpoint(tmp_path / "two", model=other)
    assert frozen(other.state_dict()) == frozen(run.model.state_dict())


def test_followers_of_another_width_are_named_and_nothing_changes(tmp_path):
    saved = Run().train(1, 3)
    save_checkpoint(tmp_path / "wide", **saved.parts)
    contents = torch.load(tmp_path / "wide", weights_only=True)
    contents["followers"][1]["model"]["head.bias"] = torch.ones(3)
    write(contents, tmp_path / "wide")
    run = Run(seed=7)
    before = run.everything()
    with pytest.raises(SavingError, match=r"wide: follow\[1\]: head\.bias has shape \(3,\).*expected \(5"):
        load_checkpoint(tmp_path / "wide", **run.parts)
    assert run.everything() == before


def test_an_average_may_be_added_to_a_training_that_is_resumed(tmp_path):
    save_checkpoint(tmp_path / "bare", **Run(follow=[]).train(1, 3).parts)
    run = Run(seed=7, follow=[])
    load_checkpoint(tmp_path / "bare", **run.parts)
    run.average = AveragedModel(run.model)
    state = run.compressor.state_dict()
    run.compressor = Compressor(run.model, run.optimizer, when=[2, 5], keep=halved, follow=[run.average])
    run.compressor.load_state_dict(state)
    assert len(run.compressor.step(5)) == 1
    run.average.update_parameters(run.model)
