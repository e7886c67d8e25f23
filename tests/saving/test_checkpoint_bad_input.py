"""What could not be read is not written, and what is not whole or does not fit changes nothing."""

import copy
import os
import pickle
from enum import Enum
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.optim.swa_utils import AveragedModel

from compressm.compression import Compressor, KeepFraction, SavingError, load_checkpoint, load_model, save_checkpoint
from compressm.layers import LRU, S4D
from compressm.models import SequenceClassifier
from compressm.saving.checkpoints import seal
from tests.saving.test_checkpoint import SCHEDULERS, Run, Shrinker


class Colour(Enum):
    RED = 1


class Point(tuple):
    pass


def within_itself():
    extra = [1]
    extra.append({"again": extra})
    return extra


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"a": [1, object()]}, r"extra\['a'\]\[1\] is a builtins.object, expected tensors"),
        ({"a": np.ones(2)}, r"extra\['a'\] is a numpy.ndarray"),
        (Colour.RED, "extra is a .*Colour"),
        (Point((1, 2)), "extra is a .*Point"),
        ({(1, Colour.RED): 1}, "a key of extra.*Colour"),
        (lambda: 1, "extra is a builtins.function"),
        (nn.Linear(1, 1), "extra is a torch.nn.modules.linear.Linear"),
        ({"a": torch.eye(2).to_sparse()}, r"extra\['a'\] is a tensor of the layout torch.sparse_coo.*to_dense"),
        (within_itself(), "cannot be written: extra contains itself"),
    ],
)
def test_what_would_need_code_to_read_is_not_written(extra, said, tmp_path):
    with pytest.raises(SavingError, match=said):
        save_checkpoint(tmp_path / "c", model=LRU(1, 1), extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_a_crash_leaves_the_old_checkpoint_whole(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "c", model=LRU(1, 1), step=1)

    def crash(*_):
        raise OSError("no power")

    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, crash)
            with pytest.raises(OSError, match="no power"):
                save_checkpoint(tmp_path / "c", model=LRU(1, 1), step=2)
    assert load_checkpoint(tmp_path / "c", model=LRU(1, 1)).step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    layer = LRU(1, 2)
    save_checkpoint(path, model=layer)
    return layer, path, path.with_name("other")


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(saved, share):
    _, whole, path = saved
    data = whole.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(SavingError, match=path.name):
        load_checkpoint(path, model=LRU(1, 2))


@settings(max_examples=200)
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_file_with_a_flipped_bit_is_refused(saved, share, bit):
    _, whole, path = saved
    data = bytearray(whole.read_bytes())
    data[int(share * len(data))] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(SavingError, match=path.name):
        load_checkpoint(path, model=LRU(1, 2))


