import pytest
import torch

from compressm.bench.train_step import StepCase, eager_step, measure_steps, paper_case


def tiny(**changes):
    sizes = {
        "depth": 1,
        "width": 4,
        "order": 3,
        "batch": 2,
        "length": 12,
        "inputs": 1,
        "vocabulary": None,
        "classes": 3,
    }
    return StepCase("tiny", **{**sizes, **changes})


def test_a_step_trains_every_parameter():
    from compressm.bench.train_step import _batch, _model

    torch.manual_seed(0)
    case = tiny()
    model, (x, target) = _model(case), _batch(case, torch.device("cpu"))
    before = {name: value.clone() for name, value in model.named_parameters()}
    eager_step(model, x, target, case)()
    assert all((value != before[name]).any() for name, value in model.named_parameters())


@pytest.mark.parametrize("case", [tiny(), tiny(inputs=None, vocabulary=5), tiny(inputs=None, vocabulary=5, towers=2)])
def test_a_measurement_times_every_kind_of_model(case):
    (row,) = measure_steps([case], repeats=1).rows
    assert row["step_s"] > 0
    assert row["parameters"] > 0
    assert row["task"] == "tiny"


@pytest.mark.parametrize("task", ["smnist", "scifar", "listops", "imdb", "aan", "pathfinder"])
def test_every_task_of_the_paper_has_its_sizes(task):
    case = paper_case(task, 16)
    assert case.order == 16
    assert (case.inputs is None) != (case.vocabulary is None)
    assert case.towers == (2 if task == "aan" else 1)
