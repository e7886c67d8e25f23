"""A checkpoint is loaded as a whole or not at all: with any part changed, and with an error at any line."""

import gc
import re
import sys
from pathlib import Path

import pytest
import torch

import compressm
from compressm.compression import Compressor, KeepFraction, SavingError, load_checkpoint, save_checkpoint
from compressm.ops import SequenceError
from tests.saving.changed_checkpoints import Guarded, at, changed, everything, goes_on, others, places, saved, write


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("whole") / "c")


def cases(contents):
    found = [path for path in places(contents) if path]
    return [(path, k) for path in found for k, _ in enumerate(others(at(contents, path)))]


def check_all_or_nothing(contents, chosen, path):
    """The numbers of changed files that were refused, with all as before, and of those that train on."""
    refused = loaded = 0
    run = Guarded(seed=1).train(1, 1)
    before = everything(run)
    for place, k in chosen:
        write(changed(contents, place, list(others(at(contents, place)))[k]), path)
        try:
            load_checkpoint(path, **run.parts)
        except SavingError:
            refused += 1
            assert everything(run) == before, place
            continue
        loaded += 1
        # NaN in weights and moments is what a training that failed saves; the model says so.
        try:
            assert goes_on(path)
        except (SequenceError, SavingError) as error:
            if not re.search("nan|not finite", str(error)):
                raise
        run = Guarded(seed=1).train(1, 1)
        before = everything(run)
    return refused, loaded


@pytest.mark.filterwarnings("ignore:the file has no weights of follow")
def test_a_file_with_any_part_changed_is_refused_or_trains_on(contents, tmp_path):
    refused, loaded = check_all_or_nothing(contents, cases(contents)[::70], tmp_path / "x")
    assert refused > 10
    assert loaded > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the file has no weights of follow")
def test_a_file_with_every_part_changed_is_refused_or_trains_on(contents, tmp_path):
    refused, loaded = check_all_or_nothing(contents, cases(contents), tmp_path / "x")
    assert refused > 2500
    assert loaded > 200


