"""The stages of a cut are seen by who watches, and by nobody else."""

from contextlib import contextmanager

import torch

import compressm as cs
from compressm.compression.planning import STAGES, watching


def test_every_stage_of_a_cut_is_watched_once_and_in_order():
    seen = []

    @contextmanager
    def watch(name):
        seen.append(name)
        yield
        seen.append(f"{name} ended")

    torch.manual_seed(0)
    model = cs.models.SequenceClassifier(cs.layers.LRU, depth=2, width=4, order=6, inputs=1, classes=2)
    x = torch.randn(4, 30, 1)
    with watching(watch):
        cs.compress_(model, keep=cs.TargetOrder(3), calibrate=lambda model: model(x))
    assert set(seen[::2]) == set(STAGES)
    assert len(seen) == 2 * len(STAGES)
    assert all(end == f"{begin} ended" for begin, end in zip(seen[::2], seen[1::2], strict=True))
    cs.compress_(model, keep=cs.TargetOrder(2))
    assert len(seen) == 2 * len(STAGES)


def test_layers_that_fall_to_unequal_orders_are_cut_alike_on_one_thread_and_on_several():
    def cut(threads):
        torch.manual_seed(0)
        model = cs.models.SequenceClassifier(cs.layers.LRU, depth=3, width=4, order=12, inputs=1, classes=2)
        torch.set_num_threads(threads)
        try:
            orders = cs.compress_(model, keep=lambda spectra: dict(zip(spectra, (7, 6, 5), strict=True)))
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(1)
        return [event.rank for event in orders], model.state_dict()

    (alone, first), (together, second) = cut(1), cut(3)
    assert alone == together == [7, 6, 5]
    assert all(torch.equal(value, second[name]) for name, value in first.items())
