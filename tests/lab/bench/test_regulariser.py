import pytest
import torch

from compressm_lab.baselines import HankelNuclearNorm
from compressm_lab.bench.regulariser import PenaltyCase, default_cases, measure_regulariser, norm_by_autograd
from compressm_lab.bench.train_step import StepCase

TINY = StepCase(task="tiny", depth=2, width=4, order=5, batch=2, length=8, inputs=1, classes=2)


def test_the_papers_way_is_the_same_penalty():
    torch.manual_seed(0)
    model = PenaltyCase(TINY, 6.28).model()
    ours, theirs = HankelNuclearNorm(floor=1e-6, fold=False)(model), norm_by_autograd(model)
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-5)


def test_a_row_has_the_times_and_their_ratios():
    (row,) = measure_regulariser([PenaltyCase(TINY)], repeats=1).rows
    assert row["ratio"] == pytest.approx(1 + row["norm_s"] / row["step_s"])
    assert row["ratio_every"] == pytest.approx(1 + row["norm_s"] / (row["every"] * row["step_s"]))
    assert row["majoriser_s"] < row["step_s"] * 100


def test_sizes_are_those_of_the_recipe_and_a_gpu_has_the_deep_model_too():
    assert {case.step.order for case in default_cases("cpu")} == {32, 64, 128, 256, 512}
    assert default_cases("cuda")[-1].step.task == "scifar"