class Trap:
    """Would leave a file behind when unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_files_of_others_are_refused_and_run_no_code(tmp_path):
    path, left = tmp_path / "other", tmp_path / "left"

    def sealed(contents):
        torch.save(contents, path)
        seal(path)

    ours = {"format": "compressm checkpoint"}
    writers = {
        "not a whole checkpoint": lambda: path.write_bytes(pickle.dumps(Trap(left))),
        "is not a whole checkpoint": lambda: path.write_bytes(b""),
        r"begin with b'PK.*save_checkpoint did not write it": lambda: torch.save({"weight": torch.ones(1)}, path),
        "holds more than tensors": lambda: sealed(Trap(left)),
        "it holds weight": lambda: sealed({"weight": torch.ones(1)}),
        "it holds list": lambda: sealed([1]),
        "has version 9": lambda: sealed(ours | {"version": 9}),
        "has no model": lambda: sealed(ours | {"version": 1}),
    }
    for said, write_file in writers.items():
        write_file()
        with pytest.raises(SavingError, match=rf"other .*{said}"):
            load_checkpoint(path, model=LRU(1, 1))
    assert not left.exists()


def test_what_is_not_there_or_is_a_directory_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_checkpoint(tmp_path / "none", model=LRU(1, 1))
    with pytest.raises(SavingError, match="is a directory"):
        save_checkpoint(tmp_path, model=LRU(1, 1))
    with pytest.raises(SavingError, match="is a directory, expected the file that save_checkpoint wrote"):
        load_checkpoint(tmp_path, model=LRU(1, 1))


@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="there is no file of that kind")
def test_a_file_that_the_system_does_not_give_is_told():
    for load in (lambda path: load_checkpoint(path, model=LRU(1, 1)), load_model):
        with pytest.raises(SavingError, match=r"/proc/self/mem cannot be read: .*; expected an ordinary file"):
            load("/proc/self/mem")


def reordered():
    run = Run()
    run.optimizer = torch.optim.Adam([{"params": list(group["params"])[::-1]} for group in run.optimizer.param_groups])
    return run


def other_model(**options):
    run = Run()
    run.model = SequenceClassifier(LRU, **{"depth": 2, "width": 3, "order": 6, "inputs": 2, "classes": 2} | options)
    run.optimizer = torch.optim.Adam([{"params": child.parameters()} for child in run.model.children()])
    run.compressor = Shrinker(run.model, run.optimizer)
    return run


OTHERS = {
    "another kind of optimizer": (lambda: Run(optimizer=torch.optim.SGD), "optimizer Adam, this one is a SGD"),
    "another kind of scheduler": (
        lambda: Run(scheduler=SCHEDULERS["cosine"]),
        "scheduler StepLR, this one is a CosineAnnealingWarmRestarts",
    ),
    "parameters in another order": (reordered, "saved with 'encoder.linear.weight' where this one has"),
    "another depth": (lambda: other_model(depth=1), r"groups of \[2, .*\] parameters, this one has \[2"),
    "another width": (lambda: other_model(width=4), r"encoder\.linear\.weight has shape \(3, 2\).*expected \(4, 2\)"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_does_not_fit_is_refused_before_anything_is_changed(case, tmp_path):
    make, said = OTHERS[case]
    save_checkpoint(tmp_path / "c", **Run(seed=5).parts)
    run = make()
    before = [p.tolist() for p in run.model.parameters()], torch.get_rng_state().tolist()
    with pytest.raises(SavingError, match=said):
        load_checkpoint(tmp_path / "c", **run.parts)
    assert ([p.tolist() for p in run.model.parameters()], torch.get_rng_state().tolist()) == before


def resumable(when):
    run = Run(layer=LRU)
    run.compressor = Compressor(run.model, run.optimizer, when=when, keep=KeepFraction(0.5))
    return run


def everything(run):
    parts = run.model, run.optimizer, run.scheduler, run.compressor
    return repr([part.state_dict() for part in parts]), torch.get_rng_state().tolist()


def test_a_schedule_with_another_past_is_refused_before_anything_is_changed(tmp_path):
    resumable([1, 3]).train(1, 2, path=tmp_path)
    for when in ([3], [1, 2, 3]):
        run = resumable(when)
        before = everything(run)
        with pytest.raises(SavingError) as refused:
            load_checkpoint(tmp_path / "2", **run.parts)
        said = str(refused.value)
        assert said.startswith(f"{tmp_path / '2'}: the saved schedule is [1, 3], this one's {when}")
        assert "the same steps up to step 2" in said
        assert "later steps may differ" in said
        assert everything(run) == before


def test_a_schedule_may_be_lengthened_when_training_is_resumed(tmp_path):
    resumable([1]).train(1, 2, path=tmp_path)
    run = resumable([1, 4])
    assert load_checkpoint(tmp_path / "2", **run.parts).step == 2
    run.train(3, 4, path=tmp_path)
    assert [(cut.step, cut.rank) for cut in run.compressor.history] == [(1, 3), (1, 3), (4, 1), (4, 1)]


COPIES = {"average": AveragedModel, "copy": copy.deepcopy, "compiled copy": lambda m: torch.compile(copy.deepcopy(m))}


@pytest.mark.parametrize("kind", COPIES)
def test_parts_of_another_model_are_neither_saved_nor_loaded(kind, tmp_path):
    run = resumable([1])
    save_checkpoint(tmp_path / "c", **run.parts)
    before, other = everything(run), COPIES[kind](run.model)
    own = torch.optim.Adam(other.parameters())
    for changed, said in (
        ({"compressor": None}, "optimizer, a Adam, holds no parameter of model.*not of another or of a copy"),
        ({"compressor": None, "optimizer": [own, run.optimizer]}, r"optimizer\[1\], a Adam, holds no parameter"),
        ({"optimizer": own}, r"compressor cuts no layer of model.*averages are saved with.*in follow="),
    ):
        parts = {**run.parts, "model": other, "scheduler": None, **changed}
        with pytest.raises(SavingError, match=said):
            save_checkpoint(tmp_path / "new", **parts)
        with pytest.raises(SavingError, match=said):
            load_checkpoint(tmp_path / "c", **parts)
    assert everything(run) == before
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: nn.Sequential(model, nn.ReLU())])
def test_parts_of_the_model_inside_wrappers_and_larger_models_are_its_own(wrap, tmp_path):
    run = resumable([1])
    parts = {**run.parts, "model": wrap(run.model)}
    save_checkpoint(tmp_path / "c", **parts, step=3)
    assert load_checkpoint(tmp_path / "c", **parts).step == 3


def test_a_part_that_was_not_saved_is_missed(tmp_path):
    run = Run()
    save_checkpoint(tmp_path / "c", model=run.model)
    with pytest.raises(SavingError, match="saved without a compressor"):
        load_checkpoint(tmp_path / "c", model=run.model, compressor=run.compressor)


@pytest.mark.parametrize("left", [["scheduler"], ["optimizer"], ["scheduler", "compressor"]])
def test_a_state_that_stays_in_the_file_while_training_goes_on_is_named(left, tmp_path, recwarn):
    run = Run()
    save_checkpoint(tmp_path / "c", **run.parts)
    load_checkpoint(tmp_path / "c", model=run.model)  # to use the model
    load_checkpoint(tmp_path / "c", **run.parts)
    assert not recwarn
    said = rf"has the state of the {' and of the '.join(left)}, .*pass {', '.join(f'{name}=...' for name in left)}"
    with pytest.warns(UserWarning, match=said):
        load_checkpoint(tmp_path / "c", **{name: part for name, part in run.parts.items() if name not in left})


def test_another_dtype_or_another_model_is_refused(tmp_path):
    save_checkpoint(tmp_path / "c", model=LRU(1, 1))
    with pytest.raises(SavingError, match=r"nu_log was saved as torch\.float32, the model's is torch\.float64"):
        load_checkpoint(tmp_path / "c", model=LRU(1, 1).double())
    with pytest.raises(SavingError, match="has the orders of '', expected those of nothing"):
        load_checkpoint(tmp_path / "c", model=nn.Linear(1, 1))
    with pytest.raises(SavingError, match="A_imag, log_A_real, log_step missing"):
        load_checkpoint(tmp_path / "c", model=S4D(1, 1))


class Picky(torch.optim.lr_scheduler.StepLR):
    """Loads half of a state, then wants a key that only its later version writes."""

    def load_state_dict(self, state):
        self.step_size = state["step_size"]
        if state["last_epoch"] > 0:
            raise KeyError("wanted")
        super().load_state_dict(state)


def test_a_scheduler_that_does_not_load_leaves_all_as_it_was(tmp_path):
    Run(scheduler=lambda optimizer: Picky(optimizer, 7)).train(1, 2, path=tmp_path)
    other = Run(scheduler=lambda optimizer: Picky(optimizer, 3), seed=1)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(SavingError, match="a Picky does not load its state in the file: 'wanted'"):
        load_checkpoint(tmp_path / "2", **other.parts)
    assert other.scheduler.step_size == 3
    assert all(torch.equal(value, before[name]) for name, value in other.model.state_dict().items())
    assert not other.optimizer.state


@pytest.mark.parametrize("step", [np.int64(3), torch.tensor(3)])
def test_a_step_may_come_from_numpy_or_a_tensor(tmp_path, step):
    """As in `Compressor.step`."""
    save_checkpoint(tmp_path / "c.pt", model=LRU(1, 1), step=step)
    assert load_checkpoint(tmp_path / "c.pt", model=LRU(1, 1)).step == 3


class Pair(nn.Module):
    """Two layers and two matrices, which may be shared."""

    def __init__(self, shared="", order=6):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.table, self.head = LRU(4, order), LRU(4, order), nn.Embedding(7, 4), nn.Linear(4, 7, False)
        if shared == "layer":
            self.b = self.a
        if shared == "matrix":
            self.head.weight = self.table.weight
        if shared == "parameter":
            self.b.D = self.a.D
        if shared != "matrix":
            torch.nn.init.ones_(self.table.weight)


SHARING = [
    ("", "layer", "the model uses one layer as a and as b, and the file has one for each: it was saved by a model"),
    ("layer", "", "the file has one layer for a and b, and the model one for each: share them here too, or load"),
    ("", "matrix", "the model shares one tensor as table.weight and as head.weight, and the file has other values in"),
    ("", "parameter", "the model shares one tensor as a.D and as b.D, and the file has other values in each"),
    ("matrix", "layer", "the model uses one layer as a and as b"),
]


@pytest.mark.parametrize(("saved", "here", "said"), SHARING)
@pytest.mark.parametrize("trained", [False, True], ids=["model", "with an optimizer"])
@pytest.mark.parametrize("order", [6, 4])
def test_a_file_of_a_model_that_shares_otherwise_is_refused_with_what_is_shared(
    saved, here, said, trained, order, tmp_path
):
    one, other = Pair(saved, order), Pair(here)
    one.a.D.data += 1
    optimizers = [{"optimizer": torch.optim.SGD(model.parameters())} if trained else {} for model in (one, other)]
    save_checkpoint(tmp_path / "c", model=one, **optimizers[0])
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(SavingError, match=f"{tmp_path / 'c'}: {said}"):
        load_checkpoint(tmp_path / "c", model=other, **optimizers[1])
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("shared", ["layer", "matrix", "parameter"])
def test_a_file_of_a_model_that_shares_the_same_is_loaded(shared, tmp_path):
    save_checkpoint(tmp_path / "c", model=Pair(shared, 4))
    other = Pair(shared)
    load_checkpoint(tmp_path / "c", model=other)
    assert other.a.order == other.b.order == 4
    save_checkpoint(tmp_path / "matrix", model=Pair("matrix"))
    apart = Pair()
    load_checkpoint(tmp_path / "matrix", model=apart)  # both copies are the same, and are the model's own from here on
    assert torch.equal(apart.head.weight, apart.table.weight)
    assert apart.head.weight is not apart.table.weight
