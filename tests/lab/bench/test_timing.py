import time

import torch

from compressm_lab.bench.timing import best_seconds, median_seconds, threads


def test_work_is_called_once_to_warm_up_and_then_repeats_times():
    calls = []
    assert median_seconds(lambda: calls.append(None), repeats=5) > 0
    assert len(calls) == 6


def test_repeats_stop_when_the_time_is_up_but_never_before_one():
    calls = []
    median_seconds(lambda: (calls.append(None), time.sleep(0.01)), repeats=1000, within=0.001)
    assert len(calls) == 2


def test_the_best_is_the_shortest():
    pauses = iter((0.0, 0.05, 0.001, 0.05))
    assert best_seconds(lambda: time.sleep(next(pauses)), repeats=3) < 0.04


def test_threads_are_given_back():
    before = torch.get_num_threads()
    with threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
