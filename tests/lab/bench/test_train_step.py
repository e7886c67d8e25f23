import pytest
import torch

from compressm_lab.bench.train_step import (
    PAPER,
    StepCase,
    build_batch,
    build_model,
    captured_step,
    default_cases,
    eager_step,
    measure_steps,
    paper_case,
    paper_orders,
)


def tiny(**changes):
    sizes = {"depth": 1, "width": 4, "order": 3, "batch": 2, "length": 12, "inputs": 1, "classes": 3}
    return StepCase(**{"task": "tiny", **sizes, **changes})


def tokens(**changes):
    return tiny(inputs=None, vocabulary=5, **changes)


def test_a_step_trains_every_parameter():
    torch.manual_seed(0)
    case = tiny()
    model, (x, target) = build_model(case), build_batch(case, torch.device("cpu"))
    before = {name: value.clone() for name, value in model.named_parameters()}
    eager_step(model, x, target, case)()
    assert all((value != before[name]).any() for name, value in model.named_parameters())


def test_a_measurement_times_every_kind_of_model_beside_its_floor():
    lines = []
    rows = measure_steps([tiny(), tokens(), tokens(towers=2)], repeats=1, progress=lines.append).rows
    assert len(rows) == 3
    for row in rows:
        assert row["step_s"] > row["floor_s"] > 0
        assert row["floor_s"] == max(row["flops"] / row["ceiling_flops"], row["bytes"] / row["ceiling_bytes"])
        assert row["parameters"] > 0
        assert row["task"] == "tiny"
        assert not row["compiled"]
        assert "peak_bytes" not in row
    # Those of the device are measured once for all of a precision.
    assert sum("ceilings" in line for line in lines) == 1


@pytest.mark.parametrize("task", PAPER)
def test_every_task_of_the_paper_has_its_sizes(task):
    case = paper_case(task, 16)
    assert case.order == 16
    assert (case.inputs is None) != (case.vocabulary is None)
    assert case.towers == (2 if task == "aan" else 1)
    assert paper_case(task).order == paper_orders(task)[0]


def test_the_default_cases_are_smnist_on_a_cpu_and_every_task_on_a_gpu():
    assert [(case.task, case.order) for case in default_cases("cpu")] == [("smnist", n) for n in (256, 28, 13)]
    cases = default_cases("cuda", compiled=True)
    assert {case.task for case in cases} == set(PAPER)
    assert all(case.compiled for case in cases)
    assert {case.precision for case in cases if case.task != "smnist"} == {"bfloat16"}
    assert [case.order for case in cases if case.task == "imdb"] == [192, 48]


@pytest.mark.gpu
def test_a_captured_step_trains_and_counts_its_kernels_and_memory():
    case = tiny()
    device = torch.device("cuda")
    model, (x, target) = build_model(case).to(device), build_batch(case, device)
    step = captured_step(model, x, target, case)
    before = [value.clone() for value in model.parameters()]
    step()
    torch.cuda.synchronize()
    assert all((value != old).any() for value, old in zip(model.parameters(), before, strict=True))
    assert step.kernels > 10
    assert step.peak_bytes > sum(value.nbytes for value in model.parameters())