CHANGES = {
    "a moment of another shape": (("optimizer", "state", "state", 0, "exp_avg"), torch.ones(7), "exp_avg"),
    "a moment that is missing": (("optimizer", "state", "state", 0), {"step": torch.ones(())}, "has no exp_avg"),
    "a learning rate as text": (("optimizer", "state", "param_groups", 0, "lr"), "fast", "lr = 'fast'"),
    "a learning rate below 0": (("optimizer", "state", "param_groups", 1, "lr"), -1.0, "AdamW refuses"),
    "betas of another length": (("optimizer", "state", "param_groups", 0, "betas"), (0.9,), "betas"),
    "random numbers of torch": (("random", "torch"), torch.zeros(3, dtype=torch.uint8), "random state"),
    "random numbers of Python": (("random", "python"), (3, (1, 2), None), "random state"),
    "random numbers of NumPy": (("random", "numpy", "bit_generator"), "PCG64", "random state"),
    "a count of the scheduler": (("scheduler", "state", "last_epoch"), "three", "last_epoch = 'three'"),
    "the rates of the scheduler": (("scheduler", "state", "base_lrs"), [0.1], "base_lrs"),
    "a tensor of the guard": (
        ("compressor", "state", "watch", "snapshot", "tensors", "parameter 0/head.bias"),
        torch.ones(3),
        r"head\.bias is \(3,\)",
    ),
    "the guard's value": (("compressor", "state", "watch", "before"), float("nan"), "finite"),
    "the history": (("compressor", "state", "history"), [3], "stored as 3"),
    "the step": (("step",), -1, "step is -1"),
    "versions": (("versions", ""), 3, "versions of modules"),
    "a version as text": (("versions", "blocks.0.norm", "version"), "2", "hold {'version': '2'} for 'blocks.0.norm'"),
    "a version that is True": (("versions", "", "version"), True, "hold {'version': True} for ''"),
    "a version of no module": (("versions",), {3: {"version": 2}}, "hold {'version': 2} for 3"),
    "no followers": (("followers",), 3, "followers are stored as 3"),
    "a follower without orders": (("followers", 0), {"model": {}, "versions": {}}, "followers are stored as"),
    "an average of another width": (
        ("followers", 0, "model", "head.bias"),
        torch.ones(3),
        r"follow\[0\]: head\.bias has shape \(3,\)",
    ),
    "an average of other orders than it says": (
        ("followers", 0, "orders", "blocks.0.ssm"),
        3,
        r"follow\[0\]: blocks\.0\.ssm",
    ),
    "an average with text as a version": (
        ("followers", 0, "versions", "blocks.0.norm", "version"),
        "2",
        r"follow\[0\]: the versions of modules",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_does_not_fit_is_named_before_anything_changes(case, contents, tmp_path):
    place, other, said = CHANGES[case]
    write(changed(contents, place, other), tmp_path / "x")
    run = Guarded(seed=1).train(1, 1)
    before = everything(run)
    with pytest.raises(SavingError, match=rf"^{tmp_path / 'x'}: .*{said}"):
        load_checkpoint(tmp_path / "x", **run.parts)
    assert everything(run) == before


def test_a_cut_that_nothing_will_judge_is_told(contents, tmp_path):
    write(contents, tmp_path / "x")
    run = Guarded(seed=1)
    compressor = Compressor(run.model, run.optimizer, when=[2], keep=KeepFraction(0.5), follow=[run.average])
    parts = {"model": run.model, "optimizer": run.optimizer, "scheduler": run.scheduler, "compressor": compressor}
    with pytest.warns(UserWarning, match=r"a guard was to judge at step 5; this compressor has no guard"):
        load_checkpoint(tmp_path / "x", **parts)
    assert (compressor.step(5), run.model.blocks[0].ssm.order) == ([], 2)


FILES = [
    str(Path(compressm.__file__).parent / name)
    for name in (
        "saving",
        "compression/rollback.py",
        "compression/compressor.py",
        "layers/parameters.py",
        "layers/base.py",
    )
]


class Injected(BaseException):
    """An error that nobody expects."""


def loaded_with_an_error(run, path, number):
    """Load, with an error at this line of all that are run; return the number of lines that were."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        if event == "line" and count == number:
            sys.settrace(None)
            raise Injected
        return trace

    def enter(frame, event, arg):
        return trace if frame.f_code.co_filename.startswith(tuple(FILES)) else None

    earlier = sys.gettrace()
    sys.settrace(enter)
    try:
        load_checkpoint(path, **run.parts)
    except Injected:
        return count
    finally:
        sys.settrace(earlier)
    return count


def check_errors_at_lines(path, numbers, **options):
    after = Guarded(seed=1, **options).train(1, 1)
    load_checkpoint(path, **after.parts)
    states = everything(after)["states"]
    run = Guarded(seed=1, **options).train(1, 1)
    before = everything(run)
    kept = 0
    for number in numbers:
        loaded_with_an_error(run, path, number)
        now = everything(run)
        if now == before:
            kept += 1
            continue
        assert now["states"] == states, number
        run = Guarded(seed=1, **options).train(1, 1)
        before = everything(run)
    return kept


def lines(path, **options):
    gc.collect()  # every run that still lives adds lines: wrappers are found among all living objects
    return loaded_with_an_error(Guarded(seed=1, **options).train(1, 1), path, None)


def test_an_error_at_a_line_of_loading_leaves_all_as_before_or_all_loaded(contents, tmp_path):
    write(contents, tmp_path / "x")
    total = lines(tmp_path / "x")
    assert total > 1000
    numbers = [*range(1, total, total // 25), *range(total - 5, total + 1)]
    assert check_errors_at_lines(tmp_path / "x", numbers) > 25


@pytest.mark.slow
def test_an_error_at_every_line_of_loading_leaves_all_as_before_or_all_loaded(tmp_path):
    # An average would make the lines, and the time of each load, twice as many.
    saved(tmp_path / "x", averaged=False)
    total = lines(tmp_path / "x", averaged=False)
    assert check_errors_at_lines(tmp_path / "x", range(1, total + 1), averaged=False) > 0.9 * total


class Wilful(torch.optim.SGD):
    """An optimizer that refuses every state, after it has changed its own."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.param_groups[0]["lr"] = 7.0
        raise ZeroDivisionError("wilful")


def test_an_optimizer_that_refuses_while_it_loads_leaves_all_as_before(tmp_path):
    def make(seed, order):
        run = Guarded(seed)
        run.optimizer = Wilful(run.model.parameters(), lr=0.1, momentum=0.9)
        run.model(torch.ones(1, 3, 1)).sum().backward()
        run.optimizer.step()
        return run

    run = make(1, 4)
    parts = {"model": run.model, "optimizer": run.optimizer}
    save_checkpoint(tmp_path / "c", **{"model": (other := make(0, 4)).model, "optimizer": other.optimizer})
    before = everything(run)
    with pytest.raises(SavingError, match="a Wilful does not load its state in the file: wilful"):
        load_checkpoint(tmp_path / "c", **parts)
    assert everything(run) == before
